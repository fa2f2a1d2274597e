//! One op at a time on both devices, from the same 16-bit inputs.

use forward_bench::backend::cpu::{CpuDevice, CpuOptions};
use forward_bench::backend::cuda::{CudaDevice, CudaOptions, Products};
use forward_bench::backend::{
    Act, BackendError, Capture, Device, Dtype, Forward, KvInit, KvLayer, L2, Rope, StepSpec, WeightRole,
    WeightSource, WeightSpec, Weights, dummy,
};
use forward_bench::batch::{Batch, BatchPlan, KvGroup, Limits};
use forward_bench::case::Case;
use forward_bench::units::Bytes;

/// Rows of every embedding here.
pub const VOCABULARY: usize = 997;

/// How many tokens a step of these tests may have.
pub const MAX_TOKENS: usize = 4096;

pub fn cuda_options(dtype: Dtype) -> CudaOptions {
    CudaOptions {
        device: 0,
        memory_utilization: 0.9,
        kv_bytes: Some(Bytes(512 << 20)),
        dtype,
        kv_init: KvInit::Random,
        seed: 7,
        max_tokens: MAX_TOKENS,
        l2: L2::Warm,
        retune: false,
        products: Products::Fastest,
    }
}

pub fn cpu_options(dtype: Dtype) -> CpuOptions {
    CpuOptions { kv_bytes: Bytes(8 << 30), dtype, kv_init: KvInit::Random, seed: 7, threads: None }
}

/// Weights of ordinary size: uniform with the standard deviation that its role calls for.
pub struct Random(pub u64);

impl WeightSource for Random {
    fn read(&self, spec: &WeightSpec, out: &mut [f32]) -> Result<(), BackendError> {
        if spec.name.starts_with("poison") {
            out.fill(1e4);
            return Ok(());
        }
        let name = spec.name.bytes().fold(0_u64, |hash, byte| dummy::mix(hash ^ u64::from(byte)));
        let stream = dummy::stream(self.0, name);
        let (spread, offset) = match spec.role {
            WeightRole::Linear => (1.7 / (spec.cols as f32).sqrt(), 0.0),
            WeightRole::Norm => (0.5, 1.0),
            WeightRole::Embedding | WeightRole::Bias => (1.7, 0.0),
        };
        for (i, value) in out.iter_mut().enumerate() {
            *value = offset + spread * dummy::uniform(stream, i as u64);
        }
        Ok(())
    }
}

pub fn weight(name: &str, rows: usize, cols: usize, role: WeightRole) -> WeightSpec {
    WeightSpec { name: name.to_owned(), parts: Vec::new(), rows, cols, role, cut: None }
}

/// A model of these weights and activations, with one KV layer.
pub fn spec(weights: Vec<WeightSpec>, acts: &[(Act, usize)], kv: (usize, usize), group: KvGroup) -> StepSpec {
    let head_dim = kv.1;
    let half = head_dim / 2;
    StepSpec {
        weights,
        acts: acts.to_vec(),
        kv_groups: vec![group],
        kv_layers: vec![KvLayer::whole(0, kv.0, head_dim)],
        ropes: vec![Rope {
            inv_freq: (0..half).map(|i| 1e4_f32.powf(-(i as f32) / half as f32)).collect(),
            factor: 1.1,
        }],
        max_model_len: 100_000,
    }
}

pub fn group(block_size: u32, window: Option<u32>) -> KvGroup {
    KvGroup { block_size, window, replay: None }
}

/// The batch of a case, its blocks in random order.
pub fn batch(case: &str, group: KvGroup, seed: u64) -> Batch {
    batch_of_groups(case, &[group], seed)
}

/// The same over several KV groups.
pub fn batch_of_groups(case: &str, groups: &[KvGroup], seed: u64) -> Batch {
    let case: Case = case.parse().expect("a case");
    let limits = Limits {
        num_kv_blocks: 1 << 20,
        max_num_batched_tokens: MAX_TOKENS as u32,
        max_num_seqs: 1024,
        max_model_len: 100_000,
        num_speculative_tokens: 100,
    };
    let plan = BatchPlan::new(&case, groups, 0);
    let mut batch = Batch::build(&plan, &limits, seed, VOCABULARY as u32).expect("room");
    batch.shuffle_blocks(seed);
    batch
}

