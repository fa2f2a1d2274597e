//! What a device must offer: [`Ops`] to write a forward over, [`Device`] to hold a model, [`Capture`] to replay one step.
//!
//! No vendor is named here, and nothing here knows a model: a device sees numbered weights, named activation
//! buffers and numbered KV layers.

mod check;
mod communicator;
pub mod cpu;
#[cfg(feature = "cuda-api")]
pub mod cuda;
mod cut;
pub mod dummy;
mod experts;
pub mod fit;
mod info;
mod tape;
mod traced;
mod weight;

pub use communicator::Communicator;
pub use cut::{Block, Cut};
pub use experts::{Activation, All2All, Moe, Routing, Scoring};
pub use info::{DeviceInfo, GemmRate, Sensors, Telemetry};
pub use traced::{Activity, Part, Traced, Tracing};
pub use weight::{Form, TensorSpec, WeightRole, WeightSource, WeightSpec, Weights};

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::batch::{Batch, KvGroup};
use crate::layout::Group;
use crate::units::{Bytes, Nanos};

/// The index of a weight in [`StepSpec::weights`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightId(pub usize);

/// The activation buffers of a step. Each is `[tokens, width]`, row-major, its width given by [`StepSpec::acts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Act {
    /// The residual stream, `[tokens, hidden]`.
    Residual,
    /// A normalised copy of the residual stream, `[tokens, hidden]`; after the last norm, the step's output.
    Normed,
    /// Query, key and value heads side by side, `[tokens, (q_heads + 2 * kv_heads) * head_dim]`.
    Qkv,
    /// The attention's result before its output projection, `[tokens, q_heads * head_dim]`.
    Context,
    /// What a block adds to the residual stream, `[tokens, hidden]`.
    Delta,
    /// Gate and up projection side by side, `[tokens, 2 * intermediate]`.
    GateUp,
    /// The gated activation, `[tokens, intermediate]`.
    Gated,
}

/// One rotary embedding: angle = position × `inv_freq[i]` for the pair (i, i + head_dim / 2).
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// `[head_dim / 2]` inverse frequencies.
    pub inv_freq: Vec<f32>,
    /// Factor on cosine and sine (YaRN's attention factor, else 1).
    pub factor: f32,
}

/// Where a layer's keys and values live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayer {
    /// Index of its KV group in [`StepSpec::kv_groups`].
    pub group: usize,
    /// Heads of K and of V.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Heads of the whole layer, of which these are some.
    pub all_heads: usize,
    /// Number of the first of these among them.
    pub first_head: usize,
}

impl KvLayer {
    /// A layer that is whole.
    #[must_use]
    pub fn whole(group: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self { group, kv_heads, head_dim, all_heads: kv_heads, first_head: 0 }
    }
}

/// One attention layer, as [`Ops::qk_norm_rope_kvwrite`] and [`Ops::attention`] need it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Index in [`StepSpec::kv_layers`].
    pub kv_layer: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// A query attends to the last `window` positions, its own included.
    pub window: Option<u32>,
    /// Index in [`StepSpec::ropes`].
    pub rope: usize,
    /// RMS norm of each query head before RoPE, `[1, head_dim]`.
    pub q_norm: Option<WeightId>,
    /// RMS norm of each key head before RoPE, `[1, head_dim]`.
    pub k_norm: Option<WeightId>,
    /// Epsilon of both.
    pub eps: f32,
    /// One logit for each query head that joins the softmax's denominator and has no value, `[1, q_heads]`.
    pub sinks: Option<WeightId>,
}

/// Everything a device must know of a model before it can hold it.
#[derive(Debug, Clone, PartialEq)]
pub struct StepSpec {
    /// All weights, in [`WeightId`] order.
    pub weights: Vec<WeightSpec>,
    /// The activation buffers and their widths.
    pub acts: Vec<(Act, usize)>,
    /// KV groups, which share one pool of blocks.
    pub kv_groups: Vec<KvGroup>,
    /// KV layers, in the order of the model's layers.
    pub kv_layers: Vec<KvLayer>,
    /// Rotary embeddings.
    pub ropes: Vec<Rope>,
    /// Positions that a request may reach.
    pub max_model_len: u32,
}

