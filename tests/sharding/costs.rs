//! What the ranks of a layout read and compute, together, against the whole; and what they send each other.

use forward_bench::backend::{BackendError, Communicator, Ops};
use forward_bench::case::Request;
use forward_bench::layout::{Group, Layout, Place};
use forward_bench::model::cost::{ElementBytes, Hit, OpCost, Reached, Traffic, costs, traffic};
use forward_bench::model::{Model, ModelConfig};

use super::*;

const TWO: ElementBytes = ElementBytes { weight: 2, kv: 2 };

fn requests() -> Vec<Request> {
    let request = |query_len, kv_len| Request { query_len, kv_len, num_draft_tokens: 0, chunked: false };
    vec![request(1, 700), request(1, 90), request(5, 300), request(64, 64)]
}

fn of_rank(config: &ModelConfig, place: Place, all2all: All2All, reached: &Reached) -> Vec<OpCost> {
    let model = Model::shard(config.clone(), 16, 4096, place, all2all).unwrap();
    costs(config, &model.shard, &requests(), TWO, reached)
}

/// Bytes and FLOPs of an operation; nothing if it is not there.
fn op(costs: &[OpCost], name: &str) -> (u128, u128) {
    costs.iter().find(|cost| cost.op == name).map_or((0, 0), |cost| (cost.bytes.0, cost.flops.0))
}

/// The sum over the ranks of a layout.
fn sum(config: &ModelConfig, layout: Layout, name: &str, reached: &Reached) -> (u128, u128) {
    let each = layout.places().map(|place| op(&of_rank(config, place, All2All::default(), reached), name));
    each.fold((0, 0), |sum, cost| (sum.0 + cost.0, sum.1 + cost.1))
}

fn tensor(ranks: usize) -> Layout {
    Layout { tensor: ranks, ..Layout::ONE }
}

#[test]
fn tensor_parallel_ranks_share_what_is_not_replicated() {
    let biases = config("llama3-rope-tiny", None);
    for (config, ranks) in [
        (ModelConfig::resolve("qwen3-8b", None).unwrap(), 8),
        (ModelConfig::resolve("mistral-7b", None).unwrap(), 4),
        (ModelConfig::resolve("smollm2-135m", None).unwrap(), 3),
        (biases, 2),
    ] {
        let one = of_rank(&config, Place::ONE, All2All::default(), &Reached::Expected);
        for cost in &one {
            let total = sum(&config, tensor(ranks), cost.op, &Reached::Expected);
            let copies = if ["norm", "qk_norm"].contains(&cost.op) { ranks as u128 } else { 1 };
            let whole = (cost.bytes.0 * copies, cost.flops.0);
            assert_eq!(total, whole, "{} {} over {ranks}", config.name, cost.op);
        }
    }
}

#[test]
fn kv_heads_on_several_ranks_are_read_on_each() {
    let config = ModelConfig::resolve("qwen3-8b", None).unwrap();
    let one = of_rank(&config, Place::ONE, All2All::default(), &Reached::Expected);
    // 8 KV heads on 16 ranks.
    let (bytes, flops) = sum(&config, tensor(16), "attention", &Reached::Expected);
    assert_eq!((bytes, flops), (2 * op(&one, "attention").0, op(&one, "attention").1));
    let (bytes, _) = sum(&config, tensor(16), "qkv", &Reached::Expected);
    assert_eq!(bytes - op(&one, "qkv").0, 36 * 2 * 8 * 128 * 4096 * 2);
}

#[test]
fn experts_are_shared_whole_or_in_parts() {
    let config = ModelConfig::resolve("gpt-oss-20b", None).unwrap();
    // 71 tokens, 4 experts each, over all 32 experts.
    let all = Hit { experts: 32, rows: 71 * 4 };
    let one = of_rank(&config, Place::ONE, All2All::default(), &Reached::Exactly(vec![all; 24]));
    let whole = op(&one, "experts");
    let second_bias = 24 * 32 * 2880 * 2;
    // A part of every expert on each rank: the second product's bias on one of them.
    assert_eq!(sum(&config, tensor(4), "experts", &Reached::Exactly(vec![all; 24])), whole);
    // Eight experts and a quarter of the rows on each rank, with their biases.
    let layout = Layout { expert_parallel: true, ..tensor(4) };
    let quarter = Reached::Exactly(vec![Hit { experts: 8, rows: 71 }; 24]);
    assert_eq!(sum(&config, layout, "experts", &quarter), whole);
    assert!(whole.0 > second_bias);
    // With data-parallel ranks the rows are those of all.
    let layout = Layout { data: 2, expert_parallel: true, ..tensor(2) };
    let (bytes, flops) = sum(&config, layout, "experts", &Reached::Expected);
    let one = of_rank(&config, Place::ONE, All2All::default(), &Reached::Expected);
    assert_eq!(flops, 2 * op(&one, "experts").1);
    assert!(bytes > op(&one, "experts").0 && bytes <= whole.0);
}

