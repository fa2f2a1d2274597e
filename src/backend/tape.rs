//! A forward's operations as plain values: what a capture records, checks and replays.

use crate::backend::{Act, Attention, BackendError, Moe, Ops, StepSpec, WeightId};
use crate::layout::Group;

/// One call of [`Ops`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::backend) enum Op {
    EmbedGather { table: WeightId, out: Act },
    AddRmsnorm { delta: Option<Act>, residual: Act, weight: WeightId, eps: f32, out: Act },
    Linear { x: Act, weight: WeightId, bias: Option<WeightId>, out: Act },
    QkNormRopeKvwrite { qkv: Act, attention: Attention },
    Attention { qkv: Act, attention: Attention, out: Act },
    SiluMul { gate_up: Act, out: Act },
    Moe { x: Act, moe: Moe, out: Act },
    AllReduce { act: Act, group: Group },
}

/// Checks each operation against the model and hands it on.
pub(in crate::backend) struct Checked<'a, F> {
    pub spec: &'a StepSpec,
    pub then: F,
}

fn misfit(message: String) -> BackendError {
    BackendError::Device(format!("the forward does not fit the model: {message}"))
}

fn expect(ok: bool, message: impl FnOnce() -> String) -> Result<(), BackendError> {
    if ok { Ok(()) } else { Err(misfit(message())) }
}

impl<F: FnMut(Op) -> Result<(), BackendError>> Checked<'_, F> {
    fn width(&self, act: Act) -> Result<usize, BackendError> {
        let found = self.spec.acts.iter().find(|(name, _)| *name == act);
        found.map(|(_, width)| *width).ok_or_else(|| misfit(format!("it has no buffer {act:?}")))
    }

    /// Fails unless the weight is `[rows, cols]`.
    fn weight(&self, id: WeightId, rows: usize, cols: usize) -> Result<(), BackendError> {
        let weight =
            self.spec.weights.get(id.0).ok_or_else(|| misfit(format!("it has no weight {}", id.0)))?;
        expect((weight.rows, weight.cols) == (rows, cols), || {
            format!("{} is [{}, {}], used as [{rows}, {cols}]", weight.name, weight.rows, weight.cols)
        })
    }

    fn layer(&self, qkv: Act, a: &Attention) -> Result<(), BackendError> {
        let layer = self.spec.kv_layers.get(a.kv_layer);
        let layer = layer.ok_or_else(|| misfit(format!("it has no KV layer {}", a.kv_layer)))?;
        expect((layer.kv_heads, layer.head_dim) == (a.kv_heads, a.head_dim), || {
            format!("KV layer {} has {} heads of {}", a.kv_layer, layer.kv_heads, layer.head_dim)
        })?;
        expect(a.kv_heads > 0 && a.q_heads > 0 && a.q_heads.is_multiple_of(a.kv_heads), || {
            format!("{} query heads over {} key heads", a.q_heads, a.kv_heads)
        })?;
        let width = (a.q_heads + 2 * a.kv_heads) * a.head_dim;
        expect(self.width(qkv)? == width, || format!("{qkv:?} is not {width} wide"))
    }

    fn distinct(a: Act, b: Act) -> Result<(), BackendError> {
        expect(a != b, || format!("{a:?} is both read and written"))
    }
}

