//! `--output-json`: where results go, and that they can.

use std::fs;
use std::path::{Path, PathBuf};

use super::Failure;
use crate::baseline::write_atomically;
use crate::report::results::CaseResult;

fn refuse(path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("--output-json {}: {why}", path.display()))
}

/// Checks that the file can be written, before an hour is spent on its contents.
pub fn check(path: &Path) -> Result<(), Failure> {
    if path.is_dir() {
        return Err(refuse(path, "this is a folder; name a file"));
    }
    if is_special(path) {
        return Ok(());
    }
    let target = target(path);
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        return Err(refuse(path, format!("there is no folder {}; create it", folder.display())));
    }
    let probe = folder.join(format!(".forward-bench-{}", std::process::id()));
    let written = fs::write(&probe, "").and_then(|()| fs::remove_file(&probe));
    written.map_err(|error| refuse(path, format!("{} cannot be written to: {error}", folder.display())))
}

/// Writes the results: a regular file, or what a link leads to, is replaced as a whole; a device or pipe is written into.
pub fn write(path: &Path, results: &[CaseResult]) -> Result<(), Failure> {
    let mut text = serde_json::to_string_pretty(results).map_err(|error| refuse(path, error))?;
    text.push('\n');
    if is_special(path) {
        return fs::write(path, text).map_err(|error| refuse(path, error));
    }
    Ok(write_atomically(&target(path), &text)?)
}

/// Something that is there and is no regular file, such as `/dev/stdout`: it must be written into, not replaced.
fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.is_file())
}

/// The file itself where `path` is a link to one.
fn target(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_stays_and_its_target_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        check(&link).unwrap();
        write(&link, &[]).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "[]\n");
    }

    #[test]
    fn a_device_is_written_into() {
        let path = Path::new("/dev/null");
        check(path).unwrap();
        write(path, &[]).unwrap();
        assert!(is_special(path));
    }
}
