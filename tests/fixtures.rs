//! Tiny random checkpoints with the hidden states that transformers computes for them, fed in every way that a step can.

use std::path::{Path, PathBuf};

use forward_bench::backend::cpu::{CpuDevice, CpuOptions};
use forward_bench::backend::{
    Activation, BackendError, Dtype, KvInit, Moe, Scoring, WeightSource, WeightSpec, Weights,
};
use forward_bench::model::verify::{Expected, Row, verify};
use forward_bench::model::{Checkpoint, Mlp, Model, ModelConfig};
use forward_bench::units::Bytes;

const TOLERANCE: f64 = 1e-5;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn model(name: &str, block_size: u32) -> Model {
    Model::new(ModelConfig::from_dir(&folder(name), None).unwrap(), block_size, 256).unwrap()
}

fn options() -> CpuOptions {
    CpuOptions {
        kv_bytes: Bytes(64 << 20),
        dtype: Dtype::Float32,
        kv_init: KvInit::Random,
        seed: 0,
        threads: None,
    }
}

fn rows(name: &str, model: &Model, source: &dyn WeightSource, options: &CpuOptions) -> Vec<Row> {
    let expected = Expected::read(&folder(name).join("expected.safetensors")).unwrap();
    let mut device = CpuDevice::new(&model.spec, &Weights::Read(source), options).unwrap();
    verify(model, &mut device, &expected).unwrap()
}

fn agrees(name: &str) {
    // A block of 4 puts many blocks into a row of a table; 16 is what vLLM uses; 64 holds the whole sequence.
    for block_size in [4, 16, 64] {
        let model = model(name, block_size);
        let checkpoint = Checkpoint::open(&folder(name), &model.spec).unwrap();
        let rows = rows(name, &model, &checkpoint, &options());
        let phases: Vec<&str> = rows.iter().map(|row| row.phase).collect();
        assert_eq!(phases, ["prefill", "chunk", "prefix_hit", "decode", "verify", "mixed"]);
        for row in &rows {
            assert!(row.relative_rms <= TOLERANCE, "{name}, blocks of {block_size}: {row:?}");
            assert!(row.rows > 40 && row.relative_rms > 0.0, "{name}: nothing was compared: {row:?}");
        }
    }
}

#[test]
fn llama() {
    agrees("llama-tiny");
}

#[test]
fn qwen3_with_head_norms() {
    agrees("qwen3-tiny");
}

#[test]
fn mistral_with_a_window() {
    agrees("mistral-swa-tiny");
}

#[test]
fn qwen2_with_biases_and_a_window_in_its_second_layer() {
    let model = model("qwen2-tiny", 16);
    assert_eq!(model.spec.kv_groups.len(), 2);
    agrees("qwen2-tiny");
}

#[test]
fn llama_with_llama3_rope_and_biases() {
    agrees("llama3-rope-tiny");
}

#[test]
fn llama_with_yarn_and_wide_heads() {
    agrees("yarn-tiny");
}

#[test]
fn mixtral_with_a_tensor_for_each_expert() {
    agrees("mixtral-tiny");
}

#[test]
fn mixtral_with_a_window_and_one_tensor_for_all_experts() {
    agrees("mixtral-stacked-tiny");
}

#[test]
fn qwen3_moe() {
    agrees("qwen3-moe-tiny");
}

#[test]
fn qwen3_moe_with_dense_layers_in_between_and_without_renormalisation() {
    let experts = model("qwen3-moe-sparse-tiny", 16).config.experts.unwrap();
    assert_eq!(experts.layers, [false, true, false, false, false, true]);
    agrees("qwen3-moe-sparse-tiny");
}

#[test]
fn gpt_oss() {
    agrees("gpt-oss-tiny");
}

#[test]
fn gpt_oss_with_other_layers_experts_and_window() {
    agrees("gpt-oss-deep-tiny");
}

#[test]
fn gpt_oss_in_mxfp4() {
    agrees("gpt-oss-mxfp4-tiny");
}

#[test]
fn sixteen_bit_types_are_near() {
    for (dtype, tolerance) in [(Dtype::Bfloat16, 0.05), (Dtype::Float16, 0.005)] {
        let model = model("llama-tiny", 16);
        let checkpoint = Checkpoint::open(&folder("llama-tiny"), &model.spec).unwrap();
        for row in rows("llama-tiny", &model, &checkpoint, &CpuOptions { dtype, ..options() }) {
            assert!((TOLERANCE..tolerance).contains(&row.relative_rms), "{dtype:?}: {row:?}");
        }
    }
}

/// A checkpoint of which one weight is slightly wrong.
struct Broken<'a>(Checkpoint, &'a str);

impl WeightSource for Broken<'_> {
    fn read(&self, spec: &WeightSpec, out: &mut [f32]) -> Result<(), BackendError> {
        self.0.read(spec, out)?;
        if spec.name == self.1 {
            out.iter_mut().step_by(7).for_each(|w| *w *= 1.01);
        }
        Ok(())
    }
}