impl<F: FnMut(Op) -> Result<(), BackendError>> Ops for Checked<'_, F> {
    fn embed_gather(&mut self, table: WeightId, out: Act) -> Result<(), BackendError> {
        let rows = self.spec.weights.get(table.0).map_or(0, |weight| weight.rows);
        self.weight(table, rows, self.width(out)?)?;
        (self.then)(Op::EmbedGather { table, out })
    }

    fn add_rmsnorm(
        &mut self,
        delta: Option<Act>,
        residual: Act,
        weight: WeightId,
        eps: f32,
        out: Act,
    ) -> Result<(), BackendError> {
        let width = self.width(residual)?;
        self.weight(weight, 1, width)?;
        for act in delta.into_iter().chain([out]) {
            Self::distinct(act, residual)?;
            expect(self.width(act)? == width, || format!("{act:?} is not {width} wide"))?;
        }
        expect(delta != Some(out), || format!("{out:?} is both read and written"))?;
        (self.then)(Op::AddRmsnorm { delta, residual, weight, eps, out })
    }

    fn linear(
        &mut self,
        x: Act,
        weight: WeightId,
        bias: Option<WeightId>,
        out: Act,
    ) -> Result<(), BackendError> {
        Self::distinct(x, out)?;
        self.weight(weight, self.width(out)?, self.width(x)?)?;
        if let Some(bias) = bias {
            self.weight(bias, 1, self.width(out)?)?;
        }
        (self.then)(Op::Linear { x, weight, bias, out })
    }

    fn qk_norm_rope_kvwrite(&mut self, qkv: Act, attention: &Attention) -> Result<(), BackendError> {
        self.layer(qkv, attention)?;
        let rope = self.spec.ropes.get(attention.rope).map(|rope| 2 * rope.inv_freq.len());
        expect(rope == Some(attention.head_dim), || {
            format!("rotary embedding {} is not for heads of {}", attention.rope, attention.head_dim)
        })?;
        for norm in [attention.q_norm, attention.k_norm].into_iter().flatten() {
            self.weight(norm, 1, attention.head_dim)?;
        }
        (self.then)(Op::QkNormRopeKvwrite { qkv, attention: *attention })
    }

    fn attention(&mut self, qkv: Act, attention: &Attention, out: Act) -> Result<(), BackendError> {
        self.layer(qkv, attention)?;
        Self::distinct(qkv, out)?;
        if let Some(sinks) = attention.sinks {
            self.weight(sinks, 1, attention.q_heads)?;
        }
        let width = attention.q_heads * attention.head_dim;
        expect(self.width(out)? == width, || format!("{out:?} is not {width} wide"))?;
        (self.then)(Op::Attention { qkv, attention: *attention, out })
    }

    fn silu_mul(&mut self, gate_up: Act, out: Act) -> Result<(), BackendError> {
        let width = self.width(out)?;
        Self::distinct(gate_up, out)?;
        expect(self.width(gate_up)? == 2 * width, || format!("{gate_up:?} is not {} wide", 2 * width))?;
        (self.then)(Op::SiluMul { gate_up, out })
    }

    fn moe(&mut self, x: Act, moe: &Moe, out: Act) -> Result<(), BackendError> {
        let (hidden, experts, inter) = (self.width(x)?, moe.experts, moe.inter);
        Self::distinct(x, out)?;
        expect(self.width(out)? == hidden, || format!("{out:?} is not {hidden} wide"))?;
        expect((1..=experts).contains(&moe.top_k), || format!("top {} of {experts} experts", moe.top_k))?;
        let (first, local) = (moe.first, moe.local);
        expect(local > 0 && first + local <= experts && moe.data > 0, || {
            format!("experts {first} to {} of {experts}, {} data-parallel ranks", first + local, moe.data)
        })?;
        // Rows go to the rank whose number times `local` is the first expert's.
        expect(!moe.is_all_to_all() || local * moe.data == experts, || {
            format!("{local} experts a rank on {} ranks are not {experts}, as all-to-all needs", moe.data)
        })?;
        self.weight(moe.gate, experts, hidden)?;
        self.weight(moe.w13, local * 2 * inter, hidden)?;
        self.weight(moe.w2, local * hidden, inter)?;
        let biases =
            [(moe.gate_bias, experts), (moe.w13_bias, local * 2 * inter), (moe.w2_bias, local * hidden)];
        for (bias, len) in biases {
            bias.map_or(Ok(()), |bias| self.weight(bias, 1, len))?;
        }
        (self.then)(Op::Moe { x, moe: *moe, out })
    }

    fn all_reduce(&mut self, act: Act, group: Group) -> Result<(), BackendError> {
        self.width(act)?;
        (self.then)(Op::AllReduce { act, group })
    }
}
