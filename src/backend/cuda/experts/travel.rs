//! Tokens on their way between data-parallel ranks that share experts.

use super::Key;
use super::sizes::{ROUTE_THREADS, ROUTE_TOKENS, Sizes, WHAT, defines};
use crate::backend::cuda::collectives::Span;
use crate::backend::cuda::compile::File;
use crate::backend::cuda::device::Parts;
use crate::backend::cuda::kernels::{Arg, Function, Grid};
use crate::backend::cuda::memory::Buffer;
use crate::backend::{BackendError, Dtype, alone};
use crate::layout::Group;

/// This rank's own tokens, by address.
#[derive(Debug, Clone, Copy)]
pub(super) struct Own {
    pub tokens: usize,
    /// `[tokens, hidden]`
    pub x: u64,
    /// `[tokens, experts]`
    pub logits: u64,
    /// `[tokens, hidden]`
    pub out: u64,
}

/// What this rank's experts work on: the tokens of all data-parallel ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Here {
    /// `[tokens, hidden]`
    pub x: u64,
    /// `[tokens, experts]`; zero where the choice came with the tokens.
    pub logits: u64,
    /// `[tokens, hidden]`
    pub out: u64,
}

/// How tokens get to the experts.
pub(super) enum Travel {
    /// They are here.
    Stay,
    /// All go everywhere.
    Gather(Gather),
    /// Each goes to where its experts are.
    Send(Box<Send>),
}

/// Buffers of [`Travel::Gather`].
pub(super) struct Gather {
    /// `[all tokens, hidden]`, and later what the experts make of them.
    x: Buffer,
    /// `[all tokens, experts]`
    logits: Buffer,
}

/// Kernels and buffers of [`Travel::Send`]; a part a rank.
pub(super) struct Send {
    route: Function,
    place: Function,
    pack: Function,
    unpack: Function,
    /// `[own tokens, top_k]` this rank's choice, and its weights.
    ids: Buffer,
    weights: Buffer,
    /// What `moe_route` counts; nobody reads it.
    counts: Buffer,
    /// `[ranks, own tokens]`
    places: Buffer,
    /// `[ranks, own tokens, top_k]`
    sent_ids: Buffer,
    sent_weights: Buffer,
    /// `[ranks, own tokens, hidden]` what is sent, and later what comes back.
    sent: Buffer,
    /// The same, received, and later what the experts make of it.
    received: Buffer,
}

impl Travel {
    /// Makes room for so many tokens of each rank.
    pub(super) fn new(parts: &Parts, key: &Key, tokens: usize) -> Result<Self, BackendError> {
        let kernels = &parts.kernels;
        let buffer = |bytes: usize| {
            let buffer = Buffer::new(&kernels.gpu, bytes, WHAT)?;
            buffer.fill(0)?;
            Ok::<_, BackendError>(buffer)
        };
        if key.data == 1 {
            return Ok(Self::Stay);
        }
        if parts.collectives.is_none() {
            return Err(alone("a block of experts"));
        }
        let (all, slots) = (key.all_tokens(tokens), key.slots(tokens));
        let rows = all * key.hidden * 2;
        if !key.sends {
            return Ok(Self::Gather(Gather { x: buffer(rows)?, logits: buffer(all * key.experts * 2)? }));
        }
        let travel = |name| kernels.get(File::MoeTravel, &[("TOP_K", key.top_k)], name);
        Ok(Self::Send(Box::new(Send {
            route: kernels.get(File::MoeRoute, &defines(key, true), "moe_route")?,
            place: travel("moe_place")?,
            pack: travel("moe_pack")?,
            unpack: travel("moe_unpack")?,
            ids: buffer(tokens * key.top_k * 4)?,
            weights: buffer(tokens * key.top_k * 4)?,
            counts: buffer(tokens.div_ceil(ROUTE_TOKENS) * key.experts * 4)?,
            places: buffer(all * 4)?,
            sent_ids: buffer(slots * 4)?,
            sent_weights: buffer(slots * 4)?,
            sent: buffer(rows)?,
            received: buffer(rows)?,
        })))
    }

    /// Brings the tokens of all ranks here.
    pub(super) fn bring(
        &self,
        parts: &Parts,
        sizes: &Sizes,
        key: &Key,
        own: Own,
    ) -> Result<Here, BackendError> {
        match self {
            Self::Stay => Ok(Here { x: own.x, logits: own.logits, out: own.out }),
            Self::Gather(gather) => {
                let span = |address, width: usize| Span {
                    address,
                    count: own.tokens * width,
                    dtype: parts.gemm.dtype,
                };
                let (x, logits) = (gather.x.address(), gather.logits.address());
                parts.communicate("a block of experts", |collectives, gpu| {
                    collectives.all_gather(gpu, Group::Data, span(own.x, key.hidden), x)?;
                    collectives.all_gather(gpu, Group::Data, span(own.logits, key.experts), logits)
                })?;
                Ok(Here { x, logits, out: x })
            }
            Self::Send(send) => {
                send.pack(parts, key, own)?;
                send.exchange(parts, sizes, key, own)?;
                let x = send.received.address();
                Ok(Here { x, logits: 0, out: x })
            }
        }
    }

