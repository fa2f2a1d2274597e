//! What the replays of several ranks amount to: each takes as long as on its slowest rank.

use serde::{Deserialize, Serialize};

use super::RankError;
use crate::backend::Replay;
use crate::stats::median;
use crate::units::Nanos;

/// Replays of all ranks as one step's.
#[derive(Debug, Clone, PartialEq)]
pub struct Slowest {
    /// Each replay's time is the max over ranks, its clock that of the slowest rank.
    pub replays: Vec<Replay>,
    /// How far the ranks lay apart in each: max − min.
    pub skew: Vec<Nanos>,
}

/// One rank's times of a case.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RankTimes {
    /// Median of its replays.
    pub median: Nanos,
    /// The fastest.
    pub min: Nanos,
}

impl Slowest {
    /// Of each rank's replays, in rank order; of unlike lengths is a bug.
    ///
    /// # Errors
    /// If a rank has more or fewer replays than rank 0.
    pub fn of(ranks: &[Vec<Replay>]) -> Result<Self, RankError> {
        let n = ranks.first().map_or(0, Vec::len);
        if let Some(rank) = ranks.iter().position(|replays| replays.len() != n) {
            let found = ranks[rank].len();
            return Err(RankError::Protocol(format!("rank {rank} has {found} replays, rank 0 has {n}")));
        }
        let replays = (0..n).filter_map(|at| {
            ranks.iter().map(|replays| replays[at]).max_by(|a, b| a.time.0.total_cmp(&b.time.0))
        });
        let replays: Vec<Replay> = replays.collect();
        let min = |at: usize| ranks.iter().map(|replays| replays[at].time.0).fold(f64::INFINITY, f64::min);
        let skew = replays.iter().enumerate().map(|(at, max)| Nanos(max.time.0 - min(at))).collect();
        Ok(Self { replays, skew })
    }

    /// The median of what lies between ranks; `None` without replays.
    #[must_use]
    pub fn median_skew(&self) -> Option<Nanos> {
        median(&self.skew.iter().map(|skew| skew.0).collect::<Vec<_>>()).map(Nanos)
    }
}

impl RankTimes {
    /// Of one rank's replays; `None` if there are none.
    #[must_use]
    pub fn of(replays: &[Replay]) -> Option<Self> {
        let times: Vec<f64> = replays.iter().map(|replay| replay.time.0).collect();
        let min = times.iter().copied().fold(f64::INFINITY, f64::min);
        Some(Self { median: Nanos(median(&times)?), min: Nanos(min) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(times: &[f64], clock: f64) -> Vec<Replay> {
        times.iter().map(|time| Replay { time: Nanos(*time), clock_mhz: Some(clock) }).collect()
    }

    #[test]
    fn a_replay_takes_as_long_as_on_its_slowest_rank() {
        let ranks = [rank(&[5.0, 1.0, 3.0], 100.0), rank(&[4.0, 2.0, 3.0], 200.0)];
        let slowest = Slowest::of(&ranks).unwrap();
        assert_eq!(slowest.replays[0], Replay { time: Nanos(5.0), clock_mhz: Some(100.0) });
        assert_eq!(slowest.replays[1], Replay { time: Nanos(2.0), clock_mhz: Some(200.0) });
        assert_eq!(slowest.skew, [Nanos(1.0), Nanos(1.0), Nanos(0.0)]);
        assert_eq!(slowest.median_skew(), Some(Nanos(1.0)));
        assert_eq!(RankTimes::of(&ranks[0]), Some(RankTimes { median: Nanos(3.0), min: Nanos(1.0) }));
    }

    #[test]
    fn one_rank_is_itself_and_no_replays_are_none() {
        let one = rank(&[5.0, 1.0], 1.0);
        assert_eq!(Slowest::of(std::slice::from_ref(&one)).unwrap().replays, one);
        assert_eq!(Slowest::of(&[]).unwrap().median_skew(), None);
        assert_eq!(RankTimes::of(&[]), None);
    }

    #[test]
    fn a_missing_replay_is_a_bug() {
        assert!(
            Slowest::of(&[rank(&[1.0], 1.0), rank(&[], 1.0)]).unwrap_err().to_string().contains("rank 1")
        );
    }
}
