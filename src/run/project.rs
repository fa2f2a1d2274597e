//! Folders of the project that is being worked on.

use std::path::{Path, PathBuf};

/// A folder of the project, looked for from where this was started, then beside the package that was built.
pub fn find(folder: &str) -> Option<PathBuf> {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let roots = [package, Some(PathBuf::from(".")), Some(PathBuf::from(env!("CARGO_MANIFEST_DIR")))];
    let found = roots.into_iter().flatten().map(|root| root.join(folder)).find(|folder| folder.is_dir());
    found.map(|folder| folder.strip_prefix(".").map(Path::to_owned).unwrap_or(folder))
}
