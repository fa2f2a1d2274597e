//! A block of experts: the rows of each expert are gathered, go through its two products, and are summed in slot order.
//!
//! A slot is one of the `top_k` choices of a token: slot `t * top_k + j` is the `j`th of token `t`.

use rayon::prelude::*;

use super::elementwise;
use super::isa::Isa;
use super::linear::{self, Segment};
use super::memory;
use crate::backend::{Activation, BackendError, Moe, Scoring};
use crate::units::Bytes;

/// Tokens a task of the choice and of the sum.
const TOKENS: usize = 64;

/// The weights of one block.
pub(super) struct Weights<'a> {
    pub gate: &'a [f32],
    pub gate_bias: Option<&'a [f32]>,
    pub w13: &'a [f32],
    pub w13_bias: Option<&'a [f32]>,
    pub w2: &'a [f32],
    pub w2_bias: Option<&'a [f32]>,
}

/// Working memory of the blocks of a step, and what their experts did.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[tokens, experts]`
    logits: Vec<f32>,
    /// `[slots]` expert of each slot.
    chosen: Vec<u32>,
    /// `[slots]` its weight.
    weights: Vec<f32>,
    /// `[slots]` the row of each slot, rows being sorted by expert.
    rows: Vec<usize>,
    /// `[slots, hidden]` inputs by row, then, after the second product, results by row.
    hidden: Vec<f32>,
    /// `[slots, 2 * inter]`
    gate_up: Vec<f32>,
    /// `[slots, inter]`
    gated: Vec<f32>,
    /// `[MoE layers][experts]` rows that each expert computed in the last run.
    pub loads: Vec<Vec<u32>>,
}

impl Scratch {
    /// Makes room for a block of experts. Fails if memory is short.
    pub(super) fn reserve(&mut self, tokens: usize, hidden: usize, moe: &Moe) -> Result<(), BackendError> {
        let slots = tokens * moe.top_k;
        let needed = |have: usize, want: usize| want.saturating_sub(have) as u128 * 4;
        let bytes = needed(self.hidden.len(), slots * hidden)
            + needed(self.gate_up.len(), slots * 2 * moe.inter)
            + needed(self.gated.len(), slots * moe.inter);
        let advice = |_| "lower the case's query lengths or --max-num-batched-tokens".to_owned();
        memory::require(Bytes(bytes), &format!("the experts' rows of {tokens} query tokens"), advice)?;
        let grow = |buffer: &mut Vec<f32>, len: usize| buffer.resize(buffer.len().max(len), 0.0);
        grow(&mut self.logits, tokens * moe.experts);
        grow(&mut self.weights, slots);
        grow(&mut self.hidden, slots * hidden);
        grow(&mut self.gate_up, slots * 2 * moe.inter);
        grow(&mut self.gated, slots * moe.inter);
        self.chosen.resize(self.chosen.len().max(slots), 0);
        self.rows.resize(self.rows.len().max(slots), 0);
        if self.loads.len() <= moe.index {
            self.loads.resize(moe.index + 1, Vec::new());
        }
        self.loads[moe.index].resize(moe.experts, 0);
        Ok(())
    }

    /// `out [tokens, hidden]` from `x [tokens, hidden]`; `replaced [tokens, experts]` takes the place of the gate's logits.
    /// [`Scratch::reserve`] has made room.
    pub(super) fn run(
        &mut self,
        isa: Isa,
        moe: &Moe,
        weights: &Weights<'_>,
        replaced: Option<&[f32]>,
        x: &[f32],
        out: &mut [f32],
    ) {
        let hidden = weights.gate.len() / moe.experts;
        let tokens = x.len() / hidden;
        let slots = tokens * moe.top_k;
        let logits = &mut self.logits[..tokens * moe.experts];
        linear::linear(isa, x, weights.gate, hidden, weights.gate_bias, logits);
        if let Some(replaced) = replaced {
            logits.copy_from_slice(replaced);
        }
        choose(moe, logits, &mut self.chosen[..slots], &mut self.weights[..slots]);
        let segments = self.group(moe, slots);
        let (rows, k) = (&self.rows[..slots], moe.top_k);
        gather(x, hidden, rows, k, &mut self.hidden[..slots * hidden]);
        let gate_up = &mut self.gate_up[..slots * 2 * moe.inter];
        let hidden_rows = &self.hidden[..slots * hidden];
        linear::grouped(isa, &segments, hidden_rows, weights.w13, hidden, weights.w13_bias, gate_up);
        let gated = &mut self.gated[..slots * moe.inter];
        activate(isa, moe, gate_up, gated);
        let results = &mut self.hidden[..slots * hidden];
        linear::grouped(isa, &segments, gated, weights.w2, moe.inter, weights.w2_bias, results);
        sum(results, hidden, rows, &self.weights[..slots], k, out);
    }

