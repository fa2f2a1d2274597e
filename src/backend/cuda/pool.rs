//! The KV pool: one allocation that all KV groups share, `[tensors, blocks, 2, block_size, kv_heads, head_dim]`.
//!
//! Blocks are disjoint over groups, so layer `i` of every group lives in tensor `i`.

use super::compile::File;
use super::kernels::{Arg, Grid, Kernels};
use super::memory::Buffer;
use crate::backend::{BackendError, KvInit, KvLayer, StepSpec, dummy};
use crate::batch::Batch;
use crate::units::Bytes;

/// All KV blocks.
pub(super) struct KvPool {
    pub buffer: Buffer,
    /// Blocks, the null block included.
    pub blocks: u32,
    /// Bytes of a block of one layer.
    pub page: usize,
    /// Tensor and group of each layer.
    layers: Vec<(usize, usize)>,
    /// Heads that are here of each layer's: elements of a token's row, of the whole row, and the first.
    rows: Vec<[usize; 3]>,
    zeros: Buffer,
    init: KvInit,
    seed: u64,
}

/// How much memory the pool may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    /// Bytes for KV.
    pub bytes: usize,
    /// Where the number comes from, for the error message.
    pub flag: &'static str,
}

impl KvPool {
    pub(super) fn new(
        kernels: &Kernels,
        spec: &StepSpec,
        budget: Budget,
        init: KvInit,
        seed: u64,
    ) -> Result<Self, BackendError> {
        let unsupported = |message: &str| BackendError::Unsupported(message.to_owned());
        let mut in_group = vec![0; spec.kv_groups.len()];
        let (mut layers, mut page) = (Vec::new(), None);
        for layer in &spec.kv_layers {
            let group =
                spec.kv_groups.get(layer.group).ok_or_else(|| unsupported("a KV layer without a group"))?;
            if ![16, 32, 64].contains(&group.block_size) {
                let message = format!("--block-size {}: CUDA takes 16, 32 or 64", group.block_size);
                return Err(BackendError::Unsupported(message));
            }
            let bytes = 2 * 2 * group.block_size as usize * layer.kv_heads * layer.head_dim;
            if *page.get_or_insert(bytes) != bytes {
                return Err(unsupported("KV layers with blocks of different sizes cannot share a pool"));
            }
            layers.push((in_group[layer.group], layer.group));
            in_group[layer.group] += 1;
        }
        let page = page.ok_or_else(|| unsupported("a model without KV layers"))?;
        let tensors = in_group.iter().max().copied().unwrap_or(0);
        // Kernels count blocks and slots of a table in 32 bits.
        let blocks = (budget.bytes / (tensors * page)).min(i32::MAX as usize / 64);
        if blocks < 2 {
            return Err(BackendError::NoRoom(format!(
                "the KV pool needs {} for the null block and one more, {} are left; raise {} or choose a smaller --model",
                Bytes(2 * (tensors * page) as u128),
                Bytes(budget.bytes as u128),
                budget.flag
            )));
        }
        let buffer = Buffer::new(&kernels.gpu, tensors * blocks * page, "the KV pool")?;
        let zeros = Buffer::new(&kernels.gpu, page, "an empty KV block")?;
        zeros.fill(0)?;
        let row = |layer: &KvLayer| {
            [layer.kv_heads, layer.all_heads, layer.first_head].map(|heads| heads * layer.head_dim)
        };
        let rows = spec.kv_layers.iter().map(row).collect();
        Ok(Self { buffer, blocks: blocks as u32, page, layers, rows, zeros, init, seed })
    }

    /// The group of a layer.
    pub(super) fn group(&self, layer: usize) -> usize {
        self.layers[layer].1
    }

    /// Where a layer's tensor begins.
    pub(super) fn layer(&self, layer: usize) -> u64 {
        self.buffer.address() + (self.layers[layer].0 * self.blocks as usize * self.page) as u64
    }

    /// The addresses of the given blocks (a list a group) in every layer.
    pub(super) fn pages(&self, blocks: &[Vec<u32>]) -> Vec<u64> {
        let of_layer = |layer: usize| {
            let base = self.layer(layer);
            blocks[self.group(layer)].iter().map(move |&block| base + u64::from(block) * self.page as u64)
        };
        (0..self.layers.len()).flat_map(of_layer).collect()
    }

