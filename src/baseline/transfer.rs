//! A baseline as one file, to be committed, cached or taken to another machine.
//!
//! The file is gzipped JSON: the baseline's name, and for each benchmark the files that lie in its folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};

use super::keep::{is_plain, write_folder};
use super::{BaselineError, CRITERION_FILES, SIDECAR, Sidecar, Store, at, check_name};

/// The format's version.
const VERSION: u32 = 1;

/// What a file may unpack to: a gigabyte.
const MOST: u64 = 1 << 30;

/// A baseline of several benchmarks.
#[derive(Debug, Serialize, Deserialize)]
struct Bundle {
    forward_bench_baseline: u32,
    name: String,
    /// By id, then by file name.
    benchmarks: BTreeMap<String, BTreeMap<String, String>>,
}

/// What an import did.
#[derive(Debug)]
pub struct Imported {
    /// The baseline's name.
    pub name: String,
    /// Benchmarks that have it now.
    pub benchmarks: usize,
    /// Where baselines of that name that were there before are set aside.
    pub set_aside: Vec<PathBuf>,
}

/// Writes every benchmark's baseline of that name to one file; returns how many there were.
///
/// # Errors
/// If there is no such baseline, or the disk refuses.
pub fn export(store: &Store, name: &str, path: &Path) -> Result<usize, BaselineError> {
    let mut benchmarks = BTreeMap::new();
    for id in store.ids().into_iter().filter(|id| store.has(id, name)) {
        store.sidecar(&id, name)?; // what cannot be read could not be imported
        let folder = store.folder(&id).join(name);
        let mut files = BTreeMap::new();
        for file in CRITERION_FILES.into_iter().chain([SIDECAR]) {
            match fs::read_to_string(folder.join(file)) {
                Ok(text) => drop(files.insert(file.to_owned(), text)),
                Err(_) if file == SIDECAR => {}
                Err(error) => return Err(at(&folder.join(file))(error)),
            }
        }
        benchmarks.insert(id, files);
    }
    let count = benchmarks.len();
    if count == 0 {
        return Err(BaselineError::Refused(format!(
            "--export-baseline {name}: there is no such baseline in {}; there are: {}",
            store.home.display(),
            listed(&store.names())
        )));
    }
    let bundle = Bundle { forward_bench_baseline: VERSION, name: name.to_owned(), benchmarks };
    write(path, &bundle)?;
    Ok(count)
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn write(path: &Path, bundle: &Bundle) -> Result<(), BaselineError> {
    // What a link leads to is replaced; what is no regular file, such as a pipe, is written into.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let path = target.as_path();
    if fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        let file = fs::OpenOptions::new().write(true).open(path).map_err(at(path))?;
        return pack(path, file, bundle);
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(at(folder))?;
    let mut part = tempfile::NamedTempFile::new_in(folder).map_err(at(path))?;
    pack(path, &mut part, bundle)?;
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    part.as_file().set_permissions(permissions).map_err(at(path))?;
    part.persist(path).map_err(|error| at(path)(error.error))?;
    Ok(())
}

fn pack(path: &Path, out: impl Write, bundle: &Bundle) -> Result<(), BaselineError> {
    let broken = |what: String| BaselineError::Broken { path: path.to_owned(), what };
    let mut packed = GzEncoder::new(out, Compression::best());
    serde_json::to_writer(&mut packed, bundle).map_err(|error| broken(error.to_string()))?;
    packed.finish().and_then(|mut out| out.flush()).map_err(at(path))
}

/// Reads a file that [`export`] wrote into the store.
///
/// # Errors
/// If it is no such file, or names folders outside the store; nothing has changed then. If the disk refuses.
pub fn import(store: &Store, path: &Path) -> Result<Imported, BaselineError> {
    let Bundle { name, benchmarks, .. } = read(path)?;
    let (count, mut set_aside) = (benchmarks.len(), Vec::new());
    for (id, files) in &benchmarks {
        let folder = store.folder(id).join(&name);
        if folder.is_dir() && !same(&folder, files) {
            set_aside.push(store.set_aside(id, &name)?);
        }
        store.keep(id, &name)?;
        write_folder(&folder, Some(files))?;
        store.release(id)?;
    }
    Ok(Imported { name, benchmarks: count, set_aside })
}

fn same(folder: &Path, files: &BTreeMap<String, String>) -> bool {
    files.iter().all(|(name, text)| fs::read_to_string(folder.join(name)).is_ok_and(|there| there == *text))
}

fn read(path: &Path) -> Result<Bundle, BaselineError> {
    let refuse = |what: String| {
        BaselineError::Refused(format!("{}: {what}; --export-baseline writes such files", path.display()))
    };
    let mut text = String::new();
    let file = File::open(path).map_err(|error| refuse(format!("it cannot be opened ({error})")))?;
    let read = GzDecoder::new(file).take(MOST + 1).read_to_string(&mut text);
    read.map_err(|error| refuse(format!("this is no baseline file ({error})")))?;
    if text.len() as u64 > MOST {
        return Err(refuse("it unpacks to more than a gigabyte".to_owned()));
    }
    let bundle: Bundle =
        serde_json::from_str(&text).map_err(|error| refuse(format!("this is no baseline file ({error})")))?;
    if bundle.forward_bench_baseline != VERSION {
        let version = bundle.forward_bench_baseline;
        return Err(refuse(format!("its format is version {version}, this program reads {VERSION}")));
    }
    check_name(&bundle.name)?;
    if bundle.benchmarks.is_empty() {
        return Err(refuse("it has no benchmarks".to_owned()));
    }
    for (id, files) in &bundle.benchmarks {
        check(id, files).map_err(|what| refuse(format!("{id:?} {what}")))?;
    }
    Ok(bundle)
}

/// Whether a benchmark of a file has a safe id and whole files.
fn check(id: &str, files: &BTreeMap<String, String>) -> Result<(), String> {
    let parts: Vec<&str> = id.split('/').collect();
    if parts.len() != 3 || !parts.iter().all(|part| is_plain(part)) {
        return Err("is no GROUP/MODEL/CASE".to_owned());
    }
    if let Some(missing) = CRITERION_FILES.iter().find(|name| !files.contains_key(**name)) {
        return Err(format!("lacks {missing}"));
    }
    for (name, text) in files {
        let known = CRITERION_FILES.contains(&name.as_str()) || name == SIDECAR;
        let json = serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok();
        if !known || !json {
            return Err(format!("has a file {name:?} that is none of a baseline's"));
        }
    }
    match files.get(SIDECAR).map(|text| serde_json::from_str::<Sidecar>(text)) {
        Some(Err(error)) => Err(format!("has a {SIDECAR} that does not read: {error}")),
        Some(Ok(sidecar)) if sidecar.id != id => Err(format!("has the {SIDECAR} of {:?}", sidecar.id)),
        Some(Ok(sidecar)) => {
            sidecar.problem().map_or(Ok(()), |what| Err(format!("has a {SIDECAR} of no use: {what}")))
        }
        None => Ok(()),
    }
}

/// One baseline of a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Commit, date of the latest case, device, models; where its sidecars say.
    pub commit: Option<String>,
    /// The latest case's date.
    pub date: String,
    /// Devices.
    pub devices: Vec<String>,
    /// Models.
    pub models: Vec<String>,
    /// Benchmarks that have it.
    pub cases: usize,
    /// The most runs that a case has.
    pub runs: usize,
}

