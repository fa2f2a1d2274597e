//! One step of one batch: its buffers, and each operation over them.

use super::attention::Plan;
use super::elementwise::{self, Heads};
use super::isa::Isa;
use super::kv::KvPool;
use super::linear;
use super::memory::{self, Buffer};
use super::moe;
use super::round::Rounding;
use crate::backend::tape::Op;
use crate::backend::{Act, Attention, BackendError, Communicator, Moe, Routing, StepSpec, WeightId, alone};
use crate::batch::Batch;
use crate::units::Bytes;

/// How many [`Act`]s there are; an act's number is its place in the enum.
const ACTS: usize = Act::Gated as usize + 1;

/// What a device holds for all its steps.
#[derive(Clone, Copy)]
pub(super) struct Held<'a> {
    pub spec: &'a StepSpec,
    pub isa: Isa,
    pub threads: usize,
    pub weights: &'a [Buffer],
    pub rounding: Rounding,
    pub routing: Option<&'a Routing>,
    pub communicator: Option<&'a dyn Communicator>,
}

/// All that an operation may touch.
pub(super) struct Step<'a> {
    pub held: Held<'a>,
    pub kv: &'a mut KvPool,
    pub batch: &'a Batch,
    pub experts: moe::Scratch,
    acts: [Vec<f32>; ACTS],
    angles: Vec<Vec<f32>>,
    plans: Vec<Plan>,
}

impl<'a> Step<'a> {
    /// Buffers for the batch. `batch` has passed the device's checks.
    pub(super) fn new(held: Held<'a>, kv: &'a mut KvPool, batch: &'a Batch) -> Result<Self, BackendError> {
        let (spec, tokens) = (held.spec, batch.num_tokens());
        let angles = spec.ropes.iter().map(|rope| 2 * rope.inv_freq.len());
        let width: usize = spec.acts.iter().map(|(_, width)| *width).chain(angles).sum();
        let advice = |_| "lower the case's query lengths or --max-num-batched-tokens".to_owned();
        let what = format!("the activations of {tokens} query tokens");
        memory::require(Bytes(tokens as u128 * width as u128 * 4), &what, advice)?;
        let mut acts: [Vec<f32>; ACTS] = Default::default();
        for &(act, width) in &spec.acts {
            acts[act as usize] = vec![0.0; tokens * width];
        }
        let angles = spec.ropes.iter().map(|rope| {
            let mut table = vec![0.0; tokens * 2 * rope.inv_freq.len()];
            elementwise::angles(rope, &batch.positions, &mut table);
            table
        });
        let angles = angles.collect();
        let experts = moe::Scratch::default();
        Ok(Self { held, kv, batch, experts, acts, angles, plans: Vec::new() })
    }

    /// `[tokens, width]` of a buffer.
    pub(super) fn act(&self, act: Act) -> &[f32] {
        &self.acts[act as usize]
    }

