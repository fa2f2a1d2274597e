//! Models cut over two GPUs, one process for each, with NCCL between them, against the whole model on one of the two.

use std::collections::BTreeMap;

use forward_bench::backend::cuda::{CudaDevice, CudaOptions};
use forward_bench::backend::{All2All, Device, Dtype, Ops, Weights};
use forward_bench::batch::token_seed;
use forward_bench::layout::{Layout, Place};
use forward_bench::model::{Model, ModelConfig};

use crate::shards::{TWO_LAYERS, layout, routing};
use crate::support::{batch_of_groups, cuda_options, judge, outputs_of};
use crate::two_gpus::{Rank, apart};

/// Decode, verify, a long prefill; then decode, verify, a chunk, a hit and prefills.
const CASES: [&str; 4] = ["a=5*1@300", "a=3*4@100:3,11@75", "a=300", "a=4*1@90,2*4@50:3,20@60c,9@40,17"];

/// Of the tokens of data-parallel rank 0.
const SEED: u64 = 3;

/// A model over the two, and how far its outputs may be off.
struct Spread {
    preset: &'static str,
    overrides: &'static str,
    layout: Layout,
    all2all: All2All,
    slack: f64,
}

impl Spread {
    fn name(&self) -> String {
        let Self { preset, layout: Layout { data, tensor, expert_parallel, .. }, all2all, .. } = self;
        let experts = if *expert_parallel { format!(" experts whole {all2all:?}") } else { String::new() };
        format!("{preset} data {data} tensor {tensor}{experts}")
    }

    fn config(&self) -> ModelConfig {
        ModelConfig::resolve(self.preset, Some(self.overrides)).unwrap()
    }

    fn model(&self, place: Place) -> Model {
        let all2all = if place.layout == Layout::ONE { All2All::default() } else { self.all2all };
        Model::shard(self.config(), 16, 4096, place, all2all).unwrap()
    }
}

fn device(model: &Model, gpu: usize) -> CudaDevice {
    let options = CudaOptions { device: gpu, max_tokens: 512, ..cuda_options(Dtype::Bfloat16) };
    CudaDevice::new(&model.spec, &Weights::Dummy { seed: 3 }, &options).unwrap()
}

/// The kernels that compute a product, by what it is.
type Algorithms = BTreeMap<String, String>;

/// The output of a step of a data-parallel rank, of an eager run and two replays with the same bits. `agree` is told what makes the capture
/// choose its kernels.
fn step(
    (device, model): (&mut CudaDevice, &Model),
    (spread, case, data_rank): (&Spread, &str, usize),
    agree: impl FnOnce(&mut dyn FnMut(&Algorithms) -> Algorithms),
) -> Vec<f32> {
    let batch = batch_of_groups(case, &model.spec.kv_groups, token_seed(SEED, data_rank));
    device.set_routing(routing(&spread.config(), spread.layout, case, data_rank)).unwrap();
    device.init_kv(&batch).unwrap();
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let mut capture = device.capture(&batch, &forward).unwrap();
    agree(&mut |agreed| capture.tune(agreed).unwrap());
    let (output, same) = outputs_of(&mut *capture);
    assert!(same, "{} data rank {data_rank} {case}: eager run and replays differ", spread.name());
    output
}

/// This rank's output of each case. Both compute products by the kernels that rank 0 finds the fastest.
fn shard(rank: &Rank, spread: &Spread) -> Vec<Vec<f32>> {
    let place = Place { layout: spread.layout, rank: rank.rank };
    let model = spread.model(place);
    let mut device = device(&model, rank.rank);
    device.set_collectives(rank.joined(spread.layout, &format!("{} id", spread.name())));
    let run = |(i, case): (usize, &&str)| {
        let what = format!("{} {i} kernels", spread.name());
        step((&mut device, &model), (spread, case, place.data()), |tune| {
            if rank.rank == 0 {
                rank.say(&what, &serde_json::to_vec(&tune(&Algorithms::new())).unwrap());
            } else {
                tune(&serde_json::from_slice(&rank.hear(&what)).unwrap());
            }
        })
    };
    CASES.iter().enumerate().map(run).collect()
}

/// Rank 0 holds both ranks' outputs against those of the whole model.
fn agrees(rank: &Rank, spread: &Spread) {
    let own = shard(rank, spread);
    let what = |i: usize| format!("{} {i} output", spread.name());
    if rank.rank == 1 {
        let bytes = |output: &Vec<f32>| output.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        own.iter().enumerate().for_each(|(i, output)| rank.say(&what(i), &bytes(output)));
        return;
    }
    let whole = spread.model(Place::ONE);
    let mut device = device(&whole, rank.rank);
    for (i, case) in CASES.iter().enumerate() {
        let words = rank.hear(&what(i)).as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)).collect();
        let found = [own[i].clone(), words];
        if spread.layout.tensor == 2 {
            let bits = found.each_ref().map(|values| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
            assert!(bits[0] == bits[1], "{} {case}: the ranks' outputs differ", spread.name());
        }
        let expected: Vec<Vec<f32>> = (0..spread.layout.data)
            .map(|data| step((&mut device, &whole), (spread, case, data), |_| {}))
            .collect();
        for place in spread.layout.places() {
            let what = format!("{} rank {} {case}", spread.name(), place.rank);
            judge(&what, &found[place.rank], &expected[place.data()], Dtype::Bfloat16, spread.slack);
        }
    }
}

/// Twice as many roundings follow each other as two layers have: √2 times those.
#[test]
#[ignore = "needs two NVIDIA GPUs and NCCL"]
fn four_layers_of_qwen3_8b_over_two_gpus() {
    apart("two_gpus_steps::four_layers_of_qwen3_8b_over_two_gpus", |rank| {
        let spread = Spread {
            preset: "qwen3-8b",
            overrides: r#"{"num_hidden_layers": 4}"#,
            layout: layout(1, 2, false),
            all2all: All2All::default(),
            slack: 2_f64.sqrt() * TWO_LAYERS,
        };
        agrees(rank, &spread);
    });
}

#[test]
#[ignore = "needs two NVIDIA GPUs and NCCL"]
fn two_layers_of_experts_over_two_gpus() {
    apart("two_gpus_steps::two_layers_of_experts_over_two_gpus", |rank| {
        let layouts = [
            (layout(1, 2, true), All2All::default()),
            (layout(2, 1, true), All2All::AllgatherReducescatter),
            (layout(2, 1, true), All2All::AllToAll),
            (layout(2, 1, false), All2All::default()),
        ];
        for (layout, all2all) in layouts {
            let (preset, overrides) = ("qwen3-30b-a3b", r#"{"num_hidden_layers": 2, "vocab_size": 997}"#);
            agrees(rank, &Spread { preset, overrides, layout, all2all, slack: TWO_LAYERS });
        }
    });
}
