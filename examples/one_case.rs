//! Times one exact batch through the library alone, without Criterion: `cargo run --release --example one_case -- 4*1@256`.

use forward_bench::backend::cpu::{CpuDevice, CpuOptions};
use forward_bench::backend::{Device, Dtype, KvInit, Ops, Weights};
use forward_bench::batch::{Batch, BatchPlan, Limits};
use forward_bench::case::Case;
use forward_bench::measure::{self, Protocol};
use forward_bench::model::{Model, ModelConfig};
use forward_bench::stats::Latency;
use forward_bench::units::Bytes;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let case: Case = std::env::args().nth(1).as_deref().unwrap_or("4*1@256").parse()?;
    let model = Model::new(ModelConfig::resolve("smollm2-135m", None)?, 16, 8192)?;
    let options = CpuOptions {
        kv_bytes: Bytes(1 << 30),
        dtype: Dtype::Float32,
        kv_init: KvInit::Random,
        seed: 0,
        threads: None,
    };
    let mut device = CpuDevice::new(&model.spec, &Weights::Dummy { seed: 0 }, &options)?;
    let limits = Limits {
        num_kv_blocks: device.num_kv_blocks(),
        max_num_batched_tokens: 8192,
        max_num_seqs: 256,
        max_model_len: 8192,
        num_speculative_tokens: 0,
    };
    let plan = BatchPlan::new(&case, &model.spec.kv_groups, 0);
    let batch = Batch::build(&plan, &limits, 0, 49152)?;
    device.init_kv(&batch)?;
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let mut capture = device.capture(&batch, &forward)?;
    let prepared = measure::prepare(&mut *capture, &Protocol::own_models(0.05))?;
    let replays = measure::replay(&mut *capture, 20)?;
    let latency = Latency::of(capture.timer(), &measure::times(&replays), 20);
    println!("{case}: median {:.1} µs, min {:.1} µs; {:?}", latency.median, latency.min, prepared.checks);
    Ok(())
}
