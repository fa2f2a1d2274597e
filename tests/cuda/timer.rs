//! The timer sees what is between its events, all of it and nothing else.

use std::sync::Arc;

use forward_bench::backend::cuda::Gpu;
use forward_bench::backend::cuda::compile::{Compiler, File};
use forward_bench::backend::cuda::custom::cudarc::driver::{
    CudaFunction, CudaStream, LaunchConfig, PushKernelArg,
};
use forward_bench::backend::cuda::custom::cudarc::nvrtc::Ptx;
use forward_bench::backend::cuda::custom::{CustomCapture, CustomForward};
use forward_bench::backend::{BackendError, Capture, L2, Replay};

/// Spins for given times in the forward and in what comes before it.
struct Spin {
    kernel: CudaFunction,
    forward: u64,
    before: u64,
}

pub(crate) fn kernel(gpu: &Gpu, name: &str) -> CudaFunction {
    let compiler = Compiler::new(&gpu.arch()).unwrap();
    let cubin = compiler.cubin(File::State, &["DTYPE_BF16=1".to_owned()]).unwrap();
    gpu.context.load_module(Ptx::from_binary(cubin)).unwrap().load_function(name).unwrap()
}

pub(crate) fn spin(stream: &Arc<CudaStream>, kernel: &CudaFunction, amount: u64) -> Result<(), BackendError> {
    if amount == 0 {
        return Ok(());
    }
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel takes one 64-bit number.
    let launched = unsafe { stream.launch_builder(kernel).arg(&amount).launch(config) };
    launched.map(drop).map_err(|error| BackendError::Device(error.to_string()))
}

impl CustomForward for Spin {
    fn launch(&mut self, stream: &Arc<CudaStream>) -> Result<(), BackendError> {
        spin(stream, &self.kernel, self.forward)
    }

    fn restore(&mut self, stream: &Arc<CudaStream>) -> Result<(), BackendError> {
        spin(stream, &self.kernel, self.before)
    }
}

fn capture(gpu: &Arc<Gpu>, l2: L2, name: &str, forward: u64, before: u64) -> CustomCapture<Spin> {
    let spin = Spin { kernel: kernel(gpu, name), forward, before };
    let mut capture = CustomCapture::new(gpu, l2, spin).unwrap();
    capture.eager().unwrap();
    capture.record().unwrap();
    for _ in 0..5 {
        capture.replay().unwrap();
    }
    capture
}

fn replays(capture: &mut CustomCapture<Spin>, n: usize) -> Vec<Replay> {
    (0..n).map(|_| capture.replay().unwrap()).collect()
}

fn median(replays: &[Replay]) -> f64 {
    let mut times: Vec<f64> = replays.iter().map(|replay| replay.time.micros()).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_timer_sees_its_interval_and_nothing_else() {
    let gpu = Gpu::open(0).unwrap();
    let empty = median(&replays(&mut capture(&gpu, L2::Warm, "spin_nanos", 0, 0), 50));
    println!("the timer's floor, an empty interval: {empty:.2} µs");
    assert!(empty < 5.0, "{empty}");
    for micros in [20.0, 100.0, 1_000.0, 20_000.0] {
        let nanos = (micros * 1e3) as u64;
        for replay in replays(&mut capture(&gpu, L2::Warm, "spin_nanos", nanos, 0), 20) {
            let off = replay.time.micros() - empty - micros;
            println!("spin of {micros} µs: {} MHz {:?}", replay.time.micros(), replay.clock_mhz);
            assert!(off.abs() <= 0.01 * micros + 2.0, "{micros} µs read as {}", replay.time.micros());
        }
    }
    let restored = median(&replays(&mut capture(&gpu, L2::Warm, "spin_nanos", 0, 1_000_000), 20));
    let flushed = median(&replays(&mut capture(&gpu, L2::Cold, "spin_nanos", 0, 0), 20));
    println!("empty interval after a restore of 1 ms {restored:.2} µs, after an L2 flush {flushed:.2} µs");
    assert!((restored - empty).abs() < 2.0 && (flushed - empty).abs() < 2.0, "{restored} {flushed} {empty}");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn work_on_another_stream_is_not_seen() {
    let gpu = Gpu::open(0).unwrap();
    let mut capture = capture(&gpu, L2::Warm, "spin_nanos", 1_000_000, 0);
    let other = gpu.context.new_stream().unwrap();
    let kernel = kernel(&gpu, "spin_nanos");
    // The first launch on a second stream makes the driver set it up, which may delay whatever else runs.
    spin(&other, &kernel, 1_000).unwrap();
    other.synchronize().unwrap();
    let mut seen = Vec::new();
    for _ in 0..20 {
        spin(&other, &kernel, 20_000_000).unwrap();
        seen.push(capture.replay().unwrap());
        other.synchronize().unwrap();
    }
    println!("1 ms beside 20 ms on another stream: {seen:?}");
    assert!((median(&seen) - 1_000.0).abs() < 12.0, "{} µs: 1 % + 2 µs are allowed", median(&seen));
    assert!(seen.iter().all(|replay| replay.time.micros() < 5_000.0));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_clock_is_the_one_that_kernels_count() {
    let gpu = Gpu::open(0).unwrap();
    let cycles = 4_000_000;
    for replay in replays(&mut capture(&gpu, L2::Warm, "spin_cycles", cycles, 0), 20) {
        let clock = replay.clock_mhz.expect("a clock");
        let counted = clock * replay.time.micros();
        assert!((counted / cycles as f64 - 1.0).abs() < 0.01, "{clock} MHz: {counted} cycles, not {cycles}");
    }
}
