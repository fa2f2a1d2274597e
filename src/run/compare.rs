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
        let names: Vec<String> = self.store.names();
        let exist = if names.is_empty() { "there are none yet".to_owned() } else { names.join(", ") };
        let change = match flag {
            "--baseline" => "; --baseline-lenient compares where it exists",
            _ => "",
        };
        Failure::usage(format!(
            "{flag} {name}: missing or incomplete for {missing} of {selected} selected cases, {first} among them; \
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
        self.mismatch(configuration, old.as_ref())
            .map_or(Ok(()), |why| Err(Failure::usage(format!("{}: baseline {name} {why}", entry.id))))
    }

    /// What a saved baseline was measured on; refuses one that does not say, unless everything may differ.
    pub fn sidecar_of(&self, entry: &Entry, name: &str) -> Result<Option<Sidecar>, Failure> {
        let sidecar = self.store.sidecar(&entry.id, name)?;
        if sidecar.is_none() && self.cli.comparison.allow_mismatch.len() < FIELDS.len() {
            return Err(Failure::usage(format!("{}: baseline {name} {}", entry.id, unknown())));
        }
        Ok(sidecar)
    }

    /// Why the two must not be compared: the first field that differs and is not allowed to.
    fn mismatch(&self, configuration: &Configuration, old: Option<&Sidecar>) -> Option<String> {
        let allowed =
            |field: &str| self.cli.comparison.allow_mismatch.iter().any(|allowed| name(*allowed) == field);
        let Some(old) = old else {
            return (!FIELDS.iter().all(|field| allowed(field))).then(unknown);
        };
        let differences = configuration.differences(&old.configuration);
        let (field, found) = differences.into_iter().find(|(field, _)| !allowed(field))?;
        Some(format!(
            "was measured with another configuration ({field}: {found}); --allow-mismatch {field} compares all the same"
        ))
    }

    /// Makes ready for a case's measurement: keeps what Criterion will overwrite, and takes a baseline that must not be
    /// compared with out of its sight. Returns the baseline that the case will be compared with.
    pub fn before(&self, entry: &Entry, configuration: &Configuration) -> Result<Option<Sidecar>, Failure> {
        let (id, discards) = (&entry.id, self.cli.criterion.discard_baseline);
        let (name, _) = self.cli.compared_baseline();
        let there = self.store.folder(id).join(name).is_dir();
        let old = self.store.sidecar(id, name).unwrap_or_default();
        let why = match there {
            true if self.store.has(id, name) => self.mismatch(configuration, old.as_ref()),
            true => Some("is incomplete".to_owned()),
            false => None,
        };
        if !discards || why.is_some() {
            self.store.keep(id, if discards { name } else { self.cli.saved_baseline().unwrap_or("new") })?;
        }
        if !discards {
            self.store.forget_change(id);
        }
        match why {
            Some(why) if discards => {
                self.store.hide(id, name)?;
                eprintln!("{id}: not compared: baseline {name} {why}");
                Ok(None)
            }
            Some(why) => {
                let path = self.store.set_aside(id, name)?;
                eprintln!("{id}: baseline {name} is set aside as {}: it {why}", path.display());
                Ok(None)
            }
            None => Ok(old.filter(|_| there)),
        }
    }

    /// The case's results are saved, or were not to be.
    pub fn after(&self, entry: &Entry) -> Result<(), Failure> {
        if self.cli.criterion.discard_baseline {
            return Ok(self.store.restore(&entry.id)?);
        }
        Ok(self.store.release(&entry.id)?)
    }

    /// Says what a case was compared with and how its median moved.
    pub fn tell(&self, entry: &Entry, old: Option<&Sidecar>, median_us: f64) {
        let Some(old) = old else {
            if self.cli.comparison.fail_on_regression.is_some() {
                eprintln!("warning: {}: --fail-on-regression had no baseline to compare with", entry.id);
            }
            return;
        };
        let change = (median_us / old.median_us - 1.0) * 100.0;
        let (name, _) = self.cli.compared_baseline();
        let commit =
            old.commit.as_deref().map_or("no commit".to_owned(), |commit| format!("commit {commit}"));
        eprintln!(
            "{}: compared with baseline {name} ({commit}, {}): median {:.1} µs, now {change:+.2} %",
            entry.id, old.date, old.median_us
        );
    }
}

/// Of a baseline that does not say what it was measured on.
fn unknown() -> String {
    format!(
        "has no {SIDECAR} that says what it was measured on; save it again, or compare all the same with \
         --allow-mismatch {}",
        FIELDS.join(",")
    )
}

/// A field's name on the command line.
pub fn name(field: Field) -> &'static str {
    match field {
        Field::Backend => "backend",
        Field::Device => "device",
        Field::Dtype => "dtype",
        Field::Model => "model",
        Field::Layout => "layout",
        Field::Draws => "draws",
    }
}
