//! Sharded steps on one GPU: each rank is a thread with a device of its own, and the collectives go through the host, so that steps run
//! eagerly and are not captured. Held against the CPU's one rank.

use std::rc::Rc;
use std::sync::Arc;

use forward_bench::backend::cpu::CpuDevice;
use forward_bench::backend::cuda::{CudaDevice, CudaOptions, Products};
use forward_bench::backend::{All2All, Device, Dtype, Ops, Routing, Weights, dummy};
use forward_bench::batch::{Batch, BatchPlan, Limits};
use forward_bench::layout::{Layout, Place};
use forward_bench::measure::loads::{self, Wanted};
use forward_bench::model::routing::{self, RankRouting, Rule};
use forward_bench::model::{Model, ModelConfig};
use forward_bench::units::Bytes;

use half::bf16;

use crate::host::Host;
use crate::ranks::{Threads, on_ranks};
use crate::support::{cuda_options, outputs};

/// Decode, verify, a hit, a chunk and a prefill.
const CASE: &str = "m=3*1@40,2*4@50:3,20@60c,9@40,17";
const TOKENS: usize = 3 + 8 + 20 + 9 + 17;
const WEIGHTS: Weights<'_> = Weights::Dummy { seed: 5 };

/// The batch of a data-parallel rank: the same requests with tokens of its own.
fn batch_of(model: &Model, data_rank: usize) -> Batch {
    let limits = Limits {
        num_kv_blocks: 1000,
        max_num_batched_tokens: 256,
        max_num_seqs: 64,
        max_model_len: 1024,
        num_speculative_tokens: 3,
    };
    let plan = BatchPlan::new(&CASE.parse().unwrap(), &model.spec.kv_groups, 0);
    let mut batch = Batch::build(&plan, &limits, 2, 997).unwrap();
    batch.shuffle_blocks(2);
    if data_rank > 0 {
        let shift = dummy::mix(data_rank as u64) % 997;
        batch.token_ids.iter_mut().for_each(|id| *id = (*id + shift as u32) % 997);
    }
    batch
}

fn routing_of(config: &ModelConfig, place: Place) -> Option<RankRouting> {
    let layout = routing::Layout::of(config, place.layout)?;
    Some(RankRouting { rule: Rule::Zipf(1.0), layout, place, tokens: TOKENS, seed: 3 })
}

fn logits_of(config: &ModelConfig, place: Place) -> Option<Routing> {
    routing_of(config, place).map(|routing| routing.own().unwrap().unwrap().routing())
}

/// What a rank computes; its experts' loads are checked.
fn on_a_gpu(config: &ModelConfig, place: Place, all2all: All2All, threads: Arc<Threads>) -> Vec<f32> {
    let model = Model::shard(config.clone(), 16, 1024, place, all2all).unwrap();
    let options = CudaOptions {
        products: Products::Ours,
        max_tokens: 256,
        kv_bytes: Some(Bytes(64 << 20)),
        ..cuda_options(Dtype::Bfloat16)
    };
    let mut cuda = CudaDevice::new(&model.spec, &WEIGHTS, &options).unwrap();
    cuda.set_collectives(Rc::new(Host::new(threads, place)));
    let batch = batch_of(&model, place.data());
    cuda.set_routing(logits_of(config, place)).unwrap();
    cuda.init_kv(&batch).unwrap();
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let mut capture = cuda.capture(&batch, &forward).unwrap();
    capture.snapshot().unwrap();
    capture.eager().unwrap();
    let first = capture.output().unwrap();
    capture.restore().unwrap();
    capture.eager().unwrap();
    assert!(capture.output().unwrap() == first, "{place:?}: a second run differs");
    if let Some(routing) = routing_of(config, place) {
        let wanted = Wanted::Exactly(routing.loads().unwrap().unwrap());
        loads::check(&mut *capture, &wanted).unwrap();
    }
    first
}

/// Several roundings more than one rank's: each sum over ranks rounds once.
const TOLERANCE: f64 = 0.03;

