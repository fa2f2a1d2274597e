//! Prints how often the verdict errs, and what it finds: the tables of `docs/verdict.md`.
//!
//! `cargo run --release --example verdict_table`; a number after `--` sets the comparisons a figure (10000).

mod simulate;

use forward_bench::stats::verdict::Rules;
use simulate::{Counts, Replays, Runs, SCENARIOS, Scenario, Simulator};

const NUMBERS: [Counts; 7] = [(1, 1), (2, 2), (3, 3), (5, 5), (7, 7), (10, 10), (5, 20)];

/// CUDA's, and a tolerance.
fn rules(tolerance_pct: f64) -> Rules {
    Rules { tolerance_pct, single_run_noise_pct: 2.0 }
}

fn normal(sd: f64) -> Scenario {
    Scenario { name: "", replays: Replays::Constant, runs: Runs::Normal(sd) }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let trials = std::env::args().nth(1).map_or(Ok(10_000), |text| text.parse())?;
    for tolerance in [1.0, 0.5] {
        false_alarms(tolerance, trials);
    }
    runs_needed(trials);
    found_by_default(trials);
    Ok(())
}

fn row(name: &str, cells: impl Iterator<Item = String>) {
    println!("| {name} | {} |", cells.collect::<Vec<_>>().join(" | "));
}

fn false_alarms(tolerance: f64, trials: u32) {
    println!("\nFalse alarms in percent, tolerance {tolerance} %, by runs of the old and the new side:\n");
    row("what varies", NUMBERS.iter().map(|(old, new)| format!("{old}, {new}")));
    row("---", NUMBERS.iter().map(|_| "---:".to_owned()));
    for scenario in &SCENARIOS {
        let alarms =
            |&counts| Simulator::new(1).found(scenario, counts, 0.0, &rules(tolerance), trials).alarms();
        row(scenario.name, NUMBERS.iter().map(alarms).map(|alarms| format!("{alarms:.2}")));
    }
    let alarms = |&counts| Simulator::new(1).found_overall(counts, &rules(tolerance), trials).alarms();
    row("four cases together", NUMBERS.iter().map(alarms).map(|alarms| format!("{alarms:.2}")));
}

/// How many runs a side find a change in 95 % of comparisons, with a tolerance of half the change.
fn runs_needed(trials: u32) {
    let changes = [0.5, 1.0, 2.0];
    println!(
        "\nRuns a side that find a change in 95 % of comparisons (and in how many they do), tolerance half the change:\n"
    );
    row("sd from run to run", changes.iter().map(|change| format!("{change} %")));
    row("---", changes.iter().map(|_| "---:".to_owned()));
    for sd in [0.25, 0.5, 1.0] {
        let needed = |&change: &f64| {
            let runs: Vec<usize> = (5..200).collect();
            let finds = |&runs: &usize| power(sd, runs, change, change / 2.0, trials);
            first(&runs, |runs| finds(runs) >= 95.0)
                .map_or_else(|| "more than 199".to_owned(), |runs| format!("{runs} ({:.1} %)", finds(&runs)))
        };
        row(&format!("{sd} %"), changes.iter().map(needed));
    }
}

/// The least change that five and ten runs a side find in 95 % of comparisons with the default tolerance.
fn found_by_default(trials: u32) {
    println!("\nThe change that is found in 95 % of comparisons with the default tolerance of 1 %:\n");
    row("sd from run to run", ["5 a side", "10 a side", "20 a side"].map(str::to_owned).into_iter());
    row("---", std::iter::repeat_n("---:".to_owned(), 3));
    for sd in [0.25, 0.5, 1.0] {
        let least = |&runs: &usize| {
            let changes: Vec<f64> = (20..200).map(|twentieths| f64::from(twentieths) / 20.0).collect();
            first(&changes, |&change| power(sd, runs, change, 1.0, trials) >= 95.0)
                .map_or_else(|| "10 % or more".to_owned(), |change| format!("{change:.2} %"))
        };
        row(&format!("{sd} %"), [5, 10, 20].iter().map(least));
    }
}

/// The first of ascending values that is enough, where all after it are as well.
fn first<T: Copy>(values: &[T], enough: impl Fn(&T) -> bool) -> Option<T> {
    values.get(values.partition_point(|value| !enough(value))).copied()
}

fn power(sd: f64, runs: usize, change: f64, tolerance: f64, trials: u32) -> f64 {
    Simulator::new(2).found(&normal(sd), (runs, runs), change, &rules(tolerance), trials).slower
}
