//! The CPU backend: float32 compute on all cores, with rayon and the gemm crate. It is both the backend of machines without
//! a GPU and the reference that a GPU's results are held against.
//!
//! With a 16-bit [`Dtype`] the weights, and the keys and values written to the KV cache, are rounded to that type, but
//! everything is held and computed in float32.

mod attention;
mod capture;
mod choice;
mod dots;
mod elementwise;
mod isa;
mod kv;
mod lanes;
mod linear;
mod memory;
mod moe;
mod round;
mod shared;
mod step;
mod tile;
mod travel;

use std::sync::Arc;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use self::capture::CpuCapture;
use self::isa::Isa;
use self::kv::KvPool;
use self::memory::Buffer;
use self::round::Rounding;
use self::step::{Held, Step};
use super::{
    BackendError, Capture, Communicator, Device, DeviceInfo, Dtype, Forward, KvInit, Routing, StepSpec,
    WeightSpec, Weights, check, dummy, fit,
};
use crate::batch::Batch;
use crate::units::Bytes;

/// How a [`CpuDevice`] is set up.
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// Memory for the KV pool; only blocks that a batch touches take any.
    pub kv_bytes: Bytes,
    /// What weights and KV are rounded to.
    pub dtype: Dtype,
    /// What KV blocks hold before a step.
    pub kv_init: KvInit,
    /// Seed of random KV contents.
    pub seed: u64,
    /// Threads of a step; none: one for each core.
    pub threads: Option<usize>,
}

/// The processor, holding one model and its KV pool.
pub struct CpuDevice {
    spec: StepSpec,
    weights: Vec<Buffer>,
    kv: KvPool,
    pool: ThreadPool,
    isa: Isa,
    rounding: Rounding,
    routing: Option<Routing>,
    communicator: Option<Arc<dyn Communicator>>,
    info: DeviceInfo,
}

impl CpuDevice {
    /// Loads the weights and reserves the KV pool. Fails if memory is short or a weight cannot be read.
    pub fn new(spec: &StepSpec, weights: &Weights<'_>, options: &CpuOptions) -> Result<Self, BackendError> {
        let bytes = spec.weights.iter().map(|w| w.rows as u128 * w.cols as u128 * 4).sum();
        let advice = |free| fit::advice(spec, size_of::<f32>(), free);
        memory::require(Bytes(bytes), "the weights, held in float32,", advice)?;
        let pool = ThreadPoolBuilder::new()
            .num_threads(options.threads.unwrap_or(0))
            .thread_name(|index| format!("forward-{index}"))
            .build()
            .map_err(|error| BackendError::Device(format!("threads could not be started: {error}")))?;
        let rounding = Rounding(options.dtype);
        let kv = KvPool::new(spec, options.kv_bytes, options.kv_init, options.seed, rounding)?;
        let weights = pool.install(|| {
            let load = |(id, weight)| load(id, weight, weights, rounding);
            spec.weights.par_iter().enumerate().map(load).collect::<Result<Vec<_>, _>>()
        })?;
        let info = DeviceInfo { units: pool.current_num_threads(), ..info() };
        let (spec, isa, routing, communicator) = (spec.clone(), Isa::detect(), None, None);
        Ok(Self { spec, weights, kv, pool, isa, rounding, routing, communicator, info })
    }
}

/// One weight, as `[rows, cols]` rounded to the type.
fn load(
    id: usize,
    spec: &WeightSpec,
    weights: &Weights<'_>,
    rounding: Rounding,
) -> Result<Buffer, BackendError> {
    let mut buffer = Buffer::zeroed(spec.rows * spec.cols, &spec.name)?;
    match weights {
        Weights::Dummy { seed } => {
            let stream = dummy::stream(*seed, id as u64);
            spec.pieces(&mut buffer).into_par_iter().for_each(|(first, values)| {
                for (i, value) in values.iter_mut().enumerate() {
                    *value = dummy::weight(spec.role, stream, (first + i) as u64);
                }
            });
        }
        Weights::Read(source) => source.read(spec, &mut buffer)?,
    }
    if let Some(round) = rounding.function() {
        buffer.par_chunks_mut(1 << 16).for_each(|values| values.iter_mut().for_each(|v| *v = round(*v)));
    }
    Ok(buffer)
}

/// What the processor is, with one thread for each core.
#[must_use]
pub fn info() -> DeviceInfo {
    let units = rayon::current_num_threads();
    DeviceInfo { backend: "cpu".into(), name: processor_name(), driver: None, units }
}

/// The processor's model where the system tells (Linux), else its architecture.
fn processor_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split(':').nth(1));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |name| name.trim().to_owned())
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn element_bytes(&self) -> usize {
        size_of::<f32>()
    }

    fn num_kv_blocks(&self) -> u32 {
        self.kv.blocks
    }

    fn init_kv(&mut self, batch: &Batch) -> Result<(), BackendError> {
        check::batch(batch, &self.spec, self.kv.blocks)?;
        let (pool, kv) = (&self.pool, &mut self.kv);
        pool.install(|| kv.fill(batch));
        Ok(())
    }

    fn set_routing(&mut self, routing: Option<Routing>) -> Result<(), BackendError> {
        self.routing = routing;
        Ok(())
    }

    fn set_communicator(&mut self, communicator: Arc<dyn Communicator>) -> Result<(), BackendError> {
        self.communicator = Some(communicator);
        Ok(())
    }

    fn capture<'a>(
        &'a mut self,
        batch: &'a Batch,
        forward: Forward<'a>,
    ) -> Result<Box<dyn Capture + 'a>, BackendError> {
        check::batch(batch, &self.spec, self.kv.blocks)?;
        let Self { spec, weights, kv, pool, isa, rounding, routing, communicator, info } = self;
        let held = Held {
            spec,
            isa: *isa,
            threads: info.units,
            weights,
            rounding: *rounding,
            routing: routing.as_ref(),
            communicator: communicator.as_deref(),
        };
        let step = pool.install(|| Step::new(held, kv, batch))?;
        Ok(Box::new(CpuCapture { spec, pool, step, forward, tape: None, saved: None }))
    }
}
