//! `--diff A.kernels.json B.kernels.json`: where two profiles differ.

use std::io::{Write, stdout};
use std::path::Path;

use super::{Failure, one_line};
use crate::profile::diff::table;
use crate::profile::file::KernelsFile;

/// Prints what each file is of, what sets them apart, and the table.
pub fn print(old: &Path, new: &Path) -> Result<u8, Failure> {
    let read = |path: &Path| {
        KernelsFile::read(path)
            .map_err(|error| Failure::usage(format!("--diff {}", one_line(&error.to_string()))))
    };
    let (a, b) = (read(old)?, read(new)?);
    let unlike = unlike(&a, &b);
    if !unlike.is_empty() {
        eprintln!("warning: these are not of the same: {}", one_line(&unlike.join(", ")));
    }
    let title = |side: &str, file: &KernelsFile| {
        let commit =
            file.commit.as_deref().map_or("no commit".to_owned(), |commit| format!("commit {commit}"));
        let KernelsFile { id, rank, date, replays, .. } = file;
        one_line(&format!("{side}: {id} rank {rank}, {commit}, {date}, mean of {replays} traced replays"))
    };
    let text = format!("{}\n{}\n{}", title("A", &a), title("B", &b), table(&a.profile, &b.profile));
    // A reader that went away has seen enough.
    let _ = stdout().lock().write_all(text.as_bytes());
    Ok(0)
}

/// What should be alike and is not.
fn unlike(a: &KernelsFile, b: &KernelsFile) -> Vec<String> {
    let pairs = [
        ("id", a.id.clone(), b.id.clone()),
        ("rank", a.rank.to_string(), b.rank.to_string()),
        ("device", a.device.clone(), b.device.clone()),
        ("model", a.model.clone(), b.model.clone()),
    ];
    let differing = pairs.into_iter().filter(|(_, a, b)| a != b);
    differing.map(|(what, a, b)| format!("{what} {a} and {b}")).collect()
}