    /// Sorts the slots by expert, those of one expert by slot; returns the experts that have any.
    fn group(&mut self, moe: &Moe, slots: usize) -> Vec<Segment> {
        let loads = &mut self.loads[moe.index];
        loads.fill(0);
        for &expert in &self.chosen[..slots] {
            loads[expert as usize] += 1;
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
            *row = next[expert as usize];
            next[expert as usize] += 1;
        }
        segments
    }
}

/// The experts of each token and their weights.
fn choose(moe: &Moe, logits: &[f32], chosen: &mut [u32], weights: &mut [f32]) {
    let k = moe.top_k;
    let tasks = logits.par_chunks(TOKENS * moe.experts);
    let outputs = chosen.par_chunks_mut(TOKENS * k).zip(weights.par_chunks_mut(TOKENS * k));
    tasks.zip(outputs).for_each(|(logits, (chosen, weights))| {
        let rows = chosen.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
        for (logits, (chosen, weights)) in logits.chunks_exact(moe.experts).zip(rows) {
            top_k(logits, chosen);
            score(moe.scoring, logits, chosen, weights);
        }
    });
}

/// The indices of the greatest values, in falling order, the lower index first among equals; never a NaN's before a number's.
fn top_k(values: &[f32], chosen: &mut [u32]) {
    for j in 0..chosen.len() {
        let (earlier, rest) = chosen.split_at_mut(j);
        let free = (0..values.len()).filter(|&i| !earlier.contains(&(i as u32)));
        let better = |best: usize, i: usize| {
            if values[i] > values[best] || (values[best].is_nan() && !values[i].is_nan()) { i } else { best }
        };
        rest[0] = free.reduce(better).unwrap_or(0) as u32;
    }
}

/// The chosen experts' weights.
fn score(scoring: Scoring, logits: &[f32], chosen: &[u32], weights: &mut [f32]) {
    let max = logits[chosen[0] as usize];
    for (weight, &expert) in weights.iter_mut().zip(chosen) {
        *weight = (logits[expert as usize] - max).exp();
    }
    let total = match scoring {
        Scoring::SoftmaxThenTopK { renormalize: false } => logits.iter().map(|l| (l - max).exp()).sum(),
        Scoring::SoftmaxThenTopK { renormalize: true } | Scoring::TopKThenSoftmax => {
            weights.iter().sum::<f32>()
        }
    };
    weights.iter_mut().for_each(|weight| *weight /= total);
}

/// Copies each slot's row of `x` to its place.
fn gather(x: &[f32], hidden: usize, rows: &[usize], k: usize, out: &mut [f32]) {
    let out = super::shared::Shared::new(out);
    rows.par_chunks(TOKENS * k).enumerate().for_each(|(task, rows)| {
        for (i, &row) in rows.iter().enumerate() {
            // SAFETY: `rows` is a permutation, so each part belongs to one slot.
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
            for (&row, &weight) in rows[slot..slot + k].iter().zip(&weights[slot..]) {
                for (o, r) in out.iter_mut().zip(&results[row * hidden..][..hidden]) {
                    *o += weight * r;
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greatest_are_chosen_and_the_lower_index_wins_a_tie() {
        let choose = |values: &[f32], k: usize| {
            let mut chosen = vec![0; k];
            top_k(values, &mut chosen);
            chosen
        };
        assert_eq!(choose(&[1.0, 3.0, 2.0, 3.0], 3), [1, 3, 2]);
        assert_eq!(choose(&[0.0; 4], 2), [0, 1]);
        assert_eq!(choose(&[f32::NAN, 1.0, f32::NEG_INFINITY], 3), [1, 2, 0]);
        assert_eq!(choose(&[f32::NAN; 3], 2), [0, 1]);
    }

    #[test]
    fn scores_are_softmax_over_all_or_over_the_chosen() {
        let logits = [0.0, 2.0_f32.ln(), 5.0_f32.ln(), -1e9];
        let score = |scoring| {
            let mut weights = [0.0; 2];
            super::score(scoring, &logits, &[2, 1], &mut weights);
            weights
        };
        let near = |found: [f32; 2], expected: [f32; 2]| {
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} {expected:?}");
        };
        near(score(Scoring::SoftmaxThenTopK { renormalize: false }), [5.0 / 8.0, 2.0 / 8.0]);
        near(score(Scoring::SoftmaxThenTopK { renormalize: true }), [5.0 / 7.0, 2.0 / 7.0]);
        near(score(Scoring::TopKThenSoftmax), [5.0 / 7.0, 2.0 / 7.0]);
    }
}
