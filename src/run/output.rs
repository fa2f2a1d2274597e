//! Where results go, and that they can.

use std::fs;
use std::path::{Path, PathBuf};

use super::sidecar::Earlier;
use super::{Failure, backend};
use crate::baseline::write_atomically;
use crate::cli::Cli;
use crate::report::results::CaseResult;
use crate::report::verdicts::{self, Metric, Summary};

fn refuse(flag: &str, path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("{flag} {}: {why}", path.display()))
}

/// Checks that the files that results are asked for in can be written, before an hour is spent on their contents.
pub fn check_all(cli: &Cli) -> Result<(), Failure> {
    let flags = &cli.comparison;
    let files = [
        ("--output-json", &cli.output_json),
        ("--summary-md", &flags.summary_md),
        ("--output-bmf", &flags.output_bmf),
    ];
    let paths: Vec<_> = files.iter().filter_map(|(_, path)| path.as_ref()).collect();
    if let Some(twice) =
        paths.iter().find(|path| !is_special(path) && paths.iter().filter(|other| other == path).count() > 1)
    {
        return Err(Failure::usage(format!(
            "{}: two results cannot go into one file; name another",
            twice.display()
        )));
    }
    files
        .into_iter()
        .filter_map(|(flag, path)| Some((flag, path.as_ref()?)))
        .try_for_each(|(flag, path)| check(flag, path))
}

/// Checks that the file can be written.
fn check(flag: &str, path: &Path) -> Result<(), Failure> {
    let refuse = |path: &Path, why: String| refuse(flag, path, why);
    if path.is_dir() {
        return Err(refuse(path, "this is a folder; name a file".to_owned()));
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

/// Writes the results.
pub fn write(path: &Path, results: &[CaseResult]) -> Result<(), Failure> {
    write_json("--output-json", path, &results)
}

/// Writes the medians in the Bencher Metric Format.
pub fn bmf(path: &Path, metrics: &[Metric]) -> Result<(), Failure> {
    write_json("--output-bmf", path, &verdicts::bmf(metrics))
}

/// Writes what one of several processes measured.
pub fn gathered(path: &Path, runs: &Earlier) -> Result<(), Failure> {
    write_json("runs", path, runs)
}

/// Writes the verdicts as Markdown, if that is asked for.
pub fn summary(cli: &Cli, summary: &Summary) -> Result<(), Failure> {
    let Some(path) = &cli.comparison.summary_md else { return Ok(()) };
    write_text("--summary-md", path, &verdicts::markdown(summary, &backend::of(cli)?.device()))
}

fn write_json(flag: &str, path: &Path, value: &impl serde::Serialize) -> Result<(), Failure> {
    let mut text = serde_json::to_string_pretty(value).map_err(|error| refuse(flag, path, error))?;
    text.push('\n');
    write_text(flag, path, &text)
}

/// A regular file, or what a link leads to, is replaced as a whole; a device or pipe is written into.
fn write_text(flag: &str, path: &Path, text: &str) -> Result<(), Failure> {
    if is_special(path) {
        return fs::write(path, text).map_err(|error| refuse(flag, path, error));
    }
    Ok(write_atomically(&target(path), text)?)
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
        check("--output-json", &link).unwrap();
        write(&link, &[]).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "[]\n");
    }

    #[test]
    fn a_device_is_written_into() {
        let path = Path::new("/dev/null");
        check("--output-json", path).unwrap();
        write(path, &[]).unwrap();
        assert!(is_special(path));
    }
}
