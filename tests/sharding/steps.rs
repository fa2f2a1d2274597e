//! Steps of made-up weights, KV contents and batches over ranks, against one rank.

use std::sync::Arc;

use forward_bench::backend::{BackendError, Capture, Communicator, Ops, Routing, Weights};
use forward_bench::batch::{self, Batch, BatchPlan, Limits};
use forward_bench::layout::{Group, Place};
use forward_bench::model::Model;

use super::*;

/// The batch of a data-parallel rank, its blocks in random order.
pub fn batch(model: &Model, case: &str, data_rank: usize) -> Batch {
    let plan = BatchPlan::new(&case.parse().unwrap(), &model.spec.kv_groups, 0);
    let limits = Limits {
        num_kv_blocks: 200,
        max_num_batched_tokens: 4096,
        max_num_seqs: 64,
        max_model_len: 256,
        num_speculative_tokens: 3,
    };
    let vocabulary = model.config.vocab_size as u32;
    let mut batch = Batch::build(&plan, &limits, batch::token_seed(3, data_rank), vocabulary).unwrap();
    batch.shuffle_blocks(3);
    batch
}

/// Runs a step eagerly and as two replays, which must agree bit for bit, and hands its capture over.
pub fn step<T>(
    (model, device): (&Model, &mut dyn Device),
    batch: &Batch,
    routing: Option<Routing>,
    look: impl FnOnce(&mut dyn Capture) -> T,
) -> (Vec<f32>, T) {
    device.set_routing(routing).unwrap();
    device.init_kv(batch).unwrap();
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let mut capture = device.capture(batch, &forward).unwrap();
    capture.snapshot().unwrap();
    capture.eager().unwrap();
    let eager = capture.output().unwrap();
    capture.record().unwrap();
    for _ in 0..2 {
        capture.replay().unwrap();
        assert!(capture.output().unwrap() == eager, "a replay differs");
    }
    (eager, look(&mut *capture))
}

/// Prefill, chunk and prefix hit, decode, verify, and all of them.
const CASES: [&str; 5] =
    ["p=2*19", "c=7@60c,9@40", "d=5*1@70", "v=3*4@50:3", "m=3*1@40,2*4@50:3,20@60c,9@40,17"];

/// Weights and KV that are made up on every rank.
const DUMMY: Weights<'_> = Weights::Dummy { seed: 5 };

fn agrees(config: &ModelConfig, spread: Spread) {
    let one = model(config, Place::ONE, All2All::default());
    for case in CASES {
        let found = ranks::on_ranks(spread.layout, |place, communicator| {
            let model = model(config, place, spread.all2all);
            let mut device = device(&model, &DUMMY);
            device.set_communicator(communicator).unwrap();
            step((&model, &mut device), &batch(&model, case, place.data()), None, |_| ()).0
        });
        for (place, found) in spread.layout.places().zip(found) {
            let mut device = device(&one, &DUMMY);
            let expected = step((&one, &mut device), &batch(&one, case, place.data()), None, |_| ()).0;
            let distance = relative_rms(&found, &expected);
            assert!(distance <= TOLERANCE, "{} {spread:?} {case} {place:?}: {distance}", config.name);
        }
    }
}

