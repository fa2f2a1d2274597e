//! Measuring one prepared case through Criterion: the checks and the warm-up, Criterion's calls, and the replays that count.

use std::time::{Duration, Instant};

use super::compare::Baselines;
use super::progress::Progress;
use super::ranks::{Crew, Together};
use super::sidecar::Measured;
use super::suite::Entry;
use super::surroundings::Reading;
use super::{Failure, backend};
use crate::backend::{Capture, Replay, Sensors};
use crate::baseline::{Configuration, Sidecar, Store};
use crate::batch::Batch;
use crate::cli::{Cli, Mode};
use crate::measure;
use crate::measure::criterion::{Call, Group, Sampling, measured};
use crate::measure::limits::Surroundings;
use crate::measure::loads::Wanted;
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
        (capture, crew): (&mut dyn Capture, &mut Crew),
        sensors: Option<&Sensors>,
    ) -> Result<Option<(Measured, Option<Sidecar>)>, Failure> {
        let entry = step.entry;
        let measures = self.cli.mode() == Mode::Measure;
        let protocol = backend::of(self.cli)?.protocol(self.takes_turns);
        let protocol = if measures { protocol } else { protocol.without_warm_up() };
        let preparing = Progress::start(format!("{}: checking and warming up", entry.id));
        let begin = Instant::now();
        let checks = crew.check(capture, &protocol)?;
        let most = begin.elapsed(); // of a replay: the checks make several
        if !measures {
            drop(preparing);
            return self.run_once(group, step, (capture, crew), most).map(|()| None);
        }
        let mut together = Together::new(capture, crew.leader(), most);
        let warm = measure::warm_up(&mut together, &protocol);
        let (wall, steady) = warm.map_err(|error| Failure::case(error.to_string()))?;
        drop(preparing);
        if !steady {
            eprintln!("warning: {}: times still drifted when the warm-up ended", entry.id);
        }
        let old = self.baselines.before(entry, step.configuration)?;
        let measured = self.measure(group, step, &mut together, wall, sensors).and_then(|mut measured| {
            measured.checks = checks;
            measured.loads = crew.loads(capture, step.wanted)?;
            Ok(measured)
        });
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
        (capture, crew): (&mut dyn Capture, &mut Crew),
        most: Duration,
    ) -> Result<(), Failure> {
        let mut broken = None;
        let mut together = Together::new(capture, crew.leader(), most);
        group.bench(names(entry), self.tokens(batch), None, |n| {
            measure::replay(&mut together, n).map_err(|error| broken = Some(error)).ok()
        });
        broken.map_or(Ok(()), |error| Err(Failure::case(error.to_string())))?;
        crew.loads(capture, wanted).map(drop)
    }

    /// Query tokens of a step of all ranks.
    fn tokens(&self, batch: &Batch) -> Tokens {
        Tokens(batch.num_tokens() as u64 * u64::from(self.cli.data_parallel_size))
    }

    fn measure(
        &self,
        group: &mut Group<'_>,
        Step { entry, batch, .. }: Step<'_>,
        together: &mut Together<'_>,
        wall: Duration,
        sensors: Option<&Sensors>,
    ) -> Result<Measured, Failure> {
        let replays = u64::from(self.cli.iters) * u64::from(self.cli.samples);
        let sampling = self.sampling(replays, wall);
        let (mut broken, mut reading) = (None, Reading::new(sampling.sample_size));
        let calls = group.bench(names(entry), self.tokens(batch), Some(sampling), |n| {
            let replays = measure::replay(together, n).map_err(|error| broken = Some(error)).ok();
            reading.after_call(n, sensors);
            replays
        });
        if let Some(error) = broken {
            return Err(Failure::case(format!("{error}; nothing was saved")));
        }
        let (replays, ranks) = self.counted(&calls, sampling, replays, together)?;
        let latency = Latency::of(together.timer(), &measure::times(&replays), self.cli.iters as usize);
        let telemetry = reading.telemetry.or_else(|| sensors.map(|read| read()));
        let around = Surroundings { telemetry, ..Surroundings::default() };
        Ok(Measured { replays, ranks, latency, around, ..Measured::default() })
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

    /// The first `wanted` measured replays, and the same of each rank; what Criterion did not make is made now.
    fn counted(
        &self,
        calls: &[Call],
        sampling: Sampling,
        wanted: u64,
        together: &mut Together<'_>,
    ) -> Result<(Vec<Replay>, Vec<Vec<Replay>>), Failure> {
        let sample_size = if self.cli.criterion.quick { calls.len() } else { sampling.sample_size };
        let mut replays = measured(calls, sample_size);
        let first = together.count() - replays.len();
        replays.truncate(usize::try_from(wanted).unwrap_or(usize::MAX));
        let missing = wanted - replays.len() as u64;
        let more = measure::replay(together, missing);
        replays.extend(more.map_err(|error| Failure::case(error.to_string()))?);
        let ranks = together.ranks(first, replays.len());
        Ok((replays, ranks))
    }
}