    /// Brings each rank the sum of what the experts made of its tokens.
    pub(super) fn take_back(&self, parts: &Parts, key: &Key, own: Own) -> Result<(), BackendError> {
        let dtype = parts.gemm.dtype;
        match self {
            Self::Stay => Ok(()),
            Self::Gather(gather) => {
                let mine = Span { address: own.out, count: own.tokens * key.hidden, dtype };
                parts.communicate("a block of experts", |collectives, gpu| {
                    collectives.reduce_scatter(gpu, Group::Data, gather.x.address(), mine)
                })
            }
            Self::Send(send) => {
                let count = key.all_tokens(own.tokens) * key.hidden;
                let results = Span { address: send.received.address(), count, dtype };
                parts.communicate("a block of experts", |collectives, gpu| {
                    collectives.all_to_all(gpu, Group::Expert, results, send.sent.address())
                })?;
                send.unpack(parts, key, own)
            }
        }
    }
}

impl Send {
    /// Chooses, and lays down the rows for each rank.
    fn pack(&self, parts: &Parts, key: &Key, own: Own) -> Result<(), BackendError> {
        let address = |buffer: &Buffer| Arg::Address(buffer.address());
        let int = |n: usize| Arg::I32(n as i32);
        let [ids, weights, counts, places] =
            [&self.ids, &self.weights, &self.counts, &self.places].map(address);
        let (kernels, tokens, hidden) = (&parts.kernels, int(own.tokens), int(key.hidden));
        let args = [Arg::Address(own.logits), Arg::Address(0), ids, weights, counts, tokens, Arg::F32(1.0)];
        let grid = Grid::new(own.tokens.div_ceil(ROUTE_TOKENS), ROUTE_THREADS);
        // SAFETY: (logits, bias, ids, weights, counts, tokens, scale) as in moe_route.cu.
        unsafe { kernels.launch(self.route, grid, &args) }?;
        let [sent_ids, sent_weights] = [&self.sent_ids, &self.sent_weights].map(address);
        let args = [ids, weights, places, sent_ids, sent_weights, tokens, int(key.local)];
        // SAFETY: (ids, weights, places, sent_ids, sent_weights, tokens, local) as in moe_travel.cu.
        unsafe { kernels.launch(self.place, Grid::new(key.data, 1024), &args) }?;
        let args = [Arg::Address(own.x), places, address(&self.sent), tokens, hidden];
        // SAFETY: (x, places, sent, tokens, hidden) as in moe_travel.cu.
        unsafe { kernels.launch(self.pack, Grid::wide((own.tokens, key.data), 128), &args) }
    }

    /// Sends the rows, and receives those of the others.
    fn exchange(&self, parts: &Parts, sizes: &Sizes, key: &Key, own: Own) -> Result<(), BackendError> {
        let (all, slots) = (key.all_tokens(own.tokens), key.slots(own.tokens));
        let span = |buffer: &Buffer, count, dtype| Span { address: buffer.address(), count, dtype };
        let x = span(&self.sent, all * key.hidden, parts.gemm.dtype);
        // Ids are only moved: four bytes each.
        let ids = span(&self.sent_ids, slots, Dtype::Float32);
        let weights = span(&self.sent_weights, slots, Dtype::Float32);
        parts.communicate("a block of experts", |collectives, gpu| {
            collectives.all_to_all(gpu, Group::Expert, x, self.received.address())?;
            collectives.all_to_all(gpu, Group::Expert, ids, sizes.ids.address())?;
            collectives.all_to_all(gpu, Group::Expert, weights, sizes.weights.address())
        })
    }

    /// Sums what came back.
    fn unpack(&self, parts: &Parts, key: &Key, own: Own) -> Result<(), BackendError> {
        let [back, places] = [&self.sent, &self.places].map(|buffer| Arg::Address(buffer.address()));
        let [tokens, hidden, ranks] = [own.tokens, key.hidden, key.data].map(|n| Arg::I32(n as i32));
        let args = [back, places, Arg::Address(own.out), tokens, hidden, ranks];
        let grid = Grid::wide((key.hidden.div_ceil(1024), own.tokens.min(65_535)), 128);
        // SAFETY: (back, places, out, tokens, hidden, ranks) as in moe_travel.cu.
        unsafe { parts.kernels.launch(self.unpack, grid, &args) }
    }
}
