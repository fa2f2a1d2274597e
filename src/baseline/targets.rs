//! Target baselines: the times that a machine of a kind must reach, in TOML files that people edit too.
//!
//! `target-baselines/<device>/<model>[-<layout>].toml` has a table `[cases."group/case"]` for each case, and `[provenance]`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml_edit::{DocumentMut, Item, Table, value};

use super::{BaselineError, at, write_atomically};

/// Where target baselines lie, from the project's root.
pub const FOLDER: &str = "target-baselines";

/// What a case must reach.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Target {
    /// Median in microseconds.
    pub median_us: f64,
    /// How far above it a time may be, in percent.
    #[serde(default = "default_tolerance")]
    pub tolerance_pct: f64,
    /// Spread of the samples' medians when it was set, in percent.
    pub spread_pct: Option<f64>,
}

fn default_tolerance() -> f64 {
    1.0
}

/// What a case was measured at, to become its target.
#[derive(Debug, Clone, PartialEq)]
pub struct Reached {
    /// `group/case`, the case as it is asked for.
    pub case: String,
    /// Median in microseconds.
    pub median_us: f64,
    /// Spread of the samples' medians in percent.
    pub spread_pct: f64,
    /// Floor and serial floor in microseconds, where they are known.
    pub floors_us: Option<(f64, f64)>,
    /// Whether the protocol's checks passed.
    pub checks: bool,
}

/// How a case did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Within the tolerance.
    Met,
    /// Faster by more than the tolerance: the target can be tightened.
    Beaten,
    /// Slower by more than the tolerance.
    Slow,
    /// As fast as it must be, but it spread by more than it may.
    Spread,
    /// A check failed.
    Checks,
    /// The file has no target for it.
    None,
}

impl Outcome {
    /// Whether the target was missed.
    #[must_use]
    pub fn is_miss(self) -> bool {
        matches!(self, Self::Slow | Self::Spread | Self::Checks)
    }

    /// In words.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Beaten => "beaten: tighten it by --update-targets",
            Self::Slow => "MISSED: slower than it may be",
            Self::Spread => "MISSED: spreads more than it may",
            Self::Checks => "MISSED: a check failed",
            Self::None => "no target",
        }
    }
}

/// Judges a case; its spread may reach the target's or `spread_limit_pct`, whichever is more.
#[must_use]
pub fn judge(reached: &Reached, target: Option<&Target>, spread_limit_pct: f64) -> Outcome {
    let Some(target) = target else { return Outcome::None };
    let change = (reached.median_us / target.median_us - 1.0) * 100.0;
    let spread_limit = target.spread_pct.unwrap_or_default().max(spread_limit_pct);
    match () {
        () if !reached.checks => Outcome::Checks,
        () if change.is_nan() || change > target.tolerance_pct => Outcome::Slow,
        () if reached.spread_pct > spread_limit => Outcome::Spread,
        () if change < -target.tolerance_pct => Outcome::Beaten,
        () => Outcome::Met,
    }
}

/// A file of targets.
#[derive(Debug, Clone)]
pub struct TargetFile {
    /// Where it is, or will be.
    pub path: PathBuf,
    text: String,
    /// By `group/case`.
    pub cases: BTreeMap<String, Target>,
}

