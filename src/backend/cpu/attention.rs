//! Paged attention over a batch: cut into tiles of like work, run on all threads, and put together in a fixed order.
//!
//! The cut depends on the batch alone, never on the number of threads or on timing, so that a step repeats bit for bit.

use std::sync::Mutex;

use rayon::prelude::*;

use super::isa::{Isa, exp};
use super::shared::Shared;
use super::tile::{CHUNK, Scratch, TileInput, attend};
use crate::backend::Attention;
use crate::batch::Batch;

/// Query rows (token × head) of a tile, unless one token has more.
const ROWS: usize = 64;

/// A batch is cut into about this many tasks, if each still has [`MIN_SPAN`] positions.
const TASKS: usize = 64;

/// Positions below which a range is not cut further.
const MIN_SPAN: usize = 2 * CHUNK;

/// One piece of work.
#[derive(Debug, Clone, Copy)]
struct Task {
    tile: usize,
    range: (usize, usize),
    /// Where its partial result goes, if its tile has several tasks.
    partial: Option<usize>,
}

/// Some queries of one request with one key head.
#[derive(Debug, Clone, Copy)]
struct Tile {
    request: usize,
    token: usize,
    tokens: usize,
    position: usize,
    kv_head: usize,
    /// Its partial results: offset of the first, and how many. None if one task does it all.
    partials: Option<(usize, usize)>,
}

/// How the attention of one kind of layer is cut for one batch.
pub(super) struct Plan {
    key: (usize, usize, usize, usize, Option<u32>),
    tiles: Vec<Tile>,
    tasks: Vec<Task>,
    partials: Vec<f32>,
    scratch: Vec<Mutex<Scratch>>,
}

/// What layers must have in common to share a plan.
fn key(group: usize, a: &Attention) -> (usize, usize, usize, usize, Option<u32>) {
    (group, a.q_heads, a.kv_heads, a.head_dim, a.window)
}

impl Plan {
    /// Whether the plan serves this layer of this KV group.
    pub(super) fn fits(&self, group: usize, attention: &Attention) -> bool {
        self.key == key(group, attention)
    }

    /// Cuts the batch; `threads` is how many will run it.
    pub(super) fn new(batch: &Batch, group: usize, attention: &Attention, threads: usize) -> Self {
        let heads = attention.q_heads / attention.kv_heads;
        let rows = ROWS.max(heads);
        let mut tiles = Vec::new();
        for request in 0..batch.num_requests() {
            let (first, end) = (batch.query_start[request] as usize, batch.query_start[request + 1] as usize);
            for token in (first..end).step_by(rows / heads) {
                let tokens = (rows / heads).min(end - token);
                let position = batch.positions[token] as usize;
                tiles.extend((0..attention.kv_heads).map(|kv_head| Tile {
                    request,
                    token,
                    tokens,
                    position,
                    kv_head,
                    partials: None,
                }));
            }
        }
        let span = |tile: &Tile| {
            let window = attention.window.map_or(usize::MAX, |w| w as usize);
            ((tile.position + 1).saturating_sub(window), tile.position + tile.tokens)
        };
        let work = |tile: &Tile| {
            let (begin, end) = span(tile);
            (end - begin) * tile.tokens
        };
        let share = tiles.iter().map(work).sum::<usize>().div_ceil(TASKS);
        let mut tasks = Vec::new();
        let mut used = 0;
        for (index, tile) in tiles.iter_mut().enumerate() {
            let (begin, end) = span(tile);
            let step = (share / tile.tokens).max(MIN_SPAN).next_multiple_of(CHUNK);
            let count = (end - begin).div_ceil(step);
            let size = tile.tokens * heads * (attention.head_dim + 2);
            if count > 1 {
                tile.partials = Some((used, count));
            }
            for i in 0..count {
                let range = (begin + i * step, end.min(begin + (i + 1) * step));
                let partial = (count > 1).then(|| used + i * size);
                tasks.push(Task { tile: index, range, partial });
            }
            used += if count > 1 { count * size } else { 0 };
        }
        let scratch = || Mutex::new(Scratch::new(rows, attention.head_dim));
        Self {
            key: key(group, attention),
            tiles,
            tasks,
            partials: vec![0.0; used],
            scratch: (0..threads).map(|_| scratch()).collect(),
        }
    }

