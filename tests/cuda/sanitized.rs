//! Captured steps for compute-sanitizer: every kernel of ours in small batches, and nothing of cuBLASLt, which takes minutes to load
//! under it. CONTRIBUTING has the command; without a sanitizer these are tests like the others.

use forward_bench::backend::cuda::{CudaDevice, CudaOptions, Products};
use forward_bench::backend::{Dtype, Ops, Weights};
use forward_bench::model::{Model, ModelConfig};

use crate::support::{batch_of_groups, cuda_options, outputs};

/// Decode, verify, prefill, a hit, a chunk, and a mix; then more rows than one tile of any kernel.
const CASES: [&str; 8] = [
    "a=1@300,1@33,7*1@40",
    "a=3*4@40:3",
    "a=16",
    "a=11@75",
    "a=9@50c",
    "a=1@129,4@64:3,5,3@20",
    "a=70@140",
    "a=183",
];

fn steps(preset: &str, overrides: &str) {
    let config = ModelConfig::resolve(preset, Some(overrides)).unwrap();
    let model = Model::new(config, 16, 1024).unwrap();
    let options = CudaOptions { products: Products::Ours, max_tokens: 256, ..cuda_options(Dtype::Bfloat16) };
    let mut cuda = CudaDevice::new(&model.spec, &Weights::Dummy { seed: 5 }, &options).unwrap();
    for case in CASES {
        let batch = batch_of_groups(case, &model.spec.kv_groups, 2);
        let (found, same) = outputs(&mut cuda, &batch, &|ops: &mut dyn Ops| model.forward(ops));
        assert!(same, "{case}: eager run and replays differ");
        assert!(found.iter().all(|value| value.is_finite()) && found.iter().any(|value| *value != 0.0));
        println!("{preset} {case}: clean outputs");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tiny_steps_with_a_narrow_head() {
    steps(
        "llama-3.1-8b",
        r#"{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "intermediate_size": 128, "vocab_size": 997}"#,
    );
}

/// A head_dim of 128 takes the kernels for wide heads; on Hopper, prefill through wgmma and bulk copies.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tiny_steps_with_a_wide_head_and_norms() {
    steps(
        "qwen3-8b",
        r#"{"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128,
            "intermediate_size": 256, "vocab_size": 997}"#,
    );
}

/// Softmax over the chosen experts, no biases; a layer's inner size that is no multiple of a tile.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tiny_steps_with_experts() {
    steps(
        "qwen3-30b-a3b",
        r#"{"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128,
            "moe_intermediate_size": 200, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 997}"#,
    );
}

/// Biases, sinks, the clamped activation and a window.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tiny_steps_of_gpt_oss() {
    steps(
        "gpt-oss-20b",
        r#"{"num_hidden_layers": 2, "hidden_size": 192, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64,
            "intermediate_size": 120, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 40,
            "vocab_size": 997}"#,
    );
}
