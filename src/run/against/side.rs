//! One side of the comparison: its processes, and what they measured.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Deserialize;

use super::cases::Heat;
use super::turns::{Taker, listen};
use crate::baseline::{Configuration, RankTimes, Run, Sidecar, Store};
use crate::cli::Cli;
use crate::profile::Profile;
use crate::run::children::{Interrupt, Process, code, output};
use crate::run::suite::Entry;
use crate::run::{CASE, Failure};

/// How long an executable may take to list its cases.
const PROBE_LIMIT: Duration = Duration::from_secs(60);

/// Which side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// What is compared with.
    Old,
    /// The working tree.
    New,
}

impl Which {
    /// The baseline that the side's processes save under, in a Criterion folder of their own.
    pub fn baseline(self) -> &'static str {
        if self == Self::Old { "old" } else { "new-side" }
    }
}

/// A side.
pub struct Side {
    which: Which,
    executable: PathBuf,
    /// The commit that it was built from.
    pub commit: Option<String>,
    scratch: PathBuf,
    /// Whether its processes wait for their turn before a case.
    pub takes_turns: bool,
    /// Whether it can trace kernels.
    traces: bool,
    /// What was measured so far, by id.
    pub runs: BTreeMap<String, Vec<Run>>,
    /// What it was measured on, by id.
    pub configurations: BTreeMap<String, Configuration>,
    started: u32,
}

/// A result file's case, as far as it matters here; every version writes these.
#[derive(Deserialize)]
struct CaseResult {
    id: String,
    date: String,
    median_us: f64,
    ranks: Vec<RankResult>,
    configuration: Option<Configuration>,
}

#[derive(Deserialize)]
struct RankResult {
    latency_us: Latency,
    clock_mhz: Option<Vec<f64>>,
    telemetry: Option<crate::backend::Telemetry>,
}

#[derive(Deserialize)]
struct Latency {
    timer: String,
    sample_spread_pct: f64,
    samples_us: Vec<f64>,
}

impl Side {
    /// A side that has measured nothing yet.
    pub fn new(which: Which, executable: &Path, commit: Option<&str>, scratch: &Path) -> Self {
        Self {
            which,
            executable: executable.to_owned(),
            commit: commit.map(str::to_owned),
            scratch: scratch.to_owned(),
            takes_turns: false,
            traces: false,
            runs: BTreeMap::new(),
            configurations: BTreeMap::new(),
            started: 0,
        }
    }

    /// Whether a process's name, as the device's driver gives it, is of this side's executable.
    pub fn is(&self, process: &str) -> bool {
        let file = self.executable.file_name().unwrap_or_default().to_string_lossy();
        process.split(" (pid").next().is_some_and(|name| name.ends_with(&*file))
    }

