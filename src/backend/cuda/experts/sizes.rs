//! Kernels and buffers of blocks of one size: the choice of experts, the slots sorted by them, and the sum of what they compute.

use super::Key;
use super::products::Products;
use super::travel::{Own, Travel};
use crate::backend::cuda::compile::File;
use crate::backend::cuda::device::Parts;
use crate::backend::cuda::kernels::{Arg, Function, Grid, Kernels};
use crate::backend::cuda::memory::Buffer;
use crate::backend::{BackendError, Moe};

/// Tokens of a block of `moe_route`; up to so many, one block does all of the routing.
pub(super) const ROUTE_TOKENS: usize = 64;
/// Threads of a block of the routing kernels.
pub(super) const ROUTE_THREADS: u32 = 512;
/// Bytes of an entry of the list of tiles.
const TILE_BYTES: usize = 16;

/// What a block of one size needs. Tokens here are those of all data-parallel ranks, except for `logits`.
pub(super) struct Sizes {
    lists: Lists,
    pub products: Products,
    combine: Function,
    travel: Travel,
    /// `[own tokens, experts]`
    pub logits: Buffer,
    /// `[tokens, top_k]`; numbers among the experts that are here, or -1, where not all of them are.
    pub ids: Buffer,
    /// `[tokens, top_k]`
    pub weights: Buffer,
    counts: Buffer,
    pub slots: Buffer,
    pub tiles: Buffer,
    pub middle: Buffer,
    pub results: Buffer,
    /// Tokens.
    tokens: usize,
}

/// How slots are sorted by expert.
enum Lists {
    /// By the kernel that chooses, in one block.
    Few(Function),
    /// By another after the choice.
    Many { route: Function, align: Function },
    /// The choice came with the tokens.
    Given { count: Function, align: Function },
}

/// The defines of moe_route.cu for a block.
pub(super) fn defines(key: &Key, all_experts: bool) -> Vec<(&'static str, usize)> {
    let mut defines = vec![("EXPERTS", key.experts), ("TOP_K", key.top_k), ("ROUTE", key.route)];
    if !all_experts {
        defines.push(("EP", 1));
    }
    defines
}

impl Lists {
    fn new(kernels: &Kernels, key: &Key, tokens: usize) -> Result<Self, BackendError> {
        let defines = defines(key, key.local == key.experts);
        let get = |name| kernels.get(File::MoeRoute, &defines, name);
        Ok(match (key.sends, tokens <= ROUTE_TOKENS) {
            (true, _) => Self::Given { count: get("moe_count")?, align: get("moe_align")? },
            (false, true) => Self::Few(get("moe_route_few")?),
            (false, false) => Self::Many { route: get("moe_route")?, align: get("moe_align")? },
        })
    }
}

impl Sizes {
    /// For so many tokens of each data-parallel rank.
    pub(super) fn new(parts: &Parts, key: &Key, own_tokens: usize) -> Result<Self, BackendError> {
        let kernels = &parts.kernels;
        if key.experts > 256 || key.top_k > 8 {
            let (experts, top_k) = (key.experts, key.top_k);
            return Err(BackendError::Unsupported(format!(
                "the CUDA kernels serve up to 256 experts and 8 a token, not {experts} and {top_k}"
            )));
        }
        let (tokens, slots) = (key.all_tokens(own_tokens), key.slots(own_tokens));
        let products = Products::new(parts, key, own_tokens)?;
        let defines = defines(key, key.local == key.experts);
        let buffer = |bytes: usize| Buffer::new(&kernels.gpu, bytes, WHAT);
        Ok(Self {
            lists: Lists::new(kernels, key, tokens)?,
            combine: kernels.get(File::MoeRoute, &defines, "moe_combine")?,
            travel: Travel::new(parts, key, own_tokens)?,
            logits: buffer(own_tokens * key.experts * 2)?,
            ids: buffer(slots * 4)?,
            weights: buffer(slots * 4)?,
            counts: buffer(tokens.div_ceil(ROUTE_TOKENS) * key.experts * 4)?,
            slots: buffer(slots * 4)?,
            tiles: buffer(products.max_tiles * TILE_BYTES)?,
            middle: buffer(key.most_slots(own_tokens) * key.inter * 2)?,
            results: buffer(slots * key.hidden * 2)?,
            products,
            tokens,
        })
    }