#[test]
fn a_broken_weight_fails_every_phase() {
    let weights = [
        "embed_tokens.weight",
        "layers.0.self_attn.qkv_proj.weight",
        "layers.1.self_attn.k_norm.weight",
        "layers.1.mlp.down_proj.weight",
        "norm.weight",
    ];
    for weight in weights {
        let model = model("qwen3-tiny", 16);
        let checkpoint = Checkpoint::open(&folder("qwen3-tiny"), &model.spec).unwrap();
        for row in rows("qwen3-tiny", &model, &Broken(checkpoint, weight), &options()) {
            assert!(row.relative_rms > 10.0 * TOLERANCE, "{weight}: {row:?}");
        }
    }
}

#[test]
fn a_broken_expert_weight_fails_every_phase() {
    let weights = [
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.gate.bias",
        "layers.1.mlp.experts.w13",
        "layers.1.mlp.experts.w13_bias",
        "layers.0.mlp.experts.w2",
        "layers.1.mlp.experts.w2_bias",
        "layers.1.self_attn.sinks",
    ];
    let name = "gpt-oss-tiny";
    for weight in weights {
        let model = model(name, 16);
        assert!(model.spec.weights.iter().any(|spec| spec.name == weight), "{weight}");
        let checkpoint = Checkpoint::open(&folder(name), &model.spec).unwrap();
        for row in rows(name, &model, &Broken(checkpoint, weight), &options()) {
            assert!(row.relative_rms > 10.0 * TOLERANCE, "{weight}: {row:?}");
        }
    }
}

/// Every layer's experts.
fn experts(model: &mut Model) -> impl Iterator<Item = &mut Moe> {
    model.layers.iter_mut().filter_map(|layer| match &mut layer.mlp {
        Mlp::Experts(moe) => Some(moe),
        Mlp::Dense { .. } => None,
    })
}

/// A fixture's name and what breaks its model.
type Broke<'a> = (&'a str, &'a dyn Fn(&mut Model));

#[test]
fn broken_experts_fail() {
    let activation = |limit, alpha, interleaved| Activation::ClampedSwiglu { limit, alpha, interleaved };
    let broken: [Broke<'_>; 9] = [
        ("gpt-oss-tiny", &|m| experts(m).for_each(|moe| moe.activation = activation(0.5, 1.702, true))),
        ("gpt-oss-tiny", &|m| experts(m).for_each(|moe| moe.activation = activation(7.0, 1.7, true))),
        ("gpt-oss-tiny", &|m| experts(m).for_each(|moe| moe.activation = activation(7.0, 1.702, false))),
        ("gpt-oss-tiny", &|m| experts(m).for_each(|moe| moe.top_k = 1)),
        ("gpt-oss-tiny", &|m| experts(m).for_each(|moe| moe.w2_bias = None)),
        ("gpt-oss-tiny", &|m| m.layers.iter_mut().for_each(|layer| layer.attention.sinks = None)),
        ("gpt-oss-deep-tiny", &|m| {
            experts(m).for_each(|moe| moe.scoring = Scoring::SoftmaxThenTopK { renormalize: false });
        }),
        ("qwen3-moe-sparse-tiny", &|m| experts(m).for_each(|moe| moe.scoring = Scoring::TopKThenSoftmax)),
        ("mixtral-tiny", &|m| {
            experts(m).for_each(|moe| moe.scoring = Scoring::SoftmaxThenTopK { renormalize: false });
        }),
    ];
    for (i, (name, break_it)) in broken.into_iter().enumerate() {
        let mut model = model(name, 16);
        let checkpoint = Checkpoint::open(&folder(name), &model.spec).unwrap();
        break_it(&mut model);
        let rows = rows(name, &model, &checkpoint, &options());
        assert!(rows.iter().all(|row| row.relative_rms > 10.0 * TOLERANCE), "{i}: {rows:?}");
    }
}

#[test]
fn a_broken_model_fails() {
    let broken: [fn(&mut Model); 4] = [
        |model| model.layers.iter_mut().for_each(|layer| layer.attention.window = Some(17)),
        |model| model.config.rms_norm_eps = 1e-2,
        |model| model.spec.ropes[0].inv_freq[0] *= 1.01,
        |model| model.layers.iter_mut().for_each(|layer| layer.attention.scale *= 1.01),
    ];
    for (i, break_it) in broken.into_iter().enumerate() {
        let mut model = model("mistral-swa-tiny", 16);
        let checkpoint = Checkpoint::open(&folder("mistral-swa-tiny"), &model.spec).unwrap();
        break_it(&mut model);
        let rows = rows("mistral-swa-tiny", &model, &checkpoint, &options());
        assert!(rows.iter().all(|row| row.relative_rms > 10.0 * TOLERANCE), "{i}: {rows:?}");
    }
}