/// What a device computes: the output of an eager run, of two replays, and whether those agree bit for bit.
pub fn outputs(device: &mut dyn Device, batch: &Batch, forward: Forward<'_>) -> (Vec<f32>, bool) {
    device.init_kv(batch).expect("KV contents");
    outputs_of(&mut *device.capture(batch, forward).expect("a capture"))
}

/// The same of a capture that is there already.
pub fn outputs_of(capture: &mut dyn Capture) -> (Vec<f32>, bool) {
    capture.eager().expect("a warm-up");
    capture.snapshot().expect("a snapshot");
    capture.restore().expect("a restore");
    capture.eager().expect("an eager run");
    let eager = capture.output().expect("an output");
    capture.record().expect("a recording");
    capture.replay().expect("a replay");
    let first = capture.output().expect("an output");
    capture.replay().expect("a replay");
    let second = capture.output().expect("an output");
    let same = eager == first && first == second;
    (first, same)
}

/// Runs the forward on both devices and compares.
///
/// Tolerance, with u the rounding unit of the type (2⁻⁸ or 2⁻¹¹) and ref the CPU's float32 result from the same rounded inputs: each
/// element |out − ref| ≤ 4 u (|ref| + rms(ref)), for one rounding of the result and sums whose terms were rounded; and
/// ‖out − ref‖ ≤ u ‖ref‖, times `slack` where several ops follow each other.
pub fn compare(what: &str, spec: &StepSpec, batch: &Batch, dtype: Dtype, slack: f64, forward: Forward<'_>) {
    let weights = Random(batch.num_tokens() as u64);
    let mut cuda = CudaDevice::new(spec, &Weights::Read(&weights), &cuda_options(dtype)).expect("a GPU");
    let mut cpu = CpuDevice::new(spec, &Weights::Read(&weights), &cpu_options(dtype)).expect("a CPU");
    let (found, same) = outputs(&mut cuda, batch, forward);
    let (expected, _) = outputs(&mut cpu, batch, forward);
    assert!(same, "{what}: eager run and replays differ");
    judge(what, &found, &expected, dtype, slack);
}

pub fn judge(what: &str, found: &[f32], expected: &[f32], dtype: Dtype, slack: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let unit = if dtype == Dtype::Float16 { 2.0_f64.powi(-11) } else { 2.0_f64.powi(-8) };
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let size = square(&mut expected.iter().map(|v| f64::from(*v)));
    let rms = (size / expected.len() as f64).sqrt();
    let off = |(a, b): (&f32, &f32)| f64::from(*a) - f64::from(*b);
    let distance = (square(&mut found.iter().zip(expected).map(off)) / size).sqrt();
    let worst = found.iter().zip(expected).map(|(a, b)| {
        let ratio = off((a, b)).abs() / (4.0 * unit * slack * (f64::from(b.abs()) + rms));
        if ratio.is_nan() { f64::INFINITY } else { ratio }
    });
    let worst = worst.fold(0.0, f64::max);
    println!(
        "{what} {dtype:?}: relative RMS {:.3} u, worst element {worst:.3} of what is allowed",
        distance / unit
    );
    assert!(distance <= slack * unit && worst <= 1.0, "{what} {dtype:?}: {distance:.3e} {worst:.3}");
    assert!(rms > 1e-3, "{what}: nothing was compared");
}

/// As [`compare`], of the first `columns` of rows of `width`.
pub fn compare_columns(
    what: &str,
    spec: &StepSpec,
    batch: &Batch,
    dtype: Dtype,
    (width, columns): (usize, usize),
    forward: Forward<'_>,
) {
    let weights = Random(batch.num_tokens() as u64);
    let mut cuda = CudaDevice::new(spec, &Weights::Read(&weights), &cuda_options(dtype)).expect("a GPU");
    let mut cpu = CpuDevice::new(spec, &Weights::Read(&weights), &cpu_options(dtype)).expect("a CPU");
    let cut = |rows: &[f32]| rows.chunks(width).flat_map(|row| row[..columns].to_vec()).collect::<Vec<f32>>();
    let (found, same) = outputs(&mut cuda, batch, forward);
    let (expected, _) = outputs(&mut cpu, batch, forward);
    assert!(same, "{what}: eager run and replays differ");
    judge(what, &cut(&found), &cut(&expected), dtype, 1.0);
}
