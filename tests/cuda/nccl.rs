//! NCCL: found, joined by a world of one, captured, aborted and ended. What needs a GPU needs NCCL 2.18 or newer as well.

use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;

use forward_bench::backend::cuda::custom::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use forward_bench::backend::cuda::custom::{CustomCapture, CustomForward};
use forward_bench::backend::cuda::{
    Collectives, CudaDevice, CudaOptions, Gpu, Nccl, Products, Span, nccl_available, nccl_library_path,
};
use forward_bench::backend::{Act, BackendError, Capture, Dtype, L2, Ops, Weights};
use forward_bench::layout::{Group, Place};
use forward_bench::model::{Model, ModelConfig};

use crate::support::{batch, cuda_options, outputs};
use crate::timer::{kernel, spin};

/// Names the test in the process that runs it.
const RUNNING: &str = "FORWARD_BENCH_NCCL_TEST";

/// This executable, to run one test with NCCL on the library path.
pub(crate) fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--include-ignored", "--nocapture", "--test-threads", "1"]);
    if let Some(path) = nccl_library_path().unwrap() {
        command.env("LD_LIBRARY_PATH", path);
    }
    command
}

/// Runs the body in a process of its own: the library path is read when one starts, and an abort leaves traces in it.
fn apart(test: &str, body: impl FnOnce()) {
    if std::env::var(RUNNING).is_ok_and(|running| running == test) {
        return body();
    }
    assert!(again(test).env(RUNNING, test).status().unwrap().success(), "the process of {test} failed");
}

/// Needs no GPU: where there is an NCCL under any name, the second stage finds it.
#[test]
fn nccl_is_found_or_missed_in_one_line() {
    let test = "nccl::nccl_is_found_or_missed_in_one_line";
    let found = nccl_library_path().unwrap();
    apart(test, || match nccl_available() {
        Ok(()) => {
            println!("NCCL is there");
            // Without a GPU or a network it may refuse.
            match Nccl::unique_id() {
                Ok(id) => assert_eq!(id.len(), 128),
                Err(error) => assert!(error.to_string().starts_with("NCCL: making an id"), "{error}"),
            }
        }
        Err(error) => {
            let text = error.to_string();
            assert!(!text.contains('\n') && text.contains("nccl"), "{text:?}");
            assert!(Nccl::unique_id().is_err());
            println!("{text}");
        }
    });
    if let Some(path) = found {
        let mut folders = std::env::split_paths(&path);
        assert!(folders.next().unwrap().join("libnccl.so").is_file(), "{path:?}");
        let output = again(test).env(RUNNING, test).output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains("NCCL is there"), "{output:?}");
    }
}

fn world_of_one() -> (Arc<Gpu>, Rc<Nccl>) {
    let gpu = Gpu::open(0).unwrap();
    let nccl = Nccl::new(&gpu, Place::ONE, &Nccl::unique_id().unwrap()).unwrap();
    (gpu, nccl)
}

/// A chain of all four collectives, from the first buffer to the last.
struct Chain {
    buffers: [CudaSlice<u8>; 4],
    count: usize,
    dtype: Dtype,
    gpu: Arc<Gpu>,
    nccl: Rc<Nccl>,
}

impl CustomForward for Chain {
    fn launch(&mut self, stream: &Arc<CudaStream>) -> Result<(), BackendError> {
        let span = |i: usize| {
            let (address, _done) = self.buffers[i].device_ptr(stream);
            Span { address, count: self.count, dtype: self.dtype }
        };
        let (gpu, nccl, [a, b, c, d]) = (&self.gpu, &self.nccl, [0, 1, 2, 3].map(span));
        nccl.all_reduce(gpu, Group::World, a)?;
        nccl.all_gather(gpu, Group::Expert, a, b.address)?;
        nccl.reduce_scatter(gpu, Group::Data, b.address, c)?;
        nccl.together(&mut || nccl.all_to_all(gpu, Group::Tensor, c, d.address))
    }

    fn restore(&mut self, stream: &Arc<CudaStream>) -> Result<(), BackendError> {
        let mut later = self.buffers[1..].iter_mut();
        later
            .try_for_each(|buffer| stream.memset_zeros(buffer))
            .map_err(|e| BackendError::Device(e.to_string()))
    }

