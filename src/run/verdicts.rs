//! What the measured cases amount to beside the baselines that they were compared with.

use super::suite::Entry;
use super::{CASE, Failure, REGRESSION, backend};
use crate::baseline::{Compared, Run, Sidecar};
use crate::cli::Cli;
use crate::profile::Profile;
use crate::profile::explain::explain;
use crate::report::verdicts::{Row, Side, Summary};
use crate::stats::verdict::{self, Rules, Sides, State, Verdict};

/// Collects the verdicts of a run.
#[derive(Default)]
pub struct Verdicts {
    rows: Vec<Row>,
    /// The old side's kernels, row by row.
    profiles: Vec<Vec<Profile>>,
    sides: Vec<(Vec<verdict::Run>, Vec<verdict::Run>)>,
    tolerance_pct: f64,
    /// Cases of which a side has nothing to compare.
    unjudged: Vec<String>,
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
    /// Its kernels by rank, where they were traced.
    pub profiles: &'a [Profile],
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
        let Some(verdict) = verdict else {
            eprintln!("error: {}: not judged: a side has no replays that can be compared", entry.id);
            self.unjudged.push(entry.id.clone());
            return Ok(None);
        };
        let fatal = is_fatal(cli, &verdict);
        eprintln!("{}: {}; against {}", entry.id, verdict.line(), described(old));
        if fatal {
            eprintln!("regression: {}: slower by {:.2} %", entry.id, verdict.time.pct);
        }
        self.sides.push(sides);
        self.profiles.push(old.profiles.to_vec());
        self.rows.push(Row {
            id: entry.id.clone(),
            old: old.side(),
            new: new.side(),
            verdict: verdict.clone(),
            explained: None,
            fatal,
        });
        Ok(Some(verdict))
    }

    /// The exit status: of a case that is slower by so much that it is fatal, or that could not be judged.
    pub fn status(&self) -> u8 {
        let fatal = self.rows.iter().any(|row| row.fatal);
        let regression = if fatal { REGRESSION } else { 0 };
        regression.max(if self.unjudged.is_empty() { 0 } else { CASE })
    }

    /// Names the kernels that explain a slower case, where both sides were traced; `kernels` are the new side's, by id.
    pub fn explain(&mut self, kernels: impl Fn(&str) -> Vec<Profile>) {
        for (row, old) in self.rows.iter_mut().zip(&self.profiles) {
            if row.verdict.state != State::Slower {
                continue;
            }
            let new = kernels(&row.id);
            let slowest = |pair: &(&Profile, &Profile)| pair.1.span_us - pair.0.span_us;
            let pairs = old.iter().zip(&new);
            let Some((old, new)) = pairs.max_by(|a, b| slowest(a).total_cmp(&slowest(b))) else { continue };
            row.explained = explain(old, new, row.new.median_us - row.old.median_us)
                .map(|explained| explained.to_string());
            if let Some(explained) = &row.explained {
                eprintln!("{}: slower because of: {explained}", row.id);
            }
        }
    }

    /// The cases' rows and the verdict on all of them, told in one line.
    pub fn finish(self, cli: &Cli) -> Result<Summary, Failure> {
        let sides: Vec<Sides<'_>> = self.sides.iter().map(|(old, new)| Sides { old, new }).collect();
        let rules = rules(cli, self.tolerance_pct)?;
        let overall = if sides.len() > 1 { verdict::overall(&sides, &rules) } else { None };
        if let Some(overall) = &overall {
            eprintln!("all {} cases together: {}", sides.len(), overall.line());
        }
        Ok(Summary { rows: self.rows, overall, unjudged: self.unjudged })
    }
}

/// Whether the verdict is a regression that the command line asks to be fatal.
pub fn is_fatal(cli: &Cli, verdict: &Verdict) -> bool {
    let slower = verdict.state == State::Slower;
    cli.comparison.fail_on_regression.is_some_and(|limit| slower && verdict.time.pct > limit)
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
        profiles: old.profiles.clone(),
        verdict,
    }
}
