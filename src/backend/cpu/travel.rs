//! Tokens on their way between data-parallel ranks that share experts: to all ranks and back ([`Travel::gather`]), or to those that
//! have their experts ([`Travel::all_to_all`]).

use rayon::prelude::*;

use super::moe::{Block, Scratch, TOKENS};
use crate::backend::{BackendError, Communicator, Moe};
use crate::layout::Group;

/// The row of a token at a rank where it has no expert, and the expert of a row that is none.
const NONE: u32 = u32::MAX;

/// Tokens of all ranks: *here* is what this rank's experts work on.
#[derive(Default)]
pub(super) struct Travel {
    /// `[data * tokens, hidden]` the tokens that are here.
    x: Vec<f32>,
    /// `[data * tokens, hidden]` what the experts here make of them.
    partial: Vec<f32>,
    /// `[data * tokens, experts]` the logits of all tokens.
    logits: Vec<f32>,
    /// `[data, tokens, hidden + 2 * top_k]` rows for each rank: a token, its experts and their weights.
    send: Vec<f32>,
    /// The same, from each rank.
    received: Vec<f32>,
    /// `[data, tokens, hidden]` what each rank's experts made of the rows that it got.
    back: Vec<f32>,
    /// `[data][tokens]` which row each token is at each rank.
    places: Vec<Vec<u32>>,
}

/// Elements of a travelling row.
fn row_width(hidden: usize, moe: &Moe) -> usize {
    hidden + 2 * moe.top_k
}

impl Travel {
    /// What a block needs.
    pub(super) fn bytes(tokens: usize, hidden: usize, moe: &Moe) -> u128 {
        let widths = match (moe.data, moe.is_all_to_all()) {
            (1, _) => 0,
            (_, false) => 2 * hidden + moe.experts,
            (_, true) => 3 * hidden + 2 * row_width(hidden, moe),
        };
        (moe.data * tokens * widths) as u128 * 4
    }

    /// Makes room for a block.
    pub(super) fn reserve(&mut self, tokens: usize, hidden: usize, moe: &Moe) {
        if moe.data == 1 {
            return;
        }
        let all = moe.data * tokens;
        let grow = |buffer: &mut Vec<f32>, len: usize| buffer.resize(buffer.len().max(len), 0.0);
        grow(&mut self.x, all * hidden);
        grow(&mut self.partial, all * hidden);
        if moe.is_all_to_all() {
            grow(&mut self.send, all * row_width(hidden, moe));
            grow(&mut self.received, all * row_width(hidden, moe));
            grow(&mut self.back, all * hidden);
            self.places = vec![vec![NONE; tokens]; moe.data];
        } else {
            grow(&mut self.logits, all * moe.experts);
        }
    }

    /// All ranks' tokens come here with their logits; each rank gets its tokens' part of the sum over ranks.
    pub(super) fn gather(
        &mut self,
        communicator: &dyn Communicator,
        scratch: &mut Scratch,
        block: Block<'_>,
        (x, out): (&[f32], &mut [f32]),
    ) -> Result<(), BackendError> {
        let moe = block.moe;
        let tokens = moe.data * (x.len() * moe.experts / block.weights.gate.len());
        let all = &mut self.x[..moe.data * x.len()];
        communicator.all_gather(Group::Data, x, all)?;
        let logits = &mut self.logits[..tokens * moe.experts];
        communicator.all_gather(Group::Data, scratch.logits(moe, tokens / moe.data), logits)?;
        scratch.choose(moe, tokens, Some(logits));
        let partial = &mut self.partial[..moe.data * x.len()];
        scratch.compute(block, all, partial);
        communicator.reduce_scatter(Group::Data, partial, out)
    }

