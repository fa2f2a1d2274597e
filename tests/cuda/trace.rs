//! The events against CUPTI: in the same traced replays, the interval between the events is the span of the kernels between them.

use std::process::Command;

use forward_bench::backend::cuda::custom::cudarc::driver::CudaFunction;
use forward_bench::backend::cuda::trace::{Tracer, forwards, span};
use forward_bench::backend::cuda::{CudaDevice, CudaOptions, Gpu};
use forward_bench::backend::{Capture, Device, Dtype, Ops, Replay, Weights};
use forward_bench::batch::{Batch, BatchPlan, Limits};
use forward_bench::model::{Model, ModelConfig};

use crate::support::cuda_options;
use crate::timer::{kernel, spin};

/// Traced replays of each case; an odd number has a median.
const REPLAYS: usize = 21;

/// Replays that warm up before the traced ones, traced as well, and left out.
const WARM_UP: usize = 5;

/// Nanoseconds for which the stream is kept busy before each replay. Under CUPTI the driver submits a graph's kernels one by
/// one, at about 0.7 µs each: the start event would fire while most of them are still on their way (seen: 250 µs in a step of 362
/// kernels). Behind a busy stream all are there when the event comes.
const BUSY: u64 = 3_000_000;

fn replays(gpu: &Gpu, spinning: &CudaFunction, capture: &mut dyn Capture, count: usize) -> Vec<Replay> {
    let replay = |_| {
        spin(&gpu.stream, spinning, BUSY).expect("a spinning kernel");
        capture.replay().expect("a replay")
    };
    (0..count).map(replay).collect()
}

/// (event interval, kernel span) in µs of each traced replay.
fn traced(device: &mut CudaDevice, tracer: &mut Tracer, model: &Model, case: &str) -> Vec<(f64, f64)> {
    let limits = Limits {
        num_kv_blocks: device.num_kv_blocks(),
        max_num_batched_tokens: 8192,
        max_num_seqs: 1024,
        max_model_len: model.spec.max_model_len,
        num_speculative_tokens: 0,
    };
    let plan = BatchPlan::new(&case.parse().expect("a case"), &model.spec.kv_groups, 0);
    let vocabulary = model.config.vocab_size as u32;
    let mut batch = Batch::build(&plan, &limits, 0, vocabulary).expect("room for the KV");
    batch.shuffle_blocks(0);
    device.init_kv(&batch).expect("KV contents");
    let gpu = device.gpu().clone();
    let spinning = kernel(&gpu, "spin_nanos");
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let mut capture = device.capture(&batch, &forward).expect("a capture");
    capture.eager().expect("an eager run");
    capture.snapshot().expect("a snapshot");
    capture.record().expect("a recording");
    replays(&gpu, &spinning, capture.as_mut(), 20);
    // Recorded again under the tracer: whether a graph that was made before is traced is up to CUPTI's version.
    tracer.start().expect("tracing");
    capture.record().expect("a recording");
    let events = replays(&gpu, &spinning, capture.as_mut(), WARM_UP + REPLAYS);
    // Reading the output waits for the stream, and with it for the probe after the last event.
    capture.output().expect("an output");
    let kernels = tracer.stop().expect("a trace");
    let forwards = forwards(&kernels);
    assert_eq!(forwards.len(), events.len(), "{case}: forwards in the trace");
    let counts: Vec<usize> = forwards.iter().map(|kernels| kernels.len()).collect();
    assert!(counts.iter().all(|count| *count == counts[0] && *count > 100), "{case}: kernels {counts:?}");
    let outside = |name: &str| ["copy_segments", "read_sum", "clock_probe"].contains(&name);
    assert!(forwards.iter().all(|kernels| kernels.iter().all(|kernel| !outside(&kernel.name))), "{case}");
    println!("{case}: {} kernels in each of {} traced forwards", counts[0], counts.len());
    let spans = forwards.iter().map(|kernels| span(kernels).micros());
    events.iter().map(|replay| replay.time.micros()).zip(spans).skip(WARM_UP).collect()
}

/// Set in the process that traces.
const TRACING: &str = "FORWARD_BENCH_TRACING";

#[test]
#[ignore = "needs an NVIDIA GPU and libcupti"]
fn events_agree_with_the_kernels_that_cupti_saw() {
    if std::env::var_os(TRACING).is_some() {
        return compare();
    }
    // In a process of its own: CUPTI wants to be there before the GPU is used, and stays until the process ends.
    let test = "trace::events_agree_with_the_kernels_that_cupti_saw";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--include-ignored", "--nocapture"]).env(TRACING, "1");
    assert!(command.status().unwrap().success(), "the tracing process failed");
}

fn compare() {
    let mut tracer = Tracer::attach().expect("CUPTI");
    let config = ModelConfig::resolve("qwen3-8b", None).unwrap();
    let model = Model::new(config, 16, 40_960).unwrap();
    let options = CudaOptions { kv_bytes: None, max_tokens: 8192, ..cuda_options(Dtype::Bfloat16) };
    let mut device = CudaDevice::new(&model.spec, &Weights::Dummy { seed: 0 }, &options).expect("a GPU");
    for case in ["a=1*1@8192", "a=64*1@8192", "a=512"] {
        let mut pairs = traced(&mut device, &mut tracer, &model, case);
        pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (event, span) = pairs[pairs.len() / 2];
        let (off, allowed) = (event - span, 0.005 * span + 2.0);
        println!(
            "{case}: event {event:.2} µs, kernels {span:.2} µs, difference {off:+.2} µs of ±{allowed:.2} µs"
        );
        assert!(off.abs() <= allowed, "{case}: {off:+.2} µs, allowed are ±{allowed:.2} µs; all: {pairs:?}");
    }
}
