//! The launches of one kind of attention layer over one batch: split-KV for requests of few queries, tiles for the rest.

use super::compile::File;
use super::device::Parts;
use super::kernels::{Arg, Function, Grid};
use super::memory::Buffer;
use super::plan::{self, Heads};
use super::step::{Step, Tables};
use crate::backend::{Act, Attention, BackendError};
use crate::batch::Batch;

/// A prefill of so few rows (queries × heads of a group) leaves most of a prefill block idle.
const FEW_ROWS: usize = 64;

/// Layers with the same key share their work lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct AttentionKey {
    heads: Heads,
    head_dim: usize,
    /// The KV group.
    pub group: usize,
    /// Whether the softmax has a sink.
    sinks: bool,
}

impl AttentionKey {
    pub(super) fn of(parts: &Parts, attention: &Attention) -> Self {
        let Attention { q_heads, kv_heads, head_dim, window, .. } = *attention;
        let heads = Heads { kv_heads, group: q_heads / kv_heads.max(1), window };
        Self { heads, head_dim, group: parts.kv.group(attention.kv_layer), sinks: attention.sinks.is_some() }
    }
}

/// The launches of a layer.
pub(super) struct AttentionPlan {
    decode: Option<Decode>,
    prefill: Option<Prefill>,
}

struct Decode {
    function: Function,
    grid: Grid,
    items: Buffer,
    block_items: Buffer,
    part_o: Buffer,
    part_ml: Buffer,
    combine: Option<(Function, Grid, Buffer)>,
}

struct Prefill {
    function: Function,
    grid: Grid,
    items: Buffer,
    /// Of the persistent kernel.
    block_items: Option<Buffer>,
}

/// Bytes of a row of a tile of head vectors, as common.cuh lays it out.
fn row_bytes(head_dim: usize) -> usize {
    let units = head_dim.next_multiple_of(16) / 8;
    16 * if units.is_multiple_of(8) { units } else { units | 1 }
}

/// Dynamic shared memory of `decode_attention`, as decode.cu says.
#[must_use]
pub fn decode_shared(head_dim: usize, m_tiles: usize) -> usize {
    let stages = match head_dim {
        _ if head_dim > 192 || head_dim * m_tiles > 192 => 2,
        65.. => 3,
        _ => 4,
    };
    let (rows, warps) = (16 * m_tiles, if head_dim > 128 { 2 } else { 4 });
    let queries = if m_tiles * head_dim.div_ceil(16) <= 8 { 0 } else { rows * row_bytes(head_dim) };
    warps * stages * 32 * row_bytes(head_dim) + queries + warps * rows * 8
}

/// Rows of a tile of `prefill_attention`.
fn prefill_rows(head_dim: usize) -> usize {
    if head_dim <= 128 { 128 } else { 64 }
}

/// Dynamic shared memory of `prefill_attention`, as prefill.cu says.
#[must_use]
pub fn prefill_shared(head_dim: usize) -> usize {
    let columns = if head_dim <= 128 { 64 } else { 32 };
    (prefill_rows(head_dim) + 4 * columns) * row_bytes(head_dim)
}

/// Dynamic shared memory of `prefill_wgmma`, as prefill_hopper.cu says.
#[must_use]
pub fn prefill_hopper_shared(head_dim: usize) -> usize {
    2048 + (2 * HOPPER_ROWS + 4 * HOPPER_ROWS) * head_dim * 2
}

/// Rows of a tile of `prefill_wgmma`.
const HOPPER_ROWS: usize = 128;

/// What the attention kernels of a layer are compiled for.
fn attention_defines(key: &AttentionKey, tables: &Tables) -> Vec<(&'static str, usize)> {
    let mut defines =
        vec![("HEAD_DIM", key.head_dim), ("GROUP", key.heads.group), ("BLOCK_SIZE", tables.block_size)];
    if key.sinks {
        defines.push(("SINKS", 1));
    }
    defines
}

