//! A block of experts: the rows of each expert are gathered, go through its two products, and are summed in slot order.
//!
//! A slot is one of the `top_k` choices of a token: slot `t * top_k + j` is the `j`th of token `t`. Tokens are this rank's own or,
//! where several data-parallel ranks share the experts, those that [`super::travel`] brought here; slots of other ranks' experts
//! are passed over.

use rayon::prelude::*;

use super::choice::choose;
use super::elementwise;
use super::isa::Isa;
use super::linear::{self, Segment};
use super::memory;
use super::travel::Travel;
use crate::backend::{Activation, BackendError, Communicator, Moe, alone};
use crate::units::Bytes;

/// Tokens a task of the choice and of the sum.
pub(super) const TOKENS: usize = 64;

/// The row of a slot whose expert another rank has.
const NOWHERE: usize = usize::MAX;

/// The weights of one block.
pub(super) struct Weights<'a> {
    pub gate: &'a [f32],
    pub gate_bias: Option<&'a [f32]>,
    pub w13: &'a [f32],
    pub w13_bias: Option<&'a [f32]>,
    pub w2: &'a [f32],
    pub w2_bias: Option<&'a [f32]>,
}

/// One block, and what it runs on.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    pub isa: Isa,
    pub moe: &'a Moe,
    pub weights: &'a Weights<'a>,
    /// `[tokens, experts]` takes the place of the gate's logits.
    pub replaced: Option<&'a [f32]>,
    pub communicator: Option<&'a dyn Communicator>,
}

/// Working memory of the blocks of a step, and what their experts did.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[tokens, experts]` of this rank's tokens.
    logits: Vec<f32>,
    /// `[slots]` expert of each slot, of all tokens that are here.
    pub chosen: Vec<u32>,
    /// `[slots]` its weight.
    pub weights: Vec<f32>,
    /// `[slots]` the row of each slot, rows being sorted by expert.
    rows: Vec<usize>,
    /// `[rows, hidden]` inputs by row, then, after the second product, results by row.
    hidden: Vec<f32>,
    /// `[rows, 2 * inter]`
    gate_up: Vec<f32>,
    /// `[rows, inter]`
    gated: Vec<f32>,
    /// `[MoE layers][local experts]` rows that each expert computed in the last run.
    pub loads: Vec<Vec<u32>>,
    /// What travels between ranks.
    travel: Travel,
}

impl Scratch {
    /// Makes room for a block of experts. Fails if memory is short.
    pub(super) fn reserve(&mut self, tokens: usize, hidden: usize, moe: &Moe) -> Result<(), BackendError> {
        let (rows, slots) = (moe.most_slots(tokens), moe.data * tokens * moe.top_k);
        let needed = |have: usize, want: usize| want.saturating_sub(have) as u128 * 4;
        let bytes = needed(self.hidden.len(), rows * hidden)
            + needed(self.gate_up.len(), rows * 2 * moe.inter)
            + needed(self.gated.len(), rows * moe.inter)
            + Travel::bytes(tokens, hidden, moe);
        let advice = |_| "lower the case's query lengths or --max-num-batched-tokens".to_owned();
        memory::require(Bytes(bytes), &format!("the experts' rows of {tokens} query tokens"), advice)?;
        let grow = |buffer: &mut Vec<f32>, len: usize| buffer.resize(buffer.len().max(len), 0.0);
        grow(&mut self.logits, tokens * moe.experts);
        grow(&mut self.weights, slots);
        grow(&mut self.hidden, rows * hidden);
        grow(&mut self.gate_up, rows * 2 * moe.inter);
        grow(&mut self.gated, rows * moe.inter);
        self.chosen.resize(self.chosen.len().max(slots), 0);
        self.rows.resize(self.rows.len().max(slots), 0);
        if self.loads.len() <= moe.index {
            self.loads.resize(moe.index + 1, Vec::new());
        }
        self.loads[moe.index].resize(moe.local, 0);
        self.travel.reserve(tokens, hidden, moe);
        Ok(())
    }

    /// `out [tokens, hidden]` from `x [tokens, hidden]`. [`Scratch::reserve`] has made room. Fails if a rank is lost.
    pub(super) fn run(&mut self, block: Block<'_>, x: &[f32], out: &mut [f32]) -> Result<(), BackendError> {
        let Block { isa, moe, weights, replaced, communicator } = block;
        let hidden = weights.gate.len() / moe.experts;
        let tokens = x.len() / hidden;
        let logits = &mut self.logits[..tokens * moe.experts];
        linear::linear(isa, x, weights.gate, hidden, weights.gate_bias, logits);
        if let Some(replaced) = replaced {
            logits.copy_from_slice(replaced);
        }
        if moe.data == 1 {
            self.choose(moe, tokens, None);
            self.compute(block, x, out);
            return Ok(());
        }
        let communicator = communicator.ok_or_else(|| alone("a block of experts"))?;
        let mut travel = std::mem::take(&mut self.travel);
        let travelled = if moe.is_all_to_all() {
            self.choose(moe, tokens, None);
            travel.all_to_all(communicator, self, block, (x, out))
        } else {
            travel.gather(communicator, self, block, (x, out))
        };
        self.travel = travel;
        travelled
    }

