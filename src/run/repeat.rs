//! `--runs N`: the suite in N processes, one after the other.
//!
//! All but the last gather their runs and save nothing; the last one saves, with the others' runs beside its own. So Criterion
//! compares with the baseline from before all of them, and an interrupted series changes nothing.

use std::path::Path;

use super::children::Interrupt;
use super::{CASE, Failure, ranks};
use crate::cli::Cli;

/// Runs the suite so many times; returns the exit status.
pub fn run(cli: &Cli, home: &Path, runs: u32) -> Result<u8, Failure> {
    let interrupt = Interrupt::listen()?;
    let folder = tempfile::Builder::new()
        .prefix("forward-bench-runs-")
        .tempdir()
        .map_err(|error| Failure::usage(format!("a folder for the runs: {error}")))?;
    let mut last = cli.clone();
    for run in 1..runs {
        eprintln!("run {run} of {runs}");
        let file = folder.path().join(format!("{run}.json"));
        let status = ranks::launch(&gathering(cli, &file), home, true, Some(&interrupt))?;
        if status != 0 && status != CASE {
            return Err(Failure {
                status,
                message: format!("run {run} of {runs} ended with {status}; nothing was saved"),
            });
        }
        if file.exists() {
            last.part.earlier.push(file);
        }
    }
    eprintln!("run {runs} of {runs}");
    ranks::launch(&last, home, false, Some(&interrupt))
}

/// The command line of a process that only gathers: nothing is saved, drawn or compared.
fn gathering(cli: &Cli, file: &Path) -> Cli {
    let mut cli = cli.clone();
    cli.part.gather_into = Some(file.to_owned());
    cli.profile_dir = None;
    let flags = &mut cli.criterion;
    flags.save_baseline = None;
    flags.baseline = None;
    flags.baseline_lenient = None;
    flags.discard_baseline = true;
    flags.noplot = true;
    flags.nresamples = flags.nresamples.or(Some(1000)); // its intervals are thrown away
    cli
}