#[test]
fn heads_that_three_ranks_share() {
    // 128 rows of the embedding over three ranks: 43, 43 and 42.
    let three = r#"{"num_attention_heads": 6, "num_key_value_heads": 3}"#;
    agrees(&config("llama-tiny", Some(three)), spread(1, 3, false));
    agrees(&config("llama-tiny", Some(three)), spread(2, 3, false));
    let smollm = ModelConfig::resolve("smollm2-135m", Some(r#"{"num_hidden_layers": 2}"#)).unwrap();
    agrees(&smollm, spread(1, 3, false));
}

#[test]
fn kv_heads_that_several_ranks_hold() {
    agrees(&config("qwen3-tiny", None), spread(1, 4, false));
    let one_head = r#"{"num_key_value_heads": 1}"#;
    agrees(&config("gpt-oss-tiny", Some(one_head)), spread(2, 2, false));
    agrees(&config("mistral-swa-tiny", Some(one_head)), spread(1, 4, false));
}

#[test]
fn made_up_experts() {
    for spread in [spread(2, 2, true), spread(2, 2, false), spread(1, 2, true), sent(4)] {
        agrees(&config("qwen3-moe-tiny", None), spread);
        agrees(&config("gpt-oss-tiny", None), spread);
    }
}

/// Fails from a given call on.
struct Failing(std::sync::atomic::AtomicUsize);

impl Failing {
    fn after(calls: usize) -> Arc<Self> {
        Arc::new(Self(calls.into()))
    }

    fn call(&self) -> Result<(), BackendError> {
        let left = self.0.load(std::sync::atomic::Ordering::Relaxed);
        self.0.store(left.saturating_sub(1), std::sync::atomic::Ordering::Relaxed);
        if left > 0 { Ok(()) } else { Err(BackendError::Device("rank 1 is lost".into())) }
    }
}

impl Communicator for Failing {
    fn all_reduce(&self, _: Group, _: &mut [f32]) -> Result<(), BackendError> {
        self.call()
    }
    fn all_gather(&self, _: Group, _: &[f32], _: &mut [f32]) -> Result<(), BackendError> {
        self.call()
    }
    fn reduce_scatter(&self, _: Group, _: &[f32], _: &mut [f32]) -> Result<(), BackendError> {
        self.call()
    }
    fn all_to_all(&self, _: Group, _: &[f32], _: &mut [f32]) -> Result<(), BackendError> {
        self.call()
    }
}

#[test]
fn a_lost_rank_fails_the_run() {
    for (spread, calls) in [(spread(1, 2, false), 5), (spread(2, 1, true), 6), (sent(2), 4)] {
        let place = Place { layout: spread.layout, rank: 0 };
        let model = model(&config("qwen3-moe-tiny", None), place, spread.all2all);
        for fail_at in 0..calls {
            let mut device = device(&model, &DUMMY);
            let batch = batch(&model, "a=1@9", 0);
            device.init_kv(&batch).unwrap();
            device.set_communicator(Failing::after(fail_at + calls)).unwrap();
            let forward = |ops: &mut dyn Ops| model.forward(ops);
            let mut capture = device.capture(&batch, &forward).unwrap();
            capture.eager().unwrap();
            capture.record().unwrap();
            let error = capture.replay().unwrap_err().to_string();
            assert_eq!(error, "rank 1 is lost", "{spread:?} {fail_at}");
        }
    }
}

#[test]
fn a_device_alone_refuses_steps_of_several_ranks() {
    for (spread, words) in [(spread(1, 2, false), "a sum over ranks"), (sent(2), "a block of experts")] {
        let place = Place { layout: spread.layout, rank: 0 };
        let model = model(&config("qwen3-moe-tiny", None), place, spread.all2all);
        let mut device = device(&model, &DUMMY);
        let batch = batch(&model, "a=1@9", 0);
        device.init_kv(&batch).unwrap();
        let forward = |ops: &mut dyn Ops| model.forward(ops);
        let error = device.capture(&batch, &forward).unwrap().eager().unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("no way to them"), "{error}");
    }
}

/// Sends every token to the first expert, over and over.
struct Absurd;

impl Communicator for Absurd {
    fn all_reduce(&self, _: Group, _: &mut [f32]) -> Result<(), BackendError> {
        Ok(())
    }
    fn all_gather(&self, _: Group, _: &[f32], _: &mut [f32]) -> Result<(), BackendError> {
        Ok(())
    }
    fn reduce_scatter(&self, _: Group, _: &[f32], _: &mut [f32]) -> Result<(), BackendError> {
        Ok(())
    }
    fn all_to_all(&self, _: Group, _: &[f32], receive: &mut [f32]) -> Result<(), BackendError> {
        receive.fill(0.0);
        Ok(())
    }
}

#[test]
fn rows_that_nobody_can_have_chosen_are_refused() {
    let spread = sent(3);
    let place = Place { layout: spread.layout, rank: 0 };
    // Each rank has two experts, and a token three.
    let model = model(&config("qwen3-moe-sparse-tiny", None), place, spread.all2all);
    let mut device = device(&model, &DUMMY);
    device.set_communicator(Arc::new(Absurd)).unwrap();
    let batch = batch(&model, "a=1@9", 0);
    device.init_kv(&batch).unwrap();
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let error = device.capture(&batch, &forward).unwrap().eager().unwrap_err().to_string();
    assert_eq!(error, "other ranks sent 9 rows to 2 experts, which 3 tokens cannot have chosen");
}
