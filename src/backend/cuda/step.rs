//! A forward's operations as kernel launches. All that an operation needs (kernels, work lists, algorithms) is made by a first
//! pass, [`Prepare`]; the launching pass, [`Launch`], only looks things up, so that it may run inside a capture.

use std::collections::HashMap;

use super::attention::{AttentionKey, AttentionPlan};
use super::collectives::Span;
use super::compile::File;
use super::device::{Parts, View};
use super::experts::Experts;
use super::gemm::{Operands, Shape};
use super::kernels::{Arg, Function, Grid};
use super::memory::Buffer;
use super::tune::{Job, Tuner};
use crate::backend::{Act, Attention, BackendError, Moe, Ops, Routing, WeightId, alone};
use crate::batch::Batch;
use crate::layout::Group;

/// The metadata of a batch on the GPU, and what the first pass made.
pub(super) struct Step {
    pub token_ids: Buffer,
    pub positions: Buffer,
    pub query_start: Buffer,
    pub kv_lens: Buffer,
    pub groups: Vec<Tables>,
    pub tokens: usize,
    attentions: HashMap<AttentionKey, AttentionPlan>,
    pub experts: Experts,
}

/// One KV group's metadata on the GPU.
pub(super) struct Tables {
    pub block_tables: Buffer,
    pub slots: Buffer,
    pub stride: usize,
    pub block_size: usize,
}

impl Step {
    pub(super) fn new(parts: &Parts, batch: &Batch) -> Result<Self, BackendError> {
        let gpu = &parts.kernels.gpu;
        let group = |tables: &crate::batch::GroupTables| {
            Ok(Tables {
                block_tables: Buffer::of(gpu, &tables.block_tables, "block tables")?,
                slots: Buffer::of(gpu, &tables.slots, "slots")?,
                stride: tables.stride,
                block_size: tables.group.block_size as usize,
            })
        };
        Ok(Self {
            token_ids: Buffer::of(gpu, &batch.token_ids, "token ids")?,
            positions: Buffer::of(gpu, &batch.positions, "positions")?,
            query_start: Buffer::of(gpu, &batch.query_start, "query starts")?,
            kv_lens: Buffer::of(gpu, &batch.kv_lens, "KV lengths")?,
            groups: batch.groups.iter().map(group).collect::<Result<_, BackendError>>()?,
            tokens: batch.num_tokens(),
            attentions: HashMap::new(),
            experts: Experts::default(),
        })
    }
}

/// A product's shape and addresses, checked.
fn product(
    parts: &Parts,
    tokens: usize,
    (x, out): (Act, Act),
    weight: WeightId,
    bias: Option<WeightId>,
) -> Result<(Shape, Operands), BackendError> {
    let spec = parts.weight_spec(weight)?;
    let (from, to) = (parts.act(x)?, parts.act(out)?);
    if from.width != spec.cols || to.width != spec.rows {
        let (name, rows, cols) = (&spec.name, spec.rows, spec.cols);
        return Err(BackendError::Device(format!(
            "{name} [{rows}, {cols}] from {x:?} to {out:?} does not fit"
        )));
    }
    let bias_address = bias.map_or(Ok(0), |bias| parts.vector(bias, spec.rows))?;
    let shape = Shape { t: tokens, n: spec.rows, k: spec.cols, bias: bias.is_some() };
    let w = parts.weight(weight)?;
    Ok((shape, Operands { x: from.address, w, bias: bias_address, out: to.address }))
}

/// The first pass.
pub(super) struct Prepare<'a> {
    pub parts: &'a Parts,
    pub step: &'a mut Step,
    pub batch: &'a Batch,
    pub tuner: &'a Tuner,
    pub routing: Option<&'a Routing>,
}

