//! Our own report: static pages over every sidecar below Criterion's folder, beside Criterion's own report.
//!
//! `forward/index.html` lists every case; `forward/case/GROUP/MODEL/CASE.html` is a case's page. The pages need no network and no
//! other file. Everything is readable without JavaScript, which only sorts tables.

mod case;
mod gather;
mod index;
mod kernels;
mod layout;
mod picture;
mod ranks;
mod requests;
mod roofline;
mod text;
mod timing;
mod trend;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::baseline::{BaselineError, Store, at, write_atomically};
use gather::Book;

/// The report's folder below Criterion's; no group may have this name.
const FOLDER: &str = "forward";

/// The pages of cases below it; only pages are in it.
const CASES: &str = "case";

/// How the pages are written.
#[derive(Debug, Clone)]
pub struct Options {
    /// Whether they have pictures; their numbers are in tables either way.
    pub pictures: bool,
    /// A folder within the git repository whose history orders the commits.
    pub repository: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self { pictures: true, repository: PathBuf::from(".") }
    }
}

/// Writes the report of everything in the store, removes the pages of benchmarks that are gone, and returns the path of
/// its index. A sidecar that cannot be read is listed with its error; the rest is shown.
///
/// # Errors
/// If the disk refuses a page.
pub fn write(store: &Store, options: &Options) -> Result<PathBuf, BaselineError> {
    let book = Book::read(store);
    let home = store.home.join(FOLDER);
    let mut kept = BTreeSet::new();
    for benchmark in book.benchmarks.iter().filter(|benchmark| benchmark.current().is_some()) {
        let path = home.join(benchmark.page());
        write_page(&path, &case::page(benchmark, options).into_string())?;
        kept.insert(path);
    }
    remove_others(&home.join(CASES), &kept);
    let index = home.join("index.html");
    write_page(&index, &index::page(&book, options).into_string())?;
    Ok(index)
}

fn write_page(path: &Path, text: &str) -> Result<(), BaselineError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(at(folder))?;
    write_atomically(path, text)
}

/// Removes every file but `kept`, then the folders that are empty.
fn remove_others(folder: &Path, kept: &BTreeSet<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.filter_map(Result::ok) {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_others(&path, kept);
        } else if !kept.contains(&path) {
            // A page that cannot be removed is one that nothing links to.
            let _ = fs::remove_file(&path);
        }
    }
    // Fails where something is left, as it should.
    let _ = fs::remove_dir(folder);
}
