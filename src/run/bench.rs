//! Measuring the selected cases: groups for Criterion, one prepared capture a case, and what is saved of it.

use super::against::turns::Turns;
use super::backend;
use super::ceilings::Known;
use super::compare::Baselines;
use super::device::{self, Loaded};
use super::measuring::{Measuring, Step, names};
use super::output;
use super::pages;
use super::profiles::Profiles;
use super::ranks::Crew;
use super::sidecar::{self, Earlier, Measured, Origin, now};
use super::suite::Entry;
use super::surroundings;
use super::targets::Targets;
use super::verdicts::{Verdicts, Version, compared};
use super::{CASE, Failure, REGRESSION, one_line};
use crate::baseline::{Configuration, Sidecar, Store};
use crate::batch::Batch;
use crate::case::Case;
use crate::cli::{Cli, Mode};
use crate::measure::criterion::{Group, Harness};
use crate::measure::limits::Surroundings;
use crate::measure::loads;
use crate::report::results::{CaseResult, RankResult};
use crate::report::verdicts::Metric;
use crate::stats::{Latency, median};
use crate::units::Tokens;

/// Prints the ids.
pub fn list(cli: &Cli, selected: &[&Entry]) -> Result<u8, Failure> {
    let mut harness = Harness::from_process_arguments();
    for_each_group(&mut harness, selected, |group, entry| {
        group.bench(names(entry), tokens(cli, entry), None, |_| None);
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
    let mut verdicts = Verdicts::default();
    let mut loaded = loaded.into_iter();
    let old_name = cli.compared_baseline().0;
    for_each_group(&mut harness, selected, |group, entry| {
        group.bench(names(entry), tokens(cli, entry), None, |_| None);
        if let Some(loaded) = loaded.next().flatten() {
            let old = store.sidecar(&entry.id, old_name)?;
            baselines.tell(entry, old.as_ref(), loaded.median_us);
            if let Some(old) = &old {
                let (old, new) = (Version::of(old_name, old), Version::of(loaded_name, &loaded));
                verdicts.judge(cli, entry, old, new)?;
            }
        }
        Ok(())
    })?;
    harness.finish();
    let kernels = |id: &str| store.sidecar(id, loaded_name).ok().flatten().map(|loaded| loaded.profiles);
    verdicts.explain(|id| kernels(id).unwrap_or_default());
    pages::write(store, !cli.criterion.noplot);
    let status = verdicts.status();
    output::summary(cli, &verdicts.finish(cli)?)?;
    Ok(status)
}

/// Checks, before anything runs, that the baselines that are asked for are there, and were measured on the like.
pub fn check_baselines<'a>(
    cli: &'a Cli,
    store: &'a Store,
    selected: &[&Entry],
) -> Result<Baselines<'a>, Failure> {
    let baselines = Baselines::of(cli, store);
    baselines.require(selected)?;
    let flags = &cli.criterion;
    if flags.baseline.is_none() && flags.baseline_lenient.is_none() {
        return Ok(baselines);
    }
    for entry in selected {
        let plan = match device::Plan::of(cli, entry) {
            Err(failure) if failure.status == CASE => continue, // told of when its turn comes
            plan => plan?,
        };
        baselines.refuse_mismatch(entry, &device::configuration(cli, entry, &plan)?)?;
    }
    Ok(baselines)
}

/// Measures, tests or profiles the selected cases.
pub fn run(cli: &Cli, store: &Store, selected: &[&Entry], crew: Crew) -> Result<u8, Failure> {
    let baselines = check_baselines(cli, store, selected)?;
    let mut bench = Bench {
        cli,
        store,
        baselines,
        crew,
        selected,
        loaded: None,
        ceilings: Known::default(),
        origin: Origin::ask(),
        turns: cli.comparison.take_turns.as_deref().map(Turns::connect).transpose()?,
        targets: Targets::open(cli, selected)?,
        kernels: None,
        earlier: sidecar::earlier(cli)?,
        gathered: Earlier::new(),
        verdicts: Verdicts::default(),
        results: Vec::new(),
        metrics: Vec::new(),
        status: 0,
    };
    let mut harness = Harness::from_process_arguments();
    for_each_group(&mut harness, selected, |group, entry| bench.case(group, entry))?;
    if cli.mode() == Mode::Measure {
        harness.finish();
    }
    bench.profile(selected)?;
    bench.finish()
}