    /// Each token goes to the ranks that have an expert that it chose, once to each, and what they make of it comes back and is
    /// summed in the order of ranks. The choice is made.
    pub(super) fn all_to_all(
        &mut self,
        communicator: &dyn Communicator,
        scratch: &mut Scratch,
        block: Block<'_>,
        (x, out): (&[f32], &mut [f32]),
    ) -> Result<(), BackendError> {
        let moe = block.moe;
        let hidden = block.weights.gate.len() / moe.experts;
        let tokens = x.len() / hidden;
        let (all, width) = (moe.data * tokens, row_width(hidden, moe));
        self.pack(moe, scratch, x, tokens);
        let received = &mut self.received[..all * width];
        communicator.all_to_all(Group::Expert, &self.send[..all * width], received)?;
        self.receive(moe, scratch, hidden, tokens)?;
        let partial = &mut self.partial[..all * hidden];
        scratch.compute(block, &self.x[..all * hidden], partial);
        communicator.all_to_all(Group::Expert, partial, &mut self.back[..all * hidden])?;
        self.unpack(hidden, tokens, out);
        Ok(())
    }

    /// Takes what was received apart. Fails if it is more than the experts here can have been chosen for.
    fn receive(
        &mut self,
        moe: &Moe,
        scratch: &mut Scratch,
        hidden: usize,
        tokens: usize,
    ) -> Result<(), BackendError> {
        let (all, width, mut slots) = (moe.data * tokens, row_width(hidden, moe), 0);
        for (row, received) in self.received[..all * width].chunks_exact(width).enumerate() {
            let (x, choice) = received.split_at(hidden);
            let (experts, weights) = choice.split_at(moe.top_k);
            self.x[row * hidden..][..hidden].copy_from_slice(x);
            scratch.weights[row * moe.top_k..][..moe.top_k].copy_from_slice(weights);
            for (chosen, &expert) in scratch.chosen[row * moe.top_k..].iter_mut().zip(experts) {
                *chosen = if expert < 0.0 { NONE } else { expert as u32 };
                slots += usize::from(moe.local_expert(*chosen as usize).is_some());
            }
        }
        if slots <= moe.most_slots(tokens) {
            return Ok(());
        }
        Err(BackendError::Device(format!(
            "other ranks sent {slots} rows to {} experts, which {all} tokens cannot have chosen",
            moe.local
        )))
    }

    /// Writes, for each rank, a row for each token that chose one of its experts, in the tokens' order; other experts are -1, and
    /// so are all of the rows that are left.
    fn pack(&mut self, moe: &Moe, scratch: &Scratch, x: &[f32], tokens: usize) {
        let (hidden, k) = (x.len() / tokens, moe.top_k);
        let width = row_width(hidden, moe);
        let parts = self.send.par_chunks_mut(tokens * width).zip(&mut self.places).take(moe.data);
        parts.enumerate().for_each(|(rank, (part, places))| {
            let there = rank * moe.local..(rank + 1) * moe.local;
            let mut rows = part.chunks_exact_mut(width);
            let mut next = 0;
            for (t, place) in places.iter_mut().enumerate().take(tokens) {
                *place = NONE;
                let chosen = &scratch.chosen[t * k..][..k];
                if !chosen.iter().any(|&expert| there.contains(&(expert as usize))) {
                    continue;
                }
                let Some(row) = rows.next() else { break };
                row[..hidden].copy_from_slice(&x[t * hidden..][..hidden]);
                for (to, &expert) in row[hidden..].iter_mut().zip(chosen) {
                    *to = if there.contains(&(expert as usize)) { expert as f32 } else { -1.0 };
                }
                row[hidden + k..].copy_from_slice(&scratch.weights[t * k..][..k]);
                (*place, next) = (next, next + 1);
            }
            rows.for_each(|row| row[hidden..][..k].fill(-1.0));
        });
    }

    /// `out[t]`: the sum of what came back of token t.
    fn unpack(&self, hidden: usize, tokens: usize, out: &mut [f32]) {
        out.par_chunks_mut(hidden).enumerate().with_min_len(TOKENS).for_each(|(t, out)| {
            out.fill(0.0);
            for (back, places) in self.back.chunks_exact(tokens * hidden).zip(&self.places) {
                if places[t] != NONE {
                    let row = &back[places[t] as usize * hidden..][..hidden];
                    out.iter_mut().zip(row).for_each(|(o, r)| *o += r);
                }
            }
        });
    }
}