    /// Gives the blocks of the batch's tables their initial contents; the null block of each tensor is filled too.
    pub(super) fn fill(&self, kernels: &Kernels, batch: &Batch) -> Result<(), BackendError> {
        let used: Vec<Vec<u32>> = batch
            .groups
            .iter()
            .map(|tables| {
                let mut blocks = tables.block_tables.clone();
                blocks.sort_unstable();
                blocks.dedup();
                blocks
            })
            .collect();
        match self.init {
            KvInit::Random => {
                used.iter().enumerate().try_for_each(|(g, blocks)| self.fill_random(kernels, g, blocks))?
            }
            KvInit::Zeros => {
                let segments =
                    self.pages(&used).into_iter().map(|page| [page, self.zeros.address()]).collect();
                Segments::new(kernels, segments, self.page)?.copy(kernels, Direction::Restore)?;
            }
        }
        kernels.gpu.synchronize()
    }

    fn fill_random(&self, kernels: &Kernels, group: usize, blocks: &[u32]) -> Result<(), BackendError> {
        let of_group: Vec<usize> =
            (0..self.layers.len()).filter(|layer| self.group(*layer) == group).collect();
        if of_group.is_empty() || blocks.is_empty() {
            return Ok(());
        }
        let bases: Vec<u64> = of_group.iter().map(|layer| self.layer(*layer)).collect();
        let ids: Vec<u32> = of_group.iter().map(|layer| *layer as u32).collect();
        let upload = |what| (Buffer::of(&kernels.gpu, &bases, what), Buffer::of(&kernels.gpu, &ids, what));
        let ((bases, ids), list) = (upload("KV layers"), Buffer::of(&kernels.gpu, blocks, "KV blocks")?);
        let (bases, ids) = (bases?, ids?);
        // Layers of a group have equal heads, as the pool's one page size asks.
        let row = self.rows[of_group[0]];
        let is_part = row[0] != row[1];
        let name = if is_part { "fill_kv_part" } else { "fill_kv" };
        let function = kernels.get(File::Fill, &[], name)?;
        let mut args = vec![
            Arg::Address(bases.address()),
            Arg::Address(ids.address()),
            Arg::Address(list.address()),
            Arg::U32((self.page / 2) as u32),
            Arg::U64(self.seed),
        ];
        if is_part {
            args.extend(row.map(|n| Arg::U32(n as u32)));
        }
        kernels.no_overlap();
        // SAFETY: (layer_bases, layer_ids, blocks, block_elems, seed, and of a part its row, the whole row and the first element) as in
        // fill.cu; every block is within the pool, as the batch was checked.
        unsafe { kernels.launch(function, Grid::wide((blocks.len(), of_group.len()), 256), &args) }?;
        kernels.gpu.synchronize() // before the lists are freed
    }
}

/// Which way segments are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the pool.
    Save,
    /// To the pool.
    Restore,
}

/// Pairs of addresses, (pool, saved), of equally many bytes each, copied by one kernel.
pub(super) struct Segments {
    list: Buffer,
    count: usize,
    bytes: usize,
    function: super::kernels::Function,
}

impl Segments {
    pub(super) fn new(
        kernels: &Kernels,
        segments: Vec<[u64; 2]>,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        let list = Buffer::of(&kernels.gpu, &segments, "a list of KV blocks")?;
        let function = kernels.get(File::State, &[], "copy_segments")?;
        Ok(Self { list, count: segments.len(), bytes, function })
    }

    pub(super) fn copy(&self, kernels: &Kernels, direction: Direction) -> Result<(), BackendError> {
        if self.count == 0 {
            return Ok(());
        }
        let restore = i32::from(direction == Direction::Restore);
        let args = [Arg::Address(self.list.address()), Arg::U32(self.bytes as u32), Arg::I32(restore)];
        let grid = Grid::wide((self.count, self.bytes.div_ceil(16384)), 256);
        // SAFETY: (segments, bytes, restore) as in state.cu; all segments are blocks of living buffers.
        unsafe { kernels.launch(self.function, grid, &args) }
    }
}

/// The stream of values that the host's generator would use; here so that the two stay side by side.
pub(super) fn weight_stream(seed: u64, id: usize) -> u64 {
    dummy::stream(seed, id as u64)
}
