//! Models over ranks: tensor, data and expert parallel steps of tiny models, on threads of one process, against one rank.

mod costs;
mod fixtures;
#[path = "../common/ranks.rs"]
mod ranks;
mod refused;
mod routed;
mod steps;

use std::path::{Path, PathBuf};

use forward_bench::backend::cpu::{CpuDevice, CpuOptions};
use forward_bench::backend::{All2All, Device, Dtype, KvInit, Weights};
use forward_bench::layout::{Layout, Place};
use forward_bench::model::{Model, ModelConfig};
use forward_bench::units::Bytes;

/// Relative RMS that sums in another order may cause.
const TOLERANCE: f64 = 1e-5;

/// Data × tensor ranks, with or without whole experts on each, and how tokens travel.
#[derive(Debug, Clone, Copy)]
struct Spread {
    layout: Layout,
    all2all: All2All,
}

const fn spread(data: usize, tensor: usize, expert_parallel: bool) -> Spread {
    let layout = Layout { data, pipeline: 1, tensor, expert_parallel };
    Spread { layout, all2all: All2All::AllgatherReducescatter }
}

/// Data-parallel ranks between which tokens are sent to their experts.
const fn sent(data: usize) -> Spread {
    Spread { all2all: All2All::AllToAll, ..spread(data, 1, true) }
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn config(name: &str, overrides: Option<&str>) -> ModelConfig {
    ModelConfig::resolve(folder(name).to_str().unwrap(), overrides).unwrap()
}

fn model(config: &ModelConfig, place: Place, all2all: All2All) -> Model {
    Model::shard(config.clone(), 16, 256, place, all2all).unwrap()
}

fn device(model: &Model, weights: &Weights<'_>) -> CpuDevice {
    let options = CpuOptions {
        kv_bytes: Bytes(16 << 20),
        dtype: Dtype::Float32,
        kv_init: KvInit::Random,
        seed: 11,
        threads: Some(1),
    };
    CpuDevice::new(&model.spec, weights, &options).unwrap()
}

fn relative_rms(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f64| x * x;
    let off: f64 = found.iter().zip(expected).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let size: f64 = expected.iter().map(|b| square(f64::from(*b))).sum();
    let distance = (off / size).sqrt();
    if off == 0.0 { 0.0 } else { distance }
}
