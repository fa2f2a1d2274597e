//! The CUDA backend: the forward as a one-shot CUDA graph with the timing events inside it.
//!
//! The only module that names cudarc. Nothing of CUDA is needed to build; at run time the driver, NVRTC and cuBLASLt are
//! loaded if they are there ([`available`] asks). [`CudaDevice`] holds a model; [`custom`] times a forward of your own.
//!
//! | file | what it does |
//! | --- | --- |
//! | `library`, `gpu`, `error` | whether CUDA can be used; one GPU; its errors |
//! | `memory`, `cache` | device memory; files that later processes use again |
//! | `compile`, `kernels` | NVRTC; loaded kernels and launches |
//! | `weights`, `pool`, `device` | what a model on a GPU is made of |
//! | `descriptor`, `gemm`, `tune` | dense products, and which algorithm computes them |
//! | `experts` | blocks of experts as launches |
//! | `collectives`, `nccl` | what ranks tell each other within a step, and the library that does it |
//! | `meeting` | where ranks wait for each other before a timed forward |
//! | `plan`, `attention`, `step` | work lists, and operations as launches |
//! | `graph`, `timed`, `capture` | graphs, the timed one, and a step's |
//! | `ceilings`, `telemetry` | what the GPU can do at most; power, heat and neighbours |
//! | `trace` | which kernels ran when, by CUPTI |
//! | `profile`, `nvtx` | replays for a profiler, ours or one from outside; named ranges |

mod attention;
mod cache;
mod capture;
mod ceilings;
mod collectives;
pub mod compile;
pub mod custom;
mod descriptor;
mod device;
mod error;
mod experts;
mod gemm;
mod gpu;
mod graph;
mod kernels;
mod library;
mod meeting;
mod memory;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(not(feature = "cuda"))]
#[path = "nccl/absent.rs"]
mod nccl;
mod nvtx;
mod plan;
mod pool;
mod profile;
mod step;
mod telemetry;
mod timed;
#[cfg(feature = "cuda")]
pub mod trace;
mod tune;
mod weights;

use std::rc::Rc;

pub use attention::{decode_shared, prefill_hopper_shared, prefill_shared};
pub use collectives::{Collectives, Span};
pub use experts::Variant;
pub use gemm::{Products, gemv_defines};
pub use gpu::Gpu;
pub use library::available;
pub use memory::Buffer;
pub use nccl::{Nccl, nccl_available, nccl_library_path};

use self::capture::CudaCapture;
use self::device::{Parts, Ropes};
use self::gemm::Gemm;
use self::kernels::Kernels;
use self::pool::{Budget, KvPool};
use self::telemetry::Nvml;
use self::tune::Tuner;
use super::{
    BackendError, Capture, Device, DeviceInfo, Dtype, Forward, GemmRate, KvInit, L2, Routing, Sensors,
    StepSpec, Weights, check,
};
use crate::batch::Batch;
use crate::units::Bytes;

/// How a [`CudaDevice`] is set up.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// Device number among those that CUDA_VISIBLE_DEVICES leaves.
    pub device: usize,
    /// Share of the GPU's memory that weights, workspace and KV may take.
    pub memory_utilization: f64,
    /// Memory of the KV pool; none: what the share leaves.
    pub kv_bytes: Option<Bytes>,
    /// Type of weights, activations and KV; not float32.
    pub dtype: Dtype,
    /// What KV blocks hold before a step.
    pub kv_init: KvInit,
    /// Seed of random KV contents.
    pub seed: u64,
    /// Query tokens that a step may have.
    pub max_tokens: usize,
    /// What the L2 cache holds when a timed forward starts.
    pub l2: L2,
    /// Measure the algorithms of matrix products again.
    pub retune: bool,
    /// Who computes the products.
    pub products: Products,
}

/// A GPU that holds one model and its KV pool.
pub struct CudaDevice {
    parts: Parts,
    tuner: Tuner,
    l2: L2,
    info: DeviceInfo,
    kernels_hash: String,
    routing: Option<Routing>,
}