impl TargetFile {
    /// Reads a file; one that is not there has no targets.
    ///
    /// # Errors
    /// If it cannot be read, or is no file of targets.
    pub fn read(path: &Path) -> Result<Self, BaselineError> {
        #[derive(Deserialize)]
        struct File {
            #[serde(default)]
            cases: BTreeMap<String, Target>,
        }
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(at(path)(error)),
        };
        let refuse = |what: String| BaselineError::Refused(format!("{}: {what}; mend it", path.display()));
        let File { cases } = toml::from_str(&text).map_err(|error| refuse(place(&text, &error)))?;
        let positive = |number: f64| number > 0.0 && number.is_finite();
        for (name, target) in &cases {
            if !positive(target.median_us) || target.tolerance_pct < 0.0 || target.tolerance_pct.is_nan() {
                return Err(refuse(format!(
                    "[cases.{name:?}]: median_us must be above 0, tolerance_pct 0 or more"
                )));
            }
        }
        Ok(Self { path: path.to_owned(), text, cases })
    }

    /// The file's text with these cases and this provenance; what it has beside them, comments and order stay.
    ///
    /// # Errors
    /// If the text is no TOML.
    pub fn updated(
        &self,
        reached: &[Reached],
        provenance: &[(&str, String)],
    ) -> Result<String, BaselineError> {
        let refuse =
            |what: String| BaselineError::Refused(format!("{}: {what}; mend it", self.path.display()));
        let mut document: DocumentMut =
            self.text.parse().map_err(|error: toml_edit::TomlError| refuse(error.message().to_owned()))?;
        let root = document.as_table_mut();
        let table = table(root, "provenance").ok_or_else(|| refuse("provenance is no table".to_owned()))?;
        for (key, text) in provenance {
            set(table, key, value(text.as_str()));
        }
        let cases = table_of_tables(root, "cases").ok_or_else(|| refuse("cases is no table".to_owned()))?;
        for case in reached {
            let table = self::table(cases, &case.case)
                .ok_or_else(|| refuse(format!("{:?} is no table", case.case)))?;
            set(table, "median_us", value(rounded(case.median_us, 1)));
            if let Some((floor, serial)) = case.floors_us {
                set(table, "floor_us", value(rounded(floor, 1)));
                set(table, "serial_floor_us", value(rounded(serial, 1)));
            }
            set(table, "spread_pct", value(rounded(case.spread_pct, 2)));
            if !table.contains_key("tolerance_pct") {
                set(table, "tolerance_pct", value(default_tolerance()));
            }
        }
        Ok(document.to_string())
    }

    /// Checks, before an hour is spent on its contents, that the file can be updated.
    ///
    /// # Errors
    /// If its text is no TOML of the right shape, or its folder cannot be written to.
    pub fn check_updatable(&self) -> Result<(), BaselineError> {
        self.updated(&[], &[])?;
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(at(folder))?;
        tempfile::NamedTempFile::new_in(folder).map(drop).map_err(at(folder))
    }

    /// Writes the updated text.
    ///
    /// # Errors
    /// Those of [`TargetFile::updated`], and if the disk refuses.
    pub fn update(&self, reached: &[Reached], provenance: &[(&str, String)]) -> Result<(), BaselineError> {
        let text = self.updated(reached, provenance)?;
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(at(folder))?;
        // What a link leads to is replaced, not the link.
        write_atomically(&fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone()), &text)
    }
}

/// Where and why, in one line.
fn place(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
    let line = line.map_or_else(String::new, |line| format!("line {line}: "));
    format!("{line}{}", error.message().replace('\n', " "))
}

fn rounded(number: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (number * scale).round() / scale
}

fn table<'a>(parent: &'a mut Table, key: &str) -> Option<&'a mut Table> {
    let item = parent.entry(key).or_insert_with(|| Item::Table(Table::new()));
    if let Some(inline) = item.as_inline_table().cloned() {
        *item = Item::Table(inline.into_table());
    }
    item.as_table_mut()
}

fn table_of_tables<'a>(parent: &'a mut Table, key: &str) -> Option<&'a mut Table> {
    let fresh = !parent.contains_key(key);
    let table = table(parent, key)?;
    if fresh {
        table.set_implicit(true);
    }
    Some(table)
}

/// Sets a value and keeps what stands around the old one.
fn set(table: &mut Table, key: &str, mut item: Item) {
    let decor = table.get(key).and_then(Item::as_value).map(|old| old.decor().clone());
    if let (Some(decor), Some(new)) = (decor, item.as_value_mut()) {
        *new.decor_mut() = decor;
    }
    table[key] = item;
}

