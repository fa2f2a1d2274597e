//! A block of experts as launches: the gate's product, the choice, two grouped products over slots sorted by expert, and the sum.
//!
//! Nothing is read back by the host: grids are bounds for the worst load, and blocks without work leave at once. What was
//! reached is read after the timing, from each layer's offsets.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::compile::File;
use super::device::Parts;
use super::gemm::{Operands, Shape};
use super::kernels::{Arg, Function, Grid};
use super::memory::Buffer;
use super::tune::{Job, Tuner};
use super::weights::to_bits;
use crate::backend::{Act, Activation, BackendError, Moe, Routing, Scoring, WeightId};

/// Tokens of a block of `moe_route`; up to so many, one block does all of the routing.
const ROUTE_TOKENS: usize = 64;
/// Threads of a block of the routing kernels.
const ROUTE_THREADS: u32 = 512;
/// Bytes of an entry of the list of tiles.
const TILE_BYTES: usize = 16;

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
    top_k: usize,
    inter: usize,
    hidden: usize,
    route: usize,
    clamped: bool,
    interleaved: bool,
}

/// Kernels and buffers of blocks of one size.
struct Sizes {
    route: Function,
    align: Option<Function>,
    products: Products,
    combine: Function,
    logits: Buffer,
    ids: Buffer,
    weights: Buffer,
    counts: Buffer,
    slots: Buffer,
    tiles: Buffer,
    middle: Buffer,
    results: Buffer,
}

/// The two grouped products.
struct Products {
    functions: [Function; 2],
    grids: [Grid; 2],
    tile_rows: usize,
    max_tiles: usize,
}

/// What a layer has of its own.
struct Layer {
    /// `[experts + 1]`: where each expert's slots begin.
    offsets: Buffer,
    /// Logits that replace the gate's, `[tokens, experts]`.
    replaced: Option<Buffer>,
    experts: usize,
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
        let Moe { experts, top_k, inter, .. } = *moe;
        Self { experts, top_k, inter, hidden, route, clamped, interleaved }
    }

    fn slots(&self, tokens: usize) -> usize {
        tokens * self.top_k
    }
}

/// Rows of a tile of the grouped products, and columns of a block where the Hopper kernels serve; `slots` an expert decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// Slots of one expert that a block multiplies.
    pub tile_rows: usize,
    /// Weight rows of a block of the kernels for Hopper; none: the kernels for all architectures.
    pub hopper: Option<usize>,
}

impl Variant {
    /// For so many slots over so many experts: the smallest tile that takes an expert's rows where loads are even, as
    /// `tests/gpu/check_moe.py` timed them on an H200.
    #[must_use]
    pub fn of(slots: usize, experts: usize, is_hopper: bool) -> Self {
        let rows = slots.div_ceil(experts.min(slots).max(1));
        let tile_rows = match rows {
            0..=16 => 16,
            17..=32 => 32,
            33..=64 => 64,
            _ => 128,
        };
        Self { tile_rows, hopper: (is_hopper && tile_rows == 128).then_some(256) }
    }

    /// Dynamic shared memory, as moe_gemm.cu and moe_gemm_hopper.cu say.
    #[must_use]
    pub fn shared(&self) -> usize {
        if let Some(columns) = self.hopper {
            return 1024 + 4 * (128 + columns) * 128 + 8 * 16 * 80 + 128;
        }
        let (columns, depth, stages) = match self.tile_rows {
            16 => (64, 128, 4),
            32 => (64, 128, 3),
            64 => (128, 64, 4),
            _ => (128, 64, 3),
        };
        stages * (self.tile_rows + columns) * depth * 2
    }

    /// Columns of the result that a block of the first and of the second product writes.
    fn out_columns(&self) -> [usize; 2] {
        let columns = self.hopper.unwrap_or(if self.tile_rows <= 32 { 64 } else { 128 });
        [columns / 2, columns]
    }