impl CudaDevice {
    /// Loads the weights, takes workspace for `max_tokens` tokens, and gives the rest of the share to the KV pool.
    ///
    /// # Errors
    /// If CUDA cannot be used, memory is short, a weight cannot be read, or the kernels do not serve the model.
    pub fn new(spec: &StepSpec, weights: &Weights<'_>, options: &CudaOptions) -> Result<Self, BackendError> {
        let gpu = Gpu::open(options.device)?;
        library::guarded(|| Self::on(&gpu, spec, weights, options))
    }

    fn on(
        gpu: &std::sync::Arc<Gpu>,
        spec: &StepSpec,
        weights: &Weights<'_>,
        options: &CudaOptions,
    ) -> Result<Self, BackendError> {
        supported(spec)?;
        let kernels = Rc::new(Kernels::new(gpu, options.dtype)?);
        let weights = weights::load(&kernels, spec, weights, options.dtype)?;
        let gemm = Gemm::new(&kernels, options.dtype, options.products)?;
        let act = |&(act, width): &(super::Act, usize)| {
            let buffer =
                Buffer::new(gpu, options.max_tokens * width * 2, "activations (--max-num-batched-tokens)")?;
            buffer.fill(0)?;
            Ok((act, width, buffer))
        };
        let acts = spec.acts.iter().map(act).collect::<Result<_, BackendError>>()?;
        let budget = budget(gpu, options)?;
        let kv = KvPool::new(&kernels, spec, budget, options.kv_init, options.seed)?;
        let info = info(options.device)?;
        let tuner = Tuner::new(&gemm, options.retune);
        let ropes = Ropes::new(&spec.ropes);
        let (spec, max_tokens) = (spec.clone(), options.max_tokens);
        let collectives = None;
        let parts = Parts { spec, gemm, kv, weights, acts, ropes, max_tokens, collectives, kernels };
        let (l2, kernels_hash) = (options.l2, compile::kernels_hash());
        Ok(Self { parts, tuner, l2, info, kernels_hash, routing: None })
    }

    /// The GPU, and with it the stream that captures run on: what is put there goes before the next replay.
    #[must_use]
    pub fn gpu(&self) -> &std::sync::Arc<Gpu> {
        &self.parts.kernels.gpu
    }

    /// Lets the steps of later captures communicate with other ranks', and their replays begin together.
    pub fn set_collectives(&mut self, collectives: Rc<dyn Collectives>) {
        self.parts.collectives = Some(collectives);
    }

    /// A weight as it is stored, for tests: `[rows, cols]` row-major.
    ///
    /// # Errors
    /// If there is no such weight, or it cannot be copied from the GPU.
    pub fn weight(&self, id: super::WeightId) -> Result<Vec<f32>, BackendError> {
        let spec = self.parts.weight_spec(id)?;
        let bits: Vec<u16> = self.parts.weights[id.0].read(0, spec.rows * spec.cols)?;
        Ok(weights::from_bits(&bits, self.parts.gemm.dtype))
    }
}

/// Whether the device has memory for a model's weights and a tenth more, as far as its size says; nothing is started on it.
///
/// # Errors
/// If CUDA cannot be used.
pub fn fits(device: usize, spec: &StepSpec, memory_utilization: f64) -> Result<bool, BackendError> {
    available()?;
    let total = library::guarded(|| library::total_memory(device))?;
    Ok(weights::bytes(spec) as f64 * 1.1 < total as f64 * memory_utilization)
}

/// Bytes of memory that a device has; nothing is started on it.
///
/// # Errors
/// If CUDA cannot be used or there is no such device.
pub fn total_memory(device: usize) -> Result<usize, BackendError> {
    available()?;
    library::guarded(|| library::total_memory(device))
}

/// What a device is; nothing is started on it.
///
/// # Errors
/// If CUDA cannot be used or there is no such device.
pub fn info(device: usize) -> Result<DeviceInfo, BackendError> {
    available()?;
    library::guarded(|| {
        let (name, units) = library::name_and_units(device)?;
        let driver = Some(telemetry::driver(library::driver_version()?));
        Ok(DeviceInfo { backend: "cuda".into(), name, driver, units })
    })
}