/// The operations of a decoder step, at the granularity at which fast kernels exist.
///
/// A forward is written once over this trait and never sees a device. The batch's metadata (positions, slots, block
/// tables) belongs to the implementation.
pub trait Ops {
    /// `out[t] = table[token_ids[t]]`; zeros where the table is cut by rows and does not have the token's.
    fn embed_gather(&mut self, table: WeightId, out: Act) -> Result<(), BackendError>;

    /// `residual += delta` where a delta is given, then `out = rmsnorm(residual) * weight`.
    fn add_rmsnorm(
        &mut self,
        delta: Option<Act>,
        residual: Act,
        weight: WeightId,
        eps: f32,
        out: Act,
    ) -> Result<(), BackendError>;

    /// `out = x · weightᵀ (+ bias)`.
    fn linear(
        &mut self,
        x: Act,
        weight: WeightId,
        bias: Option<WeightId>,
        out: Act,
    ) -> Result<(), BackendError>;

    /// Normalises the query and key heads where asked for, rotates them, and writes K and V to their slots.
    fn qk_norm_rope_kvwrite(&mut self, qkv: Act, attention: &Attention) -> Result<(), BackendError>;

    /// Paged attention, causal by position, of the query heads in `qkv` over the KV layer.
    fn attention(&mut self, qkv: Act, attention: &Attention, out: Act) -> Result<(), BackendError>;

    /// `out = silu(gate) * up`.
    fn silu_mul(&mut self, gate_up: Act, out: Act) -> Result<(), BackendError>;

    /// A block of experts: of each row of `x` the gate's product chooses [`Moe::top_k`] experts, and `out` is the sum of what
    /// those compute, each times its weight. `x` and `out` are as wide as the model.
    ///
    /// With several data-parallel ranks the rows travel to where the experts are and back; what tensor-parallel ranks compute
    /// stays to be summed by [`Ops::all_reduce`].
    fn moe(&mut self, x: Act, moe: &Moe, out: Act) -> Result<(), BackendError>;

    /// `act` becomes the sum of the group's.
    fn all_reduce(&mut self, act: Act, group: Group) -> Result<(), BackendError>;
}

/// A forward, written over [`Ops`].
pub type Forward<'a> = &'a dyn Fn(&mut dyn Ops) -> Result<(), BackendError>;

/// What KV blocks hold before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvInit {
    /// All zeros.
    Zeros,
    /// Uniform in ±1, from the seed.
    Random,
}

/// What a device's last cache holds when a timed forward starts.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum L2 {
    /// What the replay before left there.
    #[default]
    Warm,
    /// None of the forward's data: more than twice its size was read.
    Cold,
}

/// The numeric type of weights, activations and KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE 754 binary32.
    Float32,
    /// bfloat16.
    Bfloat16,
    /// IEEE 754 binary16.
    Float16,
}

/// A device that holds one model and its KV pool.
pub trait Device {
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// Bytes of one element of weights and of KV, as stored.
    fn element_bytes(&self) -> usize;

    /// Blocks in the KV pool, the null block included.
    fn num_kv_blocks(&self) -> u32;

    /// Gives the KV blocks of the batch's tables their initial contents. What they hold stays there over captures, so
    /// that a later batch can go on from an earlier one's tokens.
    fn init_kv(&mut self, batch: &Batch) -> Result<(), BackendError>;

