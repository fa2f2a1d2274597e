//! Models cut over ranks, all of them on one GPU, against the whole model on it.

use std::rc::Rc;

use forward_bench::backend::cuda::{CudaDevice, CudaOptions, Products};
use forward_bench::backend::{All2All, Device, Dtype, Ops, Routing, Weights};
use forward_bench::layout::{Layout, Place};
use forward_bench::model::routing::{self, Choices, Rule, Slice};
use forward_bench::model::{Model, ModelConfig};

use crate::host::Host;
use crate::ranks::on_ranks;
use crate::support::{batch_of_groups, cuda_options, judge};

/// Decode, verify, prefill, a hit and a chunk; then all of them.
const CASES: [&str; 4] =
    ["a=5*1@300", "a=3*4@100:3,11@75", "a=70@140c,33", "a=4*1@90,2*4@50:3,20@60c,9@40,17"];

/// Our own products, whose choices are kept apart: several ranks that tune on one GPU disturb each other.
fn options() -> CudaOptions {
    CudaOptions { products: Products::Ours, max_tokens: 256, ..cuda_options(Dtype::Bfloat16) }
}

/// What one eager step gives.
fn step(
    device: &mut CudaDevice,
    model: &Model,
    case: &str,
    data_rank: usize,
    routing: Option<Routing>,
) -> Vec<f32> {
    let batch = batch_of_groups(case, &model.spec.kv_groups, 1 + data_rank as u64);
    device.set_routing(routing).unwrap();
    device.init_kv(&batch).unwrap();
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let mut capture = device.capture(&batch, &forward).unwrap();
    capture.eager().unwrap();
    capture.output().unwrap()
}

/// Experts by `balanced`, so that rounding cannot change who is chosen; none in a model without experts.
pub(crate) fn routing(config: &ModelConfig, layout: Layout, case: &str, data_rank: usize) -> Option<Routing> {
    let ranks = routing::Layout::of(config, layout)?;
    let case: forward_bench::case::Case = case.parse().unwrap();
    let tokens = case.requests.iter().map(|request| request.query_len as usize).sum();
    let slice = Slice { first: data_rank * tokens, tokens };
    Some(Choices::of(Rule::Balanced, ranks, slice, 1).unwrap().unwrap().routing())
}

/// Every rank's output is the whole model's for the same batch, within `slack` of the tolerance of [`crate::support::compare`].
fn agrees((preset, overrides): (&str, &str), layout: Layout, all2all: All2All, slack: f64) {
    let config = ModelConfig::resolve(preset, Some(overrides)).unwrap();
    let weights = Weights::Dummy { seed: 3 };
    let found: Vec<Vec<Vec<f32>>> = on_ranks(layout, |place, threads| {
        let model = Model::shard(config.clone(), 16, 4096, place, all2all).unwrap();
        let mut device = CudaDevice::new(&model.spec, &weights, &options()).unwrap();
        device.set_collectives(Rc::new(Host::new(threads, place)));
        let rank = place.data();
        let run = |case: &&str| step(&mut device, &model, case, rank, routing(&config, layout, case, rank));
        CASES.iter().map(run).collect()
    });
    let whole = Model::shard(config.clone(), 16, 4096, Place::ONE, All2All::default()).unwrap();
    let mut device = CudaDevice::new(&whole.spec, &weights, &options()).unwrap();
    for (i, case) in CASES.iter().enumerate() {
        for rank in 0..layout.data {
            let expected = step(&mut device, &whole, case, rank, routing(&config, layout, case, rank));
            for place in layout.places().filter(|place| place.data() == rank) {
                let what = format!("{preset} {layout:?} {all2all:?} rank {} {case}", place.rank);
                judge(&what, &found[place.rank][i], &expected, Dtype::Bfloat16, slack);
            }
        }
    }
}

pub(crate) const fn layout(data: usize, tensor: usize, expert_parallel: bool) -> Layout {
    Layout { data, pipeline: 1, tensor, expert_parallel }
}

/// Two layers of about ten rounded results each; those of a shard are rounded once more before they are added up.
pub(crate) const TWO_LAYERS: f64 = 4.0;

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn two_layers_of_qwen3_8b_over_two_ranks() {
    let two = ("qwen3-8b", r#"{"num_hidden_layers": 2}"#);
    agrees(two, layout(1, 2, false), All2All::default(), TWO_LAYERS);
    agrees(two, layout(2, 2, false), All2All::default(), TWO_LAYERS);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn two_layers_of_experts_over_two_ranks() {
    let two = ("qwen3-30b-a3b", r#"{"num_hidden_layers": 2, "vocab_size": 997}"#);
    agrees(two, layout(2, 1, true), All2All::AllgatherReducescatter, TWO_LAYERS);
    agrees(two, layout(2, 1, true), All2All::AllToAll, TWO_LAYERS);
    agrees(two, layout(1, 2, true), All2All::default(), TWO_LAYERS);
    agrees(two, layout(1, 2, false), All2All::default(), TWO_LAYERS);
}

/// As many roundings follow each other as 36 layers have: √18 times those of two.
#[test]
#[ignore = "needs an NVIDIA GPU with 60 GB"]
fn all_layers_of_qwen3_8b_over_two_ranks() {
    agrees(("qwen3-8b", "{}"), layout(1, 2, false), All2All::default(), 18_f64.sqrt() * TWO_LAYERS);
}
