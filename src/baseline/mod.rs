//! Saved baselines: where they lie, what each was measured on, and whether two of them may be compared.

pub mod commit;
pub mod keep;
pub mod targets;
pub mod transfer;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::stats::verdict;

/// The sidecar's name beside Criterion's files.
pub const SIDECAR: &str = "forward.json";

/// What Criterion itself writes into a baseline; one that lacks any of it is not whole.
const CRITERION_FILES: [&str; 4] = ["benchmark.json", "estimates.json", "sample.json", "tukey.json"];

/// What two runs must share to be comparable, field by field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Configuration {
    /// Kind of device.
    pub backend: String,
    /// The device's name and size.
    pub device: String,
    /// Type of weights and KV.
    pub dtype: String,
    /// The model after overrides, and where its weights come from.
    pub model: Value,
    /// Ranks and KV layout.
    pub layout: Value,
    /// Requests after jitter, and what the KV cache held.
    pub draws: Value,
}

/// The names of a configuration's fields, as `--allow-mismatch` takes them.
pub const FIELDS: [&str; 6] = ["backend", "device", "dtype", "model", "layout", "draws"];

impl Configuration {
    fn fields(&self) -> [Value; 6] {
        let text = |text: &str| Value::String(text.to_owned());
        [
            text(&self.backend),
            text(&self.device),
            text(&self.dtype),
            self.model.clone(),
            self.layout.clone(),
            self.draws.clone(),
        ]
    }

    /// The fields in which `other` differs, each with what is found there and what here.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<(&'static str, String)> {
        let pairs = self.fields().into_iter().zip(other.fields());
        FIELDS
            .into_iter()
            .zip(pairs)
            .filter(|(_, (here, there))| here != there)
            .map(|(field, (here, there))| (field, describe(&here, &there)))
            .collect()
    }
}

/// The first place in which two values differ, as `key: THERE there, HERE here`.
fn describe(here: &Value, there: &Value) -> String {
    if let (Value::Object(ours), Value::Object(theirs)) = (here, there) {
        let keys = ours.keys().chain(theirs.keys().filter(|key| !ours.contains_key(*key)));
        for key in keys {
            let (ours, theirs) = (&here[key], &there[key]);
            if ours != theirs {
                return format!("{key} {}", describe(ours, theirs));
            }
        }
    }
    format!("{} there, {} here", shorten(there), shorten(here))
}

fn shorten(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 {
        return text;
    }
    format!("{}…", text.chars().take(59).collect::<String>())
}

/// `forward.json`: everything about a measured case that Criterion's own files do not say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sidecar {
    /// The benchmark's id.
    pub id: String,
    /// When it was measured, RFC 3339 in UTC.
    pub date: String,
    /// The commit, `-dirty` where tracked files differed from it; none outside git.
    pub commit: Option<String>,
    /// This program's version.
    pub version: String,
    /// What it was measured on.
    pub configuration: Configuration,
    /// The command line's seed.
    pub seed: u64,
    /// Device driver or library version.
    pub driver: Option<String>,
    /// The device's kernels, sensors and limits.
    #[serde(flatten)]
    pub around: crate::measure::limits::Surroundings,
    /// The device's choices among ways to compute the same, by what they compute.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub choices: BTreeMap<String, String>,
    /// How tokens chose experts; none for a model without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing: Option<String>,
    /// Rows that each expert really computed, by MoE layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_loads: Option<Vec<crate::measure::loads::ExpertLoads>>,
    /// Hash of what tracked files differ from the commit in; none where they do not.
    #[serde(default)]
    pub dirty_diff: Option<String>,
    /// Median of the runs' medians in microseconds.
    pub median_us: f64,
    /// One entry a process that measured; Criterion's own files are the last one's.
    pub runs: Vec<Run>,
    /// The protocol's checks.
    pub checks: crate::measure::Checks,
    /// What it was compared with when it was measured.
    #[serde(default)]
    pub compared: Option<Compared>,
    /// Kernels by rank, where they were traced.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<crate::profile::Profile>,
}

