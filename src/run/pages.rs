//! Our own report: written after what changes the store, and never the reason why a run fails.

use std::path::PathBuf;

use crate::baseline::Store;
use crate::report::html::{self, Options};

/// Writes the pages and says where they are; a disk that refuses is a warning, as the results are saved already.
pub fn write(store: &Store, pictures: bool) {
    match html::write(store, &Options { pictures, repository: PathBuf::from(".") }) {
        Ok(index) => eprintln!("report: {}", index.display()),
        Err(error) => eprintln!("warning: the report's pages could not be written: {error}"),
    }
}
