//! Every sidecar below Criterion's folder, by benchmark, and what could not be read.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::{CASES, FOLDER};
use crate::baseline::{BaselineError, Compared, SIDECAR, Sidecar, Store};
use crate::profile::Profile;

/// Longer names leave no room for `.html` and a temporary ending in a file's name.
const MAX_NAME: usize = 200;

/// Times beyond this many microseconds (11 days) are no times of a forward, and pictures could not show them.
const MAX_US: f64 = 1e12;

/// A file that is not shown, and why.
#[derive(Debug)]
pub struct Problem {
    /// Its path below Criterion's folder.
    pub path: String,
    /// What is wrong.
    pub what: String,
}

/// A benchmark with all its baselines.
#[derive(Debug)]
pub struct Benchmark {
    /// Group, model and case: its folder.
    pub parts: [String; 3],
    /// By the baseline's name; `new` is the last measurement.
    pub sidecars: BTreeMap<String, Sidecar>,
    /// Its sidecars that could not be read.
    pub problems: Vec<Problem>,
    /// Whether Criterion wrote a report of it.
    pub criterion: bool,
}

/// Everything in a store.
#[derive(Debug, Default)]
pub struct Book {
    /// Sorted by group, model, case.
    pub benchmarks: Vec<Benchmark>,
    /// Folders that could not be benchmarks' at all.
    pub problems: Vec<Problem>,
    /// Whether Criterion wrote an index.
    pub criterion: bool,
}

impl Book {
    /// Reads all of it.
    pub fn read(store: &Store) -> Self {
        let criterion = store.home.join("report/index.html").is_file();
        let mut book = Self { criterion, ..Self::default() };
        for folder in store.benchmarks() {
            let relative = folder.strip_prefix(&store.home).unwrap_or(&folder);
            let sidecars = sidecars(&folder);
            if relative.starts_with(FOLDER) || sidecars.is_empty() {
                continue;
            }
            match parts(relative) {
                Ok(parts) => book.benchmarks.push(Benchmark::read(store, parts, &sidecars)),
                Err(what) => book
                    .problems
                    .push(Problem { path: relative.to_string_lossy().into_owned(), what: what.to_owned() }),
            }
        }
        book.benchmarks.sort_by(|a, b| a.parts.cmp(&b.parts));
        book
    }
}

/// The subfolders that have a sidecar, or something in its place.
fn sidecars(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.join(SIDECAR).exists()).collect();
    paths.sort();
    paths
}

fn parts(relative: &Path) -> Result<[String; 3], &'static str> {
    let names = relative.iter().map(|part| part.to_str().ok_or("its name is not text; rename the folder"));
    let names = names.map(|name| name.map(str::to_owned)).collect::<Result<Vec<_>, _>>()?;
    if names.iter().any(|name| name.len() > MAX_NAME) {
        return Err("its name is too long for a page's; rename the folder");
    }
    <[String; 3]>::try_from(names).map_err(|_| "it is not in group/model/case")
}

impl Benchmark {
    fn read(store: &Store, parts: [String; 3], folders: &[PathBuf]) -> Self {
        let id = parts.join("/");
        let criterion = store.folder(&id).join("report/index.html").is_file();
        let mut benchmark = Self { parts, sidecars: BTreeMap::new(), problems: Vec::new(), criterion };
        for folder in folders {
            let name = folder.file_name().unwrap_or_default();
            let path = format!("{id}/{}/{SIDECAR}", name.to_string_lossy());
            let read = name.to_str().ok_or_else(|| "the folder's name is not text".to_owned());
            match read.and_then(|name| Ok((name, read_one(store, &id, name)?))) {
                Ok((name, sidecar)) => drop(benchmark.sidecars.insert(name.to_owned(), sidecar)),
                Err(what) => benchmark.problems.push(Problem { path, what }),
            }
        }
        benchmark
    }

    /// `group/model/case`.
    pub fn id(&self) -> String {
        self.parts.join("/")
    }

    /// Its page below the report's folder.
    pub fn page(&self) -> PathBuf {
        let [group, model, case] = &self.parts;
        Path::new(CASES).join(group).join(model).join(format!("{case}.html"))
    }

    /// The last measurement and its name; without one, the baseline that was measured last. None: nothing could be read.
    pub fn current(&self) -> Option<(&str, &Sidecar)> {
        let named = ["new", "base"].iter().find_map(|name| self.sidecars.get_key_value(*name));
        let last = || self.sidecars.iter().max_by(|a, b| a.1.date.cmp(&b.1.date));
        named.or_else(last).map(|(name, sidecar)| (name.as_str(), sidecar))
    }

    /// The sidecar of the side that `compared` names, if that very measurement is still there under any name.
    pub fn old_side(&self, compared: &Compared) -> Option<&Sidecar> {
        let is_it = |sidecar: &&Sidecar| {
            sidecar.date == compared.date
                && sidecar.commit == compared.commit
                && sidecar.median_us == compared.median_us
        };
        self.sidecars.get(&compared.baseline).filter(is_it).or_else(|| self.sidecars.values().find(is_it))
    }

    /// The old side's kernels by rank; empty where they were not traced or are gone.
    pub fn old_profiles<'a>(&'a self, compared: &'a Compared) -> &'a [Profile] {
        match self.old_side(compared) {
            Some(old) if compared.profiles.is_empty() => &old.profiles,
            _ => &compared.profiles,
        }
    }
}

fn read_one(store: &Store, id: &str, name: &str) -> Result<Sidecar, String> {
    let sidecar = match store.sidecar(id, name) {
        Ok(sidecar) => sidecar.ok_or("it is gone")?,
        Err(BaselineError::Broken { what, .. }) => return Err(what),
        Err(BaselineError::Io { source, .. }) => return Err(source.to_string()),
        Err(error) => return Err(error.to_string()),
    };
    if sidecar.id != id {
        return Err(format!("it is of {}, not of the folder that it lies in", sidecar.id));
    }
    check_times(&sidecar).map(|()| sidecar)
}

/// What the pages take for granted of times.
fn check_times(sidecar: &Sidecar) -> Result<(), String> {
    let is_time = |us: f64| us > 0.0 && us < MAX_US;
    if !is_time(sidecar.median_us) {
        return Err(format!("a median of {} µs", sidecar.median_us));
    }
    for (at, run) in sidecar.runs.iter().enumerate() {
        for (rank, times) in run.ranks.iter().enumerate() {
            if let Some(us) = times.samples_us.iter().find(|us| !is_time(**us)) {
                return Err(format!("run {}, rank {rank}: a replay of {us} µs", at + 1));
            }
            let clocks = times.clock_mhz.iter().flatten();
            if let Some(clock) = clocks.into_iter().find(|clock| !(0.0..1e6).contains(*clock)) {
                return Err(format!("run {}, rank {rank}: a clock of {clock} MHz", at + 1));
            }
        }
    }
    match sidecar.runs.iter().any(|run| !run.for_verdict().times_us.is_empty()) {
        true => Ok(()),
        false => Err("it has no replay".to_owned()),
    }
}
