//! The CUDA backend against the CPU backend. Everything here needs a GPU, except what says so.
#![cfg(feature = "cuda-api")]

mod fixtures;
mod host;
#[cfg(feature = "cuda")]
mod nccl;
mod ops;
#[cfg(feature = "cuda")]
mod profile;
#[path = "../common/ranks.rs"]
mod ranks;
mod sanitized;
mod sharded;
mod shards;
mod support;
mod timer;
#[cfg(feature = "cuda")]
mod trace;
#[cfg(feature = "cuda")]
mod two_gpus;
#[cfg(feature = "cuda")]
mod two_gpus_steps;
mod weights;

use forward_bench::backend::cuda;

/// Needs no GPU: whatever this machine has, the answer is a line and not a panic.
#[test]
fn asking_for_cuda_never_panics() {
    if let Err(error) = cuda::available() {
        let text = error.to_string();
        assert!(!text.contains('\n') && text.len() > 20, "{text:?}");
    }
}