    /// The file and the defines of a product, `kind` 1 or 2.
    #[must_use]
    pub fn compilation(
        &self,
        kind: usize,
        (top_k, clamped): (usize, bool),
    ) -> (File, Vec<(&'static str, usize)>) {
        let mut defines = vec![("KIND", kind)];
        if kind == 1 {
            let clamped = usize::from(clamped);
            defines.extend([("TOP_K", top_k), ("ACT", clamped), ("INTERLEAVED", clamped)]);
        }
        match self.hopper {
            Some(columns) => {
                defines.push(("BN", columns));
                (File::MoeGemmHopper, defines)
            }
            None => {
                defines.push(("BM", self.tile_rows));
                (File::MoeGemm, defines)
            }
        }
    }
}

impl Products {
    fn new(parts: &Parts, key: &Key, tokens: usize) -> Result<Self, BackendError> {
        if key.clamped != key.interleaved {
            return Err(BackendError::Unsupported(
                "the CUDA kernels take clamped experts with gate and up in turns only".into(),
            ));
        }
        let (kernels, slots) = (&parts.kernels, key.slots(tokens));
        let hopper = kernels.gpu.capability == (9, 0);
        let variant = Variant::of(slots, key.experts, hopper);
        let used = key.experts.min(slots);
        let max_tiles = used + (slots - used) / variant.tile_rows;
        let (shared, columns) = (variant.shared(), [key.inter, key.hidden]);
        let threads = if variant.hopper.is_some() { 384 } else { 128 };
        let make = |kind: usize, name: &'static str| -> Result<(Function, Grid), BackendError> {
            let (file, defines) = variant.compilation(kind, (key.top_k, key.clamped));
            let function = kernels.get(file, &defines, name)?;
            kernels.allow_shared(function, shared, "a product of experts")?;
            let blocks = max_tiles * columns[kind - 1].div_ceil(variant.out_columns()[kind - 1]);
            let most = if variant.hopper.is_some() { kernels.gpu.multiprocessors as usize } else { blocks };
            Ok((function, Grid::new(blocks.min(most), threads).shared(shared)))
        };
        let names = match variant.hopper {
            Some(_) => ["moe_gemm1_wgmma", "moe_gemm2_wgmma"],
            None => ["moe_gemm1", "moe_gemm2"],
        };
        let (first, second) = (make(1, names[0])?, make(2, names[1])?);
        Ok(Self {
            functions: [first.0, second.0],
            grids: [first.1, second.1],
            tile_rows: variant.tile_rows,
            max_tiles,
        })
    }
}

impl Sizes {
    fn new(parts: &Parts, key: &Key, tokens: usize) -> Result<Self, BackendError> {
        let (kernels, slots) = (&parts.kernels, key.slots(tokens));
        if key.experts > 256 || key.top_k > 8 {
            let (experts, top_k) = (key.experts, key.top_k);
            return Err(BackendError::Unsupported(format!(
                "the CUDA kernels serve up to 256 experts and 8 a token, not {experts} and {top_k}"
            )));
        }
        let defines = [("EXPERTS", key.experts), ("TOP_K", key.top_k), ("ROUTE", key.route)];
        let few = tokens <= ROUTE_TOKENS;
        let name = if few { "moe_route_few" } else { "moe_route" };
        let align = (!few).then(|| kernels.get(File::MoeRoute, &defines, "moe_align")).transpose()?;
        let products = Products::new(parts, key, tokens)?;
        let buffer = |bytes: usize| {
            Buffer::new(&kernels.gpu, bytes, "what experts compute (--max-num-batched-tokens)")
        };
        Ok(Self {
            route: kernels.get(File::MoeRoute, &defines, name)?,
            align,
            combine: kernels.get(File::MoeRoute, &defines, "moe_combine")?,
            logits: buffer(tokens * key.experts * 2)?,
            ids: buffer(slots * 4)?,
            weights: buffer(slots * 4)?,
            counts: buffer(tokens.div_ceil(ROUTE_TOKENS) * key.experts * 4)?,
            slots: buffer(slots * 4)?,
            tiles: buffer(products.max_tiles * TILE_BYTES)?,
            middle: buffer(slots * key.inter * 2)?,
            results: buffer(slots * key.hidden * 2)?,
            products,
        })
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
        self.layers.insert(moe.index, Layer { offsets, replaced, experts: moe.experts });
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
        sizes.choose(parts, tokens, layer)?;
        sizes.multiply(parts, (x.address, moe, &key))?;
        let args = [
            Arg::Address(sizes.results.address()),
            Arg::Address(out),
            Arg::I32(tokens as i32),
            Arg::I32(key.hidden as i32),
        ];
        let grid = Grid::wide((key.hidden.div_ceil(1024), tokens.min(65_535)), 128);
        // SAFETY: (y, out, tokens, hidden) as in moe_route.cu.
        unsafe { parts.kernels.launch(sizes.combine, grid, &args) }
    }

