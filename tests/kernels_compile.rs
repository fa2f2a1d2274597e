//! Compiles the kernels of every preset and fixture for every architecture with NVRTC: needs that library, but no GPU.
//!
//! A warning or a spill that is not listed fails, and so does more shared memory than a block may have. NVRTC is looked for in the
//! folder that FORWARD_BENCH_NVRTC names, then on LD_LIBRARY_PATH; without it nothing is compiled, which one line says, and
//! with FORWARD_BENCH_REQUIRE_NVRTC set that is a failure.
#![cfg(feature = "cuda-api")]

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use forward_bench::backend::cuda::compile::{Compiler, File};
use forward_bench::backend::cuda::{
    Variant, decode_shared, gemv_defines, prefill_hopper_shared, prefill_shared,
};
use forward_bench::backend::{Activation, Scoring};
use forward_bench::model::{Layer, Mlp, Model, ModelConfig, preset_names};

/// Architectures, and the KiB of dynamic shared memory that a block may have there.
const ARCHS: [(&str, usize); 5] =
    [("sm_80", 163), ("sm_89", 99), ("sm_90a", 227), ("sm_100", 227), ("sm_120", 99)];

/// Where float16 is compiled as well, and every block size.
const BOTH_TYPES: [&str; 2] = ["sm_80", "sm_90a"];

/// The (head_dim, query heads a KV head) that every block size is compiled for: that of Qwen3-8B.
const EVERY_BLOCK_SIZE: (usize, usize) = (128, 4);

/// Spills that are accepted: kernel, architecture, and why.
const SPILLS: [(&str, &str, &str); 3] = [
    (
        "attention_combine",
        "sm_100",
        "one word by ptxas 13.5, though registers are free; ptxas 13.0 spills none",
    ),
    (
        "gemv",
        "sm_100",
        "one word by ptxas 13.5 in one of several variants that are timed; ptxas 13.0 spills none",
    ),
    ("gemv", "sm_120", "as on sm_100"),
];

/// Exit status of a child that found no NVRTC.
const NO_NVRTC: i32 = 77;

/// One compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Job {
    file: File,
    arch: &'static str,
    limit: usize,
    defines: Vec<String>,
    head_dim: usize,
    /// Dynamic shared memory of the file's kernel, if it has any.
    shared: usize,
}

/// Every preset and fixture.
fn models() -> Vec<Model> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let folders = std::fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path());
    let fixtures = folders.filter(|path| path.join("config.json").is_file());
    let presets = preset_names().into_iter().map(|name| ModelConfig::resolve(name, None).unwrap());
    let configs = fixtures.map(|path| ModelConfig::from_dir(&path, None).unwrap()).chain(presets);
    configs.map(|config| Model::new(config, 16, 256).unwrap()).collect()
}

/// (head_dim, query heads a KV head, whether there are sinks) of every model's layers.
fn heads() -> BTreeSet<(usize, usize, bool)> {
    let heads = |layer: &Layer| {
        let attention = &layer.attention;
        (attention.head_dim, attention.q_heads / attention.kv_heads, attention.sinks.is_some())
    };
    models().iter().flat_map(|model| model.layers.iter().map(heads).collect::<Vec<_>>()).collect()
}

/// (experts, experts a token, ROUTE of moe_route.cu, whether gate and up are clamped) of every model's blocks of experts.
fn experts() -> BTreeSet<(usize, usize, usize, bool)> {
    let experts = |layer: &Layer| match layer.mlp {
        Mlp::Dense { .. } => None,
        Mlp::Experts(moe) => {
            let route = match moe.scoring {
                Scoring::SoftmaxThenTopK { renormalize } => usize::from(renormalize),
                Scoring::TopKThenSoftmax => 2,
            };
            Some((moe.experts, moe.top_k, route, moe.activation != Activation::SiluMul))
        }
    };
    models().iter().flat_map(|model| model.layers.iter().filter_map(experts).collect::<Vec<_>>()).collect()
}

