//! From the command line to the exit status.
//!
//! Criterion reads the process's own arguments, and panics or stays silent where a user deserves a sentence. So this runs in two
//! stages: the first takes our flags, checks everything that can be checked without a device, and replaces the process
//! with itself, given what Criterion knows; the second measures.

mod against;
mod backend;
mod bench;
mod ceilings;
mod children;
mod compare;
mod device;
mod diff;
mod handover;
mod ids;
mod measuring;
mod output;
mod pages;
mod plan;
mod profiles;
mod progress;
mod project;
mod ranks;
mod refuse;
mod repeat;
mod routing;
mod sidecar;
mod suite;
mod surroundings;
mod targets;
mod transfer;
mod verdicts;
mod verify;

use std::path::Path;
use std::process::ExitCode;

use crate::baseline::{BaselineError, Store, check_name, commit};
use crate::cli::{Cli, Mode};
use suite::Suite;

/// Why a run ends, and with which exit status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The process's exit status.
    pub status: u8,
    /// One line.
    pub message: String,
}

/// A regression that was asked to be fatal.
const REGRESSION: u8 = 1;
/// Bad usage or a bad file.
const USAGE: u8 = 2;
/// A case could not run or failed a check.
const CASE: u8 = 3;
/// A rank was lost.
const LOST: u8 = 4;
/// Ended by ctrl-C, as shells have it.
const INTERRUPTED: u8 = 130;

impl Failure {
    fn usage(message: impl Into<String>) -> Self {
        Self { status: USAGE, message: message.into() }
    }

    fn case(message: impl Into<String>) -> Self {
        Self { status: CASE, message: message.into() }
    }
}

impl From<BaselineError> for Failure {
    fn from(error: BaselineError) -> Self {
        Self::usage(error.to_string())
    }
}

/// The bench target's whole `main`.
#[must_use]
pub fn main() -> ExitCode {
    handover::end_with_a_closed_pipe();
    handover::end_at_a_panic();
    let outcome = match handover::received() {
        Some(cli) => cli.and_then(|cli| second_stage(&cli)),
        None => first_stage(),
    };
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(failure) => crate::rank::fail(failure.status, &one_line(&failure.message)),
    }
}

/// The text with control characters written out: what a user's file says must not steer the terminal.
fn one_line(text: &str) -> String {
    let write_out = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.trim_end().chars().map(write_out).collect()
}

/// Everything that needs no device; ends by replacing the process, unless there is nothing to measure.
fn first_stage() -> Result<u8, Failure> {
    let mut cli = Cli::from_command_line(handover::arguments()?.into_iter(), ranks::is_launched());
    let role = refuse::check_values(&cli).map_err(Failure::usage).and_then(|()| ranks::role(&cli));
    let home = handover::criterion_home();
    match role {
        Err(failure) if ranks::is_echo() => std::process::exit(i32::from(failure.status)),
        Err(failure) => return Err(failure),
        Ok(role) if !role.speaks() => return follow(&cli, &home),
        Ok(_) => {}
    }
    if let Some(status) = without_a_suite(&cli, &home)? {
        return Ok(status);
    }
    let suite = load_suite(&cli)?;
    if let Some(format) = cli.plan {
        let selected = suite.select(&cli, false)?;
        device::warn_of_length(&cli, &selected);
        return plan::print(&cli, &selected, format);
    }
    let selected = checked(&cli, &suite)?;
    device::warn_of_length(&cli, &selected);
    name_baselines(&mut cli, &Store { home: home.clone() })?;
    output::check_all(&cli)?;
    if let Some(folder) = cli.profile_dir.as_deref().filter(|_| cli.mode() == Mode::Measure) {
        profiles::check(&cli, folder)?;
    }
    say_what_has_no_effect(&cli);
    if cli.mode() == Mode::Test && !cli.criterion.test {
        eprintln!("test mode: each case runs once and nothing is timed; `cargo bench`, or --bench, measures");
    }
    start(&cli, &home, &selected)
}

/// What needs no cases; none if something else was asked for.
fn without_a_suite(cli: &Cli, home: &Path) -> Result<Option<u8>, Failure> {
    if let [old, new] = cli.diff.as_slice() {
        return diff::print(old, new).map(Some);
    }
    if let Some(expected) = &cli.verify {
        return verify::run(cli, expected).map(Some);
    }
    transfer::run(cli, &Store { home: home.to_owned() })
}

/// The selected cases, checked as far as they can be without a device.
fn checked<'a>(cli: &Cli, suite: &'a Suite) -> Result<Vec<&'a suite::Entry>, Failure> {
    suite.check_ids()?;
    let selected = suite.select(cli, cli.mode() == Mode::List)?;
    if !matches!(cli.mode(), Mode::List | Mode::Load) {
        device::check_settings(cli, &selected)?;
    }
    Ok(selected)
}