/// All baselines, the oldest first.
#[must_use]
pub fn list(store: &Store) -> Vec<Listed> {
    let ids = store.ids();
    let mut all: Vec<Listed> = store.names().into_iter().map(|name| entry(store, &ids, name)).collect();
    all.sort_by(|a, b| (&a.date, &a.name).cmp(&(&b.date, &b.name)));
    all
}

fn entry(store: &Store, ids: &[String], name: String) -> Listed {
    let mut listed = Listed {
        commit: None,
        date: String::new(),
        devices: Vec::new(),
        models: Vec::new(),
        cases: 0,
        runs: 0,
        name,
    };
    for id in ids.iter().filter(|id| store.folder(id).join(&listed.name).is_dir()) {
        listed.cases += 1;
        listed.models.extend(id.split('/').nth(1).map(str::to_owned));
        let Ok(Some(sidecar)) = store.sidecar(id, &listed.name) else { continue };
        listed.devices.push(sidecar.configuration.device);
        listed.runs = listed.runs.max(sidecar.runs.len());
        if sidecar.date >= listed.date {
            listed.date = sidecar.date;
            listed.commit = sidecar.commit;
        }
    }
    for texts in [&mut listed.models, &mut listed.devices] {
        texts.sort();
        texts.dedup();
    }
    listed
}