impl Ops for Prepare<'_> {
    fn embed_gather(&mut self, table: WeightId, _out: Act) -> Result<(), BackendError> {
        embed_kernel(self.parts, table).map(drop)
    }

    fn add_rmsnorm(
        &mut self,
        _delta: Option<Act>,
        _residual: Act,
        _weight: WeightId,
        _eps: f32,
        _out: Act,
    ) -> Result<(), BackendError> {
        self.parts.kernels.get(File::Norm, &[], "add_rmsnorm").map(drop)
    }

    fn linear(
        &mut self,
        x: Act,
        weight: WeightId,
        bias: Option<WeightId>,
        out: Act,
    ) -> Result<(), BackendError> {
        let (shape, operands) = product(self.parts, self.step.tokens, (x, out), weight, bias)?;
        let Operands { x, bias, out, .. } = operands;
        let weights = self.parts.weights_of(shape.n, shape.k);
        self.tuner.choose(&self.parts.gemm, &Job { shape, x, weights, bias, out })
    }

    fn qk_norm_rope_kvwrite(&mut self, _qkv: Act, attention: &Attention) -> Result<(), BackendError> {
        let last = self.batch.positions.iter().max().copied().unwrap_or(0);
        self.parts.ropes.reserve(self.parts, attention.rope, last as usize + 1)?;
        rope_kernel(self.parts, self.step, attention).map(drop)
    }

    fn attention(&mut self, _qkv: Act, attention: &Attention, _out: Act) -> Result<(), BackendError> {
        let key = AttentionKey::of(self.parts, attention);
        if !self.step.attentions.contains_key(&key) {
            let plan = AttentionPlan::new(self.parts, &self.step.groups[key.group], self.batch, key)?;
            self.step.attentions.insert(key, plan);
        }
        Ok(())
    }

    fn silu_mul(&mut self, _gate_up: Act, _out: Act) -> Result<(), BackendError> {
        self.parts.kernels.get(File::Act, &[], "silu_mul").map(drop)
    }

    fn moe(&mut self, x: Act, moe: &Moe, _out: Act) -> Result<(), BackendError> {
        let tokens = self.step.tokens;
        self.step.experts.prepare((self.parts, self.tuner), tokens, (x, moe), self.routing)
    }

    fn all_reduce(&mut self, act: Act, _group: Group) -> Result<(), BackendError> {
        self.parts.act(act)?;
        if self.parts.collectives.is_some() { Ok(()) } else { Err(alone("a sum over ranks")) }
    }
}

/// The embedding's kernel for a table, and what it needs beside the usual arguments if that is a part of the vocabulary's rows.
fn embed_kernel(parts: &Parts, table: WeightId) -> Result<(Function, Vec<Arg>), BackendError> {
    let spec = parts.weight_spec(table)?;
    if spec.cut.is_none() {
        return Ok((parts.kernels.get(File::Embed, &[], "embed_gather")?, Vec::new()));
    }
    let rows = [spec.first_row(), spec.rows].map(|n| Arg::I32(n as i32));
    Ok((parts.kernels.get(File::Embed, &[("SHARD", 1)], "embed_gather")?, rows.to_vec()))
}

/// Threads of `add_rmsnorm`: few tokens want the least latency, many want reads in flight.
fn norm_threads(tokens: usize, hidden: usize) -> usize {
    if tokens < 256 {
        (hidden / 8).next_multiple_of(32).min(1024)
    } else {
        (hidden / 32).next_multiple_of(32).max(128)
    }
}

/// Tokens up to which the rotary embedding's kernel for few of them is the faster one.
const FEW_TOKENS: usize = 64;

/// The rotary embedding's kernel for a step, and its grid.
fn rope_kernel(parts: &Parts, step: &Step, attention: &Attention) -> Result<(Function, Grid), BackendError> {
    let block_size = step.groups[parts.kv.group(attention.kv_layer)].block_size;
    let defines = [("HEAD_DIM", attention.head_dim), ("BLOCK_SIZE", block_size)];
    let few = step.tokens <= FEW_TOKENS;
    let (name, passes) = if few { ("qk_norm_rope_kvwrite_few", 1) } else { ("qk_norm_rope_kvwrite", 4) };
    let lanes = (attention.head_dim / 8).next_power_of_two();
    let groups = (attention.q_heads + 2 * attention.kv_heads).div_ceil(passes * 32 / lanes);
    let grid = Grid::new((step.tokens * groups).div_ceil(4), 128);
    Ok((parts.kernels.get(File::Rope, &defines, name)?, grid))
}

/// The launching pass.
pub(super) struct Launch<'a> {
    pub parts: &'a Parts,
    pub step: &'a Step,
}

