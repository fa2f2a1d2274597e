//! The CPU device and its capture: what repeats, what is put back, what is refused.

use forward_bench::backend::cpu::{CpuDevice, CpuOptions};
use forward_bench::backend::{Act, Device, Dtype, KvInit, Ops, WeightId, Weights};
use forward_bench::batch::{Batch, GroupTables};
use forward_bench::model::{Model, ModelConfig};
use forward_bench::units::Bytes;

fn model() -> Model {
    let overrides = r#"{"num_hidden_layers": 3, "vocab_size": 512}"#;
    Model::new(ModelConfig::resolve("smollm2-135m", Some(overrides)).unwrap(), 16, 2048).unwrap()
}

fn options(threads: usize) -> CpuOptions {
    CpuOptions {
        kv_bytes: Bytes(64 << 20),
        dtype: Dtype::Float32,
        kv_init: KvInit::Random,
        seed: 3,
        threads: Some(threads),
    }
}

fn device(model: &Model, threads: usize) -> CpuDevice {
    CpuDevice::new(&model.spec, &Weights::Dummy { seed: 1 }, &options(threads)).unwrap()
}

/// One request of the tokens `begin..end`, its blocks from 1 on.
fn batch(model: &Model, begin: u32, end: u32) -> Batch {
    let blocks = end.div_ceil(16);
    let tables = GroupTables {
        group: model.spec.kv_groups[0],
        block_tables: (1..=blocks).collect(),
        stride: blocks as usize,
        slots: (begin..end).map(|t| i64::from(t + 16)).collect(),
    };
    Batch {
        order: vec![0],
        query_start: vec![0, end - begin],
        kv_lens: vec![end],
        num_decodes: usize::from(begin > 0),
        positions: (begin..end).collect(),
        token_ids: (begin..end).map(|t| t * 7 % 512).collect(),
        groups: vec![tables],
        blocks_used: blocks + 1,
    }
}

fn output(model: &Model, device: &mut CpuDevice, batch: &Batch) -> Vec<f32> {
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    device.init_kv(batch).unwrap();
    let mut capture = device.capture(batch, &forward).unwrap();
    capture.snapshot().unwrap();
    capture.eager().unwrap();
    let eager = capture.output().unwrap();
    capture.record().unwrap();
    for _ in 0..3 {
        assert!(capture.replay().unwrap().time.0 > 0.0);
        assert_eq!(capture.output().unwrap(), eager, "a replay differs from the eager run");
    }
    eager
}

#[test]
fn a_step_repeats_bit_for_bit_on_any_number_of_threads() {
    let model = model();
    for (begin, end) in [(600, 601), (500, 504), (0, 40), (100, 228)] {
        let batch = batch(&model, begin, end);
        let one = output(&model, &mut device(&model, 1), &batch);
        assert!(one.iter().all(|x| x.is_finite()) && one.iter().any(|x| x.abs() > 0.1));
        // The gemm crate may cut its work by threads, but adds up each result in one order.
        assert_eq!(one, output(&model, &mut device(&model, 3), &batch), "{begin}..{end}");
    }
}

#[test]
fn a_restored_step_sees_the_state_before_it() {
    let model = model();
    let (prompt, step) = (batch(&model, 0, 40), batch(&model, 40, 44));
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let mut device = device(&model, 2);
    device.init_kv(&step).unwrap();
    device.capture(&prompt, &forward).unwrap().eager().unwrap();
    // Attention before the write: a step that sees what an earlier run of itself left behind.
    let peeking = |ops: &mut dyn Ops| {
        let attention = &model.layers[0].attention;
        ops.embed_gather(model.embedding, Act::Residual)?;
        ops.add_rmsnorm(None, Act::Residual, model.layers[0].input_norm, 1e-5, Act::Normed)?;
        ops.linear(Act::Normed, model.layers[0].qkv, None, Act::Qkv)?;
        ops.attention(Act::Qkv, attention, Act::Context)?;
        ops.qk_norm_rope_kvwrite(Act::Qkv, attention)?;
        ops.linear(Act::Context, model.layers[0].o_proj, None, Act::Normed)
    };
    let mut capture = device.capture(&step, &peeking).unwrap();
    // Three layers of 48 + … tokens: the last ⌈4 / 16⌉ + 2 blocks of [2, 16, 3, 64] float32 values.
    assert_eq!(capture.snapshot().unwrap(), Bytes(3 * 3 * 2 * 16 * 3 * 64 * 4));
    capture.eager().unwrap();
    let first = capture.output().unwrap();
    capture.eager().unwrap();
    assert_ne!(capture.output().unwrap(), first, "the step does not see its own traces");
    capture.restore().unwrap();
    capture.eager().unwrap();
    assert_eq!(capture.output().unwrap(), first);
    capture.record().unwrap();
    capture.replay().unwrap();
    assert_eq!(capture.output().unwrap(), first);
}