/// Every variant of the grouped products on an architecture.
fn variants(arch: &str) -> Vec<Variant> {
    let any = [16, 32, 64, 128].map(|tile_rows| Variant { tile_rows, hopper: None });
    let hopper = [192, 256].map(|columns| Variant { tile_rows: 128, hopper: Some(columns) });
    // On Hopper its own kernels serve tiles of 128.
    if arch == "sm_90a" { any.into_iter().take(3).chain(hopper).collect() } else { any.to_vec() }
}

/// Every compilation, each once.
fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    for (arch, limit) in ARCHS {
        // The element type changes conversions and one instruction's suffix: two architectures' worth is enough to see it.
        let dtypes: &[&str] = if BOTH_TYPES.contains(&arch) { &["BF16", "F16"] } else { &["BF16"] };
        for &dtype in dtypes {
            let mut add = |file, defines: &[(&str, usize)], head_dim, shared| {
                let mut all = vec![format!("DTYPE_{dtype}=1")];
                all.extend(defines.iter().map(|(name, value)| format!("{name}={value}")));
                let job = Job { file, arch, limit, defines: all, head_dim, shared };
                if !jobs.contains(&job) {
                    jobs.push(job);
                }
            };
            for file in [File::Act, File::Embed, File::Fill, File::Norm, File::State] {
                add(file, &[], 0, 0);
            }
            add(File::Embed, &[("SHARD", 1)], 0, 0);
            for defines in gemv_defines() {
                add(File::Gemv, &defines, 0, 0);
            }
            for (experts, top_k, route, clamped) in experts() {
                let choice = [("EXPERTS", experts), ("TOP_K", top_k), ("ROUTE", route)];
                add(File::MoeRoute, &choice, 0, 0);
                add(File::MoeRoute, &[&choice[..], &[("EP", 1)]].concat(), 0, 0);
                add(File::MoeTravel, &[("TOP_K", top_k)], 0, 0);
                for (variant, kind) in
                    variants(arch).into_iter().flat_map(|variant| [(variant, 1), (variant, 2)])
                {
                    let (file, defines) = variant.compilation(kind, (top_k, clamped));
                    add(file, &defines, 0, variant.shared());
                }
            }
            for (head_dim, group, sinks) in heads() {
                let sinks: &[(&str, usize)] = if sinks { &[("SINKS", 1)] } else { &[] };
                let all_sizes =
                    dtype == "BF16" && BOTH_TYPES.contains(&arch) && (head_dim, group) == EVERY_BLOCK_SIZE;
                for &block_size in if all_sizes { &[16, 32, 64][..] } else { &[16] } {
                    let base = [("HEAD_DIM", head_dim), ("BLOCK_SIZE", block_size)];
                    add(File::Rope, &base, head_dim, 0);
                    let with_group = [&[base[0], base[1], ("GROUP", group)], sinks].concat();
                    // On Hopper the other kernel serves these.
                    if arch == "sm_90a" && [64, 128].contains(&head_dim) {
                        add(File::PrefillHopper, &with_group, head_dim, prefill_hopper_shared(head_dim));
                    } else {
                        add(File::Prefill, &with_group, head_dim, prefill_shared(head_dim));
                    }
                    for tiles in 1..=if head_dim <= 128 { 2 } else { 1 } {
                        let defines = [&with_group[..], &[("M_TILES", tiles)]].concat();
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
    let accepted = |kernel: &str| SPILLS.iter().any(|(k, arch, _)| *k == kernel && *arch == job.arch);
    let mut found = Vec::new();
    let mut kernel = "";
    for line in log.lines() {
        let spill = line.contains("spill") && !line.contains(" 0 bytes spill stores, 0 bytes spill loads");
        if let Some((_, rest)) = line.split_once("Function properties for ") {
            kernel = rest.trim();
        } else if let Some((_, rest)) = line.split_once("in function '") {
            kernel = rest.split('\'').next().unwrap_or_default();
        }
        let warned = line.contains("warning") || (line.contains("C75") && !line.contains("C7517"));
        if (spill && !accepted(kernel)) || (warned && !spill) {
            found.push(format!("{kernel}: {}", line.trim()));
        }
        let shared = static_shared(line) + job.shared;
        if kernel != "attention_combine" && shared > job.limit * 1024 {
            found.push(format!("{kernel}: {shared} bytes of shared memory, {} KiB are allowed", job.limit));
        }
    }
    found
}

/// Bytes of static shared memory that a line of the log tells of.
fn static_shared(line: &str) -> usize {
    let before = line.split_once(" bytes smem").map(|(before, _)| before);
    before.and_then(|text| text.rsplit([' ', ',']).next()?.parse().ok()).unwrap_or(0)
}

/// Set for a child process: which share of the compilations is its own, `index/count`.
const SHARE: &str = "FORWARD_BENCH_KERNELS_SHARE";

/// Compiles one share; returns what is wrong. NVRTC compiles one program at a time, so the shares are processes.
fn compile_share(index: usize, count: usize) -> Vec<String> {
    let mut jobs = jobs();
    // Neighbours take about as long as each other, and go to different shares.
    jobs.sort_by_key(|job| (job.file.name(), job.head_dim, job.shared));
    let mut bad = Vec::new();
    for job in jobs.iter().skip(index).step_by(count) {
        let compiled = Compiler::new(job.arch).and_then(|compiler| compiler.fresh(job.file, &job.defines));
        let found = match compiled {
            Ok((_, log)) => problems(job, &log),
            Err(error) => vec![error.to_string()],
        };
        let name = format!("{}.cu {} {}", job.file.name(), job.arch, job.defines.join(" "));
        bad.extend(found.into_iter().map(|problem| format!("{name}: {problem}")));
    }
    bad
}

/// A line that the test harness does not keep back.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// This test again, in a process that compiles one share.
fn child(test: &str, index: usize, count: usize) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(SHARE, format!("{index}/{count}"));
    if let Some(folder) = std::env::var_os("FORWARD_BENCH_NVRTC") {
        let mut folders = vec![folder.into()];
        folders.extend(std::env::split_paths(&std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
        command.env("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap());
    }
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn every_kernel_compiles_everywhere_without_warning_or_spill() {
    if let Ok(share) = std::env::var(SHARE) {
        let (index, count) = share.split_once('/').unwrap();
        if let Err(error) = Compiler::new("sm_80") {
            say(&error.to_string());
            std::process::exit(NO_NVRTC);
        }
        let bad = compile_share(index.parse().unwrap(), count.parse().unwrap());
        bad.iter().for_each(|line| say(line));
        std::process::exit(i32::from(!bad.is_empty()));
    }
    let count = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let name = "every_kernel_compiles_everywhere_without_warning_or_spill";
    let children: Vec<Child> = (0..count).map(|index| child(name, index, count)).collect();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let text: String = outputs.iter().map(|output| String::from_utf8_lossy(&output.stderr)).collect();
    if outputs.iter().any(|output| output.status.code() == Some(NO_NVRTC)) {
        assert!(std::env::var_os("FORWARD_BENCH_REQUIRE_NVRTC").is_none(), "no kernel was compiled: {text}");
        return say(&format!("SKIPPED, no kernel was compiled: {}", text.lines().next().unwrap_or_default()));
    }
    assert!(outputs.iter().all(|output| output.status.success()), "{text}");
    say(&format!("{} compilations, each without a warning or an unlisted spill", jobs().len()));
}

#[test]
fn dynamic_shared_memory_fits_every_architecture() {
    for (arch, limit) in ARCHS.into_iter().chain([("sm_86", 99)]) {
        for variant in variants(arch) {
            assert!(variant.shared() <= limit * 1024, "{variant:?} on {arch}: {} bytes", variant.shared());
        }
    }
    for (head_dim, _, _) in heads() {
        for (arch, limit) in ARCHS.into_iter().chain([("sm_86", 99), ("sm_90", 227)]) {
            let tiles = 1..=if head_dim <= 128 { 2 } else { 1 };
            let hopper = arch.starts_with("sm_90") && [64, 128].contains(&head_dim);
            let prefill = if hopper { prefill_hopper_shared(head_dim) } else { prefill_shared(head_dim) };
            for bytes in tiles.map(|tiles| decode_shared(head_dim, tiles)).chain([prefill]) {
                assert!(bytes <= limit * 1024, "head_dim {head_dim} on {arch}: {bytes} bytes, {limit} KiB");
            }
        }
    }
}