/// A name as part of a path: small letters, digits, `-` and `.`.
#[must_use]
pub fn slug(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { '-' };
    let text: String = name.chars().map(plain).collect();
    let parts: Vec<&str> = text.split('-').filter(|part| !part.is_empty()).collect();
    let slug = parts.join("-");
    let cut = slug.char_indices().nth(64).map_or(slug.len(), |(at, _)| at);
    slug[..cut].trim_matches(['-', '.']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# By hand.\n\n[provenance]\ndevice = \"X\" # the card\ndate = \"old\"\n\n\
        [cases.\"decode/b\"]\nmedian_us = 10.0   # the goal\ntolerance_pct = 2.0\nnote = \"kept\"\n\n\
        # The long one.\n[cases.\"decode/a\"]\nmedian_us = 20.0\nspread_pct = 0.7\n";

    fn reached(case: &str, median_us: f64) -> Reached {
        Reached {
            case: case.into(),
            median_us,
            spread_pct: 0.123,
            floors_us: Some((1.23, 4.56)),
            checks: true,
        }
    }

    fn file(text: &str) -> (tempfile::TempDir, TargetFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x/m.toml");
        fs::create_dir_all(folder.path().join("x")).unwrap();
        fs::write(&path, text).unwrap();
        let file = TargetFile::read(&path).unwrap();
        (folder, file)
    }

    #[test]
    fn an_update_keeps_comments_order_and_foreign_keys() {
        let (_folder, file) = file(FILE);
        file.update(&[reached("decode/b", 9.876), reached("new/c", 3.0)], &[("date", "new".into())]).unwrap();
        let text = fs::read_to_string(&file.path).unwrap();
        let kept = [
            "# By hand.",
            "device = \"X\" # the card",
            "date = \"new\"",
            "median_us = 9.9   # the goal",
            "tolerance_pct = 2.0",
            "note = \"kept\"",
            "# The long one.",
            "[cases.\"new/c\"]",
        ];
        let places: Vec<usize> =
            kept.iter().map(|line| text.find(line).unwrap_or_else(|| panic!("{line}: {text}"))).collect();
        assert!(places.is_sorted(), "{text}");
        let again = TargetFile::read(&file.path).unwrap();
        assert_eq!(
            again.cases["new/c"],
            Target { median_us: 3.0, tolerance_pct: 1.0, spread_pct: Some(0.12) }
        );
        assert_eq!(again.cases["decode/a"].median_us, 20.0);
    }

    #[test]
    fn a_first_update_makes_a_file_that_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nvidia-h200/m.toml");
        let file = TargetFile::read(&path).unwrap();
        file.update(&[reached("decode/1*1@8", 5.0)], &[("device", "X \"y\"".into())]).unwrap();
        assert_eq!(TargetFile::read(&path).unwrap().cases["decode/1*1@8"].median_us, 5.0);
        assert!(!fs::read_to_string(&path).unwrap().contains("[cases]"));
    }

    #[test]
    fn a_target_is_missed_by_time_by_spread_and_by_checks() {
        let (_folder, file) = file(FILE);
        let (b, a) = (file.cases.get("decode/b"), file.cases.get("decode/a"));
        assert_eq!(judge(&reached("decode/b", 10.19), b, 0.5), Outcome::Met);
        assert_eq!(judge(&reached("decode/b", 10.21), b, 0.5), Outcome::Slow);
        assert_eq!(judge(&reached("decode/b", 9.7), b, 0.5), Outcome::Beaten);
        let spread = |spread_pct| Reached { spread_pct, ..reached("decode/a", 20.0) };
        assert_eq!(judge(&spread(0.6), a, 0.5), Outcome::Met, "the target itself spread by 0.7");
        assert_eq!(judge(&spread(0.8), a, 0.5), Outcome::Spread);
        assert_eq!(judge(&Reached { checks: false, ..spread(0.1) }, a, 0.5), Outcome::Checks);
        assert_eq!(judge(&reached("x", 1.0), None, 0.5), Outcome::None);
    }

    #[test]
    fn a_broken_file_is_named_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.toml");
        for (text, what) in [
            ("a = 1\nb = ", "line 2"),
            ("[cases.\"x\"]\nmedian_us = -1.0", "above 0"),
            ("[cases.x]\n", "median_us"),
        ] {
            fs::write(&path, text).unwrap();
            let error = TargetFile::read(&path).unwrap_err().to_string();
            assert!(error.contains(what) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn the_committed_files_read() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(FOLDER);
        let mut files = 0;
        for device in fs::read_dir(root).unwrap() {
            let Ok(device) = fs::read_dir(device.unwrap().path()) else { continue };
            for file in device {
                let path = file.unwrap().path();
                if path.extension().is_some_and(|extension| extension == "toml") {
                    assert!(!TargetFile::read(&path).unwrap().cases.is_empty(), "{}", path.display());
                    files += 1;
                }
            }
        }
        assert!(files > 0);
    }

    #[test]
    fn devices_become_folders() {
        assert_eq!(slug("NVIDIA H200"), "nvidia-h200");
        assert_eq!(slug("Intel(R) Xeon(R) 6767P @ 2.4GHz"), "intel-r-xeon-r-6767p-2.4ghz");
        assert_eq!(slug("../.."), "");
    }
}
