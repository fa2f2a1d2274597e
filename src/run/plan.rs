//! `--plan`: what would run, without building a model or touching a device.

use std::io::{BufWriter, ErrorKind, Write, stdout};

use super::suite::Entry;
use super::{Failure, backend, device};
use crate::case::Case;
use crate::cli::{Cli, PlanFormat};
use crate::report::plan::{OpRow, PlanRow, write_json, write_table};

/// Prints the selected cases' plans on stdout.
pub fn print(cli: &Cli, selected: &[&Entry], format: PlanFormat) -> Result<u8, Failure> {
    let rows = selected.iter().map(|entry| row(cli, entry)).collect::<Result<Vec<_>, _>>()?;
    if format == PlanFormat::Json {
        check_size(&rows)?;
    }
    let mut out = BufWriter::new(stdout().lock());
    let written = match format {
        PlanFormat::Table => write_table(&mut out, &rows),
        PlanFormat::Json => write_json(&mut out, &rows),
    };
    match written.and_then(|()| out.flush()) {
        // A reader such as `head` may have seen enough.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::usage(format!("stdout: {error}")))
        }
        _ => Ok(0),
    }
}

/// Block ids that a JSON plan may list: half a gigabyte of them.
const MAX_BLOCK_IDS: u64 = 1 << 26;

fn check_size(rows: &[PlanRow]) -> Result<(), Failure> {
    let runs = rows.iter().flat_map(|row| &row.plan.schedules).flat_map(|schedule| &schedule.blocks);
    let ids = runs.fold(0_u64, |sum, run| sum.saturating_add(run.entries()));
    if ids > MAX_BLOCK_IDS {
        return Err(Failure::usage(format!(
            "--plan=json: {ids} block ids to list, and at most {MAX_BLOCK_IDS} are; --plan prints how many there are, and a \
             filter or a larger --block-size makes them fewer"
        )));
    }
    Ok(())
}

fn row(cli: &Cli, entry: &Entry) -> Result<PlanRow, Failure> {
    let plan = device::Plan::of(cli, entry)?;
    let costs = plan.costs(cli, backend::of(cli)?).into_iter();
    let ops = costs.map(|cost| OpRow { op: cost.op, bytes: cost.bytes, flops: cost.flops });
    Ok(PlanRow {
        id: entry.id.clone(),
        name: plan.case.name.clone(),
        requests: requests(&plan.case),
        ops: ops.collect(),
        plan: plan.batch,
    })
}

/// A case's requests without its name.
fn requests(case: &Case) -> String {
    let text = case.to_string();
    text.strip_prefix(&format!("{}=", case.name)).map_or_else(|| text.clone(), str::to_owned)
}