    /// How many slots each expert of each layer had in the last run; none without experts.
    pub(super) fn loads(&self) -> Result<Option<Vec<Vec<u32>>>, BackendError> {
        if self.layers.is_empty() {
            return Ok(None);
        }
        let mut indices: Vec<&usize> = self.layers.keys().collect();
        indices.sort_unstable();
        let loads = |index: &usize| {
            let layer = &self.layers[index];
            let offsets: Vec<u32> = layer.offsets.read(0, layer.experts + 1)?;
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

impl Sizes {
    /// The choice of experts, and the slots sorted by them.
    fn choose(&self, parts: &Parts, tokens: usize, layer: &Layer) -> Result<(), BackendError> {
        let logits = layer.replaced.as_ref().unwrap_or(&self.logits).address();
        let [ids, weights, counts, slots, tiles] =
            [&self.ids, &self.weights, &self.counts, &self.slots, &self.tiles]
                .map(|buffer| Arg::Address(buffer.address()));
        let offsets = Arg::Address(layer.offsets.address());
        let (logits, no_bias, scale) = (Arg::Address(logits), Arg::Address(0), Arg::F32(1.0));
        let count = Arg::I32(tokens as i32);
        let [rows, most] = [self.products.tile_rows, self.products.max_tiles].map(|n| Arg::I32(n as i32));
        let Some(align) = self.align else {
            let args = [logits, no_bias, ids, weights, offsets, slots, tiles, count, rows, most, scale];
            // SAFETY: (logits, bias, ids, weights, offsets, slots, tiles, tokens, tile_rows, max_tiles, scale) as in moe_route.cu.
            return unsafe { parts.kernels.launch(self.route, Grid::new(1, ROUTE_THREADS), &args) };
        };
        let grid = Grid::new(tokens.div_ceil(ROUTE_TOKENS), ROUTE_THREADS);
        let args = [logits, no_bias, ids, weights, counts, count, scale];
        // SAFETY: (logits, bias, ids, weights, counts, tokens, scale) as in moe_route.cu.
        unsafe { parts.kernels.launch(self.route, grid, &args) }?;
        let args = [ids, counts, offsets, slots, tiles, count, rows, most];
        // SAFETY: (ids, counts, offsets, slots, tiles, tokens, tile_rows, max_tiles) as in moe_route.cu.
        unsafe { parts.kernels.launch(align, grid, &args) }
    }

    /// The two grouped products.
    fn multiply(&self, parts: &Parts, (x, moe, key): (u64, &Moe, &Key)) -> Result<(), BackendError> {
        let bias = |id: Option<WeightId>, len: usize| id.map_or(Ok(0), |id| parts.vector(id, len));
        let (alpha, limit) = match moe.activation {
            Activation::SiluMul => (1.0, 0.0),
            Activation::ClampedSwiglu { alpha, limit, .. } => (alpha, limit),
        };
        let [slots, weights, tiles, middle, results] =
            [&self.slots, &self.weights, &self.tiles, &self.middle, &self.results].map(Buffer::address);
        let address = |list: &[u64]| list.iter().copied().map(Arg::Address).collect::<Vec<_>>();
        let int = |n: usize| Arg::I32(n as i32);
        let w13 = parts.matrix(moe.w13, key.hidden)?;
        let b13 = bias(moe.w13_bias, key.experts * 2 * key.inter)?;
        let mut args = address(&[x, w13, b13, slots, tiles, middle]);
        args.extend([
            int(key.inter),
            int(key.hidden),
            int(self.products.max_tiles),
            Arg::F32(alpha),
            Arg::F32(limit),
        ]);
        let ([first, second], [first_grid, second_grid]) = (self.products.functions, self.products.grids);
        // SAFETY: (x, w13, b13, slots, tiles, mid, n, k, max_tiles, alpha, limit) as in moe_gemm.cu; the list is this step's.
        unsafe { parts.kernels.launch(first, first_grid, &args) }?;
        let w2 = parts.matrix(moe.w2, key.inter)?;
        let b2 = bias(moe.w2_bias, key.experts * key.hidden)?;
        let mut args = address(&[middle, w2, b2, slots, weights, tiles, results]);
        args.extend([int(key.hidden), int(key.inter), int(self.products.max_tiles)]);
        // SAFETY: (mid, w2, b2, slots, weights, tiles, y, n, k, max_tiles) as in moe_gemm.cu.
        unsafe { parts.kernels.launch(second, second_grid, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_rows_an_expert_take_larger_tiles() {
        let of = |slots, hopper| Variant::of(slots, 128, hopper);
        assert_eq!(of(8, true), Variant { tile_rows: 16, hopper: None });
        assert_eq!([256, 257, 512, 1024].map(|t| of(t * 8, true).tile_rows), [16, 32, 32, 64]);
        assert_eq!(of(8192 * 8, true), Variant { tile_rows: 128, hopper: Some(256) });
        assert_eq!(of(8192 * 8, false), Variant { tile_rows: 128, hopper: None });
    }

    #[test]
    fn shared_memory_is_what_the_kernels_lay_out() {
        let shared = |tile_rows, hopper| Variant { tile_rows, hopper }.shared();
        assert_eq!([16, 32, 64, 128].map(|rows| shared(rows, None)), [81_920, 73_728, 98_304, 98_304]);
        assert_eq!([shared(128, Some(256)), shared(128, Some(192))], [208_000, 175_232]);
    }
}
