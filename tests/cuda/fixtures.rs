//! Whole models on the GPU against the CPU: the tiny checkpoints in every phase, and a full-size layer.

use std::path::{Path, PathBuf};

use forward_bench::backend::cpu::CpuDevice;
use forward_bench::backend::cuda::CudaDevice;
use forward_bench::backend::{Device, Dtype, Ops, Routing, Weights};
use forward_bench::model::routing::{Choices, Layout, Rule, Slice};
use forward_bench::model::verify::{Expected, verify_routed};
use forward_bench::model::{Checkpoint, Model, ModelConfig};

use crate::support::{cpu_options, cuda_options, outputs};

fn folder(name: &str) -> PathBuf {
    let root = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| ".".to_owned());
    Path::new(&root).join("tests/data").join(name)
}

/// The whole sequence as one prefill on the CPU, its weights and KV rounded to the type.
fn on_the_cpu(
    model: &Model,
    checkpoint: &Checkpoint,
    expected: &Expected,
    dtype: Dtype,
    routing: Option<&Routing>,
) -> Expected {
    let mut cpu = CpuDevice::new(&model.spec, &Weights::Read(checkpoint), &cpu_options(dtype)).unwrap();
    cpu.set_routing(routing.cloned()).unwrap();
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
///
/// Where gates choose, a rounding may also change who is chosen: experts are compared with the choice made for both (`zipf`),
/// every row; and with the gates' own choice, where some of the rows may be those of other experts: bfloat16 rounds eight times as
/// coarsely as float16, so as many times more often.
fn agrees(name: &str) {
    let folder = folder(name);
    let expected = Expected::read(&folder.join("expected.safetensors")).unwrap();
    for (dtype, tolerance) in [(Dtype::Bfloat16, 0.03), (Dtype::Float16, 0.006)] {
        for block_size in [16, 32, 64] {
            let config = ModelConfig::from_dir(&folder, None).unwrap();
            let slice = Slice { first: 0, tokens: expected.input_ids.len() };
            let zipf = |layout| Choices::of(Rule::Zipf(1.0), layout, slice, 5).unwrap().unwrap().routing();
            let made = Layout::of(&config, forward_bench::layout::Layout::ONE).map(zipf);
            let model = Model::new(config, block_size, 256).unwrap();
            let checkpoint = Checkpoint::open(&folder, &model.spec).unwrap();
            let mut cuda =
                CudaDevice::new(&model.spec, &Weights::Read(&checkpoint), &cuda_options(dtype)).unwrap();
            let routings = if made.is_some() { vec![made.as_ref(), None] } else { vec![None] };
            for routing in routings {
                let expected = on_the_cpu(&model, &checkpoint, &expected, dtype, routing);
                cuda.set_routing(None).unwrap();
                let may_flip = made.is_some() && routing.is_none();
                for row in verify_routed(&model, &mut cuda, &expected, routing).unwrap() {
                    let off = row.distances.iter().filter(|distance| **distance > tolerance).count();
                    println!(
                        "{name} {dtype:?} {block_size} {} worst {:.4}, {off} of {} off",
                        row.phase, row.relative_rms, row.rows
                    );
                    let share = if dtype == Dtype::Bfloat16 { 2 } else { 8 };
                    let allowed = if may_flip { row.rows / share } else { 0 };
                    assert!(off <= allowed, "{name} {dtype:?} {block_size}: {off} rows off, {row:?}");
                    assert!(row.rows > 40 && row.relative_rms > 0.0, "{name}: nothing was compared: {row:?}");
                }
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

/// One full-size layer of experts against the CPU's, tokens spread by `balanced` so that rounding cannot change who is chosen.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn full_size_layers_of_experts() {
    for preset in ["qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b"] {
        let overrides = r#"{"num_hidden_layers": 1, "vocab_size": 997}"#;
        let config = ModelConfig::resolve(preset, Some(overrides)).unwrap();
        let layout = Layout::of(&config, forward_bench::layout::Layout::ONE).unwrap();
        let model = Model::new(config, 16, 32_768).unwrap();
        let forward = |ops: &mut dyn Ops| model.forward(ops);
        let dummy = Weights::Dummy { seed: 3 };
        let options = cuda_options(Dtype::Bfloat16);
        let mut cuda = CudaDevice::new(&model.spec, &dummy, &options).unwrap();
        let mut cpu = CpuDevice::new(&model.spec, &dummy, &cpu_options(Dtype::Bfloat16)).unwrap();
        for case in ["a=1@300", "a=33*1@100", "a=4*4@300:3,200,129@700", "a=1100"] {
            let batch = crate::support::batch_of_groups(case, &model.spec.kv_groups, 1);
            let slice = Slice { first: 0, tokens: batch.num_tokens() };
            let choices = Choices::of(Rule::Balanced, layout, slice, 1).unwrap().unwrap();
            cuda.set_routing(Some(choices.routing())).unwrap();
            cpu.set_routing(Some(choices.routing())).unwrap();
            let (found, same) = outputs(&mut cuda, &batch, &forward);
            let (expected, _) = outputs(&mut cpu, &batch, &forward);
            assert!(same, "{preset} {case}: eager run and replays differ");
            // A dozen ops with rounded results follow each other.
            crate::support::judge(&format!("{preset} layer {case}"), &found, &expected, Dtype::Bfloat16, 3.0);
        }
    }
}