    /// This rank's logits.
    pub(super) fn logits(&self, moe: &Moe, tokens: usize) -> &[f32] {
        &self.logits[..tokens * moe.experts]
    }

    /// Chooses for so many tokens, whose logits are this rank's or others.
    pub(super) fn choose(&mut self, moe: &Moe, tokens: usize, logits: Option<&[f32]>) {
        let logits = logits.unwrap_or_else(|| &self.logits[..tokens * moe.experts]);
        let slots = tokens * moe.top_k;
        choose(moe, logits, &mut self.chosen[..slots], &mut self.weights[..slots]);
    }

    /// What the local experts make of the tokens whose choice is made, into `out`.
    pub(super) fn compute(&mut self, block: Block<'_>, x: &[f32], out: &mut [f32]) {
        let Block { isa, moe, weights, .. } = block;
        let hidden = weights.gate.len() / moe.experts;
        let (slots, k) = (x.len() / hidden * moe.top_k, moe.top_k);
        let segments = self.group(moe, slots);
        let Some(last) = segments.last() else { return out.fill(0.0) };
        let count = last.first + last.rows;
        let rows = &self.rows[..slots];
        gather(x, hidden, rows, k, &mut self.hidden[..count * hidden]);
        let gate_up = &mut self.gate_up[..count * 2 * moe.inter];
        let hidden_rows = &self.hidden[..count * hidden];
        linear::grouped(isa, &segments, hidden_rows, weights.w13, hidden, weights.w13_bias, gate_up);
        let gated = &mut self.gated[..count * moe.inter];
        activate(isa, moe, gate_up, gated);
        let results = &mut self.hidden[..count * hidden];
        linear::grouped(isa, &segments, gated, weights.w2, moe.inter, weights.w2_bias, results);
        sum(results, hidden, rows, &self.weights[..slots], k, out);
    }

    /// Sorts the slots of local experts by expert, those of one expert by slot; returns the experts that have any.
    fn group(&mut self, moe: &Moe, slots: usize) -> Vec<Segment> {
        let loads = &mut self.loads[moe.index];
        loads.fill(0);
        for local in self.chosen[..slots].iter().filter_map(|&expert| moe.local_expert(expert as usize)) {
            loads[local] += 1;
        }
        let mut first = 0;
        let mut next = Vec::with_capacity(loads.len());
        let mut segments = Vec::new();
        for (matrix, &load) in loads.iter().enumerate() {
            next.push(first);
            if load > 0 {
                segments.push(Segment { matrix, first, rows: load as usize });
            }
            first += load as usize;
        }
        for (row, &expert) in self.rows[..slots].iter_mut().zip(&self.chosen) {
            *row = NOWHERE;
            if let Some(local) = moe.local_expert(expert as usize) {
                *row = next[local];
                next[local] += 1;
            }
        }
        segments
    }
}

/// Copies each slot's row of `x` to its place.
fn gather(x: &[f32], hidden: usize, rows: &[usize], k: usize, out: &mut [f32]) {
    let out = super::shared::Shared::new(out);
    rows.par_chunks(TOKENS * k).enumerate().for_each(|(task, rows)| {
        for (i, &row) in rows.iter().enumerate().filter(|(_, row)| **row != NOWHERE) {
            // SAFETY: the rows are all different, so each part belongs to one slot.
            let target = unsafe { out.part(row * hidden, hidden) };
            target.copy_from_slice(&x[(task * TOKENS + i / k) * hidden..][..hidden]);
        }
    });
}

fn activate(isa: Isa, moe: &Moe, gate_up: &[f32], gated: &mut [f32]) {
    match moe.activation {
        Activation::SiluMul => elementwise::silu_mul(isa, gate_up, moe.inter, gated),
        Activation::ClampedSwiglu { limit, alpha, interleaved } => {
            elementwise::clamped_swiglu(isa, gate_up, moe.inter, (limit, alpha, interleaved), gated);
        }
    }
}

/// `out[t] = Σ weight * result` over the token's slots, in their order.
fn sum(results: &[f32], hidden: usize, rows: &[usize], weights: &[f32], k: usize, out: &mut [f32]) {
    let few = TOKENS / 8;
    out.par_chunks_mut(few * hidden).enumerate().for_each(|(task, out)| {
        for (i, out) in out.chunks_exact_mut(hidden).enumerate() {
            let slot = (task * few + i) * k;
            out.fill(0.0);
            let local = rows[slot..slot + k].iter().zip(&weights[slot..]).filter(|(row, _)| **row != NOWHERE);
            for (&row, &weight) in local {
                for (o, r) in out.iter_mut().zip(&results[row * hidden..][..hidden]) {
                    *o += weight * r;
                }
            }
        }
    });
}
