//! Attention of one tile: some queries of one request and the heads that share one key head, over a range of positions.
//!
//! The scores of 64 positions at a time go through a running softmax (Milakov and Gimelshein, "Online normalizer
//! calculation for softmax", 2018), so no row of scores is ever whole.

#![allow(clippy::needless_range_loop, reason = "indices run over several arrays of registers at a time")]

use super::dots::{Rows, Target, dots_body};
use super::isa::{exp, fma, vectorised};
use super::lanes::{Lanes, One};
use super::shared::Shared;

/// Positions whose scores are held at a time.
pub(super) const CHUNK: usize = 64;

/// From this many rows on, the keys are transposed first and scores computed like a product.
const TRANSPOSE_ROWS: usize = 17;

/// What a tile reads.
#[derive(Clone, Copy)]
pub(super) struct TileInput<'a> {
    /// `[tokens, width]` query, key and value heads.
    pub qkv: &'a [f32],
    /// Columns of `qkv`.
    pub width: usize,
    /// First query token of the tile.
    pub token: usize,
    /// Query tokens of the tile.
    pub tokens: usize,
    /// Position of the first query token.
    pub position: usize,
    /// First query head, and how many.
    pub head: usize,
    /// Query heads that share the key head.
    pub heads: usize,
    /// `[blocks, 2, block_size, kv_heads, head_dim]` of this layer.
    pub kv: &'a [f32],
    /// Block of each `block_size` positions of the request.
    pub table: &'a [u32],
    /// Positions a block.
    pub block_size: usize,
    /// Key heads of the layer.
    pub kv_heads: usize,
    /// The key head.
    pub kv_head: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// First position and the one after the last.
    pub range: (usize, usize),
    /// A query attends to this many last positions.
    pub window: usize,
    /// Factor on the scores.
    pub scale: f32,
}

/// Working memory of one thread; after a tile, its unnormalised result.
pub(super) struct Scratch {
    q: Vec<f32>,
    keys: Vec<f32>,
    scores: Vec<f32>,
    /// `[rows, head_dim]` values weighted by e^(score − max); a row is a query token's head.
    pub acc: Vec<f32>,
    /// `[rows]` greatest score.
    pub max: Vec<f32>,
    /// `[rows]` sum of the weights.
    pub sum: Vec<f32>,
}

impl Scratch {
    pub(super) fn new(rows: usize, head_dim: usize) -> Self {
        let zeros = |len: usize| vec![0.0; len];
        Self {
            q: zeros(rows * head_dim),
            keys: zeros(head_dim * CHUNK),
            scores: zeros(rows * CHUNK),
            acc: zeros(rows * head_dim),
            max: zeros(rows),
            sum: zeros(rows),
        }
    }
}

vectorised! {
    /// Leaves the tile's result in `scratch`.
    fn attend(input: TileInput<'_>, scratch: &mut Scratch) = attend_body
}

#[inline(always)]
fn attend_body<V: Lanes, const FMA: bool>(input: TileInput<'_>, scratch: &mut Scratch) {
    let (rows, dim) = (input.tokens * input.heads, input.head_dim);
    for r in 0..rows {
        let from = (input.token + r / input.heads) * input.width + (input.head + r % input.heads) * dim;
        for (q, x) in scratch.q[r * dim..][..dim].iter_mut().zip(&input.qkv[from..][..dim]) {
            *q = x * input.scale;
        }
    }
    scratch.acc[..rows * dim].fill(0.0);
    scratch.max[..rows].fill(f32::NEG_INFINITY);
    scratch.sum[..rows].fill(0.0);
    let mut start = input.range.0;
    while start < input.range.1 {
        let len = CHUNK.min(input.range.1 - start);
        score::<V, FMA>(&input, scratch, rows, start, len);
        mask(&input, scratch, rows, start, len);
        for r in 0..rows {
            soften::<V, FMA>(scratch, r, dim);
        }
        for (at, block, offset, count) in segments(&input, start, len) {
            let values = &input.kv[row_start(&input, block, 1, offset)..];
            let weights = &scratch.scores[at..];
            multiply::<V, FMA>(
                (rows, count, dim),
                (weights, CHUNK),
                (values, input.kv_heads * dim),
                &mut scratch.acc,
                dim,
            );
        }
        start += len;
    }
}

/// The runs of positions within one block: offset in the chunk, block, offset in the block, length.
#[inline(always)]
fn segments<'a>(
    input: &TileInput<'a>,
    start: usize,
    len: usize,
) -> impl Iterator<Item = (usize, usize, usize, usize)> + use<'a> {
    let (table, size) = (input.table, input.block_size);
    let mut at = 0;
    std::iter::from_fn(move || {
        (at < len).then(|| {
            let position = start + at;
            let (block, offset) = (table[position / size] as usize, position % size);
            let count = (size - offset).min(len - at);
            at += count;
            (at - count, block, offset, count)
        })
    })
}

/// Where a position's key (`side` 0) or value (1) of the tile's head lies.
#[inline(always)]
fn row_start(input: &TileInput<'_>, block: usize, side: usize, offset: usize) -> usize {
    (((block * 2 + side) * input.block_size + offset) * input.kv_heads + input.kv_head) * input.head_dim
}