impl AttentionPlan {
    pub(super) fn new(
        parts: &Parts,
        tables: &Tables,
        batch: &Batch,
        key: AttentionKey,
    ) -> Result<Self, BackendError> {
        let rows = |r: usize| (batch.query_start[r + 1] - batch.query_start[r]) as usize * key.heads.group;
        let (few, many): (Vec<usize>, Vec<usize>) =
            (0..batch.num_requests()).partition(|&r| r < batch.num_decodes || rows(r) <= FEW_ROWS);
        let most_rows = few.iter().map(|&r| rows(r)).max().unwrap_or(0);
        let m_tiles = if most_rows > 16 && key.head_dim <= 128 { 2 } else { 1 };
        let decode = |few: &[usize]| Decode::new(parts, tables, batch, key, few, m_tiles);
        let prefill = |many: &[usize]| Prefill::new(parts, tables, batch, key, many);
        Ok(Self {
            decode: (!few.is_empty()).then(|| decode(&few)).transpose()?,
            prefill: (!many.is_empty()).then(|| prefill(&many)).transpose()?,
        })
    }

    pub(super) fn launch(
        &self,
        parts: &Parts,
        step: &Step,
        attention: &Attention,
        qkv: Act,
        out: Act,
    ) -> Result<(), BackendError> {
        let tables = &step.groups[parts.kv.group(attention.kv_layer)];
        let width = attention.q_heads * attention.head_dim;
        let q_stride = width + 2 * attention.kv_heads * attention.head_dim;
        let inputs = [
            parts.act_of(qkv, q_stride)?,
            parts.kv.layer(attention.kv_layer),
            tables.block_tables.address(),
            step.query_start.address(),
            step.kv_lens.address(),
        ];
        let sizes = [
            Arg::I32(q_stride as i32),
            Arg::I32(tables.stride as i32),
            Arg::I32(attention.kv_heads as i32),
            Arg::I32(attention.window.map_or(0, |window| i32::try_from(window).unwrap_or(0))),
            Arg::F32(attention.scale),
        ];
        let out = parts.act_of(out, width)?;
        let sinks = attention.sinks.map(|id| parts.vector(id, attention.q_heads)).transpose()?;
        let sinks = sinks.map(Arg::Address);
        if let Some(decode) = &self.decode {
            decode.launch(parts, step, (&inputs, &sizes, out), (attention.kv_heads, sinks))?;
        }
        if let Some(prefill) = &self.prefill {
            let lists =
                [Some(prefill.items.address()), prefill.block_items.as_ref().map(Buffer::address), Some(out)];
            let addresses = inputs.iter().copied().chain(lists.into_iter().flatten()).map(Arg::Address);
            let args: Vec<Arg> = addresses.chain(sizes).chain(sinks).collect();
            // SAFETY: (qkv, kv, block_tables, query_start, kv_lens, items, [block_items,] out, q_stride, table_stride, kv_heads,
            // window, scale[, sinks]) as in prefill.cu and prefill_hopper.cu; the items are those of this batch.
            unsafe { parts.kernels.launch(prefill.function, prefill.grid, &args) }?;
        }
        Ok(())
    }
}

impl Decode {
    fn new(
        parts: &Parts,
        tables: &Tables,
        batch: &Batch,
        key: AttentionKey,
        requests: &[usize],
        m_tiles: usize,
    ) -> Result<Self, BackendError> {
        let (kernels, head_dim, rows) = (&parts.kernels, key.head_dim, 16 * m_tiles);
        let mut defines = attention_defines(&key, tables);
        defines.push(("M_TILES", m_tiles));
        let function = kernels.get(File::Decode, &defines, "decode_attention")?;
        let shared = decode_shared(head_dim, m_tiles);
        kernels.allow_shared(function, shared, "decode attention")?;
        let grid = Grid::new(1, if head_dim > 128 { 64 } else { 128 }).shared(shared);
        let plan = plan::decode(batch, requests, key.heads, rows, kernels.resident(function, grid)?);
        let gpu = &kernels.gpu;
        let combine = if plan.combines.is_empty() {
            None
        } else {
            let function = kernels.get(File::Decode, &defines, "attention_combine")?;
            let list = Buffer::of(gpu, &plan.combines, "the attention's work list")?;
            Some((function, Grid::wide((plan.combines.len(), rows), 128), list))
        };
        Ok(Self {
            function,
            grid: Grid { blocks: (plan.block_items.len() as u32 - 1, 1), ..grid },
            items: Buffer::of(gpu, &plan.items, "the attention's work list")?,
            block_items: Buffer::of(gpu, &plan.block_items, "the attention's work list")?,
            part_o: Buffer::new(gpu, plan.slots * rows * head_dim * 4, "parts of split attention")?,
            part_ml: Buffer::new(gpu, plan.slots * rows * 8, "parts of split attention")?,
            combine,
        })
    }