/// The first stage of a rank that a launcher started and that is not rank 0: what rank 0 refuses it refuses as well, without a word.
fn follow(cli: &Cli, home: &Path) -> Result<u8, Failure> {
    let prints = cli.plan.is_some() || cli.verify.is_some() || !cli.diff.is_empty() || transfer::asked(cli);
    if prints || !matches!(cli.mode(), Mode::Measure | Mode::Test | Mode::Profile) {
        return Ok(0);
    }
    let starts = [("--against", cli.comparison.against.is_some()), ("--runs", cli.comparison.runs > Some(1))];
    let refused =
        starts.iter().filter(|(_, given)| *given).try_for_each(|(flag, _)| ranks::refuse_launcher(flag));
    match refused.and_then(|()| checked(cli, &load_suite(cli)?).map(drop)) {
        Ok(()) => ranks::launch(cli, home, false, None),
        Err(failure) => std::process::exit(i32::from(failure.status)),
    }
}

/// Measures in one process or several.
fn start(cli: &Cli, home: &Path, selected: &[&suite::Entry]) -> Result<u8, Failure> {
    let measures = cli.mode() == Mode::Measure;
    let store = Store { home: home.to_owned() };
    if let Some(reference) = cli.comparison.against.as_ref().filter(|_| measures) {
        ranks::refuse_launcher("--against")?;
        return against::run(cli, &store, reference, selected);
    }
    match cli.comparison.runs {
        Some(runs) if runs > 1 && measures => {
            ranks::refuse_launcher("--runs")?;
            bench::check_baselines(cli, &store, selected)?;
            repeat::run(cli, home, runs)
        }
        _ if !measures && matches!(cli.mode(), Mode::List | Mode::Load) => {
            Err(handover::replace_process(cli, home))
        }
        _ => ranks::launch(cli, home, false, None),
    }
}

/// Flags that ask for results where nothing is measured.
fn say_what_has_no_effect(cli: &Cli) {
    let measures = cli.mode() == Mode::Measure;
    let compares = measures || cli.mode() == Mode::Load;
    let flags = [
        ("--output-json", cli.output_json.is_some() && !compares),
        ("--fail-on-regression", cli.comparison.fail_on_regression.is_some() && !compares),
        ("--save-baseline", cli.criterion.save_baseline.is_some() && !compares),
        ("--profile-dir", cli.profile_dir.is_some() && !measures),
        ("--summary-md", cli.comparison.summary_md.is_some() && !compares),
        ("--output-bmf", cli.comparison.output_bmf.is_some() && !measures),
        ("--check-targets", cli.comparison.check_targets && !measures),
        ("--update-targets", cli.comparison.update_targets && !measures),
    ];
    for (flag, _) in flags.iter().filter(|(_, given)| *given) {
        eprintln!("warning: {flag} has no effect: nothing is measured in this mode");
    }
}

/// Puts back what an interrupted save left, and turns the baselines that were asked for into names on disk.
fn name_baselines(cli: &mut Cli, store: &Store) -> Result<(), Failure> {
    if matches!(cli.mode(), Mode::Measure | Mode::Load) {
        let _lock = store.lock()?;
        for folder in store.recover()? {
            eprintln!(
                "{}: a save was interrupted here; the older baseline is back",
                folder.strip_prefix(&store.home).unwrap_or(&folder).display()
            );
        }
    }
    let (imports, folder) = (matches!(cli.mode(), Mode::Measure | Mode::Load), targets::device_folder(cli)?);
    let flags = &mut cli.criterion;
    if let Some(name) = &mut flags.save_baseline {
        *name = commit::name_to_save(name)?;
        check_name(name)?;
    }
    for name in
        [&mut flags.baseline, &mut flags.baseline_lenient, &mut flags.load_baseline].into_iter().flatten()
    {
        *name = commit::name_to_read(name, store)?;
        check_name(name)?;
        if imports {
            transfer::import_committed(name, store, &folder)?;
        }
    }
    Ok(())
}

/// Measures, as Criterion's mode says; the command line was checked by the first stage.
fn second_stage(cli: &Cli) -> Result<u8, Failure> {
    let store = Store { home: handover::criterion_home() };
    let suite = load_suite(cli)?;
    let selected = suite.select(cli, true)?;
    match cli.mode() {
        Mode::List => bench::list(cli, &selected),
        Mode::Load => {
            let _lock = store.lock()?;
            bench::load(cli, &store, &selected)
        }
        Mode::Measure | Mode::Test | Mode::Profile => ranks::run_suite(cli, &store, &selected),
    }
}

fn load_suite(cli: &Cli) -> Result<Suite, Failure> {
    let backend = backend::of(cli)?;
    Suite::load(cli, backend.default_model(cli), backend.default_folder())
}
