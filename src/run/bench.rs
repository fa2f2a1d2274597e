//! Measuring the selected cases: groups for Criterion, one prepared capture a case, and what is saved of it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::backend;
use super::ceilings::Known;
use super::compare::Baselines;
use super::device::{self, Loaded};
use super::output;
use super::profiles::Profiles;
use super::progress::Progress;
use super::suite::Entry;
use super::surroundings::{self, Reading};
use super::{CASE, Failure, REGRESSION, one_line};
use crate::backend::{Capture, Replay, Sensors};
use crate::baseline::{Configuration, RankTimes, Run, Sidecar, Store, commit};
use crate::batch::Batch;
use crate::case::Case;
use crate::cli::{Cli, Mode};
use crate::measure::criterion::{Call, Group, Harness, Sampling, measured};
use crate::measure::limits::Surroundings;
use crate::measure::{self, Checks, Prepared};
use crate::report::results::{CaseResult, RankResult};
use crate::stats::Latency;
use crate::units::Tokens;

/// Criterion asserts on fewer.
const MIN_SAMPLE_SIZE: usize = 10;

/// Prints the ids.
pub fn list(selected: &[&Entry]) -> Result<u8, Failure> {
    let mut harness = Harness::from_process_arguments();
    for_each_group(&mut harness, selected, |group, entry| {
        group.bench(names(entry), entry.asked.num_tokens(), None, |_| None);
        Ok(())
    })?;
    Ok(0)
}

/// Compares two saved baselines.
pub fn load(cli: &Cli, store: &Store, selected: &[&Entry]) -> Result<u8, Failure> {
    let baselines = Baselines::of(cli, store);
    baselines.require(selected)?;
    let loaded_name = cli.criterion.load_baseline.as_deref().unwrap_or_default();
    let loaded: Vec<Option<Sidecar>> =
        selected.iter().map(|entry| baselines.sidecar_of(entry, loaded_name)).collect::<Result<_, _>>()?;
    for (entry, sidecar) in selected.iter().zip(&loaded) {
        if let Some(sidecar) = sidecar {
            baselines.refuse_mismatch(entry, &sidecar.configuration)?;
        }
    }
    let mut harness = Harness::from_process_arguments();
    let mut status = 0;
    let mut loaded = loaded.into_iter();
    for_each_group(&mut harness, selected, |group, entry| {
        group.bench(names(entry), entry.asked.num_tokens(), None, |_| None);
        if let Some(loaded) = loaded.next().flatten() {
            let old = store.sidecar(&entry.id, cli.compared_baseline().0)?;
            if baselines.report(entry, old.as_ref(), loaded.median_us) {
                status = REGRESSION;
            }
        }
        Ok(())
    })?;
    harness.finish();
    Ok(status)
}

/// Measures, tests or profiles the selected cases.
pub fn run(cli: &Cli, store: &Store, selected: &[&Entry]) -> Result<u8, Failure> {
    let baselines = Baselines::of(cli, store);
    baselines.require(selected)?;
    let mut bench = Bench {
        cli,
        store,
        baselines,
        loaded: None,
        ceilings: Known::default(),
        commit: commit::head(),
        results: Vec::new(),
        status: 0,
    };
    bench.refuse_mismatches(selected)?;
    let mut harness = Harness::from_process_arguments();
    for_each_group(&mut harness, selected, |group, entry| bench.case(group, entry))?;
    if cli.mode() == Mode::Measure {
        harness.finish();
    }
    bench.write_results()?;
    bench.profile(selected)?;
    Ok(bench.status)
}

/// Calls `each` for every entry within its Criterion group. Entries of one group follow each other.
fn for_each_group(
    harness: &mut Harness,
    selected: &[&Entry],
    mut each: impl FnMut(&mut Group<'_>, &Entry) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for entries in selected.chunk_by(|a, b| a.parts().0 == b.parts().0) {
        let mut group = harness.group(entries[0].parts().0);
        for entry in entries {
            each(&mut group, entry)?;
        }
        group.finish();
    }
    Ok(())
}

fn names(entry: &Entry) -> (&str, &str) {
    let (_, model, case) = entry.parts();
    (model, case)
}

/// What a run carries from case to case.
struct Bench<'a> {
    cli: &'a Cli,
    store: &'a Store,
    baselines: Baselines<'a>,
    loaded: Option<Loaded>,
    ceilings: Known,
    commit: Option<String>,
    results: Vec<CaseResult>,
    status: u8,
}

/// A measured case.
struct Measured {
    replays: Vec<Replay>,
    latency: Latency,
    checks: Checks,
    around: Surroundings,
}

