//! The operations between products: embedding, norms, rotary embedding with the KV write, gated activation.

use rayon::prelude::*;

use super::isa::{Isa, exp, fma, vectorised};
use super::lanes::Lanes;
use super::shared::Shared;

/// Elements below which a second thread costs more than it saves: tens of microseconds of work.
const SERIAL: usize = 128 * 1024;

/// Rows a task for rows of `width` elements.
fn rows_a_task(width: usize) -> usize {
    (SERIAL / width.max(1)).max(1)
}

/// `out[t] = table[ids[t] - first]`; zeros for ids whose rows the table does not have.
pub(super) fn gather(table: &[f32], first: usize, ids: &[u32], width: usize, out: &mut [f32]) {
    let rows = table.len() / width;
    out.par_chunks_mut(width).with_min_len(rows_a_task(width)).zip(ids).for_each(|(row, &id)| {
        match (id as usize).checked_sub(first).filter(|at| *at < rows) {
            Some(at) => row.copy_from_slice(&table[at * width..][..width]),
            None => row.fill(0.0),
        }
    });
}

/// `residual += delta`, then `out = rmsnorm(residual) * weight`, row by row.
pub(super) fn add_norm(
    isa: Isa,
    delta: Option<&[f32]>,
    residual: &mut [f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let width = weight.len();
    let chunk = rows_a_task(width) * width;
    residual.par_chunks_mut(chunk).zip(out.par_chunks_mut(chunk)).enumerate().for_each(|(i, (r, o))| {
        let delta = delta.map(|delta| &delta[i * chunk..][..r.len()]);
        add_norm_rows(isa, delta, r, weight, eps, o);
    });
}

vectorised! {
    fn add_norm_rows(
        delta: Option<&[f32]>,
        residual: &mut [f32],
        weight: &[f32],
        eps: f32,
        out: &mut [f32],
    ) = add_norm_body
}

#[inline(always)]
fn add_norm_body<V: Lanes, const FMA: bool>(
    delta: Option<&[f32]>,
    residual: &mut [f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let width = weight.len();
    if let Some(delta) = delta {
        for (r, d) in residual.iter_mut().zip(delta) {
            *r += d;
        }
    }
    for (row, out) in residual.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let factor = inverse_rms::<V, FMA>(row, eps);
        for ((o, x), w) in out.iter_mut().zip(row).zip(weight) {
            *o = x * factor * w;
        }
    }
}

/// `1 / sqrt(mean(row²) + eps)`
#[inline(always)]
fn inverse_rms<V: Lanes, const FMA: bool>(row: &[f32], eps: f32) -> f32 {
    let mut lanes = V::splat(0.0);
    let mut chunks = row.chunks_exact(V::N);
    for chunk in &mut chunks {
        let x = V::load(chunk);
        lanes = x.fma(x, lanes);
    }
    let total = chunks.remainder().iter().fold(lanes.sum(), |total, x| fma::<FMA>(*x, *x, total));
    1.0 / (total / row.len() as f32 + eps).sqrt()
}

/// `out = silu(gate) * up`, gate and up being the halves of each row of `gate_up`, `width` wide each.
pub(super) fn silu_mul(isa: Isa, gate_up: &[f32], width: usize, out: &mut [f32]) {
    let rows = rows_a_task(width);
    out.par_chunks_mut(rows * width).zip(gate_up.par_chunks(rows * 2 * width)).for_each(|(out, gate_up)| {
        silu_rows(isa, gate_up, width, out);
    });
}

vectorised! {
    fn silu_rows(gate_up: &[f32], width: usize, out: &mut [f32]) = silu_body
}

#[inline(always)]
fn silu_body<V: Lanes, const FMA: bool>(gate_up: &[f32], width: usize, out: &mut [f32]) {
    for (out, row) in out.chunks_exact_mut(width).zip(gate_up.chunks_exact(2 * width)) {
        let (gate, up) = row.split_at(width);
        for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
            *o = g / (1.0 + exp::<FMA>(-g)) * u;
        }
    }
}

/// `out = (up + 1) * gate * sigmoid(alpha * gate)`, gate at most `limit`, up within plus or minus it; gate and up are in turns
/// or the halves of each row.
pub(super) fn clamped_swiglu(
    isa: Isa,
    gate_up: &[f32],
    width: usize,
    (limit, alpha, interleaved): (f32, f32, bool),
    out: &mut [f32],
) {
    let rows = rows_a_task(width);
    out.par_chunks_mut(rows * width).zip(gate_up.par_chunks(rows * 2 * width)).for_each(|(out, gate_up)| {
        clamped_rows(isa, gate_up, width, limit, alpha, interleaved, out);
    });
}

vectorised! {
    fn clamped_rows(
        gate_up: &[f32],
        width: usize,
        limit: f32,
        alpha: f32,
        interleaved: bool,
        out: &mut [f32],
    ) = clamped_body
}