#[test]
fn the_initial_kv_follows_init_and_seed() {
    let model = model();
    let step = batch(&model, 64, 65);
    let with = |kv_init, seed| {
        let options = CpuOptions { kv_init, seed, ..options(2) };
        let mut device = CpuDevice::new(&model.spec, &Weights::Dummy { seed: 1 }, &options).unwrap();
        output(&model, &mut device, &step)
    };
    let (zeros, a, b) = (with(KvInit::Zeros, 0), with(KvInit::Random, 0), with(KvInit::Random, 1));
    assert!(zeros != a && a != b && zeros == with(KvInit::Zeros, 1) && a == with(KvInit::Random, 0));
}

#[test]
fn what_does_not_fit_is_refused() {
    let model = model();
    let mut device = device(&model, 1);
    let good = batch(&model, 16, 20);
    let blocks = device.num_kv_blocks();
    assert_eq!(blocks, (64 << 20) / (3 * 2 * 16 * 3 * 64 * 4));
    let mut refused = |change: fn(&mut Batch), expected: &str| {
        let mut batch = good.clone();
        change(&mut batch);
        let error = device.init_kv(&batch).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        let forward = |_: &mut dyn Ops| Ok(());
        assert!(device.capture(&batch, &forward).is_err());
    };
    refused(|b| b.groups[0].block_tables[0] = 9999, "needs 10000 KV blocks, the pool has");
    refused(|b| b.groups[0].slots[1] = -1, "slot Some(-1)");
    refused(|b| b.groups[0].slots[1] = b.groups[0].slots[0], "is written twice");
    refused(|b| b.groups[0].stride = 0, "columns");
    refused(|b| b.token_ids[0] = 512, "token id 512 is outside the vocabulary of 512");
    refused(|b| b.positions[2] += 1, "gaps");
    refused(|b| b.kv_lens[0] = 4000, "--max-model-len 2048");
    refused(|b| b.query_start = vec![0], "query_start");
    refused(|b| b.groups.clear(), "KV groups");
    refused(|b| b.groups[0].group.block_size = 8, "blocks of 8, the pool has blocks of 16");
}

#[test]
fn a_forward_that_does_not_fit_the_model_is_refused() {
    let model = model();
    let mut device = device(&model, 1);
    let step = batch(&model, 16, 20);
    let mut refused = |forward: &dyn Fn(&mut dyn Ops) -> Result<(), forward_bench::backend::BackendError>| {
        let mut capture = device.capture(&step, forward).unwrap();
        let error = capture.record().unwrap_err().to_string();
        assert_eq!(capture.eager().unwrap_err().to_string(), error);
        assert!(capture.replay().unwrap_err().to_string().contains("before it is recorded"));
        error
    };
    let error = refused(&|ops| ops.linear(Act::Residual, model.layers[0].qkv, None, Act::Delta));
    assert!(error.contains("qkv_proj.weight is [960, 576], used as [576, 576]"), "{error}");
    assert!(refused(&|ops| ops.embed_gather(WeightId(999), Act::Residual)).contains("no weight 999"));
    assert!(refused(&|ops| ops.silu_mul(Act::Gated, Act::Gated)).contains("both read and written"));
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    let big = ModelConfig::resolve("qwen3-32b", Some(r#"{"num_hidden_layers": 4096}"#)).unwrap();
    let big = Model::new(big, 16, 2048).unwrap();
    let error = CpuDevice::new(&big.spec, &Weights::Dummy { seed: 0 }, &options(1)).err().unwrap();
    assert!(error.to_string().contains("num_hidden_layers"), "{error}");
    let none = CpuOptions { kv_bytes: Bytes(1000), ..options(1) };
    let error = CpuDevice::new(&model().spec, &Weights::Dummy { seed: 0 }, &none).err().unwrap();
    assert!(error.to_string().contains("holds no block"), "{error}");
}