impl Bench<'_> {
    /// With `--baseline`, comparing unlike configurations is refused before anything runs.
    fn refuse_mismatches(&mut self, selected: &[&Entry]) -> Result<(), Failure> {
        let flags = &self.cli.criterion;
        if flags.baseline.is_none() && flags.baseline_lenient.is_none() {
            return Ok(());
        }
        for entry in selected {
            let plan = match device::Plan::of(self.cli, entry) {
                Err(failure) if failure.status == CASE => continue, // told of when its turn comes
                plan => plan?,
            };
            let configuration = device::configuration(self.cli, entry, &plan)?;
            self.baselines.refuse_mismatch(entry, &configuration)?;
        }
        Ok(())
    }

    /// One case. What keeps it from being measured is printed, and the next one still runs.
    fn case(&mut self, group: &mut Group<'_>, entry: &Entry) -> Result<(), Failure> {
        match self.prepare_and_measure(group, entry) {
            Ok(()) => Ok(()),
            Err(failure) if failure.status == CASE => {
                eprintln!("error: {}: {}", entry.id, one_line(&failure.message));
                self.status = self.status.max(CASE);
                Ok(())
            }
            Err(failure) => Err(failure),
        }
    }

    fn prepare_and_measure(&mut self, group: &mut Group<'_>, entry: &Entry) -> Result<(), Failure> {
        let plan = device::Plan::of(self.cli, entry)?;
        let mut loaded = Loaded::reuse(self.loaded.take(), self.cli, &entry.model, &plan.model)?;
        let outcome = self.with_device(group, entry, &plan, &mut loaded);
        self.loaded = Some(loaded);
        outcome
    }

    fn with_device(
        &mut self,
        group: &mut Group<'_>,
        entry: &Entry,
        plan: &device::Plan,
        loaded: &mut Loaded,
    ) -> Result<(), Failure> {
        let batch = loaded.batch(self.cli, entry, plan)?;
        let costs = plan.costs(backend::of(self.cli)?);
        let measures = self.cli.mode() == Mode::Measure;
        let ceilings = if measures { self.ceilings.before(loaded.device(), &costs)? } else { None };
        let configuration = device::configuration(self.cli, entry, plan)?;
        let sensors = loaded.device().sensors();
        let measured = loaded.with_capture(&batch, |capture| {
            self.on_device(group, entry, &batch, &configuration, capture, sensors.as_ref())
        })?;
        let Some((mut measured, old)) = measured else { return Ok(()) };
        measured.around.kernels = loaded.kernels_hash();
        let floors = ceilings.map(|before| before.after(loaded.device(), &costs)).transpose();
        measured.around.floors = floors.map_err(|error| Failure::case(format!("the ceilings: {error}")))?;
        self.save(entry, &configuration, loaded.info().driver.clone(), &measured)?;
        self.tell(entry, &batch, &measured, old.as_ref())?;
        self.results.push(self.result(entry, &plan.case, &batch, configuration, measured));
        Ok(())
    }

    /// Prepares and measures; none where nothing is to be kept.
    fn on_device(
        &self,
        group: &mut Group<'_>,
        entry: &Entry,
        batch: &Batch,
        configuration: &Configuration,
        capture: &mut dyn Capture,
        sensors: Option<&Sensors>,
    ) -> Result<Option<(Measured, Option<Sidecar>)>, Failure> {
        let measures = self.cli.mode() == Mode::Measure;
        let protocol = backend::of(self.cli)?.protocol();
        let protocol = if measures { protocol } else { protocol.without_warm_up() };
        let preparing = Progress::start(format!("{}: checking and warming up", entry.id));
        let prepared =
            measure::prepare(capture, &protocol).map_err(|error| Failure::case(error.to_string()))?;
        drop(preparing);
        if !measures {
            return self.run_once(group, entry, batch, capture).map(|()| None);
        }
        if !prepared.steady {
            eprintln!("warning: {}: times still drifted when the warm-up ended", entry.id);
        }
        let old = self.baselines.before(entry, configuration)?;
        let measured = self.measure(group, entry, batch, capture, prepared, sensors);
        if measured.is_err() {
            self.store.restore(&entry.id)?; // Criterion has saved what the failed calls returned
        }
        Ok(Some((measured?, old)))
    }

    /// Test and profile mode: Criterion calls the closure, nothing is kept.
    fn run_once(
        &self,
        group: &mut Group<'_>,
        entry: &Entry,
        batch: &Batch,
        capture: &mut dyn Capture,
    ) -> Result<(), Failure> {
        let mut broken = None;
        let tokens = Tokens(batch.num_tokens() as u64);
        group.bench(names(entry), tokens, None, |n| {
            measure::replay(capture, n).map_err(|error| broken = Some(error)).ok()
        });
        broken.map_or(Ok(()), |error| Err(Failure::case(error.to_string())))
    }

    fn measure(
        &self,
        group: &mut Group<'_>,
        entry: &Entry,
        batch: &Batch,
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
        Ok(Measured { replays, latency, checks: prepared.checks, around })
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

    fn save(
        &self,
        entry: &Entry,
        configuration: &Configuration,
        driver: Option<String>,
        measured: &Measured,
    ) -> Result<(), Failure> {
        if self.cli.criterion.discard_baseline {
            return self.baselines.after(entry);
        }
        let sidecar = Sidecar {
            id: entry.id.clone(),
            date: now(),
            commit: self.commit.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            configuration: configuration.clone(),
            seed: self.cli.seed,
            driver,
            around: measured.around.clone(),
            choices: BTreeMap::new(),
            dirty_diff: None,
            median_us: measured.latency.median,
            runs: vec![Run {
                date: now(),
                iters: self.cli.iters as usize,
                median_us: measured.latency.median,
                spread_pct: measured.latency.sample_spread_pct,
                telemetry: measured.around.telemetry.clone(),
                ranks: vec![RankTimes {
                    timer: measured.latency.timer.clone(),
                    samples_us: measured.latency.samples_us.clone(),
                    clock_mhz: clocks(&measured.replays),
                }],
            }],
            checks: measured.checks.clone(),
            compared: None,
            profiles: Vec::new(),
        };
        for baseline in [Some("new"), self.cli.saved_baseline()].into_iter().flatten() {
            self.store.write_sidecar(baseline, &sidecar)?;
        }
        self.baselines.after(entry)?;
        Ok(())
    }

    /// The lines under Criterion's.
    fn tell(
        &mut self,
        entry: &Entry,
        batch: &Batch,
        measured: &Measured,
        old: Option<&Sidecar>,
    ) -> Result<(), Failure> {
        let limit = backend::of(self.cli)?.spread_limit_pct();
        let latency = &measured.latency;
        let rate = tokens_per_second(batch, latency);
        eprintln!(
            "{}: median {:.1} µs, min {:.1}, p90 {:.1} over {} replays, spread {:.2} %, {rate:.1} tok/s, checks passed",
            entry.id, latency.median, latency.min, latency.p90, latency.count, latency.sample_spread_pct
        );
        if latency.sample_spread_pct > limit {
            eprintln!(
                "warning: {}: the samples' medians spread by {:.2} %, more than {limit} %; quiet the machine or raise --iters",
                entry.id, latency.sample_spread_pct
            );
        }
        for line in surroundings::lines(&measured.around, latency.median, &measured.replays) {
            eprintln!("{}: {line}", entry.id);
        }
        if self.baselines.report(entry, old, latency.median) {
            self.status = self.status.max(REGRESSION);
        }
        Ok(())
    }

    fn result(
        &self,
        entry: &Entry,
        case: &Case,
        batch: &Batch,
        configuration: Configuration,
        measured: Measured,
    ) -> CaseResult {
        let Measured { replays, latency, checks, around } = measured;
        CaseResult {
            case: case.name.clone(),
            requests: case.requests.iter().map(Into::into).collect(),
            median_us: latency.median,
            id: entry.id.clone(),
            tokens_per_second: tokens_per_second(batch, &latency),
            configuration,
            commit: self.commit.clone(),
            date: now(),
            seed: self.cli.seed,
            ranks: vec![RankResult {
                num_tokens: batch.num_tokens(),
                kv_blocks: batch.blocks_used,
                routing: None,
                num_local_tokens: batch.num_tokens(),
                num_tokens_after_padding: batch.num_tokens(),
                batch_order: batch.order.clone(),
                timing_scope: "forward",
                checks,
                clock_mhz: clocks(&replays),
                latency_us: latency,
                around,
            }],
        }
    }

    /// The second pass, of the cases that were measured: none is timed any more.
    fn profile(&mut self, selected: &[&Entry]) -> Result<(), Failure> {
        let Some(folder) = self.cli.profile_dir.as_deref().filter(|_| self.cli.mode() == Mode::Measure)
        else {
            return Ok(());
        };
        let is_measured = |entry: &&&Entry| self.results.iter().any(|result| result.id == entry.id);
        let measured: Vec<&Entry> = selected.iter().filter(is_measured).copied().collect();
        let loaded = self.loaded.take();
        let pass = Profiles::new(self.cli, self.store, folder, self.commit.clone(), loaded);
        self.status = self.status.max(pass.run(&measured)?);
        Ok(())
    }

    fn write_results(&self) -> Result<(), Failure> {
        match &self.cli.output_json {
            Some(path) if self.cli.mode() == Mode::Measure => output::write(path, &self.results),
            _ => Ok(()),
        }
    }
}

fn clocks(replays: &[Replay]) -> Option<Vec<f64>> {
    replays.iter().map(|replay| replay.clock_mhz).collect()
}

fn tokens_per_second(batch: &Batch, latency: &Latency) -> f64 {
    batch.num_tokens() as f64 / latency.median * 1e6
}

/// The time, RFC 3339 in UTC, to the second.
pub(super) fn now() -> String {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}