    fn output(&mut self) -> Result<Option<Vec<f32>>, BackendError> {
        let bytes = self.gpu.stream.clone_dtoh(&self.buffers[3]).unwrap();
        Ok(Some(bytes.into_iter().map(f32::from).collect()))
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn a_world_of_one_replays_every_collective() {
    apart("nccl::a_world_of_one_replays_every_collective", || {
        let (gpu, nccl) = world_of_one();
        for (dtype, size) in [(Dtype::Float32, 4), (Dtype::Bfloat16, 2), (Dtype::Float16, 2)] {
            let bytes: Vec<u8> = (0..4096_u32).map(|i| (i % 113) as u8).collect();
            let empty = || gpu.stream.alloc_zeros::<u8>(bytes.len()).unwrap();
            let first = gpu.stream.clone_htod(&bytes).unwrap();
            let buffers = [first, empty(), empty(), empty()];
            let chain =
                Chain { buffers, count: bytes.len() / size, dtype, gpu: gpu.clone(), nccl: nccl.clone() };
            let collectives: Rc<dyn Collectives> = nccl.clone();
            let mut capture = CustomCapture::of_rank(&gpu, L2::Warm, chain, &collectives).unwrap();
            let expected: Vec<f32> = bytes.iter().map(|byte| f32::from(*byte)).collect();
            capture.eager().unwrap();
            assert!(capture.output().unwrap() == expected, "{dtype:?}, eagerly");
            capture.restore().unwrap();
            assert!(capture.output().unwrap() != expected, "a replay has nothing to do");
            capture.record().unwrap();
            for _ in 0..3 {
                let replay = capture.replay().unwrap();
                assert!(capture.output().unwrap() == expected, "{dtype:?}");
                println!("{dtype:?}: a chain of four took {:.1} µs", replay.time.micros());
            }
        }
    });
}

fn tiny() -> Model {
    let overrides = r#"{"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 512, "vocab_size": 997}"#;
    Model::new(ModelConfig::resolve("llama-3.1-8b", Some(overrides)).unwrap(), 16, 1024).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn sums_over_a_world_of_one_change_nothing() {
    apart("nccl::sums_over_a_world_of_one_change_nothing", || {
        let (_gpu, nccl) = world_of_one();
        let model = tiny();
        let options = CudaOptions { products: Products::Ours, ..cuda_options(Dtype::Bfloat16) };
        let batch = batch("a=4*1@300,9@50", model.spec.kv_groups[0], 3);
        let new = || CudaDevice::new(&model.spec, &Weights::Dummy { seed: 1 }, &options).unwrap();
        let (expected, same) = outputs(&mut new(), &batch, &|ops: &mut dyn Ops| model.forward(ops));
        let mut device = new();
        device.set_collectives(nccl);
        let (found, same_here) = outputs(&mut device, &batch, &|ops: &mut dyn Ops| {
            ops.all_reduce(Act::Residual, Group::World)?;
            model.forward(ops)?;
            ops.all_reduce(Act::Delta, Group::Tensor)?;
            ops.all_reduce(Act::Normed, Group::World)
        });
        assert!(same && same_here && found == expected);
        assert!(expected.iter().any(|value| *value != 0.0));
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn an_abort_from_another_thread_leaves_the_process_alive() {
    apart("nccl::an_abort_from_another_thread_leaves_the_process_alive", || {
        let (gpu, nccl) = world_of_one();
        let word = gpu.stream.alloc_zeros::<u8>(4).unwrap();
        let span = || Span { address: word.device_ptr(&gpu.stream).0, count: 1, dtype: Dtype::Float32 };
        let chain = Chain {
            buffers: std::array::from_fn(|_| gpu.stream.alloc_zeros::<u8>(4).unwrap()),
            count: 1,
            dtype: Dtype::Float32,
            gpu: gpu.clone(),
            nccl: nccl.clone(),
        };
        let collectives: Rc<dyn Collectives> = nccl.clone();
        let mut capture = CustomCapture::of_rank(&gpu, L2::Warm, chain, &collectives).unwrap();
        capture.eager().unwrap();
        capture.record().unwrap();
        capture.replay().unwrap();
        let hook = nccl.abort_hook();
        spin(&gpu.stream, &kernel(&gpu, "spin_nanos"), 300_000_000).unwrap();
        nccl.all_reduce(&gpu, Group::World, span()).unwrap();
        std::thread::spawn(move || {
            hook();
            hook(); // a second time it does nothing
        })
        .join()
        .unwrap();
        let error = nccl.all_reduce(&gpu, Group::World, span()).unwrap_err().to_string();
        assert!(error.contains("aborted"), "{error}");
        gpu.synchronize().unwrap();
        drop((capture, collectives, nccl)); // after an abort there is nothing to end
        let (_, again) = world_of_one();
        again.all_reduce(&gpu, Group::World, span()).unwrap();
        gpu.synchronize().unwrap();
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn a_world_ends_in_order_and_another_begins() {
    apart("nccl::a_world_ends_in_order_and_another_begins", || {
        for _ in 0..2 {
            let (_, nccl) = world_of_one();
            let hook = nccl.abort_hook();
            drop(nccl);
            hook(); // nothing is left to abort
        }
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn what_nccl_refuses_is_told_in_one_line() {
    apart("nccl::what_nccl_refuses_is_told_in_one_line", || {
        let gpu = Gpu::open(0).unwrap();
        let error = Nccl::new(&gpu, Place::ONE, &[1, 2, 3]).err().unwrap().to_string();
        assert!(error.contains("128 bytes, 3 were given"), "{error}");
        let place = Place { rank: 7, ..Place::ONE };
        let error = Nccl::new(&gpu, place, &Nccl::unique_id().unwrap()).err().unwrap().to_string();
        println!("{error}");
        assert!(
            error.contains("joining 1 ranks as rank 7 failed") && error.contains("NCCL_DEBUG=INFO"),
            "{error}"
        );
        assert!(!error.contains('\n'), "{error}");
    });
}
