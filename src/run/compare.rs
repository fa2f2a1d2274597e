//! Which baseline a case is compared with, whether that comparison means anything, and what it said.

use super::Failure;
use super::suite::Entry;
use crate::baseline::{Configuration, FIELDS, SIDECAR, Sidecar, Store};
use crate::cli::{Cli, Field};

/// The baselines of a run.
pub struct Baselines<'a> {
    cli: &'a Cli,
    store: &'a Store,
}

impl<'a> Baselines<'a> {
    /// Those that the command line asks for, in `store`.
    pub fn of(cli: &'a Cli, store: &'a Store) -> Self {
        Self { cli, store }
    }

    /// Checks that what `--baseline` and `--load-baseline` name is there for every case; Criterion would panic.
    pub fn require(&self, selected: &[&Entry]) -> Result<(), Failure> {
        let flags = &self.cli.criterion;
        let named = [("--baseline", &flags.baseline), ("--load-baseline", &flags.load_baseline)];
        for (flag, name) in named {
            let Some(name) = name else { continue };
            let missing: Vec<&Entry> =
                selected.iter().copied().filter(|entry| !self.store.has(&entry.id, name)).collect();
            if let [first, ..] = missing.as_slice() {
                return Err(self.missing(flag, name, &first.id, missing.len(), selected.len()));
            }
        }
        Ok(())
    }

    fn missing(&self, flag: &str, name: &str, first: &str, missing: usize, selected: usize) -> Failure {
        let names = self.store.names();
        let exist = if names.is_empty() { "there are none yet".to_owned() } else { names.join(", ") };
        let change = match flag {
            "--baseline" => "; --baseline-lenient compares where it exists",
            _ => "",
        };
        Failure::usage(format!(
            "{flag} {name}: {missing} of {selected} selected cases lack it, {first} among them; \
             baselines that exist: {exist}{change}"
        ))
    }

    /// Refuses, before anything runs, to compare unlike configurations where a baseline was asked for by name.
    pub fn refuse_mismatch(&self, entry: &Entry, configuration: &Configuration) -> Result<(), Failure> {
        let flags = &self.cli.criterion;
        let Some(name) = flags.baseline.as_ref().or(flags.baseline_lenient.as_ref()) else { return Ok(()) };
        if !self.store.has(&entry.id, name) {
            return Ok(());
        }
        let old = self.store.sidecar(&entry.id, name)?;
        self.mismatch(configuration, old.as_ref()).map_or(Ok(()), |(field, found)| {
            Err(Failure::usage(format!(
                "{}: baseline {name} was measured on another {field}: {found}; \
                 --allow-mismatch {field} compares all the same",
                entry.id
            )))
        })
    }

    /// The first field that differs and is not allowed to.
    fn mismatch(
        &self,
        configuration: &Configuration,
        old: Option<&Sidecar>,
    ) -> Option<(&'static str, String)> {
        let differences = match old {
            Some(old) => configuration.differences(&old.configuration),
            None => FIELDS.map(|field| (field, format!("it has no {SIDECAR}"))).to_vec(),
        };
        let allowed = |field: &str| self.cli.allow_mismatch.iter().any(|allowed| name(*allowed) == field);
        differences.into_iter().find(|(field, _)| !allowed(field))
    }

    /// Makes ready for a case's measurement: sets aside a baseline that must not be compared with, and keeps what Criterion will
    /// overwrite. Returns the baseline that it will be compared with.
    pub fn before(&self, entry: &Entry, configuration: &Configuration) -> Result<Option<Sidecar>, Failure> {
        let id = &entry.id;
        self.store.forget_change(id);
        let (name, _) = self.cli.compared_baseline();
        let folder = self.store.folder(id).join(name);
        let mut compared = None;
        if folder.is_dir() {
            let why = if self.store.has(id, name) {
                compared = self.store.sidecar(id, name).unwrap_or_default();
                self.mismatch(configuration, compared.as_ref())
                    .map(|(field, found)| format!("it was measured on another {field}: {found}"))
            } else {
                Some("it is incomplete".to_owned())
            };
            if let Some(why) = why {
                let path = self.store.set_aside(id, name)?;
                eprintln!("{id}: baseline {name} is set aside as {}: {why}", path.display());
                compared = None;
            }
        }
        if !self.cli.criterion.discard_baseline {
            self.store.keep(id, self.cli.saved_baseline().unwrap_or("new"))?;
        }
        Ok(compared)
    }

    /// The case's results are saved.
    pub fn after(&self, entry: &Entry) -> Result<(), Failure> {
        Ok(self.store.release(&entry.id)?)
    }

    /// Says what a case was compared with and how its median moved; returns whether that is a regression that is fatal.
    pub fn report(&self, entry: &Entry, old: Option<&Sidecar>, median_us: f64) -> bool {
        let Some(old) = old else { return false };
        let change = (median_us / old.median_us - 1.0) * 100.0;
        let (name, _) = self.cli.compared_baseline();
        let commit =
            old.commit.as_deref().map_or("no commit".to_owned(), |commit| format!("commit {commit}"));
        eprintln!(
            "{}: compared with baseline {name} ({commit}, {}): median {:.1} µs, now {change:+.2} %",
            entry.id, old.date, old.median_us
        );
        let fatal = self.cli.fail_on_regression.is_some_and(|limit| change > limit);
        if fatal {
            let limit = self.cli.fail_on_regression.unwrap_or_default();
            eprintln!("regression: {}: slower by {change:.2} %, more than {limit} %", entry.id);
        }
        fatal
    }
}

/// A field's name on the command line.
fn name(field: Field) -> &'static str {
    match field {
        Field::Backend => "backend",
        Field::Device => "device",
        Field::Dtype => "dtype",
        Field::Model => "model",
        Field::Layout => "layout",
        Field::Draws => "draws",
    }
}
