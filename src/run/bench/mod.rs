//! Measuring the selected cases: groups for Criterion, one prepared capture a case, and what is saved of it.

mod keep;

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
use super::sidecar::{self, Earlier, Measured, Origin};
use super::suite::Entry;
use super::targets::Targets;
use super::verdicts::{Verdicts, Version};
use super::{CASE, Failure, REGRESSION, one_line};
use crate::baseline::{Configuration, Sidecar, Store};
use crate::batch::Batch;
use crate::cli::{Cli, Mode};
use crate::measure::criterion::{Group, Harness};
use crate::measure::loads;
use crate::report::results::CaseResult;
use crate::report::verdicts::Metric;
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