impl Ops for Launch<'_> {
    fn embed_gather(&mut self, table: WeightId, out: Act) -> Result<(), BackendError> {
        let (parts, tokens) = (self.parts, self.step.tokens);
        let out = parts.act(out)?;
        let (function, part) = embed_kernel(parts, table)?;
        let table = parts.matrix(table, out.width)?;
        let mut args = vec![
            Arg::Address(table),
            Arg::Address(self.step.token_ids.address()),
            Arg::Address(out.address),
            Arg::I32(out.width as i32),
        ];
        args.extend(part);
        // SAFETY: (table, token_ids, out, hidden, and of a part its first row and their number) as in embed.cu; ids are within the
        // vocabulary, as the batch was checked.
        unsafe { parts.kernels.launch(function, Grid::new(tokens, 128), &args) }
    }

    fn add_rmsnorm(
        &mut self,
        delta: Option<Act>,
        residual: Act,
        weight: WeightId,
        eps: f32,
        out: Act,
    ) -> Result<(), BackendError> {
        let (parts, tokens) = (self.parts, self.step.tokens);
        let (residual, out) = (parts.act(residual)?, parts.act(out)?);
        let delta = delta.map_or(Ok(0), |delta| parts.act_of(delta, out.width))?;
        let function = parts.kernels.get(File::Norm, &[], "add_rmsnorm")?;
        let hidden = out.width;
        let threads = norm_threads(tokens, hidden);
        let args = [
            Arg::Address(delta),
            Arg::Address(residual.address),
            Arg::Address(parts.vector(weight, hidden)?),
            Arg::Address(out.address),
            Arg::I32(hidden as i32),
            Arg::F32(eps),
        ];
        // SAFETY: (delta, residual, weight, out, hidden, eps) as in norm.cu; all rows are `hidden` wide.
        unsafe { parts.kernels.launch(function, Grid::new(tokens, threads as u32), &args) }
    }

    fn linear(
        &mut self,
        x: Act,
        weight: WeightId,
        bias: Option<WeightId>,
        out: Act,
    ) -> Result<(), BackendError> {
        let (shape, operands) = product(self.parts, self.step.tokens, (x, out), weight, bias)?;
        let algorithm = self.parts.gemm.chosen.borrow().get(&shape).copied();
        let algorithm = algorithm.ok_or_else(|| BackendError::Device(format!("{shape:?} was not tuned")))?;
        self.parts.gemm.run(shape, algorithm, &operands)
    }

    fn qk_norm_rope_kvwrite(&mut self, qkv: Act, attention: &Attention) -> Result<(), BackendError> {
        let (parts, step) = (self.parts, self.step);
        let tables = &step.groups[parts.kv.group(attention.kv_layer)];
        let norm = |weight: Option<WeightId>| weight.map_or(Ok(0), |id| parts.vector(id, attention.head_dim));
        let heads = attention.q_heads + 2 * attention.kv_heads;
        let addresses = [
            parts.act_of(qkv, heads * attention.head_dim)?,
            norm(attention.q_norm)?,
            norm(attention.k_norm)?,
            parts.ropes.address(attention.rope)?,
            step.positions.address(),
            tables.slots.address(),
            parts.kv.layer(attention.kv_layer),
        ];
        let sizes = [step.tokens, attention.q_heads, attention.kv_heads].map(|n| Arg::I32(n as i32));
        let args: Vec<Arg> =
            addresses.into_iter().map(Arg::Address).chain(sizes).chain([Arg::F32(attention.eps)]).collect();
        let (function, grid) = rope_kernel(parts, step, attention)?;
        // SAFETY: (qkv, q_norm, k_norm, table, positions, slots, kv, tokens, q_heads, kv_heads, eps) as in rope.cu; slots are
        // within the pool and the table reaches the last position.
        unsafe { parts.kernels.launch(function, grid, &args) }
    }

    fn attention(&mut self, qkv: Act, attention: &Attention, out: Act) -> Result<(), BackendError> {
        let key = AttentionKey::of(self.parts, attention);
        let plan = self.step.attentions.get(&key);
        let plan = plan.ok_or_else(|| BackendError::Device("an attention layer was not planned".into()))?;
        plan.launch(self.parts, self.step, attention, qkv, out)
    }

    fn silu_mul(&mut self, gate_up: Act, out: Act) -> Result<(), BackendError> {
        let (parts, tokens) = (self.parts, self.step.tokens);
        let out = parts.act(out)?;
        let function = parts.kernels.get(File::Act, &[], "silu_mul")?;
        let args = [
            Arg::Address(parts.act_of(gate_up, 2 * out.width)?),
            Arg::Address(out.address),
            Arg::I32(tokens as i32),
            Arg::I32(out.width as i32),
        ];
        let grid = Grid::wide(((out.width / 8).div_ceil(256), tokens.min(65_535)), 256);
        // SAFETY: (gate_up, out, tokens, intermediate) as in act.cu.
        unsafe { parts.kernels.launch(function, grid, &args) }
    }

    fn moe(&mut self, x: Act, moe: &Moe, out: Act) -> Result<(), BackendError> {
        self.step.experts.launch(self.parts, self.step.tokens, (x, moe, out))
    }

    fn all_reduce(&mut self, act: Act, group: Group) -> Result<(), BackendError> {
        let (parts, View { address, width }) = (self.parts, self.parts.act(act)?);
        let data = Span { address, count: self.step.tokens * width, dtype: parts.gemm.dtype };
        parts.communicate("a sum over ranks", |collectives, gpu| collectives.all_reduce(gpu, group, data))
    }
}