fn agrees(preset: &str, overrides: &str, spreads: &[(Layout, All2All)]) {
    let config = ModelConfig::resolve(preset, Some(overrides)).unwrap();
    let one = Model::new(config.clone(), 16, 1024).unwrap();
    for &(layout, all2all) in spreads {
        let found = on_ranks(layout, |place, threads| on_a_gpu(&config, place, all2all, threads));
        for (place, found) in layout.places().zip(found) {
            let options = crate::support::cpu_options(Dtype::Bfloat16);
            let mut cpu = CpuDevice::new(&one.spec, &WEIGHTS, &options).unwrap();
            cpu.set_routing(logits_of(&config, place)).unwrap();
            let batch = batch_of(&one, place.data());
            let (expected, _) = outputs(&mut cpu, &batch, &|ops: &mut dyn Ops| one.forward(ops));
            let square = |x: f64| x * x;
            let off: f64 =
                found.iter().zip(&expected).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
            let size: f64 = expected.iter().map(|b| square(f64::from(*b))).sum();
            let distance = (off / size).sqrt();
            println!("{preset} {layout:?} {all2all:?} rank {}: {distance:.2e}", place.rank);
            assert!(distance <= TOLERANCE, "{preset} {layout:?} {all2all:?} {place:?}: {distance}");
        }
    }
}

const fn spread(data: usize, tensor: usize, expert_parallel: bool) -> (Layout, All2All) {
    (Layout { data, pipeline: 1, tensor, expert_parallel }, All2All::AllgatherReducescatter)
}

const fn sent(data: usize) -> (Layout, All2All) {
    (spread(data, 1, true).0, All2All::AllToAll)
}

/// With experts: whole ones and parts, tokens that stay, are gathered and are sent.
const EXPERTS: [(Layout, All2All); 7] = [
    spread(1, 2, false),
    spread(1, 4, true),
    spread(2, 1, false),
    spread(2, 1, true),
    spread(2, 2, true),
    sent(2),
    sent(4),
];

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn dense_models_over_tensor_parallel_ranks() {
    // 997 rows of the embedding, and 2 KV heads on up to four ranks.
    let overrides = r#"{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 128, "vocab_size": 997}"#;
    agrees("llama-3.1-8b", overrides, &[spread(1, 2, false), spread(1, 4, false), spread(2, 2, false)]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn experts_over_ranks() {
    let overrides = r#"{"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 128, "moe_intermediate_size": 192, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 997}"#;
    agrees("qwen3-30b-a3b", overrides, &EXPERTS);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gpt_oss_over_ranks() {
    let overrides = r#"{"num_hidden_layers": 2, "hidden_size": 192, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 64, "intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 40,
        "vocab_size": 997}"#;
    agrees("gpt-oss-20b", overrides, &EXPERTS);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn made_up_parts_of_weights_are_the_hosts() {
    let overrides = r#"{"num_hidden_layers": 1, "hidden_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 997}"#;
    let config = ModelConfig::resolve("gpt-oss-20b", Some(overrides)).unwrap();
    for (layout, all2all) in [spread(1, 4, false), spread(2, 2, true)] {
        for place in layout.places() {
            let model = Model::shard(config.clone(), 16, 256, place, all2all).unwrap();
            let cuda = CudaDevice::new(&model.spec, &WEIGHTS, &cuda_options(Dtype::Bfloat16)).unwrap();
            for (id, weight) in model.spec.weights.iter().enumerate() {
                let stream = dummy::stream(5, id as u64);
                let mut values = vec![0.0; weight.rows * weight.cols];
                for (first, piece) in weight.pieces(&mut values) {
                    for (i, value) in piece.iter_mut().enumerate() {
                        let exact = dummy::weight(weight.role, stream, (first + i) as u64);
                        *value = bf16::from_f32(exact).to_f32();
                    }
                }
                let found = cuda.weight(forward_bench::backend::WeightId(id)).unwrap();
                assert!(found == values, "{} of {place:?}", weight.name);
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_device_alone_refuses_steps_of_several_ranks() {
    let config = ModelConfig::resolve("smollm2-135m", Some(r#"{"num_hidden_layers": 1}"#)).unwrap();
    let place = Place { layout: spread(1, 3, false).0, rank: 1 };
    let model = Model::shard(config, 16, 1024, place, All2All::default()).unwrap();
    let mut cuda = CudaDevice::new(&model.spec, &WEIGHTS, &cuda_options(Dtype::Bfloat16)).unwrap();
    let batch = crate::support::batch("a=1@9", model.spec.kv_groups[0], 2);
    cuda.init_kv(&batch).unwrap();
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let error = cuda.capture(&batch, &forward).unwrap().eager().unwrap_err().to_string();
    assert!(error.contains("a sum over ranks") && error.contains("no way to them"), "{error}");
}
