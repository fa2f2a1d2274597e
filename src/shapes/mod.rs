//! Shape files: cases and settings in YAML or JSON, one file or a folder of them; a file's stem is its Criterion group.
//!
//! The files of `vllm bench forward` read as they are. A case may also be a text `NAME=REQS`, and a file may set what
//! [`FileSettings`] has. Unknown keys are errors.

mod error;
mod read;
mod tree;

pub use error::ShapeError;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::case::Case;

/// The group of the cases from `--case`; no file may have it beside such cases (see [`refuse_case_group`]).
pub const CASE_GROUP: &str = "case";

/// The largest file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// What a file sets beside its cases; the command line goes before it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FileSettings {
    /// As `--model`.
    pub model: Option<String>,
    /// As `--kv-len-jitter`; in [0, 1).
    pub kv_len_jitter: Option<f64>,
    /// As `--routing`; not looked at here.
    pub routing: Option<String>,
    /// How far a time may be from its target, in percent; 0 or more.
    pub tolerance_pct: Option<f64>,
    /// As `--num-speculative-tokens`: the capacity for draft tokens.
    pub num_speculative_tokens: Option<u32>,
}

/// A shape file.
#[derive(Debug, Clone, PartialEq)]
pub struct ShapeFile {
    /// Where it was read from.
    pub path: PathBuf,
    /// Its Criterion group: the file's stem.
    pub group: String,
    /// At least one, each with a name of its own.
    pub cases: Vec<Case>,
    /// What it sets.
    pub settings: FileSettings,
}

/// Reads several files and folders, in the order given.
///
/// # Errors
/// Those of [`load_path`], and two files with one stem over all of them.
pub fn load_all(paths: &[PathBuf]) -> Result<Vec<ShapeFile>, ShapeError> {
    let mut files = Vec::new();
    for path in paths {
        files.extend(load_path(path)?);
    }
    distinct_groups(&files)?;
    Ok(files)
}

/// Reads a file, or the `.yaml`, `.yml` and `.json` files right in a folder, in name order, hidden ones left out.
///
/// # Errors
/// One line with file, line and case: what cannot be read, is no shape file, or breaks a rule; a folder without shape
/// files; two files with one stem.
pub fn load_path(path: &Path) -> Result<Vec<ShapeFile>, ShapeError> {
    let metadata = fs::metadata(path).map_err(|error| {
        ShapeError::of(path, format!("cannot be read: {error}: check the path and its permissions"))
    })?;
    if !metadata.is_dir() {
        return Ok(vec![load_file(path)?]);
    }
    let unreadable = |error| ShapeError::of(path, format!("the folder cannot be read: {error}"));
    let mut paths = Vec::new();
    for entry in fs::read_dir(path).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        if is_shape_file(Path::new(&name)) && !name.as_encoded_bytes().starts_with(b".") {
            paths.push(path.join(name));
        }
    }
    if paths.is_empty() {
        return Err(ShapeError::of(
            path,
            "the folder has no .yaml, .yml or .json file: give another, or add one",
        ));
    }
    paths.sort();
    let files = paths.iter().map(|path| load_file(path)).collect::<Result<Vec<_>, _>>()?;
    distinct_groups(&files)?;
    Ok(files)
}

/// Refuses a file whose group is [`CASE_GROUP`]; for use when there are cases from `--case`.
///
/// # Errors
/// The file, and that it must be renamed.
pub fn refuse_case_group(files: &[ShapeFile]) -> Result<(), ShapeError> {
    match files.iter().find(|file| file.group == CASE_GROUP) {
        None => Ok(()),
        Some(file) => Err(ShapeError::of(
            &file.path,
            format!(
                "the file's group is {CASE_GROUP}, which is the group of --case: rename it or leave out --case"
            ),
        )),
    }
}

fn distinct_groups(files: &[ShapeFile]) -> Result<(), ShapeError> {
    let mut seen: HashMap<&str, &Path> = HashMap::new();
    for file in files {
        if let Some(first) = seen.insert(&file.group, &file.path) {
            let what = format!(
                "its group {:?} is also that of {}: rename one, since a file's stem is its group",
                file.group,
                first.display()
            );
            return Err(ShapeError::of(&file.path, what));
        }
    }
    Ok(())
}

fn is_shape_file(path: &Path) -> bool {
    ["yaml", "yml", "json"].iter().any(|extension| path.extension() == Some(OsStr::new(extension)))
}

fn load_file(path: &Path) -> Result<ShapeFile, ShapeError> {
    if !is_shape_file(path) {
        return Err(ShapeError::of(path, "not a shape file: its name must end in .yaml, .yml or .json"));
    }
    let group = path.file_stem().and_then(OsStr::to_str);
    let group = group.ok_or_else(|| ShapeError::of(path, "its name is not UTF-8: rename it"))?.to_owned();
    let text = read_text(path)?;
    let is_json = path.extension() == Some(OsStr::new("json"));
    if text.trim_start_matches('\u{feff}').trim().is_empty() {
        return Err(ShapeError::of(path, "the file is empty: give at least `cases: [NAME=REQS]`"));
    }
    let root = tree::parse(&text, is_json).map_err(|(line, what)| ShapeError {
        path: path.into(),
        line,
        case: None,
        what,
    })?;
    let (cases, settings) = read::read(path, &root)?;
    Ok(ShapeFile { path: path.into(), group, cases, settings })
}

/// The text of a regular file of at most [`MAX_FILE_BYTES`]; anything else is refused before it is opened.
fn read_text(path: &Path) -> Result<String, ShapeError> {
    let unreadable =
        |error| ShapeError::of(path, format!("cannot be read: {error}: check the path and its permissions"));
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if metadata.is_dir() {
        return Err(ShapeError::of(path, "a folder where a file was expected: rename it or give a file"));
    }
    if !metadata.is_file() {
        return Err(ShapeError::of(path, "not a regular file: give a .yaml, .yml or .json file"));
    }
    let too_large = |bytes: u64| {
        ShapeError::of(
            path,
            format!("a file of {bytes} bytes or more: shape files have at most {MAX_FILE_BYTES}"),
        )
    };
    if metadata.len() > MAX_FILE_BYTES {
        return Err(too_large(metadata.len()));
    }
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(too_large(bytes.len() as u64));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..valid].iter().filter(|byte| **byte == b'\n').count() as u64;
        let what = format!("byte {valid} is not UTF-8: save the file as UTF-8");
        ShapeError { path: path.into(), line: Some(line), case: None, what }
    })
}