    /// All of a block after its gate: tokens come here, the experts compute, and the results go back.
    pub(super) fn launch(
        &self,
        parts: &Parts,
        key: &Key,
        moe: &Moe,
        offsets: u64,
        own: Own,
    ) -> Result<(), BackendError> {
        let here = self.travel.bring(parts, self, key, own)?;
        self.choose(parts, key, here.logits, offsets)?;
        self.multiply(parts, (here.x, moe, key))?;
        self.combine(parts, key, here.out)?;
        self.travel.take_back(parts, key, own)
    }

    /// The choice of experts, and the slots sorted by them.
    fn choose(&self, parts: &Parts, key: &Key, logits: u64, offsets: u64) -> Result<(), BackendError> {
        let address = |buffer: &Buffer| Arg::Address(buffer.address());
        let [ids, weights, counts, slots, tiles] =
            [&self.ids, &self.weights, &self.counts, &self.slots, &self.tiles].map(address);
        let (logits, no_bias, scale) = (Arg::Address(logits), Arg::Address(0), Arg::F32(1.0));
        let int = |n: usize| Arg::I32(n as i32);
        let (count, offsets) = (int(self.tokens), Arg::Address(offsets));
        let [rows, most] = [self.products.tile_rows, self.products.max_tiles].map(int);
        let here = [int(key.first), int(key.local)];
        let here = if key.local < key.experts { &here[..] } else { &[] };
        let grid = Grid::new(self.tokens.div_ceil(ROUTE_TOKENS), ROUTE_THREADS);
        let align = match self.lists {
            Lists::Few(route) => {
                let args = [logits, no_bias, ids, weights, offsets, slots, tiles, count, rows, most, scale];
                let args = [&args, here].concat();
                // SAFETY: (logits, bias, ids, weights, offsets, slots, tiles, tokens, tile_rows, max_tiles, scale, and with EP the first
                // expert and their number) as in moe_route.cu.
                return unsafe { parts.kernels.launch(route, Grid::new(1, ROUTE_THREADS), &args) };
            }
            Lists::Many { route, align } => {
                let args = [&[logits, no_bias, ids, weights, counts, count, scale], here].concat();
                // SAFETY: (logits, bias, ids, weights, counts, tokens, scale, and with EP as above) as in moe_route.cu.
                unsafe { parts.kernels.launch(route, grid, &args) }?;
                align
            }
            Lists::Given { count: function, align } => {
                // SAFETY: (ids, counts, tokens) as in moe_route.cu.
                unsafe { parts.kernels.launch(function, grid, &[ids, counts, count]) }?;
                align
            }
        };
        let args = [ids, counts, offsets, slots, tiles, count, rows, most];
        // SAFETY: (ids, counts, offsets, slots, tiles, tokens, tile_rows, max_tiles) as in moe_route.cu.
        unsafe { parts.kernels.launch(align, grid, &args) }
    }

    /// The sum of each token's results.
    fn combine(&self, parts: &Parts, key: &Key, out: u64) -> Result<(), BackendError> {
        let results = Arg::Address(self.results.address());
        let rest = [Arg::Address(out), Arg::I32(self.tokens as i32), Arg::I32(key.hidden as i32)];
        let ids = [Arg::Address(self.ids.address())];
        let ids = if key.local < key.experts { &ids[..] } else { &[] };
        let args = [&[results], ids, &rest].concat();
        let grid = Grid::wide((key.hidden.div_ceil(1024), self.tokens.min(65_535)), 128);
        // SAFETY: (y, with EP the ids, out, tokens, hidden) as in moe_route.cu.
        unsafe { parts.kernels.launch(self.combine, grid, &args) }
    }
}

/// What the buffers are for, where there is no room for them.
pub(super) const WHAT: &str = "what experts compute (--max-num-batched-tokens)";