/// Whether kernels can be traced, as far as that is known before a GPU is used.
///
/// # Errors
/// If CUPTI is missing, or this executable was built without it.
pub fn can_trace() -> Result<(), BackendError> {
    #[cfg(feature = "cuda")]
    return library::guarded(library::cupti);
    #[cfg(not(feature = "cuda"))]
    Err(BackendError::Unsupported("this executable was built without CUPTI (feature `cuda`)".into()))
}

/// What the share of memory leaves for KV.
fn budget(gpu: &Gpu, options: &CudaOptions) -> Result<Budget, BackendError> {
    let (free, total) = gpu.memory()?;
    if let Some(bytes) = options.kv_bytes {
        let bytes = usize::try_from(bytes.0).unwrap_or(usize::MAX);
        return Ok(Budget { bytes: bytes.min(free), flag: "--kv-cache-memory-bytes" });
    }
    let kept = total as f64 * (1.0 - options.memory_utilization);
    Ok(Budget { bytes: (free as f64 - kept).max(0.0) as usize, flag: "--gpu-memory-utilization" })
}

/// What the kernels are written for.
fn supported(spec: &StepSpec) -> Result<(), BackendError> {
    let refuse = |message: String| {
        Err(BackendError::Unsupported(format!("the CUDA kernels do not serve this model: {message}")))
    };
    for layer in &spec.kv_layers {
        if !layer.head_dim.is_multiple_of(8) || layer.head_dim > 256 || layer.head_dim == 0 {
            return refuse(format!("head_dim {} is no multiple of 8 up to 256", layer.head_dim));
        }
    }
    for &(act, width) in &spec.acts {
        if !width.is_multiple_of(8) {
            return refuse(format!("{act:?} is {width} wide, which is no multiple of 8"));
        }
        if act == super::Act::Normed && width > 32_768 {
            return refuse(format!("hidden_size {width} is more than 32768"));
        }
    }
    let heads = |layer: &super::KvLayer| (layer.kv_heads * layer.head_dim).max(1);
    let query = spec.acts.iter().find(|(act, _)| *act == super::Act::Context).map_or(0, |(_, width)| *width);
    match spec.kv_layers.iter().map(|layer| query / heads(layer)).find(|group| !(1..=16).contains(group)) {
        Some(group) => refuse(format!("{group} query heads share a KV head; 1 to 16 are served")),
        None => Ok(()),
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn element_bytes(&self) -> usize {
        2
    }

    fn num_kv_blocks(&self) -> u32 {
        self.parts.kv.blocks
    }

    fn init_kv(&mut self, batch: &Batch) -> Result<(), BackendError> {
        check::batch(batch, &self.parts.spec, self.parts.kv.blocks)?;
        self.parts.kv.fill(&self.parts.kernels, batch)
    }

    fn set_routing(&mut self, routing: Option<Routing>) -> Result<(), BackendError> {
        self.routing = routing;
        Ok(())
    }

    fn capture<'a>(
        &'a mut self,
        batch: &'a Batch,
        forward: Forward<'a>,
    ) -> Result<Box<dyn Capture + 'a>, BackendError> {
        check::batch(batch, &self.parts.spec, self.parts.kv.blocks)?;
        let Self { parts, tuner, l2, routing, .. } = self;
        Ok(Box::new(CudaCapture::new(parts, (tuner, routing.as_ref()), *l2, batch, forward)?))
    }

    fn kernels_hash(&self) -> Option<&str> {
        Some(&self.kernels_hash)
    }

    fn choices(&self, tokens: usize) -> std::collections::BTreeMap<String, String> {
        self.parts.gemm.choices(tokens)
    }

    fn sensors(&self) -> Option<Sensors> {
        let nvml = Nvml::open(&self.parts.kernels.gpu.uuid)?;
        Some(Box::new(move || nvml.read()))
    }

    fn read_rate(&mut self) -> Result<Option<f64>, BackendError> {
        ceilings::read_rate(&self.parts).map(Some)
    }

    fn gemm_rate(&mut self) -> Result<Option<GemmRate>, BackendError> {
        ceilings::gemm_rate(&self.parts, &self.tuner).map(Some)
    }
}
