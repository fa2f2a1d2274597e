//! `--check-targets` and `--update-targets`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::sidecar::{Measured, now};
use super::suite::Entry;
use super::{Failure, backend, project};
use crate::baseline::targets::{FOLDER, Outcome, Reached, TargetFile, judge, slug};
use crate::cli::Cli;

/// The target files of a run, by model, and what was reached so far.
pub struct Targets<'a> {
    cli: &'a Cli,
    files: BTreeMap<String, (TargetFile, Vec<Reached>)>,
}

impl<'a> Targets<'a> {
    /// Reads the files of the selected cases' models; refuses before anything runs to check against a file that is not there.
    pub fn open(cli: &'a Cli, selected: &[&Entry]) -> Result<Self, Failure> {
        let (checks, updates) = (cli.comparison.check_targets, cli.comparison.update_targets);
        let mut files = BTreeMap::new();
        for entry in selected.iter().filter(|_| checks || updates) {
            let model = entry.parts().1;
            if !files.contains_key(model) {
                let file = TargetFile::read(&path(cli, model)?)?;
                if updates {
                    file.check_updatable()?;
                }
                if checks && !updates && file.cases.is_empty() {
                    return Err(Failure::usage(format!(
                        "--check-targets: {} has no targets; make them by --update-targets",
                        file.path.display()
                    )));
                }
                files.insert(model.to_owned(), (file, Vec::new()));
            }
        }
        Ok(Self { cli, files })
    }

    /// A case was measured.
    pub fn add(&mut self, entry: &Entry, measured: &Measured, median_us: f64) {
        let (group, model, _) = entry.parts();
        let Some((_, reached)) = self.files.get_mut(model) else { return };
        let floors = measured.around.floors.as_ref();
        reached.push(Reached {
            case: format!("{group}/{}", entry.asked.name),
            median_us,
            spread_pct: measured.latency.sample_spread_pct,
            floors_us: floors.map(|floors| (floors.floor_us, floors.serial_floor_us)),
            checks: true, // a case that fails one is not measured
        });
    }

    /// Prints how the cases did, or writes the new targets; returns whether a target was missed.
    pub fn finish(&self, origin: &super::sidecar::Origin, kernels: Option<&str>) -> Result<bool, Failure> {
        let mut missed = false;
        for (file, reached) in self.files.values() {
            if self.cli.comparison.check_targets {
                missed |= self.check(file, reached)?;
            }
            if self.cli.comparison.update_targets && !reached.is_empty() {
                file.update(reached, &self.provenance(origin, kernels)?)?;
                eprintln!("{}: {} targets were written", file.path.display(), reached.len());
            }
        }
        Ok(missed)
    }

    fn check(&self, file: &TargetFile, reached: &[Reached]) -> Result<bool, Failure> {
        let limit = backend::of(self.cli)?.spread_limit_pct();
        let width = reached.iter().map(|reached| reached.case.chars().count()).max().unwrap_or(0).max(4);
        eprintln!("targets of {}:", file.path.display());
        eprintln!(
            "{:width$} {:>12} {:>12} {:>9} {:>7} {:>9}",
            "case", "target, µs", "median, µs", "change", "±", "spread"
        );
        let mut missed = false;
        for reached in reached {
            let target = file.cases.get(&reached.case);
            let outcome = judge(reached, target, limit);
            missed |= outcome.is_miss();
            let Reached { case, median_us, spread_pct, .. } = reached;
            let (goal, change, tolerance) =
                target.map_or(("–".into(), "–".into(), "–".into()), |target| {
                    let change = (median_us / target.median_us - 1.0) * 100.0;
                    (
                        format!("{:.1}", target.median_us),
                        format!("{change:+.2} %"),
                        format!("{} %", target.tolerance_pct),
                    )
                });
            eprintln!(
                "{case:width$} {goal:>12} {median_us:>12.1} {change:>9} {tolerance:>7} {spread_pct:>7.2} %  {}",
                outcome.text()
            );
        }
        let updates = self.cli.comparison.update_targets;
        if !updates
            && reached
                .iter()
                .all(|reached| judge(reached, file.cases.get(&reached.case), limit) == Outcome::None)
        {
            eprintln!("error: none of the cases has a target in {}", file.path.display());
            missed = true;
        }
        Ok(missed)
    }

    fn provenance(
        &self,
        origin: &super::sidecar::Origin,
        kernels: Option<&str>,
    ) -> Result<Vec<(&'static str, String)>, Failure> {
        let info = backend::of(self.cli)?.info();
        let fields = [
            ("device", Some(info.name)),
            ("driver", info.driver),
            ("date", Some(now())),
            ("commit", origin.commit.clone()),
            ("kernels", kernels.map(str::to_owned)),
            ("command", Some(command())),
        ];
        Ok(fields.into_iter().filter_map(|(key, value)| Some((key, value?))).collect())
    }
}

/// The command line, as a user would give it again.
fn command() -> String {
    let quoted = |argument: &String| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./@,:+%".contains(c);
        if !argument.is_empty() && argument.chars().all(plain) {
            argument.clone()
        } else {
            format!("'{}'", argument.replace('\'', r"'\''"))
        }
    };
    let given = std::env::var(super::handover::COMMAND_LINE).unwrap_or_default();
    let arguments: Vec<String> = serde_json::from_str(&given).unwrap_or_default();
    let arguments: Vec<String> =
        arguments.iter().filter(|argument| *argument != "--bench").map(quoted).collect();
    format!("cargo bench -- {}", arguments.join(" "))
}

/// `target-baselines/<device>/<model>[-<layout>].toml` of the project that is being worked on.
fn path(cli: &Cli, model: &str) -> Result<PathBuf, Failure> {
    let folder = device_folder(cli)?;
    Ok(folder.join(format!("{}.toml", slug(model))))
}

/// The folder of a device's target baselines.
pub fn device_folder(cli: &Cli) -> Result<PathBuf, Failure> {
    let device = slug(&backend::of(cli)?.info().name);
    let root = project::find(FOLDER).unwrap_or_else(|| Path::new(FOLDER).to_owned());
    Ok(root.join(if device.is_empty() { "device".to_owned() } else { device }))
}