impl Sidecar {
    /// What keeps it from being compared with: runs without replays, and replays that are no times.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let is_time = |us: f64| us > 1e-6 && us < 1e12;
        if self.runs.is_empty() || self.runs.iter().any(|run| run.ranks.is_empty()) {
            return Some("it has no runs, or a run without ranks".to_owned());
        }
        let ranks = self.runs.iter().flat_map(|run| &run.ranks);
        for rank in ranks {
            if rank.samples_us.is_empty() {
                return Some("a rank has no replays".to_owned());
            }
            if let Some(us) = rank.samples_us.iter().find(|us| !is_time(**us)) {
                return Some(format!("a replay of {us:e} µs is no time"));
            }
        }
        let medians = self.runs.iter().map(|run| run.median_us).chain([self.median_us]);
        medians.into_iter().find(|us| !is_time(*us)).map(|us| format!("a median of {us:e} µs is no time"))
    }
}

/// What one process measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// When, RFC 3339 in UTC.
    pub date: String,
    /// Replays of a sample.
    pub iters: usize,
    /// Median over all replays in microseconds; each replay is the maximum over ranks.
    pub median_us: f64,
    /// (max − min of the samples' medians) / median, in percent.
    pub spread_pct: f64,
    /// The device's sensors, directly after the timed replays.
    pub telemetry: Option<crate::backend::Telemetry>,
    /// One entry a rank.
    pub ranks: Vec<RankTimes>,
}

impl Run {
    /// What a verdict takes: each replay the maximum over ranks, with the clock of the rank that it is from.
    #[must_use]
    pub fn for_verdict(&self) -> verdict::Run {
        let replays = self.ranks.iter().map(|rank| rank.samples_us.len()).min().unwrap_or_default();
        let clocks = !self.ranks.is_empty() && self.ranks.iter().all(|rank| rank.clock_mhz.is_some());
        let mut run = verdict::Run { iters: self.iters, ..verdict::Run::default() };
        for replay in 0..replays {
            let slowest =
                self.ranks.iter().max_by(|a, b| a.samples_us[replay].total_cmp(&b.samples_us[replay]));
            let Some(rank) = slowest else { break };
            run.times_us.push(rank.samples_us[replay]);
            let clock = rank.clock_mhz.as_ref().filter(|_| clocks).and_then(|clock| clock.get(replay));
            run.clock_mhz.extend(clock);
        }
        run
    }
}

/// A comparison, kept with the side that was measured later.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// The baseline's name.
    pub baseline: String,
    /// The commit that it was measured at.
    pub commit: Option<String>,
    /// When it was measured.
    pub date: String,
    /// Its median in microseconds.
    pub median_us: f64,
    /// What came of it.
    pub verdict: verdict::Verdict,
    /// Its kernels by rank, where they were traced: the baseline itself may have been replaced since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<crate::profile::Profile>,
}

/// One rank's replays.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankTimes {
    /// What the times were read from.
    pub timer: String,
    /// Every replay in order, in microseconds.
    pub samples_us: Vec<f64>,
    /// The device's clock over each replay in MHz, where it can be read.
    pub clock_mhz: Option<Vec<f64>>,
}

/// What can go wrong with baselines.
#[derive(Debug, thiserror::Error)]
pub enum BaselineError {
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{path}: {what}; move this file away, or save what it belongs to again")]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A request that cannot be met.
    #[error("{0}")]
    Refused(String),
}

/// Attaches a path to an I/O error.
pub(crate) fn at(path: &Path) -> impl FnOnce(std::io::Error) -> BaselineError {
    let path = path.to_owned();
    move |source| BaselineError::Io { path, source }
}

/// Criterion's output folder.
#[derive(Debug, Clone)]
pub struct Store {
    /// `target/criterion`, or where Criterion was told to write.
    pub home: PathBuf,
}

impl Store {
    /// The folder of a benchmark; `id` is `group/model/case`, each safe as a folder name.
    #[must_use]
    pub fn folder(&self, id: &str) -> PathBuf {
        self.home.join(id)
    }