    fn launch(
        &self,
        parts: &Parts,
        step: &Step,
        (inputs, sizes, out): (&[u64; 5], &[Arg; 5], u64),
        (kv_heads, sinks): (usize, Option<Arg>),
    ) -> Result<(), BackendError> {
        let (part_o, part_ml) = (self.part_o.address(), self.part_ml.address());
        let lists = [self.items.address(), self.block_items.address(), out, part_o, part_ml];
        let addresses = inputs.iter().copied().chain(lists).map(Arg::Address);
        let args: Vec<Arg> = addresses.chain(*sizes).chain(sinks).collect();
        // SAFETY: (qkv, kv, block_tables, query_start, kv_lens, items, block_items, out, part_o, part_ml, q_stride, table_stride,
        // kv_heads, window, scale[, sinks]) as in decode.cu; the lists are those of this batch, the parts as many as the plan has slots.
        unsafe { parts.kernels.launch(self.function, self.grid, &args) }?;
        let Some((function, grid, list)) = &self.combine else { return Ok(()) };
        let addresses = [part_o, part_ml, step.query_start.address(), list.address(), out];
        let args: Vec<Arg> =
            addresses.into_iter().map(Arg::Address).chain([Arg::I32(kv_heads as i32)]).chain(sinks).collect();
        // SAFETY: (part_o, part_ml, query_start, combines, out, kv_heads[, sinks]) as in decode.cu.
        unsafe { parts.kernels.launch(*function, *grid, &args) }
    }
}

impl Prefill {
    fn new(
        parts: &Parts,
        tables: &Tables,
        batch: &Batch,
        key: AttentionKey,
        requests: &[usize],
    ) -> Result<Self, BackendError> {
        let (kernels, head_dim) = (&parts.kernels, key.head_dim);
        let defines = attention_defines(&key, tables);
        if kernels.gpu.capability == (9, 0) && [64, 128].contains(&head_dim) {
            let function = kernels.get(File::PrefillHopper, &defines, "prefill_wgmma")?;
            let shared = prefill_hopper_shared(head_dim);
            kernels.allow_shared(function, shared, "prefill attention")?;
            let blocks = kernels.gpu.multiprocessors as usize;
            let (items, starts) = plan::prefill_shares(batch, requests, key.heads, HOPPER_ROWS, blocks);
            let grid = Grid::new(starts.len() - 1, 384).shared(shared);
            let items = Buffer::of(&kernels.gpu, &items, "the attention's work list")?;
            let starts = Buffer::of(&kernels.gpu, &starts, "the attention's work list")?;
            return Ok(Self { function, grid, items, block_items: Some(starts) });
        }
        let function = kernels.get(File::Prefill, &defines, "prefill_attention")?;
        let shared = prefill_shared(head_dim);
        kernels.allow_shared(function, shared, "prefill attention")?;
        let items = plan::prefill(batch, requests, key.heads, prefill_rows(head_dim));
        let grid = Grid::new(items.len(), 128).shared(shared);
        let items = Buffer::of(&kernels.gpu, &items, "the attention's work list")?;
        Ok(Self { function, grid, items, block_items: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_what_the_kernels_lay_out() {
        assert_eq!(decode_shared(128, 1), 4 * 3 * 32 * 256 + 4 * 16 * 8);
        assert_eq!(decode_shared(16, 2), 4 * 4 * 32 * 48 + 4 * 32 * 8);
        assert_eq!(decode_shared(256, 1), 2 * 2 * 32 * 512 + 16 * 512 + 2 * 16 * 8);
        assert_eq!(prefill_shared(128), (128 + 256) * 256);
    }
}