fn sent_by(config: &ModelConfig, spread: Spread, tokens: u64) -> Traffic {
    let place = Place { layout: spread.layout, rank: 0 };
    let model = Model::shard(config.clone(), 16, 4096, place, spread.all2all).unwrap();
    traffic(config, &model.shard, tokens, 2)
}

#[test]
fn traffic_is_what_the_collectives_carry() {
    let qwen = ModelConfig::resolve("qwen3-8b", None).unwrap();
    assert_eq!(sent_by(&qwen, spread(1, 1, false), 7).total(), Bytes(0));
    assert_eq!(sent_by(&qwen, spread(2, 1, false), 7).total(), Bytes(0));
    let shared = sent_by(&qwen, spread(1, 2, false), 7);
    assert_eq!(shared.all_reduce, Bytes(73 * 7 * 4096 * 2));
    assert_eq!(shared.total(), shared.all_reduce);
    let moe = ModelConfig::resolve("qwen3-30b-a3b", None).unwrap();
    let gathered = sent_by(&moe, spread(2, 2, true), 7);
    assert_eq!(gathered.all_reduce, Bytes(97 * 7 * 2048 * 2));
    assert_eq!(gathered.all_gather, Bytes(48 * 14 * (2048 + 128) * 2));
    assert_eq!(gathered.reduce_scatter, Bytes(48 * 14 * 2048 * 2));
    let sent = sent_by(&moe, sent(4), 7);
    assert_eq!(sent.all_to_all, Bytes(48 * 28 * (2 * 2048 * 2 + 8 * 8)));
    assert_eq!(sent.total(), sent.all_to_all);
}

/// A communicator that adds up what goes through it, in elements.
#[derive(Default)]
struct Counting(std::sync::Mutex<[usize; 4]>);

impl Counting {
    fn add(&self, kind: usize, elements: usize) -> Result<(), BackendError> {
        self.0.lock().unwrap()[kind] += elements;
        Ok(())
    }
}

impl Communicator for Counting {
    fn all_reduce(&self, _: Group, data: &mut [f32]) -> Result<(), BackendError> {
        self.add(0, data.len())
    }
    fn all_gather(&self, _: Group, _: &[f32], all: &mut [f32]) -> Result<(), BackendError> {
        self.add(1, all.len())
    }
    fn reduce_scatter(&self, _: Group, all: &[f32], _: &mut [f32]) -> Result<(), BackendError> {
        self.add(2, all.len())
    }
    fn all_to_all(&self, _: Group, send: &[f32], receive: &mut [f32]) -> Result<(), BackendError> {
        receive.fill(-1.0); // no expert
        self.add(3, send.len())
    }
}

#[test]
fn a_step_sends_what_its_traffic_says() {
    for name in ["llama-tiny", "qwen3-moe-sparse-tiny"] {
        for mut spread in [spread(1, 2, false), spread(3, 2, true), sent(3)] {
            let config = config(name, None);
            spread.layout.expert_parallel &= config.experts.is_some();
            let model = model(&config, Place { layout: spread.layout, rank: 0 }, spread.all2all);
            let mut device = device(&model, &Weights::Dummy { seed: 5 });
            let counting = std::sync::Arc::new(Counting::default());
            device.set_communicator(counting.clone()).unwrap();
            let batch = steps::batch(&model, "a=9@40,12", 0);
            device.init_kv(&batch).unwrap();
            let forward = |ops: &mut dyn Ops| model.forward(ops);
            device.capture(&batch, &forward).unwrap().eager().unwrap();
            let found = counting.0.lock().unwrap().map(|elements| Bytes(4 * elements as u128));
            let Traffic { all_reduce, all_gather, reduce_scatter, all_to_all } =
                traffic(&config, &model.shard, 21, 4);
            assert_eq!(found, [all_reduce, all_gather, reduce_scatter, all_to_all], "{name} {spread:?}");
        }
    }
}
