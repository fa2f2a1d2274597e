//! What is kept of a measured case.

use super::Failure;
use super::suite::Entry;
use crate::backend::Replay;
use crate::baseline::{Compared, Configuration, RankTimes, Run, Sidecar};
use crate::cli::Cli;
use crate::measure::Checks;
use crate::measure::limits::Surroundings;
use crate::measure::loads::ExpertLoads;
use crate::model::cost::Traffic;
use crate::rank::Slowest;
use crate::stats::{Latency, median};

/// A measured case.
#[derive(Default)]
pub struct Measured {
    /// The counted replays; each takes as long as on the slowest rank.
    pub replays: Vec<Replay>,
    /// The same of each rank.
    pub ranks: Vec<Vec<Replay>>,
    /// Their summary.
    pub latency: Latency,
    /// The protocol's checks on each rank.
    pub checks: Vec<Checks>,
    /// Floors, sensors, kernels.
    pub around: Surroundings,
    /// The device's choices among ways to compute the same.
    pub choices: std::collections::BTreeMap<String, String>,
    /// How tokens choose experts; none for a model without.
    pub routing: Option<String>,
    /// What the experts of each rank did, by MoE layer; empty without experts.
    pub loads: Vec<Vec<ExpertLoads>>,
    /// What all experts did, by MoE layer.
    pub expert_loads: Option<Vec<ExpertLoads>>,
    /// What a rank sends and gets in a step.
    pub traffic: Traffic,
}

impl Measured {
    /// The measurement as one process's run.
    pub fn run(&self, cli: &Cli) -> Run {
        let latency = &self.latency;
        Run {
            date: now(),
            iters: cli.iters as usize,
            median_us: latency.median,
            spread_pct: latency.sample_spread_pct,
            telemetry: self.around.telemetry.clone(),
            ranks: self.ranks.iter().map(|replays| rank_times(&latency.timer, replays)).collect(),
        }
    }

    /// How far the ranks lay apart in each replay, in microseconds: max − min; none of one rank.
    pub fn skew_us(&self) -> Option<Vec<f64>> {
        let slowest = Slowest::of(&self.ranks).ok().filter(|_| self.ranks.len() > 1)?;
        Some(slowest.skew.iter().map(|skew| skew.micros()).collect())
    }
}

fn rank_times(timer: &str, replays: &[Replay]) -> RankTimes {
    RankTimes {
        timer: timer.to_owned(),
        samples_us: replays.iter().map(|replay| rounded(replay.time.micros(), 1e3)).collect(),
        clock_mhz: clocks(replays).map(|clocks| clocks.iter().map(|mhz| rounded(*mhz, 10.0)).collect()),
    }
}

/// The device's clock over each replay, where it can be read.
pub fn clocks(replays: &[Replay]) -> Option<Vec<f64>> {
    replays.iter().map(|replay| replay.clock_mhz).collect()
}

/// To a nanosecond, or a tenth of a megahertz: finer digits are the timer's noise, and take room.
fn rounded(value: f64, scale: f64) -> f64 {
    (value * scale).round() / scale
}

/// What the whole process's sidecars have in common.
pub struct Origin {
    /// HEAD, `-dirty` where tracked files differ from it.
    pub commit: Option<String>,
    /// Hash of what they differ in.
    pub dirty_diff: Option<String>,
}

impl Origin {
    /// Asks git.
    pub fn ask() -> Self {
        use crate::baseline::commit;
        Self { commit: commit::head(), dirty_diff: commit::dirty_diff() }
    }

    /// The sidecar of a case; `runs` are those of earlier processes, then this one's.
    pub fn sidecar(
        &self,
        (cli, entry): (&Cli, &Entry),
        configuration: &Configuration,
        driver: Option<String>,
        measured: &Measured,
        (runs, compared): (Vec<Run>, Option<Compared>),
    ) -> Sidecar {
        let medians: Vec<f64> = runs.iter().map(|run| run.median_us).collect();
        Sidecar {
            id: entry.id.clone(),
            date: now(),
            commit: self.commit.clone(),
            dirty_diff: self.dirty_diff.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            configuration: configuration.clone(),
            seed: cli.seed,
            driver,
            around: measured.around.clone(),
            choices: measured.choices.clone(),
            routing: measured.routing.clone(),
            expert_loads: measured.expert_loads.clone(),
            median_us: median(&medians).unwrap_or(measured.latency.median),
            runs,
            checks: measured.checks[0].clone(),
            compared,
            profiles: Vec::new(),
        }
    }
}

/// Runs of earlier processes of `--runs`, by id.
pub type Earlier = std::collections::BTreeMap<String, Vec<Run>>;

/// Reads what earlier processes gathered.
pub fn earlier(cli: &Cli) -> Result<Earlier, Failure> {
    let mut all = Earlier::new();
    for path in &cli.part.earlier {
        let broken = |error: &dyn std::fmt::Display| Failure::case(format!("{}: {error}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| broken(&error))?;
        let gathered: Earlier = serde_json::from_str(&text).map_err(|error| broken(&error))?;
        for (id, runs) in gathered {
            all.entry(id).or_default().extend(runs);
        }
    }
    Ok(all)
}

/// The time, RFC 3339 in UTC, to the second.
pub fn now() -> String {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}
