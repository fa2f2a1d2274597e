//! Compiles the kernels of every preset and fixture for every architecture with NVRTC: needs that library, but no GPU.
//!
//! A warning or a spill that is not listed fails, and so does more dynamic shared memory than a block may have.
#![cfg(feature = "cuda-api")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use forward_bench::backend::cuda::compile::{Compiler, File};
use forward_bench::backend::cuda::{decode_shared, gemv_defines, prefill_hopper_shared, prefill_shared};
use forward_bench::model::{ModelConfig, preset_names};

/// Architectures, and the KiB of dynamic shared memory that a block may have there.
const ARCHS: [(&str, usize); 5] =
    [("sm_80", 163), ("sm_89", 99), ("sm_90a", 227), ("sm_100", 227), ("sm_120", 99)];

/// Spills that are accepted: kernel, architecture, head_dim, and why.
const SPILLS: [(&str, &str, usize, &str); 0] = [];

/// One compilation.
#[derive(Debug, Clone)]
struct Job {
    file: File,
    arch: &'static str,
    limit: usize,
    defines: Vec<String>,
    head_dim: usize,
    /// Dynamic shared memory of the file's kernel, if it has any.
    shared: usize,
}

/// (head_dim, query heads a KV head) of every preset and fixture.
fn heads() -> BTreeSet<(usize, usize)> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let folders = std::fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path());
    let fixtures = folders.filter(|path| path.join("config.json").is_file());
    let presets = preset_names().into_iter().map(|name| ModelConfig::resolve(name, None).unwrap());
    let configs = fixtures.map(|path| ModelConfig::from_dir(&path, None).unwrap()).chain(presets);
    configs.map(|config| (config.head_dim, config.num_attention_heads / config.num_key_value_heads)).collect()
}

fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    for (arch, limit) in ARCHS {
        for dtype in ["DTYPE_BF16=1", "DTYPE_F16=1"] {
            let mut add = |file, defines: &[(&str, usize)], head_dim, shared| {
                let mut all = vec![dtype.to_owned()];
                all.extend(defines.iter().map(|(name, value)| format!("{name}={value}")));
                jobs.push(Job { file, arch, limit, defines: all, head_dim, shared });
            };
            for file in [File::Act, File::Embed, File::Fill, File::Norm, File::State] {
                add(file, &[], 0, 0);
            }
            for defines in gemv_defines() {
                add(File::Gemv, &defines, 0, 0);
            }
            for (head_dim, group) in heads() {
                // Every block size where one architecture's worth of compilations is enough to see it.
                let sizes: &[usize] =
                    if arch == "sm_90a" && dtype == "DTYPE_BF16=1" { &[16, 32, 64] } else { &[16] };
                for &block_size in sizes {
                    let base = [("HEAD_DIM", head_dim), ("BLOCK_SIZE", block_size)];
                    add(File::Rope, &base, head_dim, 0);
                    let with_group = [base[0], base[1], ("GROUP", group)];
                    add(File::Prefill, &with_group, head_dim, prefill_shared(head_dim));
                    if arch == "sm_90a" && [64, 128].contains(&head_dim) {
                        add(File::PrefillHopper, &with_group, head_dim, prefill_hopper_shared(head_dim));
                    }
                    for tiles in 1..=if head_dim <= 128 { 2 } else { 1 } {
                        let defines = [base[0], base[1], with_group[2], ("M_TILES", tiles)];
                        add(File::Decode, &defines, head_dim, decode_shared(head_dim, tiles));
                    }
                }
            }
        }
    }
    jobs
}

/// What is wrong with a compilation's log.
fn problems(job: &Job, log: &str) -> Vec<String> {
    let accepted = |kernel: &str| {
        SPILLS
            .iter()
            .any(|(k, arch, head_dim, _)| *k == kernel && *arch == job.arch && *head_dim == job.head_dim)
    };
    let mut found = Vec::new();
    let mut kernel = "";
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Function properties for ") {
            kernel = rest.trim();
        }
        let spilled = line.contains("bytes spill stores")
            && !line.contains(" 0 bytes spill stores, 0 bytes spill loads");
        let warned = line.contains("warning") || (line.contains("C75") && !line.contains("C7517"));
        if (spilled && !accepted(kernel)) || (warned && !(line.contains("spill") && accepted(kernel))) {
            found.push(format!("{kernel}: {}", line.trim()));
        }
    }
    if job.shared > job.limit * 1024 {
        found.push(format!("{} bytes of dynamic shared memory, {} KiB are allowed", job.shared, job.limit));
    }
    found
}

#[test]
#[ignore = "needs NVRTC (libnvrtc.so.13 of the wheel nvidia-cuda-nvrtc on LD_LIBRARY_PATH); a few minutes"]
fn every_kernel_compiles_everywhere_without_warning_or_spill() {
    let jobs = jobs();
    assert!(jobs.len() > 100, "{}", jobs.len());
    let (next, bad) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let compiled =
                        Compiler::new(job.arch).and_then(|compiler| compiler.fresh(job.file, &job.defines));
                    let found = match compiled {
                        Ok((_, log)) => problems(job, &log),
                        Err(error) => vec![error.to_string()],
                    };
                    let name = format!("{}.cu {} {}", job.file.name(), job.arch, job.defines.join(" "));
                    bad.lock().unwrap().extend(found.into_iter().map(|problem| format!("{name}: {problem}")));
                }
            });
        }
    });
    let bad = bad.into_inner().unwrap();
    assert!(bad.is_empty(), "{} compilations, problems:\n{}", jobs.len(), bad.join("\n"));
}