    fn weight(&self, id: WeightId) -> &'a [f32] {
        &self.held.weights[id.0]
    }

    /// Makes ready what an operation needs, so that a replay allocates no large memory. Fails if memory is short, or if the logits
    /// that replace a gate's are not those of this batch.
    pub(super) fn prepare(&mut self, op: &Op) -> Result<(), BackendError> {
        match op {
            Op::Attention { attention, .. } => {
                self.plan(attention);
                Ok(())
            }
            Op::Moe { x, moe, .. } => {
                let tokens = self.batch.num_tokens();
                let wanted = tokens * moe.experts;
                if let Some(routing) = self.held.routing
                    && routing.logits.get(moe.index).is_none_or(|logits| logits.len() != wanted)
                {
                    let found = routing.logits.get(moe.index).map_or(0, Vec::len);
                    return Err(BackendError::Device(format!(
                        "MoE layer {} needs {wanted} replaced logits, there are {found}",
                        moe.index
                    )));
                }
                let hidden = self.act(*x).len() / tokens;
                self.experts.reserve(tokens, hidden, moe)
            }
            Op::AllReduce { .. } if self.held.communicator.is_none() => Err(alone("a sum over ranks")),
            _ => Ok(()),
        }
    }

    /// Cuts the attention's work.
    fn plan(&mut self, attention: &Attention) -> usize {
        let group = self.kv.group(attention.kv_layer);
        if let Some(index) = self.plans.iter().position(|plan| plan.fits(group, attention)) {
            return index;
        }
        self.plans.push(Plan::new(self.batch, group, attention, self.held.threads));
        self.plans.len() - 1
    }

    /// Runs one operation, which has been checked against the model. Call it on a thread of the device's pool. Fails if other ranks
    /// take part in it and one is lost.
    pub(super) fn run(&mut self, op: Op) -> Result<(), BackendError> {
        match op {
            Op::EmbedGather { table, out } => self.with(out, |step, out| {
                let width = out.len() / step.batch.num_tokens();
                let first = step.held.spec.weights[table.0].first_row();
                elementwise::gather(step.weight(table), first, &step.batch.token_ids, width, out);
            }),
            Op::AddRmsnorm { delta, residual, weight, eps, out } => self.with(residual, |step, residual| {
                step.with(out, |step, out| {
                    let delta = delta.map(|delta| step.act(delta));
                    elementwise::add_norm(step.held.isa, delta, residual, step.weight(weight), eps, out);
                });
            }),
            Op::Linear { x, weight, bias, out } => self.with(out, |step, out| {
                let x = step.act(x);
                let inputs = x.len() / step.batch.num_tokens();
                let bias = bias.map(|bias| step.weight(bias));
                linear::linear(step.held.isa, x, step.weight(weight), inputs, bias, out);
            }),
            Op::QkNormRopeKvwrite { qkv, attention } => {
                self.with(qkv, |step, qkv| step.rotate(&attention, qkv));
            }
            Op::Attention { qkv, attention, out } => {
                let plan = self.plan(&attention);
                self.with(out, |step, out| {
                    let (qkv, kv) = (&step.acts[qkv as usize], step.kv.layer(attention.kv_layer));
                    let sinks = attention.sinks.map(|id| &*step.held.weights[id.0]);
                    step.plans[plan].run(step.held.isa, step.batch, &attention, qkv, kv, sinks, out);
                });
            }
            Op::SiluMul { gate_up, out } => self.with(out, |step, out| {
                let width = out.len() / step.batch.num_tokens();
                elementwise::silu_mul(step.held.isa, step.act(gate_up), width, out);
            }),
            Op::Moe { x, moe, out } => return self.with(out, |step, out| step.moe(x, &moe, out)),
            Op::AllReduce { act, group } => {
                let communicator = self.held.communicator.ok_or_else(|| alone("a sum over ranks"))?;
                return self.with(act, |_, act| communicator.all_reduce(group, act));
            }
        }
        Ok(())
    }

    fn moe(&mut self, x: Act, moe: &Moe, out: &mut [f32]) -> Result<(), BackendError> {
        let held = self.held;
        let weight = |id: WeightId| -> &[f32] { &held.weights[id.0] };
        let weights = moe::Weights {
            gate: weight(moe.gate),
            gate_bias: moe.gate_bias.map(weight),
            w13: weight(moe.w13),
            w13_bias: moe.w13_bias.map(weight),
            w2: weight(moe.w2),
            w2_bias: moe.w2_bias.map(weight),
        };
        let replaced = held.routing.map(|routing| routing.logits[moe.index].as_slice());
        let Held { isa, communicator, .. } = held;
        let block = moe::Block { isa, moe, weights: &weights, replaced, communicator };
        self.experts.run(block, &self.acts[x as usize], out)
    }

    fn rotate(&mut self, attention: &Attention, qkv: &mut [f32]) {
        let tables = &self.batch.groups[self.kv.group(attention.kv_layer)];
        let heads = Heads {
            q_heads: attention.q_heads,
            kv_heads: attention.kv_heads,
            head_dim: attention.head_dim,
            q_norm: attention.q_norm.map(|id| self.weight(id)),
            k_norm: attention.k_norm.map(|id| self.weight(id)),
            eps: attention.eps,
            angles: &self.angles[attention.rope],
            slots: &tables.slots,
            block_size: tables.group.block_size as usize,
            round: self.held.rounding.function(),
        };
        elementwise::rotate_and_write(self.held.isa, heads, qkv, self.kv.layer_mut(attention.kv_layer));
    }

    /// Lends out a buffer while the rest of the step stays usable.
    fn with<T>(&mut self, act: Act, run: impl FnOnce(&mut Self, &mut [f32]) -> T) -> T {
        let mut buffer = std::mem::take(&mut self.acts[act as usize]);
        let result = run(self, &mut buffer);
        self.acts[act as usize] = buffer;
        result
    }
}
