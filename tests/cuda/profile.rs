//! A profile has every kernel of a step, each as often as the model asks for it, and nothing else.

use std::collections::BTreeMap;
use std::process::Command;

use forward_bench::backend::cuda::{CudaDevice, CudaOptions, Products};
use forward_bench::backend::{Capture, Device, Dtype, Ops, Part, Traced, Tracing, Weights};
use forward_bench::model::{Model, ModelConfig};
use forward_bench::profile::Profile;
use forward_bench::profile::names::Names;

use crate::support::{batch, cuda_options};

/// Set in the process that traces.
const PROFILING: &str = "FORWARD_BENCH_PROFILING";

const REPLAYS: u32 = 10;

#[test]
#[ignore = "needs an NVIDIA GPU and libcupti"]
fn a_profile_counts_the_kernels_that_the_model_asks_for() {
    if std::env::var_os(PROFILING).is_some() {
        return profiles();
    }
    // In a process of its own: CUPTI stays in it until it ends, and other tests look at times.
    let test = "profile::a_profile_counts_the_kernels_that_the_model_asks_for";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--include-ignored", "--nocapture"]).env(PROFILING, "1");
    assert!(command.status().unwrap().success(), "the profiling process failed");
}

fn model() -> Model {
    let overrides = r#"{"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 512, "vocab_size": 997}"#;
    Model::new(ModelConfig::resolve("llama-3.1-8b", Some(overrides)).unwrap(), 16, 1024).unwrap()
}

/// The GPU has been used, and a graph replayed, before CUPTI is there: as in a run, which times first.
fn profiles() {
    let model = model();
    for products in [Products::Ours, Products::Fastest] {
        let options = CudaOptions { products, max_tokens: 16, ..cuda_options(Dtype::Bfloat16) };
        let mut device = CudaDevice::new(&model.spec, &Weights::Dummy { seed: 1 }, &options).unwrap();
        for case in ["a=4*1@300", "a=9@50"] {
            let batch = batch(case, model.spec.kv_groups[0], 3);
            device.init_kv(&batch).unwrap();
            let forward = |ops: &mut dyn Ops| model.forward(ops);
            let mut capture = device.capture(&batch, &forward).unwrap();
            capture.eager().unwrap();
            capture.snapshot().unwrap();
            capture.record().unwrap();
            capture.replay().unwrap();
            let output = capture.output().unwrap();
            check(capture.as_mut(), case, products == Products::Ours);
            capture.replay().unwrap();
            assert!(output == capture.output().unwrap(), "{case}: a profiled step computes something else");
        }
    }
}

fn check(capture: &mut dyn Capture, case: &str, ours: bool) {
    let replays = match capture.profile(case, REPLAYS).unwrap() {
        Tracing::Traced(replays) => replays,
        Tracing::Untraced(why) => panic!("{case}: {why}"),
    };
    assert_eq!(replays.len(), REPLAYS as usize, "{case}");
    replays.iter().for_each(|replay| parts_are_set_apart(replay, case));
    let names = Names::of(replays.iter().flat_map(|replay| &replay.activities).map(|a| a.name.as_str()));
    let profile = Profile::of(&replays, &names);
    println!("{case}: {profile:#?}");
    let sum: f64 = profile.kernels.iter().map(|kernel| kernel.us).sum();
    assert!((sum - profile.busy_us).abs() < 1e-6 * sum && profile.busy_us <= profile.span_us, "{case}");
    let mut calls: BTreeMap<&str, f64> =
        profile.kernels.iter().map(|kernel| (kernel.name.as_str(), kernel.calls)).collect();
    let mut take = |name: &str| calls.remove(name).unwrap_or_default();
    // 2 layers: two norms each and the last one, and four products each.
    assert_eq!((take("embed_gather"), take("add_rmsnorm"), take("silu_mul")), (1.0, 5.0, 2.0), "{case}");
    let rope = (take("qk_norm_rope_kvwrite"), take("qk_norm_rope_kvwrite_few"));
    assert_eq!(rope.0 + rope.1, 2.0, "{case}: one of the two");
    let attention = ["decode_attention", "prefill_attention", "prefill_wgmma"].map(&mut take);
    assert_eq!(attention.iter().sum::<f64>(), 2.0, "{case}");
    let combine = take("attention_combine");
    assert!(combine == 0.0 || combine == 2.0, "{case}: {combine}");
    if ours {
        assert_eq!(take("gemv"), 8.0, "{case}");
        assert!(calls.is_empty(), "{case}: {calls:?}");
    } else {
        // Whoever computes them; a product may be split into two kernels.
        assert!(calls.values().sum::<f64>() >= 8.0, "{case}: {calls:?}");
    }
}

fn parts_are_set_apart(replay: &Traced, case: &str) {
    let names = |part| replay.of(part).map(|activity| activity.name.as_str()).collect::<Vec<_>>();
    assert_eq!(names(Part::Before), ["copy_segments", "clock_probe"], "{case}");
    let outside = ["copy_segments", "clock_probe", "read_sum", "spin_nanos"];
    assert!(names(Part::Forward).iter().all(|name| !outside.contains(name)), "{case}");
    let end = replay.of(Part::Before).map(|activity| activity.end_ns).max();
    assert!(replay.of(Part::Forward).all(|activity| Some(activity.start_ns) >= end), "{case}");
}