    /// Makes a step of `batch` ready: buffers and metadata. Leaves the KV blocks as they are. Fails if the batch needs
    /// blocks, positions or memory that the device does not have.
    fn capture<'a>(
        &'a mut self,
        batch: &'a Batch,
        forward: Forward<'a>,
    ) -> Result<Box<dyn Capture + 'a>, BackendError>;

    /// A hash of the sources of the device's kernels, where it has any of its own.
    fn kernels_hash(&self) -> Option<&str> {
        None
    }

    /// Its choices among ways to compute the same that steps of so many tokens use, by what they compute.
    fn choices(&self, _tokens: usize) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// Reads its sensors, where it has any; not to be called while something is timed.
    fn sensors(&self) -> Option<Sensors> {
        None
    }

    /// Replaces the logits of all gates in later captures, or lets them be again. Fails on a device without experts.
    fn set_routing(&mut self, routing: Option<Routing>) -> Result<(), BackendError> {
        match routing {
            None => Ok(()),
            Some(_) => Err(BackendError::Unsupported(format!(
                "the {} backend has no experts yet; choose another --backend or a dense --model",
                self.info().backend
            ))),
        }
    }

    /// Lets the steps of later captures communicate with other ranks'. Fails on a device that does not take the host's collectives.
    fn set_communicator(&mut self, communicator: Arc<dyn Communicator>) -> Result<(), BackendError> {
        drop(communicator);
        let backend = &self.info().backend;
        Err(BackendError::Unsupported(format!("the {backend} backend does not communicate over the host")))
    }

    /// Measures how many bytes a second it reads; KV blocks lose their contents. None: this device has no such measurement.
    fn read_rate(&mut self) -> Result<Option<f64>, BackendError> {
        Ok(None)
    }

    /// Measures the rate of a large matrix product in the step's type, over a second or more; KV blocks lose their contents.
    fn gemm_rate(&mut self) -> Result<Option<GemmRate>, BackendError> {
        Ok(None)
    }
}

/// One timed replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Replay {
    /// The forward alone, from the device's own timer.
    pub time: Nanos,
    /// The device's clock over the replay in MHz, where it can be read.
    pub clock_mhz: Option<f64>,
}

/// One step of one batch: run eagerly, then recorded and replayed.
pub trait Capture {
    /// What the times are taken from, such as `std::time::Instant`.
    fn timer(&self) -> &'static str;

    /// Copies away the state that the step writes; returns how much that is.
    fn snapshot(&mut self) -> Result<Bytes, BackendError>;

    /// Puts the copied state back.
    fn restore(&mut self) -> Result<(), BackendError>;

    /// Runs the forward once, op by op, on the state as it is.
    fn eager(&mut self) -> Result<(), BackendError>;

    /// Records the step for [`Capture::replay`].
    fn record(&mut self) -> Result<(), BackendError>;

    /// Restores the state, runs the recorded forward, and times the forward alone.
    fn replay(&mut self) -> Result<Replay, BackendError>;

    /// Replays `n` times, live.
    fn replays(&mut self, n: u64) -> Result<Vec<Replay>, BackendError> {
        (0..n).map(|_| self.replay()).collect()
    }

    /// Makes ready what the first eager run would: compiles, and chooses among ways to compute the same, but for those that were `agreed`
    /// upon. Returns the choices, by what they compute. Nothing of the step runs, so that ranks may do this one after the other.
    fn tune(&mut self, agreed: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, BackendError> {
        let _ = agreed;
        Ok(BTreeMap::new())
    }

    /// Replays the recorded step `replays` times under the device's tracer, never while anything is timed, and leaves it ready
    /// for [`Capture::replay`]. `name` is what a profiler from outside sees these replays as.
    fn profile(&mut self, name: &str, replays: u32) -> Result<Tracing, BackendError> {
        let _ = (name, replays);
        Ok(Tracing::Untraced("this device has no tracer".to_owned()))
    }

    /// The step's output of the last run, `[tokens, hidden]` in batch order.
    fn output(&mut self) -> Result<Vec<f32>, BackendError>;

    /// How many rows each of this rank's experts really computed in the last run, `[local experts]` for each MoE layer, in the
    /// order of [`Moe::index`]; rows of other ranks' tokens count too. Not to be called while something is timed. None: this device counts nothing, or there are no experts.
    fn expert_loads(&mut self) -> Result<Option<Vec<Vec<u32>>>, BackendError> {
        Ok(None)
    }
}

/// What can go wrong on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// A checkpoint could not be read or does not fit the model.
    #[error("{0}")]
    Weights(String),
    /// A setting that this backend cannot serve.
    #[error("{0}")]
    Unsupported(String),
    /// Memory that is not there.
    #[error("{0}")]
    NoRoom(String),
    /// The device failed.
    #[error("{0}")]
    Device(String),
}

/// What a device says that is asked to communicate and cannot.
pub(in crate::backend) fn alone(what: &str) -> BackendError {
    BackendError::Device(format!("{what} needs other ranks, and this device has no way to them"))
}
