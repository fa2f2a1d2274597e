//! The KV pool: one allocation of blocks for all KV groups, of which only touched blocks take memory.

use rayon::prelude::*;

use super::memory::Buffer;
use super::round::Rounding;
use super::shared::Shared;
use crate::backend::{BackendError, KvInit, KvLayer, StepSpec, dummy};
use crate::batch::Batch;
use crate::units::Bytes;

/// The pool. Layer `i` of each group lives in tensor `i`, `[blocks, 2, block_size, kv_heads, head_dim]`.
pub(super) struct KvPool {
    buffer: Buffer,
    /// Blocks, the null block included.
    pub blocks: u32,
    /// Elements of a block of one layer.
    page: usize,
    /// Tensor and group of each KV layer.
    layers: Vec<(usize, usize)>,
    /// The same layers as the model has them.
    specs: Vec<KvLayer>,
    init: KvInit,
    seed: u64,
    rounding: Rounding,
}

/// Blocks copied away, to be put back.
#[derive(Default)]
pub(super) struct Saved {
    /// KV layer and block of each page of `data`.
    pages: Vec<(usize, u32)>,
    data: Vec<f32>,
}

/// Elements of a block of the layer.
fn page_of(spec: &StepSpec, layer: &KvLayer) -> Result<usize, BackendError> {
    let group = spec.kv_groups.get(layer.group);
    let group = group.ok_or_else(|| BackendError::Device(format!("no KV group {}", layer.group)))?;
    let page = (group.block_size as usize)
        .checked_mul(2 * layer.kv_heads)
        .and_then(|rows| rows.checked_mul(layer.head_dim));
    page.filter(|&page| page > 0)
        .ok_or_else(|| BackendError::NoRoom(format!("KV blocks of {} tokens", group.block_size)))
}

impl KvPool {
    /// As many blocks as `budget` holds.
    pub(super) fn new(
        spec: &StepSpec,
        budget: Bytes,
        init: KvInit,
        seed: u64,
        rounding: Rounding,
    ) -> Result<Self, BackendError> {
        let mut in_group = vec![0; spec.kv_groups.len()];
        let mut layers = Vec::new();
        let mut page = None;
        for layer in &spec.kv_layers {
            let this = page_of(spec, layer)?;
            if *page.get_or_insert(this) != this {
                let message = "KV layers with blocks of different sizes cannot share the CPU's pool";
                return Err(BackendError::Unsupported(message.into()));
            }
            layers.push((in_group[layer.group], layer.group));
            in_group[layer.group] += 1;
        }
        let page = page.ok_or_else(|| BackendError::Unsupported("a model without KV layers".into()))?;
        let tensors = in_group.iter().max().copied().unwrap_or(0);
        let block_bytes = (tensors * page) as u128 * size_of::<f32>() as u128;
        let blocks = u32::try_from(budget.0 / block_bytes).unwrap_or(u32::MAX);
        if blocks < 2 {
            return Err(BackendError::NoRoom(format!(
                "a KV pool of {budget} holds no block: the null block and one more need {}; raise --kv-cache-memory-bytes",
                Bytes(2 * block_bytes)
            )));
        }
        let buffer = Buffer::zeroed(tensors * blocks as usize * page, "the KV pool")?;
        let specs = spec.kv_layers.clone();
        Ok(Self { buffer, blocks, page, layers, specs, init, seed, rounding })
    }

    fn range(&self, layer: usize) -> std::ops::Range<usize> {
        let len = self.blocks as usize * self.page;
        self.layers[layer].0 * len..(self.layers[layer].0 + 1) * len
    }

    /// The KV group of a layer.
    pub(super) fn group(&self, layer: usize) -> usize {
        self.layers[layer].1
    }

    /// `[blocks, 2, block_size, kv_heads, head_dim]` of a layer.
    pub(super) fn layer(&self, layer: usize) -> &[f32] {
        &self.buffer[self.range(layer)]
    }

    /// As [`KvPool::layer`].
    pub(super) fn layer_mut(&mut self, layer: usize) -> &mut [f32] {
        let range = self.range(layer);
        &mut self.buffer[range]
    }

    /// Gives each block of the batch's tables its initial contents.
    pub(super) fn fill(&mut self, batch: &Batch) {
        let (init, seed, page, rounding) = (self.init, self.seed, self.page, self.rounding);
        let used: Vec<Vec<u32>> =
            batch.groups.iter().map(|tables| distinct(tables.block_tables.iter().copied())).collect();
        for layer in 0..self.layers.len() {
            let (group, spec) = (self.group(layer), self.specs[layer]);
            let row = spec.kv_heads * spec.head_dim;
            let tensor = Shared::new(self.layer_mut(layer));
            used[group].par_iter().for_each(|&block| {
                // SAFETY: the blocks of the list are all different.
                let values = unsafe { tensor.part(block as usize * page, page) };
                let stream = dummy::kv_stream(seed, layer as u32, block);
                match init {
                    KvInit::Zeros => values.fill(0.0),
                    KvInit::Random => {
                        for (i, values) in values.chunks_exact_mut(row).enumerate() {
                            let first = (i * spec.all_heads + spec.first_head) * spec.head_dim;
                            for (i, value) in values.iter_mut().enumerate() {
                                *value = rounding.round(dummy::uniform(stream, (first + i) as u64));
                            }
                        }
                    }
                }
            });
        }
    }

    /// Copies away the last ⌈scheduled / block⌉ + 2 blocks of each request.
    pub(super) fn save(&self, batch: &Batch) -> Saved {
        let mut saved = Saved::default();
        let written = batch.snapshot_blocks(0);
        for layer in 0..self.layers.len() {
            let tensor = self.layer(layer);
            for &block in &written[self.group(layer)] {
                saved.pages.push((layer, block));
                saved.data.extend_from_slice(&tensor[block as usize * self.page..][..self.page]);
            }
        }
        saved
    }

    /// Puts back what [`KvPool::save`] took.
    pub(super) fn put_back(&mut self, saved: &Saved) {
        for (&(layer, block), data) in saved.pages.iter().zip(saved.data.chunks_exact(self.page)) {
            let page = self.page;
            self.layer_mut(layer)[block as usize * page..][..page].copy_from_slice(data);
        }
    }
}

impl Saved {
    /// How much was copied.
    pub(super) fn bytes(&self) -> Bytes {
        Bytes(size_of_val(self.data.as_slice()) as u128)
    }
}

/// The blocks without repetition and without the null block.
fn distinct(blocks: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut blocks: Vec<u32> = blocks.filter(|&block| block != 0).collect();
    blocks.sort_unstable();
    blocks.dedup();
    blocks
}
