//! The step of all ranks, as rank 0's Criterion sees it: a replay takes as long as on the slowest rank.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::backend::{BackendError, Capture, Replay, Tracing};
use crate::rank::{Command, Leader, Reply, Slowest};
use crate::units::Bytes;

/// Rank 0's capture, replayed with the other ranks'.
pub struct Together<'a> {
    capture: &'a mut dyn Capture,
    leader: Option<&'a mut Leader>,
    /// Wall time of a replay, the last time.
    wall: Duration,
    /// Each rank's replays, all that were made.
    made: Vec<Vec<Replay>>,
}

impl<'a> Together<'a> {
    /// Of rank 0's capture; without a leader it is the only one. A replay does not take longer than `wall`, as far as is known.
    pub fn new(capture: &'a mut dyn Capture, leader: Option<&'a mut Leader>, wall: Duration) -> Self {
        let ranks = leader.as_ref().map_or(1, |leader| leader.world());
        Self { capture, leader, wall, made: vec![Vec::new(); ranks] }
    }

    /// How many replays each rank has made.
    pub fn count(&self) -> usize {
        self.made[0].len()
    }

    /// Each rank's replays number `first` and on, `n` of them.
    pub fn ranks(&self, first: usize, n: usize) -> Vec<Vec<Replay>> {
        self.made.iter().map(|replays| replays.iter().skip(first).take(n).copied().collect()).collect()
    }

    fn all(&mut self, n: u64) -> Result<Vec<Vec<Replay>>, BackendError> {
        let Self { capture, leader, wall, .. } = self;
        let Some(leader) = leader else { return Ok(vec![capture.replays(n)?]) };
        let expected = wall.saturating_mul(u32::try_from(n).unwrap_or(u32::MAX));
        let ranks = leader.replay(n, expected, &mut |command, _| replayed(*capture, command));
        ranks.map_err(|error| BackendError::Device(error.to_string()))
    }
}

/// A rank's answer to [`Command::Replay`].
pub fn replayed(capture: &mut dyn Capture, command: &Command) -> Reply {
    let Command::Replay { n, seq } = *command else {
        return Reply::failed(super::super::CASE, "this is a bug, please report it: no replay was asked for");
    };
    match capture.replays(n) {
        Ok(replays) => Reply::replayed(seq, &replays),
        Err(error) => Reply::failed(super::super::CASE, error),
    }
}

impl Capture for Together<'_> {
    fn timer(&self) -> &'static str {
        self.capture.timer()
    }

    fn snapshot(&mut self) -> Result<Bytes, BackendError> {
        self.capture.snapshot()
    }

    fn restore(&mut self) -> Result<(), BackendError> {
        self.capture.restore()
    }

    fn eager(&mut self) -> Result<(), BackendError> {
        self.capture.eager()
    }

    fn record(&mut self) -> Result<(), BackendError> {
        self.capture.record()
    }

    fn replay(&mut self) -> Result<Replay, BackendError> {
        let none = || BackendError::Device("no replay came back".to_owned());
        self.replays(1)?.first().copied().ok_or_else(none)
    }

    fn replays(&mut self, n: u64) -> Result<Vec<Replay>, BackendError> {
        let begin = Instant::now();
        let ranks = self.all(n)?;
        self.wall = begin.elapsed() / u32::try_from(n.max(1)).unwrap_or(u32::MAX);
        let slowest = Slowest::of(&ranks).map_err(|error| BackendError::Device(error.to_string()))?;
        self.made.iter_mut().zip(ranks).for_each(|(made, replays)| made.extend(replays));
        Ok(slowest.replays)
    }

    fn tune(&mut self, agreed: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, BackendError> {
        self.capture.tune(agreed)
    }

    fn profile(&mut self, name: &str, replays: u32) -> Result<Tracing, BackendError> {
        self.capture.profile(name, replays)
    }

    fn output(&mut self) -> Result<Vec<f32>, BackendError> {
        self.capture.output()
    }

    fn expert_loads(&mut self) -> Result<Option<Vec<Vec<u32>>>, BackendError> {
        self.capture.expert_loads()
    }
}
