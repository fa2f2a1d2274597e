//! What the measured cases amount to beside the baselines that they were compared with.

use super::suite::Entry;
use super::{Failure, backend};
use crate::baseline::{Compared, Run, Sidecar};
use crate::cli::Cli;
use crate::profile::diff;
use crate::report::verdicts::{Row, Side, Summary};
use crate::stats::verdict::{self, Rules, Sides, State, Verdict};

/// Collects the verdicts of a run.
#[derive(Default)]
pub struct Verdicts {
    rows: Vec<Row>,
    sides: Vec<(Vec<verdict::Run>, Vec<verdict::Run>)>,
    tolerance_pct: f64,
}

/// One side of a comparison.
#[derive(Clone, Copy)]
pub struct Version<'a> {
    /// The baseline's name, or what stands for the side.
    pub name: &'a str,
    /// Its commit.
    pub commit: Option<&'a str>,
    /// Its runs.
    pub runs: &'a [Run],
    /// Kernels by rank, where they were traced.
    pub profiles: &'a [crate::profile::Profile],
}

impl<'a> Version<'a> {
    /// A saved baseline.
    pub fn of(name: &'a str, sidecar: &'a Sidecar) -> Self {
        Self { name, commit: sidecar.commit.as_deref(), runs: &sidecar.runs, profiles: &sidecar.profiles }
    }

    fn medians(&self) -> Vec<f64> {
        self.runs.iter().map(|run| run.median_us).collect()
    }

    fn side(&self) -> Side {
        Side {
            name: self.name.to_owned(),
            commit: self.commit.map(str::to_owned),
            median_us: crate::stats::median(&self.medians()).unwrap_or_default(),
            runs: self.runs.len(),
        }
    }
}

/// The rules for a case.
pub fn rules(cli: &Cli, tolerance_pct: f64) -> Result<Rules, Failure> {
    Ok(Rules { tolerance_pct, single_run_noise_pct: backend::of(cli)?.single_run_noise_pct() })
}

impl Verdicts {
    /// Judges a case and remembers it.
    pub fn judge(
        &mut self,
        cli: &Cli,
        entry: &Entry,
        old: Version<'_>,
        new: Version<'_>,
    ) -> Result<Option<Verdict>, Failure> {
        let runs = |version: Version<'_>| version.runs.iter().map(Run::for_verdict).collect::<Vec<_>>();
        let sides = (runs(old), runs(new));
        let rules = rules(cli, entry.tolerance_pct)?;
        self.tolerance_pct = self.tolerance_pct.max(entry.tolerance_pct);
        let verdict = verdict::judge(Sides { old: &sides.0, new: &sides.1 }, &rules);
        let explained = verdict.as_ref().and_then(|verdict| explain(verdict, old, new));
        let Some(verdict) = verdict else { return Ok(None) };
        let fatal = is_fatal(cli, &verdict);
        eprintln!("{}: {} than {}", entry.id, verdict.line(), described(old));
        if let Some(explained) = &explained {
            eprintln!("{}: {explained}", entry.id);
        }
        if fatal {
            eprintln!("regression: {}: slower by {:.2} %", entry.id, verdict.time.pct);
        }
        self.sides.push(sides);
        self.rows.push(Row {
            id: entry.id.clone(),
            old: old.side(),
            new: new.side(),
            verdict: verdict.clone(),
            explained,
            fatal,
        });
        Ok(Some(verdict))
    }

    /// Whether a case is slower by so much that it is fatal.
    pub fn fatal(&self) -> bool {
        self.rows.iter().any(|row| row.fatal)
    }

    /// The cases' rows and the verdict on all of them, told in one line.
    pub fn finish(self, cli: &Cli) -> Result<Summary, Failure> {
        let sides: Vec<Sides<'_>> = self.sides.iter().map(|(old, new)| Sides { old, new }).collect();
        let rules = rules(cli, self.tolerance_pct)?;
        let overall = if sides.len() > 1 { verdict::overall(&sides, &rules) } else { None };
        if let Some(overall) = &overall {
            eprintln!("all {} cases together: {}", sides.len(), overall.line());
        }
        Ok(Summary { rows: self.rows, overall })
    }
}

/// Whether the verdict is a regression that the command line asks to be fatal.
pub fn is_fatal(cli: &Cli, verdict: &Verdict) -> bool {
    let slower = verdict.state == State::Slower;
    cli.comparison.fail_on_regression.is_some_and(|limit| slower && verdict.time.pct > limit.unwrap_or(0.0))
}

fn explain(verdict: &Verdict, old: Version<'_>, new: Version<'_>) -> Option<String> {
    if verdict.state != State::Slower {
        return None;
    }
    let difference = new.side().median_us - old.side().median_us;
    let pairs = old.profiles.iter().zip(new.profiles);
    let most = pairs.max_by(|a, b| (a.1.span_us - a.0.span_us).total_cmp(&(b.1.span_us - b.0.span_us)))?;
    diff::explain(most.0, most.1, difference).map(|explained| explained.to_string())
}

fn described(side: Version<'_>) -> String {
    let commit = side.commit.map_or("no commit".to_owned(), |commit| format!("commit {commit}"));
    format!("{} ({commit})", side.name)
}

/// What is kept of a comparison beside the side that was measured later.
pub fn compared(name: &str, old: &Sidecar, verdict: Verdict) -> Compared {
    Compared {
        baseline: name.to_owned(),
        commit: old.commit.clone(),
        date: old.date.clone(),
        median_us: old.median_us,
        verdict,
    }
}
