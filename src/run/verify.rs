//! `--verify`: does this checkpoint's forward compute what another implementation says?

use std::io::{Write, stdout};
use std::path::Path;

use super::device::Loaded;
use super::ranks::Links;
use super::{CASE, Failure};
use crate::cli::{BackendArg, Cli, LoadFormat};
use crate::model::verify::{Expected, Row, verify};
use crate::model::{Model, ModelConfig};

/// Feeds the sequence of `path` to the model in every phase and prints how far each is off; status 3 above the tolerance.
pub fn run(cli: &Cli, path: &Path) -> Result<u8, Failure> {
    let usage = |error: &dyn std::fmt::Display| Failure::usage(format!("--verify: {error}"));
    let folder = cli.model.as_deref().filter(|model| Path::new(model).is_dir()).ok_or_else(|| {
        Failure::usage("--verify: there is no checkpoint to verify; name its folder by --model DIR")
    })?;
    let expected = Expected::read(path).map_err(|error| usage(&error))?;
    let config = ModelConfig::resolve(folder, cli.hf_overrides.as_deref()).map_err(|error| usage(&error))?;
    let length = cli.max_model_len.unwrap_or(config.max_position_embeddings);
    let model = Model::new(config, cli.block_size, length).map_err(|error| usage(&error))?;
    // A GPU computes in 16 bits: what it gives is not compared with float32 unless that is asked for.
    let backend = if cli.backend == BackendArg::Auto { BackendArg::Cpu } else { cli.backend };
    let cli = Cli { load_format: LoadFormat::Safetensors, backend, ..cli.clone() };
    let mut loaded = Loaded::load(&cli, &Links::default(), folder, model)?;
    let (model, device) = loaded.parts();
    let rows = verify(model, device, &expected).map_err(|error| usage(&error))?;
    // A reader that went away has seen enough; the exit status still says what was found.
    let _ = print(&rows);
    let worst = rows.iter().map(|row| row.relative_rms).fold(0.0, f64::max);
    if worst <= cli.verify_tolerance {
        return Ok(0);
    }
    eprintln!(
        "error: --verify: relative RMS {worst:.3e} of the worst row, and at most {:.1e} is allowed (--verify-tolerance)",
        cli.verify_tolerance
    );
    Ok(CASE)
}

fn print(rows: &[Row]) -> std::io::Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{:<12} {:>6} {:>10} {:>13}", "phase", "rows", "worst row", "relative RMS")?;
    for Row { phase, rows, worst_row, relative_rms, .. } in rows {
        writeln!(out, "{phase:<12} {rows:>6} {worst_row:>10} {relative_rms:>13.3e}")?;
    }
    Ok(())
}
