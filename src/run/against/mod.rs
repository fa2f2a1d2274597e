//! `--against REF`: another commit's executable and this one, measured alternately on the same cases.
//!
//! | file | what it does |
//! | --- | --- |
//! | `build` | REF's executable, from a worktree |
//! | `cases` | the selected cases as shape files, and which of them both sides can hold at once |
//! | `side` | one side's processes and what they measured |
//! | `turns` | one case at a time, in the order A B B A |
//! | `save` | what is kept, and Criterion's own verdict |
//!
//! The unit that is repeated is the process: a round starts one a side. Both stay while their cases take turns if both fit into
//! the device's memory; else the sides follow each other. Rounds alternate in which side goes first.

mod build;
mod cases;
mod save;
mod side;
pub mod turns;

use std::path::Path;

use super::Failure;
use super::children::Interrupt;
use super::output;
use super::pages;
use super::suite::Entry;
use super::verdicts::{Verdicts, Version, compared};
use crate::baseline::{Run, Store};
use crate::cli::Cli;
use crate::report::verdicts::Metric;
use crate::stats::median;
use cases::Heat;
use side::{Side, Which};

/// Runs a side where the command line does not say.
const RUNS: u32 = 5;

/// Measures the selected cases on both sides and gives the verdict; returns the exit status.
pub fn run(cli: &Cli, store: &Store, reference: &str, selected: &[&Entry]) -> Result<u8, Failure> {
    let interrupt = Interrupt::listen()?;
    let _lock = store.lock()?;
    let old = build::executable(reference, &interrupt)?;
    let own = std::env::current_exe()
        .map_err(|error| Failure::usage(format!("this program's own path is unknown: {error}")))?;
    let scratch = tempfile::Builder::new()
        .prefix("forward-bench-against-")
        .tempdir()
        .map_err(|error| Failure::usage(format!("a folder for the measurements: {error}")))?;
    let scratch = scratch.path();
    let heats = cases::heats(cli, selected, scratch)?;
    let mut sides = [
        Side::new(Which::Old, &old.path, old.commit.as_deref(), scratch),
        Side::new(Which::New, &own, None, scratch),
    ];
    for heat in &heats {
        for side in &mut sides {
            side.probe(cli, heat, reference, &interrupt)?;
        }
    }
    let rounds = cli.comparison.runs.unwrap_or(RUNS);
    for round in 0..rounds {
        for heat in &heats {
            measure(cli, &mut sides, heat, (round, rounds), &interrupt)?;
        }
        tell_round(&sides, selected, (round + 1, rounds));
        if round == 0 {
            check_alike(cli, reference, &sides)?;
        }
    }
    judge(cli, store, reference, &sides, selected, scratch)
}

/// One round of a heat.
fn measure(
    cli: &Cli,
    sides: &mut [Side; 2],
    heat: &Heat,
    (round, rounds): (u32, u32),
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    let [old, new] = sides;
    let order = if round.is_multiple_of(2) { [&mut *old, new] } else { [new, &mut *old] };
    let [first, second] = order;
    let profiles = round + 1 == rounds;
    if heat.resident && first.takes_turns && second.takes_turns {
        let mut pair = [first.start(cli, heat, profiles)?, second.start(cli, heat, profiles)?];
        turns::alternate(&mut pair, interrupt)?;
        let [one, other] = pair;
        first.collect(cli, one, heat)?;
        return second.collect(cli, other, heat);
    }
    for side in [first, second] {
        let mut process = [side.start(cli, heat, profiles)?];
        turns::alternate(&mut process, interrupt)?;
        let [process] = process;
        side.collect(cli, process, heat)?;
    }
    Ok(())
}

/// Refuses to compare sides that ran unlike things: another version may have other defaults. Versions may write layout and
/// draws otherwise, so these are told of only.
fn check_alike(cli: &Cli, reference: &str, [old, new]: &[Side; 2]) -> Result<(), Failure> {
    for (id, here) in &new.configurations {
        let Some(there) = old.configurations.get(id) else { continue };
        for (field, found) in here.differences(there) {
            if cli.comparison.allow_mismatch.iter().any(|allowed| super::compare::name(*allowed) == field) {
                continue;
            }
            let what = format!("--against {reference}: {id}: the sides differ in {field}: {found}");
            if ["layout", "draws"].contains(&field) {
                eprintln!("warning: {what}");
            } else {
                return Err(Failure::usage(format!(
                    "{what}; --allow-mismatch {field} compares all the same"
                )));
            }
        }
    }
    Ok(())
}

fn tell_round(sides: &[Side; 2], selected: &[&Entry], (round, rounds): (u32, u32)) {
    for entry in selected {
        let last =
            |side: &Side| side.runs.get(&entry.id).and_then(|runs| runs.last()).map(|run| run.median_us);
        if let [Some(old), Some(new)] = [last(&sides[0]), last(&sides[1])] {
            let change = (new / old - 1.0) * 100.0;
            eprintln!(
                "run {round} of {rounds}: {}: {old:.1} µs there, {new:.1} here, {change:+.2} %",
                entry.id
            );
        }
    }
}

fn judge(
    cli: &Cli,
    store: &Store,
    reference: &str,
    sides: &[Side; 2],
    selected: &[&Entry],
    scratch: &Path,
) -> Result<u8, Failure> {
    let commit = super::sidecar::Origin::ask().commit;
    let (mut verdicts, mut metrics) = (Verdicts::default(), Vec::new());
    let [old_side, new_side] = sides;
    let none: [Run; 0] = [];
    for entry in selected {
        let runs = |side: &Side| side.runs.get(&entry.id).map_or(&none[..], Vec::as_slice).to_vec();
        let (old_runs, new_runs) = (runs(old_side), runs(new_side));
        let profiles = old_side.profiles(&entry.id);
        let old = Version {
            name: reference,
            commit: old_side.commit.as_deref(),
            runs: &old_runs,
            profiles: &profiles,
        };
        let new = Version { name: "this tree", commit: commit.as_deref(), runs: &new_runs, profiles: &[] };
        let Some(verdict) = verdicts.judge(cli, entry, old, new)? else { continue };
        let medians: Vec<f64> = new_runs.iter().map(|run| run.median_us).collect();
        let seconds = median(&medians).unwrap_or(f64::INFINITY) / 1e6;
        let tokens_per_second = entry.asked.num_tokens().0 as f64 / seconds;
        metrics.push(Metric { id: entry.id.clone(), medians_us: medians, tokens_per_second });
        save::both(store, reference, sides, entry, |old| {
            compared(&save::name(reference, old_side), old, verdict)
        })?;
    }
    verdicts.explain(|id| new_side.profiles(id));
    let status = verdicts.status();
    output::summary(cli, &verdicts.finish(cli)?)?;
    if let Some(path) = &cli.comparison.output_bmf {
        output::bmf(path, &metrics)?;
    }
    save::criterions_verdict(cli, sides, scratch)?;
    pages::write(store, !cli.criterion.noplot);
    Ok(status)
}