#[inline(always)]
fn clamped_body<V: Lanes, const FMA: bool>(
    gate_up: &[f32],
    width: usize,
    limit: f32,
    alpha: f32,
    interleaved: bool,
    out: &mut [f32],
) {
    let value = |gate: f32, up: f32| {
        // NaN stays NaN, as with torch's clamp.
        let gate = if gate > limit { limit } else { gate };
        let up = up.clamp(-limit, limit);
        (up + 1.0) * (gate / (1.0 + exp::<FMA>(-alpha * gate)))
    };
    for (out, row) in out.chunks_exact_mut(width).zip(gate_up.chunks_exact(2 * width)) {
        if interleaved {
            for (o, pair) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *o = value(pair[0], pair[1]);
            }
        } else {
            let (gate, up) = row.split_at(width);
            for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
                *o = value(*g, *u);
            }
        }
    }
}

/// Everything [`rotate_and_write`] needs besides the heads themselves.
#[derive(Clone, Copy)]
pub(super) struct Heads<'a> {
    /// Query heads.
    pub q_heads: usize,
    /// Key heads, and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Scale of the query heads' norm.
    pub q_norm: Option<&'a [f32]>,
    /// Scale of the key heads' norm.
    pub k_norm: Option<&'a [f32]>,
    /// Epsilon of both.
    pub eps: f32,
    /// `[tokens, head_dim]`: cosines, then sines, of each token's angles.
    pub angles: &'a [f32],
    /// `[tokens]` slots, all different and all inside `kv`.
    pub slots: &'a [i64],
    /// Tokens a block.
    pub block_size: usize,
    /// Rounds a value to the type of the KV cache, if that is not float32.
    pub round: Option<fn(f32) -> f32>,
}

/// Normalises and rotates the query and key heads of `qkv` in place and writes keys and values to their slots of
/// `kv [blocks, 2, block_size, kv_heads, head_dim]`.
pub(super) fn rotate_and_write(isa: Isa, heads: Heads<'_>, qkv: &mut [f32], kv: &mut [f32]) {
    let width = (heads.q_heads + 2 * heads.kv_heads) * heads.head_dim;
    let rows = rows_a_task(width);
    let kv = Shared::new(kv);
    qkv.par_chunks_mut(rows * width).enumerate().for_each(|(i, qkv)| {
        rotate_rows(isa, heads, i * rows, qkv, kv);
    });
}

vectorised! {
    fn rotate_rows(heads: Heads<'_>, first: usize, qkv: &mut [f32], kv: Shared<'_>) = rotate_body
}

#[inline(always)]
fn rotate_body<V: Lanes, const FMA: bool>(heads: Heads<'_>, first: usize, qkv: &mut [f32], kv: Shared<'_>) {
    let (dim, kv_width) = (heads.head_dim, heads.kv_heads * heads.head_dim);
    let width = heads.q_heads * dim + 2 * kv_width;
    for (i, row) in qkv.chunks_exact_mut(width).enumerate() {
        let token = first + i;
        let (cos, sin) = heads.angles[token * dim..][..dim].split_at(dim / 2);
        for (h, head) in row.chunks_exact_mut(dim).take(heads.q_heads + heads.kv_heads).enumerate() {
            let norm = if h < heads.q_heads { heads.q_norm } else { heads.k_norm };
            if let Some(norm) = norm {
                let factor = inverse_rms::<V, FMA>(head, heads.eps);
                for (x, w) in head.iter_mut().zip(norm) {
                    *x = *x * factor * w;
                }
            }
            let (low, high) = head.split_at_mut(dim / 2);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
        let slot = heads.slots[token] as usize;
        let (block, offset) = (slot / heads.block_size, slot % heads.block_size);
        for (side, source) in row[heads.q_heads * dim..].chunks_exact(kv_width).enumerate() {
            let at = ((block * 2 + side) * heads.block_size + offset) * kv_width;
            // SAFETY: the slots of a batch are all different (`CpuDevice::capture` checks), so no two tokens meet.
            let target = unsafe { kv.part(at, kv_width) };
            target.copy_from_slice(source);
            if let Some(round) = heads.round {
                target.iter_mut().for_each(|t| *t = round(*t));
            }
        }
    }
}

/// `[tokens, head_dim]` of cosines, then sines, for `positions`. The angle is the float32 product, as elsewhere.
pub(super) fn angles(rope: &crate::backend::Rope, positions: &[u32], out: &mut [f32]) {
    let half = rope.inv_freq.len();
    if half == 0 {
        return;
    }
    out.par_chunks_mut(2 * half).with_min_len(64).zip(positions).for_each(|(row, &position)| {
        let (cos, sin) = row.split_at_mut(half);
        for ((c, s), f) in cos.iter_mut().zip(sin).zip(&rope.inv_freq) {
            let (sine, cosine) = f64::from(position as f32 * f).sin_cos();
            (*c, *s) = (cosine as f32 * rope.factor, sine as f32 * rope.factor);
        }
    });
}
