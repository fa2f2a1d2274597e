//! Measuring one prepared case through Criterion: the checks and the warm-up, Criterion's calls, and the replays that count.

use std::collections::BTreeMap;
use std::time::Duration;

use super::compare::Baselines;
use super::progress::Progress;
use super::sidecar::Measured;
use super::suite::Entry;
use super::surroundings::Reading;
use super::{Failure, backend};
use crate::backend::{Capture, Replay, Sensors};
use crate::baseline::{Configuration, Sidecar, Store};
use crate::batch::Batch;
use crate::cli::{Cli, Mode};
use crate::measure::criterion::{Call, Group, Sampling, measured};
use crate::measure::limits::Surroundings;
use crate::measure::loads::{self, ExpertLoads, Wanted};
use crate::measure::{self, Prepared};
use crate::stats::Latency;
use crate::units::Tokens;

/// Criterion asserts on fewer.
const MIN_SAMPLE_SIZE: usize = 10;

/// Model and case, as they stand in an id.
pub fn names(entry: &Entry) -> (&str, &str) {
    let (_, model, case) = entry.parts();
    (model, case)
}

/// A case's step, as it is about to be measured.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    /// The case.
    pub entry: &'a Entry,
    /// Its batch.
    pub batch: &'a Batch,
    /// What it is measured on.
    pub configuration: &'a Configuration,
    /// What its experts must do, if it has any.
    pub wanted: Option<&'a Wanted>,
}

/// What every case's measurement is given.
pub struct Measuring<'a> {
    /// The command line.
    pub cli: &'a Cli,
    /// Where results are saved.
    pub store: &'a Store,
    /// What they are compared with.
    pub baselines: &'a Baselines<'a>,
    /// Whether another process measures in between.
    pub takes_turns: bool,
}

impl Measuring<'_> {
    /// Prepares and measures; none where nothing is to be kept.
    pub fn case(
        &self,
        group: &mut Group<'_>,
        step: Step<'_>,
        capture: &mut dyn Capture,
        sensors: Option<&Sensors>,
    ) -> Result<Option<(Measured, Option<Sidecar>)>, Failure> {
        let entry = step.entry;
        let measures = self.cli.mode() == Mode::Measure;
        let protocol = backend::of(self.cli)?.protocol(self.takes_turns);
        let protocol = if measures { protocol } else { protocol.without_warm_up() };
        let preparing = Progress::start(format!("{}: checking and warming up", entry.id));
        let prepared =
            measure::prepare(capture, &protocol).map_err(|error| Failure::case(error.to_string()))?;
        drop(preparing);
        if !measures {
            return self.run_once(group, step, capture).map(|()| None);
        }
        if !prepared.steady {
            eprintln!("warning: {}: times still drifted when the warm-up ended", entry.id);
        }
        let old = self.baselines.before(entry, step.configuration)?;
        let measured = self.measure(group, step, capture, prepared, sensors);
        if measured.is_err() {
            self.store.restore(&entry.id)?; // Criterion has saved what the failed calls returned
        }
        Ok(Some((measured?, old)))
    }

    /// Test and profile mode: Criterion calls the closure, nothing is kept.
    fn run_once(
        &self,
        group: &mut Group<'_>,
        Step { entry, batch, wanted, .. }: Step<'_>,
        capture: &mut dyn Capture,
    ) -> Result<(), Failure> {
        let mut broken = None;
        let tokens = Tokens(batch.num_tokens() as u64);
        group.bench(names(entry), tokens, None, |n| {
            measure::replay(capture, n).map_err(|error| broken = Some(error)).ok()
        });
        broken.map_or(Ok(()), |error| Err(Failure::case(error.to_string())))?;
        expert_loads(capture, wanted).map(drop)
    }

    fn measure(
        &self,
        group: &mut Group<'_>,
        Step { entry, batch, wanted, .. }: Step<'_>,
        capture: &mut dyn Capture,
        prepared: Prepared,
        sensors: Option<&Sensors>,
    ) -> Result<Measured, Failure> {
        let replays = u64::from(self.cli.iters) * u64::from(self.cli.samples);
        let sampling = self.sampling(replays, prepared.wall);
        let (mut broken, mut reading) = (None, Reading::new(sampling.sample_size));
        let calls = group.bench(names(entry), Tokens(batch.num_tokens() as u64), Some(sampling), |n| {
            let replays = measure::replay(capture, n).map_err(|error| broken = Some(error)).ok();
            reading.after_call(n, sensors);
            replays
        });
        if let Some(error) = broken {
            return Err(Failure::case(format!("{error}; nothing was saved")));
        }
        let replays = self.counted(&calls, sampling, replays, capture)?;
        let latency = Latency::of(capture.timer(), &measure::times(&replays), self.cli.iters as usize);
        let telemetry = reading.telemetry.or_else(|| sensors.map(|read| read()));
        let around = Surroundings { telemetry, ..Surroundings::default() };
        let (checks, choices) = (prepared.checks, BTreeMap::new());
        let expert_loads = expert_loads(capture, wanted)?;
        Ok(Measured { replays, latency, checks, around, choices, routing: None, expert_loads })
    }

    fn sampling(&self, replays: u64, wall: Duration) -> Sampling {
        let flags = &self.cli.criterion;
        let sample_size = flags.sample_size.unwrap_or_else(|| MIN_SAMPLE_SIZE.max(self.cli.samples as usize));
        let warm_up = Duration::from_secs_f64(flags.warm_up_time.unwrap_or(0.5));
        let sampling = Sampling::of(replays, sample_size, warm_up, wall);
        match flags.measurement_time {
            Some(seconds) => Sampling { measurement: Duration::from_secs_f64(seconds), ..sampling },
            None => sampling,
        }
    }

    /// The first `wanted` measured replays; what Criterion did not make is made now.
    fn counted(
        &self,
        calls: &[Call],
        sampling: Sampling,
        wanted: u64,
        capture: &mut dyn Capture,
    ) -> Result<Vec<Replay>, Failure> {
        let sample_size = if self.cli.criterion.quick { calls.len() } else { sampling.sample_size };
        let mut replays = measured(calls, sample_size);
        replays.truncate(usize::try_from(wanted).unwrap_or(usize::MAX));
        let missing = wanted - replays.len() as u64;
        replays.extend(measure::replay(capture, missing).map_err(|error| Failure::case(error.to_string()))?);
        Ok(replays)
    }
}

/// What the experts did in the last replay, if there are any, checked.
fn expert_loads(
    capture: &mut dyn Capture,
    wanted: Option<&Wanted>,
) -> Result<Option<Vec<ExpertLoads>>, Failure> {
    let checked = wanted.map(|wanted| loads::check(capture, wanted)).transpose();
    checked.map_err(|error| Failure::case(error.to_string()))
}
