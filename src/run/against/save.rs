//! What is kept of a comparison: the last process's files of each side in Criterion's folder, with all runs in the sidecars; and
//! Criterion's own verdict on the same data.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::side::Side;
use crate::baseline::{Compared, FIELDS, SIDECAR, Sidecar, Store};
use crate::cli::Cli;
use crate::run::Failure;
use crate::run::suite::Entry;

/// The baseline that the other side is kept as: `against-` and its commit, or the given file's name.
pub fn name(reference: &str, side: &Side) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '_' };
    let file = Path::new(reference).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let text: String = side.commit.clone().unwrap_or(file).chars().map(plain).take(50).collect();
    format!("against-{text}")
}

/// Keeps both sides of a case: the other one as `against-…`, this one as the case's last measurement.
pub fn both(
    store: &Store,
    reference: &str,
    sides: &[Side; 2],
    entry: &Entry,
    compared: impl FnOnce(&Sidecar) -> Compared,
) -> Result<(), Failure> {
    let [old, new] = sides;
    let runs = |side: &Side| side.runs.get(&entry.id).cloned().unwrap_or_default();
    let Some(mut new_sidecar) = new.sidecar(entry) else { return Ok(()) };
    // An older version's sidecar may read otherwise; what both sides ran is the same, so ours says most of it.
    let mut old_sidecar = old.sidecar(entry).unwrap_or_else(|| new_sidecar.clone());
    for (sidecar, side) in [(&mut old_sidecar, old), (&mut new_sidecar, new)] {
        sidecar.runs = runs(side);
        let medians: Vec<f64> = sidecar.runs.iter().map(|run| run.median_us).collect();
        sidecar.median_us = crate::stats::median(&medians).unwrap_or(sidecar.median_us);
        sidecar.compared = None;
        let telemetry = sidecar.runs.iter_mut().map(|run| &mut run.telemetry);
        for telemetry in telemetry.chain([&mut sidecar.around.telemetry]).flatten() {
            // The other side's process is no stranger on the device.
            telemetry.other_processes.retain(|name| !sides.iter().any(|side| side.is(name)));
        }
    }
    old_sidecar.commit.clone_from(&old.commit);
    old_sidecar.dirty_diff = None;
    new_sidecar.compared = Some(compared(&old_sidecar));
    let kept = [(old, name(reference, old), old_sidecar), (new, "new".to_owned(), new_sidecar)];
    for (side, name, sidecar) in kept {
        let from = side.store().folder(&entry.id).join(side.baseline());
        store.adopt(&entry.id, &name, &from)?;
        store.write_sidecar(&name, &sidecar)?;
    }
    store.forget_change(&entry.id);
    Ok(())
}

/// Has Criterion compare the last process of each side, and prints what it says.
pub fn criterions_verdict(cli: &Cli, sides: &[Side; 2], scratch: &Path) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::usage(format!("Criterion's own verdict: {error}"));
    let [old, new] = sides;
    let store = old.store();
    for id in store.ids() {
        if store.sidecar(&id, old.baseline()).is_err() {
            // An older version writes it otherwise; Criterion needs none, and this comparison allows that.
            let _ = fs::remove_file(store.folder(&id).join(old.baseline()).join(SIDECAR));
        }
        let from = new.store().folder(&id).join(new.baseline());
        if from.is_dir() {
            store.adopt(&id, new.baseline(), &from)?;
        }
    }
    let shapes: Vec<_> = ["together", "apart"].iter().map(|folder| scratch.join(folder)).collect();
    let mut status = true;
    println!("Criterion's own verdict, on the last process of each side:");
    for shapes in shapes.iter().filter(|shapes| shapes.is_dir()) {
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command
            .args(["--bench", "--noplot", "--baseline", old.baseline(), "--load-baseline", new.baseline()])
            .arg(format!("--allow-mismatch={}", FIELDS.join(",")))
            .args(layout(cli)) // it is in the ids
            .arg("--shapes")
            .arg(shapes)
            .env("CRITERION_HOME", &store.home)
            .stderr(Stdio::null());
        status &= command.status().map_err(failed)?.success();
    }
    if !status {
        eprintln!("warning: Criterion could not compare them: a case was not measured on both sides");
    }
    Ok(())
}

/// The flags that say how the step was spread over ranks.
fn layout(cli: &Cli) -> Vec<String> {
    let mut flags = vec![
        format!("--tensor-parallel-size={}", cli.tensor_parallel_size),
        format!("--data-parallel-size={}", cli.data_parallel_size),
        format!("--pipeline-parallel-size={}", cli.pipeline_parallel_size),
    ];
    flags.extend(cli.enable_expert_parallel.then(|| "--enable-expert-parallel".to_owned()));
    flags
}

impl Store {
    /// Makes a benchmark's baseline a copy of the files in `from`; what was there before survives a crash meanwhile.
    ///
    /// # Errors
    /// If the disk refuses.
    fn adopt(&self, id: &str, name: &str, from: &Path) -> Result<(), Failure> {
        let failed = |error: std::io::Error| Failure::usage(format!("{}: {error}", from.display()));
        self.keep(id, name)?;
        let folder = self.folder(id).join(name);
        if folder.is_dir() {
            fs::remove_dir_all(&folder).map_err(failed)?;
        }
        fs::create_dir_all(&folder).map_err(failed)?;
        for file in fs::read_dir(from).map_err(failed)? {
            let file = file.map_err(failed)?;
            fs::copy(file.path(), folder.join(file.file_name())).map_err(failed)?;
        }
        Ok(self.release(id)?)
    }
}
