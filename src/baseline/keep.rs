//! Nothing that was saved is lost: a baseline is kept in one file while Criterion overwrites it.
//!
//! Criterion writes a baseline file by file. Before that starts, the old baseline's files go into one file beside
//! them, written atomically; it is removed once the new baseline and its sidecar are complete. A start that finds such a
//! file knows that a save was cut short, and puts the old baseline back.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{BaselineError, Store, at, write_atomically};

/// Neither Criterion nor critcmp reads a file of this name.
const KEPT: &str = "forward-kept.json";

/// Set-aside baselines are named with this and a number.
const ASIDE: &str = "forward-aside";

/// The folders of a benchmark that a save overwrites, file by file; an absent folder is kept as absent.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    folders: BTreeMap<String, Option<BTreeMap<String, String>>>,
}

/// Whether a name that a file gives stays within the folder that it is joined to.
pub(super) fn is_plain(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

/// Reads a folder's files; `None` if there is no such folder.
fn read_folder(folder: &Path) -> Result<Option<BTreeMap<String, String>>, BaselineError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(at(folder)(error)),
    };
    let mut files = BTreeMap::new();
    for entry in entries {
        let path = entry.map_err(at(folder))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if path.is_file() && !name.ends_with(".part") {
            let text = String::from_utf8(fs::read(&path).map_err(at(&path))?).map_err(|_| {
                BaselineError::Broken { path: path.clone(), what: "it is not text".to_owned() }
            })?;
            files.insert(name.to_owned(), text);
        }
    }
    Ok(Some(files))
}

/// Makes a folder hold exactly these files.
pub(super) fn write_folder(
    folder: &Path,
    files: Option<&BTreeMap<String, String>>,
) -> Result<(), BaselineError> {
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(at(folder))?;
    }
    let Some(files) = files else { return Ok(()) };
    fs::create_dir_all(folder).map_err(at(folder))?;
    for (name, text) in files {
        let path = folder.join(name);
        fs::write(&path, text).map_err(at(&path))?;
    }
    Ok(())
}

impl Store {
    /// Keeps what a save of `baseline` will overwrite, until [`Store::release`].
    ///
    /// # Errors
    /// If the disk refuses; nothing has changed then.
    pub fn keep(&self, id: &str, baseline: &str) -> Result<(), BaselineError> {
        let benchmark = self.folder(id);
        fs::create_dir_all(&benchmark).map_err(at(&benchmark))?;
        let mut folders = BTreeMap::new();
        for name in [baseline, "new"] {
            folders.insert(name.to_owned(), read_folder(&benchmark.join(name))?);
        }
        let path = benchmark.join(KEPT);
        let text = serde_json::to_string(&Kept { folders })
            .map_err(|error| BaselineError::Broken { path: path.clone(), what: error.to_string() })?;
        write_atomically(&path, &text)
    }

    /// Takes a kept baseline out of Criterion's sight until [`Store::restore`] brings it back.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn hide(&self, id: &str, baseline: &str) -> Result<(), BaselineError> {
        let folder = self.folder(id).join(baseline);
        fs::remove_dir_all(&folder).map_err(at(&folder))
    }

    /// Puts back what was kept of a benchmark, if anything was.
    ///
    /// # Errors
    /// If the disk refuses, or what was kept cannot be read.
    pub fn restore(&self, id: &str) -> Result<(), BaselineError> {
        self.put_back(&self.folder(id)).map(drop)
    }

    /// The save is complete: what was kept is not needed any more.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn release(&self, id: &str) -> Result<(), BaselineError> {
        let path = self.folder(id).join(KEPT);
        fs::remove_file(&path).map_err(at(&path))
    }

    /// Puts back every baseline whose save was cut short; returns the folders of their benchmarks.
    ///
    /// # Errors
    /// If the disk refuses. What was kept stays kept then.
    pub fn recover(&self) -> Result<Vec<PathBuf>, BaselineError> {
        let mut recovered = Vec::new();
        for benchmark in self.benchmarks() {
            if self.put_back(&benchmark)? {
                recovered.push(benchmark);
            }
        }
        Ok(recovered)
    }

    /// Puts back what was kept in a benchmark's folder; returns whether anything was.
    fn put_back(&self, benchmark: &Path) -> Result<bool, BaselineError> {
        let path = benchmark.join(KEPT);
        let Ok(text) = fs::read_to_string(&path) else { return Ok(false) };
        let kept: Kept = serde_json::from_str(&text)
            .map_err(|error| BaselineError::Broken { path: path.clone(), what: error.to_string() })?;
        let names = kept
            .folders
            .iter()
            .flat_map(|(name, files)| std::iter::once(name).chain(files.iter().flat_map(BTreeMap::keys)));
        if let Some(name) = names.into_iter().find(|name| !is_plain(name)) {
            let what = format!("{name:?} in it is no name of a folder or file here");
            return Err(BaselineError::Broken { path, what });
        }
        for (name, files) in &kept.folders {
            write_folder(&benchmark.join(name), files.as_ref())?;
        }
        fs::remove_file(&path).map_err(at(&path))?;
        Ok(true)
    }

    /// Moves a baseline out of Criterion's sight, into one file; returns its path.
    ///
    /// # Errors
    /// If the disk refuses; the baseline is untouched then.
    pub fn set_aside(&self, id: &str, baseline: &str) -> Result<PathBuf, BaselineError> {
        let benchmark = self.folder(id);
        let folder = benchmark.join(baseline);
        let folders = BTreeMap::from([(baseline.to_owned(), read_folder(&folder)?)]);
        let path = (1_u32..)
            .map(|number| benchmark.join(format!("{ASIDE}-{baseline}-{number}.json")))
            .find(|path| !path.exists())
            .unwrap_or_else(|| benchmark.join(ASIDE));
        let text = serde_json::to_string(&Kept { folders })
            .map_err(|error| BaselineError::Broken { path: path.clone(), what: error.to_string() })?;
        write_atomically(&path, &text)?;
        fs::remove_dir_all(&folder).map_err(at(&folder))?;
        Ok(path)
    }

    /// Takes the folder for this process alone; it is free again when the result is dropped or the process ends.
    ///
    /// # Errors
    /// If another process has it: two measurements at once would disturb each other and each other's files.
    pub fn lock(&self) -> Result<File, BaselineError> {
        fs::create_dir_all(&self.home).map_err(at(&self.home))?;
        let path = self.home.join("forward.lock");
        let file = File::create(&path).map_err(at(&path))?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(TryLockError::WouldBlock) => Err(BaselineError::Refused(format!(
                "{}: another forward-bench is measuring into this folder; wait for it, or set CRITERION_HOME",
                self.home.display()
            ))),
            Err(TryLockError::Error(error)) => Err(at(&path)(error)),
        }
    }
}