    /// Whether the benchmark has all that Criterion needs of the baseline, in files that can be read.
    #[must_use]
    pub fn has(&self, id: &str, baseline: &str) -> bool {
        let folder = self.folder(id).join(baseline);
        let is_json = |file: &&str| {
            let text = fs::read_to_string(folder.join(file)).unwrap_or_default();
            serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok()
        };
        CRITERION_FILES.iter().all(is_json)
    }

    /// The names of all baselines of all benchmarks here, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .benchmarks()
            .iter()
            .flat_map(|folder| folders(folder))
            .filter(|folder| folder.join("benchmark.json").is_file())
            .filter_map(|folder| Some(folder.file_name()?.to_str()?.to_owned()))
            .filter(|name| name != "new")
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// The folders of all benchmarks, three levels down.
    #[must_use]
    pub fn benchmarks(&self) -> Vec<PathBuf> {
        folders(&self.home)
            .iter()
            .flat_map(|group| folders(group))
            .flat_map(|model| folders(&model))
            .collect()
    }

    /// The ids of all benchmarks: `group/model/case`.
    #[must_use]
    pub fn ids(&self) -> Vec<String> {
        let id = |folder: &PathBuf| Some(folder.strip_prefix(&self.home).ok()?.to_str()?.to_owned());
        self.benchmarks().iter().filter_map(id).collect()
    }

    /// Reads a baseline's sidecar; `None` if there is none.
    ///
    /// # Errors
    /// If it is there but cannot be read as one.
    pub fn sidecar(&self, id: &str, baseline: &str) -> Result<Option<Sidecar>, BaselineError> {
        let path = self.folder(id).join(baseline).join(SIDECAR);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(at(&path)(error)),
        };
        let broken = |what: String| BaselineError::Broken { path, what };
        let sidecar = match serde_json::from_str::<Sidecar>(&text) {
            Ok(sidecar) => sidecar,
            Err(error) => return Err(broken(error.to_string())),
        };
        match sidecar.problem() {
            Some(problem) => Err(broken(problem)),
            None => Ok(Some(sidecar)),
        }
    }

    /// Writes a sidecar.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn write_sidecar(&self, baseline: &str, sidecar: &Sidecar) -> Result<(), BaselineError> {
        let path = self.folder(&sidecar.id).join(baseline).join(SIDECAR);
        let text = serde_json::to_string(sidecar)
            .map_err(|error| BaselineError::Broken { path: path.clone(), what: error.to_string() })?;
        write_atomically(&path, &text)
    }

    /// Removes what Criterion derived from an earlier comparison, so that it cannot be taken for this run's.
    pub fn forget_change(&self, id: &str) {
        // A folder that is not there is what we want; one that cannot be removed only leaves a stale page.
        let _ = fs::remove_dir_all(self.folder(id).join("change"));
    }
}

fn folders(parent: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    let mut folders: Vec<PathBuf> =
        entries.filter_map(Result::ok).map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

/// Writes a file so that a reader finds either the old or the new contents, never a part.
///
/// # Errors
/// If the disk refuses; the old file is then untouched.
pub fn write_atomically(path: &Path, contents: impl AsRef<[u8]>) -> Result<(), BaselineError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let part = path.with_file_name(name);
    let written = fs::write(&part, contents).and_then(|()| fs::rename(&part, path));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written.map_err(at(path))
}

/// Checks a baseline's name: Criterion uses it as a folder name beside its own.
///
/// # Errors
/// If it is not 1 to 64 of `A-Z a-z 0-9 . _ -`, or is a name that Criterion keeps for itself.
pub fn check_name(name: &str) -> Result<(), BaselineError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        return Err(BaselineError::Refused(format!(
            "baseline {name:?}: a name is 1 to 64 of the characters A-Z a-z 0-9 . _ - (or @REV, a commit)"
        )));
    }
    if ["new", "change", "report", ".", ".."].contains(&name) || name.starts_with("forward-") {
        return Err(BaselineError::Refused(format!(
            "baseline {name:?}: Criterion or this program keeps this name for itself; choose another"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