/// Fills `scores[rows, CHUNK]` for `len` positions from `start`.
#[inline(always)]
fn score<V: Lanes, const FMA: bool>(
    input: &TileInput<'_>,
    scratch: &mut Scratch,
    rows: usize,
    start: usize,
    len: usize,
) {
    let (dim, stride) = (input.head_dim, input.kv_heads * input.head_dim);
    if rows < TRANSPOSE_ROWS {
        let q = Rows { data: &scratch.q, stride: dim, count: rows };
        let out = Shared::new(&mut scratch.scores);
        for (at, block, offset, count) in segments(input, start, len) {
            let keys = Rows { data: &input.kv[row_start(input, block, 0, offset)..], stride, count };
            dots_body::<V, FMA>(q, keys, dim, None, Target { out, first: at, stride: CHUNK });
        }
        return;
    }
    for (at, block, offset, count) in segments(input, start, len) {
        let base = row_start(input, block, 0, offset);
        for j in 0..count {
            let key = &input.kv[base + j * stride..][..dim];
            for (column, k) in scratch.keys.chunks_exact_mut(CHUNK).zip(key) {
                column[at + j] = *k;
            }
        }
    }
    scratch.scores[..rows * CHUNK].fill(0.0);
    // Columns past `len` hold keys of an earlier chunk: `mask` drops their scores.
    multiply::<V, FMA>(
        (rows, dim, CHUNK),
        (&scratch.q, dim),
        (&scratch.keys, CHUNK),
        &mut scratch.scores,
        CHUNK,
    );
}

/// Drops the scores of positions after the query, before its window, and past `len`.
#[inline(always)]
fn mask(input: &TileInput<'_>, scratch: &mut Scratch, rows: usize, start: usize, len: usize) {
    for r in 0..rows {
        let position = input.position + r / input.heads;
        let scores = &mut scratch.scores[r * CHUNK..][..CHUNK];
        let end = (position + 1).saturating_sub(start).min(len);
        let begin = (position + 1).saturating_sub(input.window).saturating_sub(start).min(end);
        scores[..begin].fill(f32::NEG_INFINITY);
        scores[end..].fill(f32::NEG_INFINITY);
    }
}

/// Turns a row of scores into weights relative to the greatest score so far, and rescales what was summed before.
#[inline(always)]
fn soften<V: Lanes, const FMA: bool>(scratch: &mut Scratch, row: usize, dim: usize) {
    let scores = &mut scratch.scores[row * CHUNK..][..CHUNK];
    let mut lanes = V::splat(f32::NEG_INFINITY);
    for chunk in scores.chunks_exact(V::N) {
        lanes = lanes.max(V::load(chunk));
    }
    let (old, new) = (scratch.max[row], lanes.greatest());
    let max = if new > old { new } else { old };
    // Before the first position that the query attends to everything is -∞, and any finite number serves as its maximum.
    let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
    for score in scores.iter_mut() {
        *score = exp::<FMA>(*score - base);
    }
    let mut sums = V::splat(0.0);
    for chunk in scores.chunks_exact(V::N) {
        sums = sums.add(V::load(chunk));
    }
    scratch.max[row] = max;
    let rescale = exp::<FMA>(old - base);
    scratch.sum[row] = fma::<FMA>(scratch.sum[row], rescale, sums.sum());
    if rescale != 1.0 {
        for a in &mut scratch.acc[row * dim..][..dim] {
            *a *= rescale;
        }
    }
}

/// `c[m, n] += a[m, k] · b[k, n]` for sizes `(m, k, n)`; each operand with its row stride.
#[inline(always)]
fn multiply<V: Lanes, const FMA: bool>(
    (rows, inner, cols): (usize, usize, usize),
    a: (&[f32], usize),
    b: (&[f32], usize),
    c: &mut [f32],
    c_stride: usize,
) {
    let mut m = 0;
    while m < rows {
        let step = if m + 4 <= rows { 4 } else { 1 };
        let mut n = 0;
        while n < cols {
            let at = (m, n);
            let left = cols - n;
            n += match step {
                4 if left >= 2 * V::N => block::<V, FMA, 4, 2>(at, inner, a, b, c, c_stride),
                4 if left >= V::N => block::<V, FMA, 4, 1>(at, inner, a, b, c, c_stride),
                4 => block::<One<FMA>, FMA, 4, 1>(at, inner, a, b, c, c_stride),
                _ if left >= 4 * V::N => block::<V, FMA, 1, 4>(at, inner, a, b, c, c_stride),
                _ if left >= V::N => block::<V, FMA, 1, 1>(at, inner, a, b, c, c_stride),
                _ => block::<One<FMA>, FMA, 1, 1>(at, inner, a, b, c, c_stride),
            };
        }
        m += step;
    }
}

/// `M` rows by `N` vectors of columns of [`multiply`]; returns the columns.
#[inline(always)]
fn block<V: Lanes, const FMA: bool, const M: usize, const N: usize>(
    (m, n): (usize, usize),
    inner: usize,
    (a, a_stride): (&[f32], usize),
    (b, b_stride): (&[f32], usize),
    c: &mut [f32],
    c_stride: usize,
) -> usize {
    let mut acc = [[V::splat(0.0); N]; M];
    let mut a_rows: [&[f32]; M] = [&[]; M];
    for i in 0..M {
        a_rows[i] = &a[(m + i) * a_stride..][..inner];
    }
    for k in 0..inner {
        let row = &b[k * b_stride + n..][..N * V::N];
        let mut columns = [V::splat(0.0); N];
        for j in 0..N {
            columns[j] = V::load(&row[j * V::N..]);
        }
        for i in 0..M {
            let factor = V::splat(a_rows[i][k]);
            for j in 0..N {
                acc[i][j] = factor.fma(columns[j], acc[i][j]);
            }
        }
    }
    for i in 0..M {
        let row = &mut c[(m + i) * c_stride + n..][..N * V::N];
        for j in 0..N {
            let part = &mut row[j * V::N..][..V::N];
            V::load(part).add(acc[i][j]).store(part);
        }
    }
    N * V::N
}