    /// The baseline that its processes save under.
    pub fn baseline(&self) -> &'static str {
        self.which.baseline()
    }

    /// The Criterion folder of the side's processes.
    pub fn store(&self) -> Store {
        Store { home: self.scratch.join(format!("criterion-{}", self.which.baseline())) }
    }

    /// The executable with what both sides are given.
    fn command(&self, cli: &Cli, heat: &Heat) -> Command {
        let mut command = Command::new(&self.executable);
        // Tuning once is what --retune asks for: all later processes take the choices of the first.
        let first = self.which == Which::Old && self.started <= 1;
        let given = cli.given.iter().filter(|flag| first || *flag != "--retune");
        command.arg("--bench").args(given).arg("--shapes").arg(&heat.shapes);
        let kv_given = cli.kv_cache_memory_bytes.is_some();
        if heat.resident && !kv_given {
            command.arg(format!("--kv-cache-memory-bytes={}", heat.kv_bytes));
        }
        command.env("CRITERION_HOME", self.store().home).stderr(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    /// Asks the executable for its cases: whether it knows the flags and the shape files, and whether it takes turns.
    pub fn probe(
        &mut self,
        cli: &Cli,
        heat: &Heat,
        reference: &str,
        interrupt: &Interrupt,
    ) -> Result<(), Failure> {
        let of = if self.which == Which::Old {
            format!("--against {reference}: its executable")
        } else {
            "this executable".into()
        };
        let ask =
            |more: &[&str]| output(self.command(cli, heat).arg("--list").args(more), interrupt, PROBE_LIMIT);
        let listed = ask(&[])?;
        if !listed.status.success() {
            let line =
                listed.stderr.lines().find(|line| !line.trim().is_empty()).unwrap_or("it says nothing");
            return Err(Failure::usage(format!("{of} refuses what it is given: {}", line.trim())));
        }
        let lacks =
            |id: &&String| !listed.stdout.lines().any(|line| line.strip_suffix(": benchmark") == Some(id));
        if let Some(id) = heat.ids.iter().find(lacks) {
            return Err(Failure::usage(format!("{of} has no benchmark {id}; its ids are made otherwise")));
        }
        let turns = ask(&["--take-turns", "none"])?.status.success();
        let traces = ask(&["--profile-dir", "none"])?.status.success();
        (self.takes_turns, self.traces) = (turns, traces);
        if !self.takes_turns && heat.resident {
            eprintln!("{of} cannot take turns case by case; whole processes alternate");
        }
        Ok(())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.scratch.join(format!("{}-{}.{name}", self.which.baseline(), self.started))
    }

    /// Starts a process over the heat's cases; with `profiles`, it traces their kernels after all timing.
    pub fn start(&mut self, cli: &Cli, heat: &Heat, profiles: bool) -> Result<Taker, Failure> {
        self.started += 1;
        let mut command = self.command(cli, heat);
        let log = self.file("log");
        let failed = |error: std::io::Error| Failure::usage(format!("{}: {error}", log.display()));
        let log_file = File::create(&log).map_err(failed)?;
        command.arg(format!("--save-baseline={}", self.which.baseline()));
        command.arg(format!("--output-json={}", self.file("json").display())).arg("--noplot");
        if !cli.given.iter().any(|flag| flag.starts_with("--nresamples")) {
            command.arg("--nresamples=1000"); // its intervals are not shown
        }
        if let Some(folder) = cli.profile_dir.as_ref().filter(|_| profiles && self.traces) {
            command.arg("--profile-dir").arg(folder.join(self.which.baseline()));
        }
        let mut listener = None;
        if self.takes_turns {
            let socket = self.file("turns");
            listener = Some(listen(&socket)?);
            command.arg("--take-turns").arg(&socket);
        }
        command.stdout(Stdio::null()).stderr(Stdio::from(log_file));
        Ok(Taker::new(Process::start(&mut command)?, listener))
    }

    /// Reads what a process measured that has ended.
    pub fn collect(&mut self, cli: &Cli, mut taker: Taker, heat: &Heat) -> Result<(), Failure> {
        let status = taker.process.ended().map_or(u8::MAX, code);
        let log = fs::read_to_string(self.file("log")).unwrap_or_default();
        for line in log.lines().filter(|line| line.starts_with("error: ")) {
            eprintln!("{}: {line}", self.which.baseline());
        }
        if status != 0 && status != CASE {
            let last = log.lines().last().unwrap_or("it said nothing").to_owned();
            let message =
                format!("a process of the {} side ended with {status}: {last}", self.which.baseline());
            return Err(Failure { status: if status == 2 { 2 } else { CASE }, message });
        }
        let file = self.file("json");
        let broken = |error: &dyn std::fmt::Display| Failure::case(format!("{}: {error}", file.display()));
        let text = fs::read_to_string(&file).map_err(|error| broken(&error))?;
        let results: Vec<CaseResult> = serde_json::from_str(&text).map_err(|error| broken(&error))?;
        for result in results.into_iter().filter(|result| heat.ids.contains(&result.id)) {
            if let Some(configuration) = &result.configuration {
                self.configurations.insert(result.id.clone(), configuration.clone());
            }
            self.runs.entry(result.id.clone()).or_default().push(run(result, cli.iters as usize));
        }
        Ok(())
    }

    /// What its last process saved of a case.
    pub fn sidecar(&self, entry: &Entry) -> Option<Sidecar> {
        self.store().sidecar(&entry.id, self.which.baseline()).ok().flatten()
    }

    /// Its kernels by rank, where they were traced.
    pub fn profiles(&self, id: &str) -> Vec<Profile> {
        let sidecar = self.store().sidecar(id, self.which.baseline()).ok().flatten();
        sidecar.map(|sidecar| sidecar.profiles).unwrap_or_default()
    }
}

/// A result as one process's run.
fn run(result: CaseResult, iters: usize) -> Run {
    let spreads = result.ranks.iter().map(|rank| rank.latency_us.sample_spread_pct);
    let spread_pct = spreads.fold(0.0, f64::max);
    let telemetry = result.ranks.first().and_then(|rank| rank.telemetry.clone());
    let rank = |rank: RankResult| RankTimes {
        timer: rank.latency_us.timer,
        samples_us: rank.latency_us.samples_us,
        clock_mhz: rank.clock_mhz,
    };
    Run {
        date: result.date,
        iters,
        median_us: result.median_us,
        spread_pct,
        telemetry,
        ranks: result.ranks.into_iter().map(rank).collect(),
    }
}