    /// Runs it: `qkv [tokens, width]` over the layer's `kv` to `out [tokens, q_heads * head_dim]`; `sinks [q_heads]`.
    #[allow(clippy::too_many_arguments, reason = "all of it is the layer's own")]
    pub(super) fn run(
        &mut self,
        isa: Isa,
        batch: &Batch,
        attention: &Attention,
        qkv: &[f32],
        kv: &[f32],
        sinks: Option<&[f32]>,
        out: &mut [f32],
    ) {
        let (group, ..) = self.key;
        let dim = attention.head_dim;
        let heads = attention.q_heads / attention.kv_heads;
        let tables = &batch.groups[group];
        let out = Shared::new(out);
        let partials = Shared::new(&mut self.partials);
        let tiles = &self.tiles;
        self.tasks.par_iter().with_max_len(1).for_each(|task| {
            let tile = &tiles[task.tile];
            let input = TileInput {
                qkv,
                width: (attention.q_heads + 2 * attention.kv_heads) * dim,
                token: tile.token,
                tokens: tile.tokens,
                position: tile.position,
                head: tile.kv_head * heads,
                heads,
                kv,
                table: &tables.block_tables[tile.request * tables.stride..][..tables.stride],
                block_size: tables.group.block_size as usize,
                kv_heads: attention.kv_heads,
                kv_head: tile.kv_head,
                head_dim: dim,
                range: task.range,
                window: attention.window.map_or(usize::MAX, |w| w as usize),
                scale: attention.scale,
            };
            let thread = rayon::current_thread_index().unwrap_or(0) % self.scratch.len();
            let Ok(mut scratch) = self.scratch[thread].lock() else { return };
            attend(isa, input, &mut scratch);
            let rows = tile.tokens * heads;
            match task.partial {
                None => finish(tile, attention, &scratch, sinks, &out),
                Some(at) => {
                    // SAFETY: each task has its own range of the partial results.
                    let part = unsafe { partials.part(at, rows * (dim + 2)) };
                    let (acc, rest) = part.split_at_mut(rows * dim);
                    acc.copy_from_slice(&scratch.acc[..rows * dim]);
                    rest[..rows].copy_from_slice(&scratch.max[..rows]);
                    rest[rows..].copy_from_slice(&scratch.sum[..rows]);
                }
            }
        });
        let partials = &self.partials;
        tiles.par_iter().filter(|tile| tile.partials.is_some()).for_each(|tile| {
            combine(tile, attention, partials, sinks, &out);
        });
    }
}

/// The output elements of a tile's row.
fn output_row<'a>(tile: &Tile, attention: &Attention, out: &Shared<'a>, row: usize) -> &'a mut [f32] {
    let (dim, heads) = (attention.head_dim, attention.q_heads / attention.kv_heads);
    let (token, head) = (tile.token + row / heads, tile.kv_head * heads + row % heads);
    // SAFETY: every token and head is in one tile, and a tile is finished by one task.
    unsafe { out.part((token * attention.q_heads + head) * dim, dim) }
}

/// The sink of a tile's row, or a logit that adds nothing.
fn sink(tile: &Tile, attention: &Attention, sinks: Option<&[f32]>, row: usize) -> f32 {
    let heads = attention.q_heads / attention.kv_heads;
    sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[tile.kv_head * heads + row % heads])
}

/// Writes the result of a tile that one task did.
fn finish(tile: &Tile, attention: &Attention, scratch: &Scratch, sinks: Option<&[f32]>, out: &Shared<'_>) {
    let dim = attention.head_dim;
    for row in 0..tile.tokens * (attention.q_heads / attention.kv_heads) {
        let factor = match sink(tile, attention, sinks, row) {
            f32::NEG_INFINITY => 1.0 / scratch.sum[row],
            sink => {
                let max = scratch.max[row].max(sink);
                let scale = exp::<false>(scratch.max[row] - max);
                scale / (scale * scratch.sum[row] + exp::<false>(sink - max))
            }
        };
        let acc = &scratch.acc[row * dim..][..dim];
        for (o, a) in output_row(tile, attention, out, row).iter_mut().zip(acc) {
            *o = a * factor;
        }
    }
}

/// Puts together the partial results of a tile, in order of position.
fn combine(tile: &Tile, attention: &Attention, partials: &[f32], sinks: Option<&[f32]>, out: &Shared<'_>) {
    let Some((at, count)) = tile.partials else { return };
    let dim = attention.head_dim;
    let rows = tile.tokens * (attention.q_heads / attention.kv_heads);
    let parts = || partials[at..].chunks_exact(rows * (dim + 2)).take(count);
    for row in 0..rows {
        let output = output_row(tile, attention, out, row);
        output.fill(0.0);
        let sink = sink(tile, attention, sinks, row);
        let max = parts().map(|part| part[rows * dim + row]).fold(sink, f32::max);
        let mut total = exp::<false>(sink - max);
        for part in parts() {
            let weight = exp::<false>(part[rows * dim + row] - max);
            total += weight * part[rows * (dim + 1) + row];
            for (o, a) in output.iter_mut().zip(&part[row * dim..]) {
                *o += weight * a;
            }
        }
        output.iter_mut().for_each(|o| *o /= total);
    }
}