/// Query tokens of a step of all ranks.
fn tokens(cli: &Cli, entry: &Entry) -> Tokens {
    Tokens(entry.asked.num_tokens().0 * u64::from(cli.data_parallel_size))
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

/// What a run carries from case to case.
struct Bench<'a> {
    cli: &'a Cli,
    store: &'a Store,
    baselines: Baselines<'a>,
    crew: Crew,
    selected: &'a [&'a Entry],
    loaded: Option<Loaded>,
    ceilings: Known,
    origin: Origin,
    turns: Option<Turns>,
    targets: Targets<'a>,
    kernels: Option<String>,
    earlier: Earlier,
    gathered: Earlier,
    verdicts: Verdicts,
    results: Vec<CaseResult>,
    metrics: Vec<Metric>,
    status: u8,
}

impl Bench<'_> {
    /// One case. What keeps it from being measured is printed, and the next one still runs.
    fn case(&mut self, group: &mut Group<'_>, entry: &Entry) -> Result<(), Failure> {
        if let Some(turns) = &mut self.turns {
            turns.wait()?;
        }
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
        let case = self.selected.iter().position(|selected| selected.id == entry.id).unwrap_or(0);
        let (links, earlier, cli) = (self.crew.links(), self.loaded.take(), self.cli);
        let load = || Loaded::reuse(earlier, cli, &links, &entry.model, &plan.model);
        let mut loaded = self.crew.load(case, load)?;
        let outcome = self.with_device(group, (entry, case), &plan, &mut loaded);
        self.loaded = Some(loaded);
        outcome
    }

    fn with_device(
        &mut self,
        group: &mut Group<'_>,
        (entry, case): (&Entry, usize),
        plan: &device::Plan,
        loaded: &mut Loaded,
    ) -> Result<(), Failure> {
        let batch = loaded.batch(self.cli, entry, plan)?;
        let (cli, backend) = (self.cli, backend::of(self.cli)?);
        let shows_floors =
            cli.mode() == Mode::Measure && cli.part.gather_into.is_none() && self.turns.is_none();
        let costs = plan.costs(cli, backend);
        let ceilings = if shows_floors { self.ceilings.before(loaded.device(), &costs)? } else { None };
        let configuration = device::configuration(cli, entry, plan)?;
        let measured = self.measure(group, (entry, case), (plan, &batch, &configuration), loaded)?;
        let Some((mut measured, old)) = measured else { return Ok(()) };
        measured.routing = plan.route.map(|route| route.rule.to_string());
        measured.around.kernels = loaded.kernels_hash();
        self.kernels = measured.around.kernels.clone();
        measured.choices = loaded.device().choices(batch.num_tokens());
        measured.traffic = plan.traffic(backend);
        if let Some(route) = plan.route {
            let whole = loads::whole(cli.layout(), &measured.loads, &route.whole()?);
            measured.expert_loads = Some(whole.map_err(|error| Failure::case(error.to_string()))?);
        }
        // Which experts the gates chose is known only now.
        let costs = plan.costs_of_ranks(cli, backend, &measured.loads)?;
        let floors = ceilings.map(|before| before.after(loaded.device(), &costs)).transpose();
        measured.around.floors =
            floors.map_err(|error| Failure::case(format!("the ceilings: {error}")))?.flatten();
        self.tell(entry, &batch, &measured)?;
        self.keep((entry, &plan.case), &batch, configuration, (measured, old), loaded.info().driver.clone())
    }

    /// Makes the step ready on all ranks and measures it; none where nothing is to be kept.
    fn measure(
        &mut self,
        group: &mut Group<'_>,
        (entry, case): (&Entry, usize),
        (plan, batch, configuration): (&device::Plan, &Batch, &Configuration),
        loaded: &mut Loaded,
    ) -> Result<Option<(Measured, Option<Sidecar>)>, Failure> {
        let sensors = loaded.device().sensors();
        let made = plan.route.map(|route| route.make()).transpose()?;
        let (logits, wanted) = made.map(|made| (made.logits, made.wanted)).unzip();
        let (cli, store, baselines) = (self.cli, self.store, &self.baselines);
        let measuring = Measuring { cli, store, baselines, takes_turns: self.turns.is_some() };
        let crew = &mut self.crew;
        loaded.with_capture(batch, logits.flatten(), |capture| {
            let step = Step { entry, batch, configuration, wanted: wanted.as_ref() };
            let ready = crew.capture(case);
            let measured = ready
                .and_then(|()| measuring.case(group, step, (&mut *capture, &mut *crew), sensors.as_ref()));
            crew.finish()?;
            measured
        })
    }

    /// Compares and saves what was measured.
    fn keep(
        &mut self,
        (entry, case): (&Entry, &Case),
        batch: &Batch,
        configuration: Configuration,
        (measured, old): (Measured, Option<Sidecar>),
        driver: Option<String>,
    ) -> Result<(), Failure> {
        if let Some(path) = &self.cli.part.gather_into {
            self.gathered.insert(entry.id.clone(), vec![measured.run(self.cli)]);
            output::gathered(path, &self.gathered)?;
            return self.baselines.after(entry);
        }
        let runs = self.judge_and_save(entry, &configuration, driver, &measured, old.as_ref())?;
        self.targets.add(entry, &measured, median(&runs).unwrap_or(measured.latency.median));
        let tokens_per_second = self.tokens_per_second(batch, &measured.latency);
        self.metrics.push(Metric { id: entry.id.clone(), medians_us: runs, tokens_per_second });
        self.results.push(self.result(entry, case, batch, configuration, measured));
        Ok(())
    }

    /// Compares a case, and saves it unless nothing is to be saved; returns the medians of its runs in microseconds.
    fn judge_and_save(
        &mut self,
        entry: &Entry,
        configuration: &Configuration,
        driver: Option<String>,
        measured: &Measured,
        old: Option<&Sidecar>,
    ) -> Result<Vec<f64>, Failure> {
        let mut runs = self.earlier.remove(&entry.id).unwrap_or_default();
        runs.push(measured.run(self.cli));
        let medians: Vec<f64> = runs.iter().map(|run| run.median_us).collect();
        self.baselines.tell(entry, old, median(&medians).unwrap_or(measured.latency.median));
        let old_name = self.cli.compared_baseline().0;
        let compared = match old {
            Some(old) => {
                let name = self.cli.saved_baseline().unwrap_or("new");
                let commit = self.origin.commit.as_deref();
                let new = Version { name, commit, runs: &runs, profiles: &[] };
                let verdict = self.verdicts.judge(self.cli, entry, Version::of(old_name, old), new)?;
                verdict.map(|verdict| compared(old_name, old, verdict))
            }
            None => None,
        };
        if !self.cli.criterion.discard_baseline {
            let of = (self.cli, entry);
            let sidecar = self.origin.sidecar(of, configuration, driver, measured, (runs, compared));
            for baseline in [Some("new"), self.cli.saved_baseline()].into_iter().flatten() {
                self.store.write_sidecar(baseline, &sidecar)?;
            }
        }
        self.baselines.after(entry)?;
        Ok(medians)
    }

    /// The lines under Criterion's.
    fn tell(&self, entry: &Entry, batch: &Batch, measured: &Measured) -> Result<(), Failure> {
        let limit = backend::of(self.cli)?.spread_limit_pct();
        let latency = &measured.latency;
        let rate = self.tokens_per_second(batch, latency);
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
        if let Some(line) = surroundings::of_ranks(measured) {
            eprintln!("{}: {line}", entry.id);
        }
        for line in surroundings::lines(&measured.around, latency.median, &measured.replays) {
            eprintln!("{}: {line}", entry.id);
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
        let skew_us = measured.skew_us();
        CaseResult {
            case: case.name.clone(),
            requests: case.requests.iter().map(Into::into).collect(),
            median_us: measured.latency.median,
            skew_us,
            traffic_bytes: (self.cli.layout().ranks() > 1).then_some(measured.traffic),
            id: entry.id.clone(),
            tokens_per_second: self.tokens_per_second(batch, &measured.latency),
            configuration,
            commit: self.origin.commit.clone(),
            date: now(),
            seed: self.cli.seed,
            ranks: (0..measured.ranks.len()).map(|rank| self.rank_result(rank, batch, &measured)).collect(),
        }
    }

    fn rank_result(&self, rank: usize, batch: &Batch, measured: &Measured) -> RankResult {
        let replays = &measured.ranks[rank];
        let times = crate::measure::times(replays);
        // Rank 0 has the device whose sensors were read.
        let around = if rank == 0 { measured.around.clone() } else { Surroundings::default() };
        RankResult {
            num_tokens: batch.num_tokens(),
            kv_blocks: batch.blocks_used,
            routing: measured.routing.clone(),
            expert_loads: measured.loads.get(rank).cloned(),
            num_local_tokens: batch.num_tokens(),
            num_tokens_after_padding: batch.num_tokens(),
            batch_order: batch.order.clone(),
            timing_scope: "forward",
            checks: measured.checks[rank.min(measured.checks.len() - 1)].clone(),
            clock_mhz: sidecar::clocks(replays),
            latency_us: Latency::of(&measured.latency.timer, &times, self.cli.iters as usize),
            around,
        }
    }

    /// Of all data-parallel ranks.
    fn tokens_per_second(&self, batch: &Batch, latency: &Latency) -> f64 {
        (batch.num_tokens() as u64 * u64::from(self.cli.data_parallel_size)) as f64 / latency.median * 1e6
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
        let ranks = (&mut self.crew, self.selected);
        let pass = Profiles::new(self.cli, self.store, folder, self.origin.commit.clone(), loaded, ranks);
        self.status = self.status.max(pass.run(&measured)?);
        Ok(())
    }

    /// Writes what was asked for, and returns the exit status.
    fn finish(mut self) -> Result<u8, Failure> {
        std::mem::replace(&mut self.crew, Crew::Alone).shutdown()?;
        if self.cli.mode() != Mode::Measure || self.cli.part.gather_into.is_some() {
            return Ok(self.status);
        }
        if let Some(path) = &self.cli.output_json {
            output::write(path, &self.results)?;
        }
        if let Some(path) = &self.cli.comparison.output_bmf {
            output::bmf(path, &self.metrics)?;
        }
        let kernels = |id: &str| self.store.sidecar(id, "new").ok().flatten().map(|new| new.profiles);
        self.verdicts.explain(|id| kernels(id).unwrap_or_default());
        let missed = self.targets.finish(&self.origin, self.kernels.as_deref())?;
        if missed {
            self.status = self.status.max(REGRESSION);
        }
        self.status = self.status.max(self.verdicts.status());
        output::summary(self.cli, &self.verdicts.finish(self.cli)?)?;
        if let Some(name) = self.cli.criterion.save_baseline.as_ref().filter(|_| !self.results.is_empty()) {
            eprintln!("baseline: saved as {name}");
        }
        if self.turns.is_none() {
            pages::write(self.store, !self.cli.criterion.noplot);
        }
        Ok(self.status)
    }
}
