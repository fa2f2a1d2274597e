//! Times a CUDA forward of your own by the same protocol and with Criterion: `cargo run --release --example custom_forward`.
//!
//! The forward here is a kernel that adds two vectors, on buffers of its own. Yours puts whatever it likes on the stream: its
//! kernels, cuBLAS, another library's. It may not allocate, copy to or from the host, or wait while it does.

use std::process::ExitCode;
use std::sync::Arc;

use forward_bench::backend::cuda::Gpu;
use forward_bench::backend::cuda::custom::cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, DriverError, LaunchConfig, PushKernelArg,
};
use forward_bench::backend::cuda::custom::cudarc::nvrtc::compile_ptx;
use forward_bench::backend::cuda::custom::{CustomCapture, CustomForward};
use forward_bench::backend::{BackendError, L2};
use forward_bench::measure::criterion::{Harness, Sampling, measured};
use forward_bench::measure::{self, Protocol};
use forward_bench::stats::Latency;
use forward_bench::units::Tokens;

const KERNEL: &str = r#"
extern "C" __global__ void add(const float *a, const float *b, float *sum, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}"#;

/// Elements of each vector: more than an L2 cache holds.
const LEN: u32 = 1 << 26;

struct Add {
    kernel: CudaFunction,
    a: CudaSlice<f32>,
    b: CudaSlice<f32>,
    sum: CudaSlice<f32>,
}

impl Add {
    fn new(gpu: &Gpu) -> Result<Self, Box<dyn std::error::Error>> {
        let (stream, len) = (&gpu.stream, LEN as usize);
        let kernel = gpu.context.load_module(compile_ptx(KERNEL)?)?.load_function("add")?;
        let values = |step: f32| (0..len).map(|i| step * (i % 1000) as f32).collect::<Vec<f32>>();
        let (a, b) = (stream.clone_htod(&values(1.0))?, stream.clone_htod(&values(0.5))?);
        Ok(Self { kernel, a, b, sum: stream.alloc_zeros(len)? })
    }
}

fn failed(error: DriverError) -> BackendError {
    BackendError::Device(error.to_string())
}

impl CustomForward for Add {
    fn launch(&mut self, stream: &Arc<CudaStream>) -> Result<(), BackendError> {
        let mut launch = stream.launch_builder(&self.kernel);
        launch.arg(&self.a).arg(&self.b).arg(&mut self.sum).arg(&LEN);
        // SAFETY: the arguments are the kernel's, and each vector has LEN elements.
        unsafe { launch.launch(LaunchConfig::for_num_elems(LEN)) }.map(drop).map_err(failed)
    }

    fn output(&mut self) -> Result<Option<Vec<f32>>, BackendError> {
        let stream = self.sum.stream().clone();
        stream.clone_dtoh(&self.sum.slice(..4096)).map(Some).map_err(failed)
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::open(0)?;
    let mut capture = CustomCapture::new(&gpu, L2::Cold, Add::new(&gpu)?)?;
    // Someone else's forward need not repeat bit for bit: a difference is reported, not fatal.
    let protocol = Protocol { exact_repeat: false, ..Protocol::own_models(0.005) };
    let prepared = measure::prepare(&mut capture, &protocol)?;
    println!("two eager runs: {:?}", prepared.checks.eager_repeat);

    let mut harness = Harness::from_process_arguments();
    let mut group = harness.group("custom");
    let sampling = Sampling::of(100, 10, std::time::Duration::from_millis(500), prepared.wall);
    let mut broken = None;
    let calls = group.bench(("add", "64M"), Tokens(1), Some(sampling), |n| {
        measure::replay(&mut capture, n).map_err(|error| broken = Some(error)).ok()
    });
    group.finish();
    if let Some(error) = broken {
        return Err(error.into());
    }
    let times = measure::times(&measured(&calls, sampling.sample_size));
    if !times.is_empty() {
        let latency = Latency::of("CUDA events in the graph", &times, 10);
        let bytes = 3.0 * 4.0 * f64::from(LEN);
        println!("median {:.1} µs, {:.2} TB/s", latency.median, bytes / latency.median / 1e6);
    }
    Ok(())
}
