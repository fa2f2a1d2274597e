//! The selected cases as shape files that any version reads: lengths after jitter, so that both sides run the same ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cli::Cli;
use crate::report::results::RequestResult;
use crate::run::suite::Entry;
use crate::run::{Failure, backend, device};

/// Cases that are measured in the same processes.
pub struct Heat {
    /// Folder of the shape files.
    pub shapes: PathBuf,
    /// Ids of the cases.
    pub ids: Vec<String>,
    /// Whether both sides' processes fit into the device's memory at once.
    pub resident: bool,
    /// The KV pool that each gets then, in bytes.
    pub kv_bytes: u128,
}

/// Memory that a process takes beside weights, KV and activations.
const CPU_SLACK: u128 = 256 << 20;
/// The same on a GPU: the context, the workspace of products, copies of KV blocks, partial results of attention.
const CUDA_SLACK: u128 = 3 << 30;

/// What one side takes for a case.
struct Need {
    /// All of it.
    bytes: u128,
    /// The KV pool.
    kv_bytes: u128,
}

/// Writes the shape files; cases of which both sides fit at once, and the others.
pub fn heats(cli: &Cli, selected: &[&Entry], scratch: &Path) -> Result<Vec<Heat>, Failure> {
    let available = backend::memory(cli)?.map(|bytes| (bytes as f64 * cli.gpu_memory_utilization) as u128);
    let mut groups: [(Vec<&Entry>, u128); 2] = [(Vec::new(), 0), (Vec::new(), 0)];
    for entry in selected {
        let need = need(cli, entry)?;
        let fits = available.is_some_and(|available| 2 * need.bytes <= available);
        let (entries, kv_bytes) = &mut groups[usize::from(!fits)];
        entries.push(entry);
        *kv_bytes = (*kv_bytes).max(need.kv_bytes);
    }
    let [together, apart] = groups;
    if !apart.0.is_empty() {
        let names: Vec<&str> = apart.0.iter().map(|entry| entry.id.as_str()).collect();
        eprintln!("two processes do not fit at once; one after the other measures: {}", names.join(", "));
    }
    let mut heats = Vec::new();
    for (resident, (entries, kv_bytes)) in [(true, together), (false, apart)] {
        if !entries.is_empty() {
            let shapes = scratch.join(if resident { "together" } else { "apart" });
            write(cli, &entries, &shapes)?;
            let ids = entries.iter().map(|entry| entry.id.clone()).collect();
            heats.push(Heat { shapes, ids, resident, kv_bytes });
        }
    }
    Ok(heats)
}

/// An upper bound of what a process takes for a case.
fn need(cli: &Cli, entry: &Entry) -> Result<Need, Failure> {
    let (plan, backend) = (device::Plan::of(cli, entry)?, backend::of(cli)?);
    let (spec, element) = (&plan.model.spec, backend.element());
    let weights: u128 = spec.weights.iter().map(|weight| weight.rows as u128 * weight.cols as u128).sum();
    let of_group = |group: usize| -> u128 {
        let layers = spec.kv_layers.iter().filter(|layer| layer.group == group);
        layers.map(|layer| 2 * layer.kv_heads as u128 * layer.head_dim as u128).sum()
    };
    let block = (0..spec.kv_groups.len()).map(of_group).max().unwrap_or(0);
    let block_bytes = block * u128::from(cli.block_size) * element.kv as u128;
    let kv_bytes = block_bytes * (u128::from(plan.batch.blocks_used()) + 4);
    // Every slot of a token has rows of its own between its expert's products.
    let experts = plan.model.config.experts.as_ref().map_or(0, |experts| {
        experts.top_k as u128 * (plan.model.config.hidden_size + 3 * experts.inter) as u128
    });
    let widths = experts + spec.acts.iter().map(|(_, width)| *width as u128).sum::<u128>();
    let activations = widths * u128::from(cli.max_num_batched_tokens) * element.kv as u128;
    let (activations, slack) = match backend {
        backend::Backend::Cpu => (widths * u128::from(plan.batch.num_tokens().0) * 4, CPU_SLACK),
        backend::Backend::Cuda(_) => (activations, CUDA_SLACK),
    };
    Ok(Need { bytes: weights * element.weight as u128 + kv_bytes + activations + slack, kv_bytes })
}

/// One file a group.
fn write(cli: &Cli, entries: &[&Entry], folder: &Path) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::usage(format!("{}: {error}", folder.display()));
    fs::create_dir_all(folder).map_err(failed)?;
    let mut files: BTreeMap<&str, Value> = BTreeMap::new();
    for entry in entries {
        let plan = device::Plan::of(cli, entry)?;
        let requests: Vec<RequestResult> = plan.case.requests.iter().map(Into::into).collect();
        let file = files.entry(entry.parts().0).or_insert_with(|| settings(entry));
        if let Some(cases) = file["cases"].as_array_mut() {
            cases.push(json!({ "name": entry.asked.name, "requests": requests }));
        }
    }
    for (group, file) in files {
        fs::write(folder.join(format!("{group}.json")), file.to_string()).map_err(failed)?;
    }
    Ok(())
}

/// What a group's file sets; the entries of a group agree in it, as they are from one file and one command line.
fn settings(entry: &Entry) -> Value {
    let mut file = json!({ "model": entry.model, "kv_len_jitter": 0, "cases": [] });
    if entry.num_speculative_tokens > 0 {
        file["num_speculative_tokens"] = json!(entry.num_speculative_tokens);
    }
    if let Some(routing) = &entry.routing {
        file["routing"] = json!(routing);
    }
    file
}
