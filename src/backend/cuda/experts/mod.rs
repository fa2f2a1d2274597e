//! A block of experts as launches: the gate's product, the choice, two grouped products over slots sorted by expert, and the sum.
//!
//! Nothing is read back by the host: grids are bounds for the worst load, and blocks without work leave at once. What was
//! reached is read after the timing, from each layer's offsets.
//!
//! | file | what it does |
//! | --- | --- |
//! | `products` | the grouped products |
//! | `sizes` | kernels and buffers of blocks of one size; the choice and the sum |
//! | `travel` | tokens on their way between data-parallel ranks |

mod products;
mod sizes;
mod travel;

use std::collections::HashMap;
use std::collections::hash_map::Entry;

pub use products::Variant;

use self::sizes::Sizes;
use super::device::Parts;
use super::gemm::{Operands, Shape};
use super::memory::Buffer;
use super::tune::{Job, Tuner};
use super::weights::to_bits;
use crate::backend::{Act, Activation, BackendError, Moe, Routing, Scoring};

/// The blocks of experts of a step. Layers of one size share everything but their offsets and replaced logits.
#[derive(Default)]
pub(super) struct Experts {
    sizes: HashMap<Key, Sizes>,
    /// By [`Moe::index`].
    layers: HashMap<usize, Layer>,
}

/// What decides a block's kernels and buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    experts: usize,
    /// The first one that is here, and how many are.
    first: usize,
    local: usize,
    top_k: usize,
    inter: usize,
    hidden: usize,
    route: usize,
    clamped: bool,
    interleaved: bool,
    /// Data-parallel ranks, and whether tokens are sent to their experts alone.
    data: usize,
    sends: bool,
}

/// What a layer has of its own.
struct Layer {
    /// `[experts + 1]`: where each expert's slots begin; those that are here come first.
    offsets: Buffer,
    /// Logits that replace the gate's, `[tokens, experts]`.
    replaced: Option<Buffer>,
    local: usize,
}

impl Key {
    fn of(moe: &Moe, hidden: usize) -> Self {
        let route = match moe.scoring {
            Scoring::SoftmaxThenTopK { renormalize: false } => 0,
            Scoring::SoftmaxThenTopK { renormalize: true } => 1,
            Scoring::TopKThenSoftmax => 2,
        };
        let (clamped, interleaved) = match moe.activation {
            Activation::SiluMul => (false, false),
            Activation::ClampedSwiglu { interleaved, .. } => (true, interleaved),
        };
        let Moe { experts, first, local, top_k, inter, data, .. } = *moe;
        let sends = moe.is_all_to_all();
        Self { experts, first, local, top_k, inter, hidden, route, clamped, interleaved, data, sends }
    }

    /// Tokens that may be here, of so many of each data-parallel rank.
    fn all_tokens(&self, tokens: usize) -> usize {
        self.data * tokens
    }

    /// Their slots, of all experts.
    fn slots(&self, tokens: usize) -> usize {
        self.all_tokens(tokens) * self.top_k
    }

    /// Slots that this rank's experts can have at most.
    fn most_slots(&self, tokens: usize) -> usize {
        self.all_tokens(tokens) * self.top_k.min(self.local)
    }
}

/// A gate's product, checked.
fn gate(
    parts: &Parts,
    tokens: usize,
    moe: &Moe,
    (x, logits): (u64, u64),
) -> Result<(Shape, Operands), BackendError> {
    let hidden = parts.weight_spec(moe.gate)?.cols;
    let w = parts.matrix(moe.gate, hidden)?;
    let bias = moe.gate_bias.map_or(Ok(0), |bias| parts.vector(bias, moe.experts))?;
    let shape = Shape { t: tokens, n: moe.experts, k: hidden, bias: moe.gate_bias.is_some() };
    Ok((shape, Operands { x, w, bias, out: logits }))
}

impl Experts {
    /// The first pass of a block: kernels, buffers, the gate's algorithm.
    pub(super) fn prepare(
        &mut self,
        (parts, tuner): (&Parts, &Tuner),
        tokens: usize,
        (x, moe): (Act, &Moe),
        routing: Option<&Routing>,
    ) -> Result<(), BackendError> {
        let x = parts.act(x)?;
        let key = Key::of(moe, x.width);
        let sizes = match self.sizes.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Sizes::new(parts, &key, tokens)?),
        };
        let logits = sizes.logits.address();
        let replaced = routing.map(|routing| replaced(parts, routing, tokens, moe)).transpose()?;
        let offsets = Buffer::new(&parts.kernels.gpu, (moe.experts + 1) * 4, "the experts' loads")?;
        offsets.fill(0)?;
        self.layers.insert(moe.index, Layer { offsets, replaced, local: moe.local });
        let (shape, operands) = gate(parts, tokens, moe, (x.address, logits))?;
        let Operands { x, bias, out, .. } = operands;
        let weights = parts.weights_of(shape.n, shape.k);
        tuner.choose(&parts.gemm, &Job { shape, x, weights, bias, out })
    }

    /// Puts a block on the stream.
    pub(super) fn launch(
        &self,
        parts: &Parts,
        tokens: usize,
        (x, moe, out): (Act, &Moe, Act),
    ) -> Result<(), BackendError> {
        let missing = || BackendError::Device("a block of experts was not prepared".into());
        let (x, out) = (parts.act(x)?, parts.act_of(out, parts.act(x)?.width)?);
        let key = Key::of(moe, x.width);
        let sizes = self.sizes.get(&key).ok_or_else(missing)?;
        let layer = self.layers.get(&moe.index).ok_or_else(missing)?;
        let (shape, operands) = gate(parts, tokens, moe, (x.address, sizes.logits.address()))?;
        let algorithm = parts.gemm.chosen.borrow().get(&shape).copied();
        parts.gemm.run(shape, algorithm.ok_or_else(missing)?, &operands)?;
        let logits = layer.replaced.as_ref().unwrap_or(&sizes.logits).address();
        let own = travel::Own { tokens, x: x.address, logits, out };
        sizes.launch(parts, &key, moe, layer.offsets.address(), own)
    }

    /// How many slots each expert of each layer that is here had in the last run; none without experts.
    pub(super) fn loads(&self) -> Result<Option<Vec<Vec<u32>>>, BackendError> {
        if self.layers.is_empty() {
            return Ok(None);
        }
        let mut indices: Vec<&usize> = self.layers.keys().collect();
        indices.sort_unstable();
        let loads = |index: &usize| {
            let layer = &self.layers[index];
            let offsets: Vec<u32> = layer.offsets.read(0, layer.local + 1)?;
            Ok(offsets.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect())
        };
        indices.into_iter().map(loads).collect::<Result<_, BackendError>>().map(Some)
    }
}

/// The logits that replace a layer's, on the GPU.
fn replaced(parts: &Parts, routing: &Routing, tokens: usize, moe: &Moe) -> Result<Buffer, BackendError> {
    let (logits, wanted) = (routing.logits.get(moe.index), tokens * moe.experts);
    match logits.filter(|logits| logits.len() == wanted) {
        Some(logits) => Buffer::of(&parts.kernels.gpu, &to_bits(logits, parts.gemm.dtype), "replaced logits"),
        None => Err(BackendError::Device(format!(
            "MoE layer {} needs {wanted} replaced logits, there are {}",
            moe.index,
            logits.map_or(0, Vec::len)
        ))),
    }
}
