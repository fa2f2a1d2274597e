//! Whole models on the GPU against the CPU: the tiny checkpoints in every phase, and a full-size layer.

use std::path::{Path, PathBuf};

use forward_bench::backend::cpu::CpuDevice;
use forward_bench::backend::cuda::CudaDevice;
use forward_bench::backend::{Device, Dtype, Ops, Weights};
use forward_bench::model::verify::{Expected, verify};
use forward_bench::model::{Checkpoint, Model, ModelConfig};

use crate::support::{cpu_options, cuda_options, outputs};

fn folder(name: &str) -> PathBuf {
    let root = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| ".".to_owned());
    Path::new(&root).join("tests/data").join(name)
}

/// The whole sequence as one prefill on the CPU, its weights and KV rounded to the type.
fn on_the_cpu(model: &Model, checkpoint: &Checkpoint, expected: &Expected, dtype: Dtype) -> Expected {
    let mut cpu = CpuDevice::new(&model.spec, &Weights::Read(checkpoint), &cpu_options(dtype)).unwrap();
    let tokens = expected.input_ids.len();
    let mut batch = {
        use forward_bench::batch::{Batch, BatchPlan, Limits};
        let limits = Limits {
            num_kv_blocks: 1000,
            max_num_batched_tokens: 10_000,
            max_num_seqs: 10,
            max_model_len: 10_000,
            num_speculative_tokens: 0,
        };
        let plan = BatchPlan::new(&format!("a={tokens}").parse().unwrap(), &model.spec.kv_groups, 0);
        Batch::build(&plan, &limits, 0, 100).unwrap()
    };
    batch.token_ids = expected.input_ids.clone();
    let (hidden, _) = outputs(&mut cpu, &batch, &|ops: &mut dyn Ops| model.forward(ops));
    Expected { hidden, ..expected.clone() }
}

/// A row may be off by the rounding of every activation on the way, which the CPU keeps in float32: about ten roundings of
/// u / √12 a layer, and what the layers make of them.
fn agrees(name: &str) {
    let folder = folder(name);
    let expected = Expected::read(&folder.join("expected.safetensors")).unwrap();
    for (dtype, tolerance) in [(Dtype::Bfloat16, 0.03), (Dtype::Float16, 0.006)] {
        for block_size in [16, 32, 64] {
            let config = ModelConfig::from_dir(&folder, None).unwrap();
            let model = Model::new(config, block_size, 256).unwrap();
            let checkpoint = Checkpoint::open(&folder, &model.spec).unwrap();
            let expected = on_the_cpu(&model, &checkpoint, &expected, dtype);
            let mut cuda =
                CudaDevice::new(&model.spec, &Weights::Read(&checkpoint), &cuda_options(dtype)).unwrap();
            for row in verify(&model, &mut cuda, &expected).unwrap() {
                println!("{name} {dtype:?} {block_size} {row:?}");
                assert!(row.relative_rms <= tolerance, "{name} {dtype:?} {block_size}: {row:?}");
                assert!(row.rows > 40 && row.relative_rms > 0.0, "{name}: nothing was compared: {row:?}");
            }
        }
    }
}

macro_rules! fixtures {
    ($($test:ident $name:literal;)*) => {$(
        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn $test() {
            agrees($name);
        }
    )*};
}
fixtures! {
    llama "llama-tiny";
    qwen3 "qwen3-tiny";
    mistral_with_a_window "mistral-swa-tiny";
    mixtral "mixtral-tiny";
    qwen3_moe "qwen3-moe-tiny";
    gpt_oss "gpt-oss-tiny";
    qwen2_with_biases "qwen2-tiny";
    llama3_rope "llama3-rope-tiny";
    yarn_with_wide_heads "yarn-tiny";
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_full_size_layer_of_qwen3_8b() {
    let overrides = r#"{"num_hidden_layers": 1, "vocab_size": 997}"#;
    let config = ModelConfig::resolve("qwen3-8b", Some(overrides)).unwrap();
    let model = Model::new(config, 16, 40_960).unwrap();
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    for dtype in [Dtype::Bfloat16, Dtype::Float16] {
        let dummy = Weights::Dummy { seed: 3 };
        let mut cuda = CudaDevice::new(&model.spec, &dummy, &cuda_options(dtype)).unwrap();
        let mut cpu = CpuDevice::new(&model.spec, &dummy, &cpu_options(dtype)).unwrap();
        for case in ["a=1@3000", "a=17*1@300", "a=4*4@1000:3,300,129@700"] {
            let batch = crate::support::batch(case, model.spec.kv_groups[0], 1);
            let (found, same) = outputs(&mut cuda, &batch, &forward);
            let (expected, _) = outputs(&mut cpu, &batch, &forward);
            assert!(same, "{case}: eager run and replays differ");
            // Ten ops with rounded results follow each other.
            crate::support::judge(&format!("layer {case}"), &found, &expected, dtype, 3.0);
        }
        assert!(cuda.num_kv_blocks() > 100);
    }
}
