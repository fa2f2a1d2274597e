//! `--baselines`, `--export-baseline` and `--import-baseline`: what needs no device.

use std::io::{BufWriter, ErrorKind, Write, stdout};
use std::path::{Path, PathBuf};

use super::{Failure, pages, project};
use crate::baseline::targets::{FOLDER, slug};
use crate::baseline::transfer::{self, Listed};
use crate::baseline::{Store, check_name, commit};
use crate::cli::Cli;

/// Does what the command line asks for, if it is one of these; returns the exit status.
pub fn run(cli: &Cli, store: &Store) -> Result<Option<u8>, Failure> {
    let flags = &cli.comparison;
    if let Some(name) = &flags.export_baseline {
        return export(store, name, flags.export_file.as_deref()).map(Some);
    }
    if let Some(path) = &flags.import_baseline {
        return import(store, path).map(|()| Some(0));
    }
    if flags.baselines {
        return print(&transfer::list(store)).map(Some);
    }
    Ok(None)
}

/// Whether the command line asks for one of these.
pub fn asked(cli: &Cli) -> bool {
    let flags = &cli.comparison;
    flags.export_baseline.is_some() || flags.import_baseline.is_some() || flags.baselines
}

fn export(store: &Store, name: &str, file: Option<&Path>) -> Result<u8, Failure> {
    let _lock = store.lock()?;
    store.recover()?;
    let name = commit::name_to_read(name, store)?;
    check_name(&name)?;
    let path = file.map_or_else(|| default_file(store, &name), Path::to_owned);
    let count = transfer::export(store, &name, &path)?;
    eprintln!("baseline {name} of {count} cases is in {}", path.display());
    Ok(0)
}

/// `target-baselines/<device>/<name>.json.gz`, the device as the baseline names it.
fn default_file(store: &Store, name: &str) -> PathBuf {
    let device = store.ids().iter().find_map(|id| Some(store.sidecar(id, name).ok()??.configuration.device));
    let device = device.unwrap_or_default();
    let device = slug(device.rsplit_once(", ").map_or(&*device, |(device, _)| device));
    let root = project::find(FOLDER).unwrap_or_else(|| Path::new(FOLDER).to_owned());
    file_of(&root.join(if device.is_empty() { "device" } else { &device }), name)
}

fn file_of(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.json.gz"))
}

fn import(store: &Store, path: &Path) -> Result<(), Failure> {
    let lock = store.lock()?;
    store.recover()?;
    let imported = transfer::import(store, path)?;
    for path in &imported.set_aside {
        eprintln!("another baseline {} was there and is set aside as {}", imported.name, path.display());
    }
    eprintln!("{}: baseline {} of {} cases is here", path.display(), imported.name, imported.benchmarks);
    pages::write(store, true);
    drop(lock);
    Ok(())
}

/// Imports a baseline that the project keeps for this device, if the store does not have it yet.
pub fn import_committed(name: &str, store: &Store, folder: &Path) -> Result<(), Failure> {
    let path = file_of(folder, name);
    if path.is_file() && !store.names().iter().any(|saved| saved == name) {
        import(store, &path)?;
        if !store.names().iter().any(|saved| saved == name) {
            return Err(Failure::usage(format!(
                "{}: the baseline in it has another name; give that one, or name the file after it",
                path.display()
            )));
        }
    }
    Ok(())
}

fn print(baselines: &[Listed]) -> Result<u8, Failure> {
    let mut out = BufWriter::new(stdout().lock());
    match write(&mut out, baselines).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::usage(format!("stdout: {error}")))
        }
        _ => Ok(0),
    }
}

fn write(out: &mut impl Write, baselines: &[Listed]) -> std::io::Result<()> {
    let header = ["name", "commit", "date", "cases", "runs", "models", "device"].map(str::to_owned);
    let row = |listed: &Listed| {
        let commit = listed.commit.clone().unwrap_or_else(|| "–".to_owned());
        let (cases, runs) = (listed.cases.to_string(), listed.runs.to_string());
        let (models, devices) = (listed.models.join(" "), listed.devices.join("; "));
        [listed.name.clone(), commit, listed.date.clone(), cases, runs, models, devices]
    };
    let rows: Vec<[String; 7]> = std::iter::once(header).chain(baselines.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..7).map(width).collect();
    for row in &rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}
