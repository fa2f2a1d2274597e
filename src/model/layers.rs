//! The layers of a decoder: their weights, cut to what a rank holds.

use std::ops::Range;

use super::config::ModelConfig;
use super::expert_weights;
use super::shard::Shard;
use super::weights::Weights;
use crate::backend::{Attention, Moe, WeightId, WeightRole};

/// The weights and the attention of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layer {
    /// Scale of the norm before the attention.
    pub input_norm: WeightId,
    /// Query, key and value projections, stacked by rows.
    pub qkv: WeightId,
    /// Their biases, side by side.
    pub qkv_bias: Option<WeightId>,
    /// The attention over the layer's KV.
    pub attention: Attention,
    /// The attention's output projection.
    pub o_proj: WeightId,
    /// Its bias; none as well where another rank adds it.
    pub o_bias: Option<WeightId>,
    /// Scale of the norm before the MLP.
    pub post_norm: WeightId,
    /// What follows.
    pub mlp: Mlp,
}

/// A layer's second half.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mlp {
    /// One gated MLP.
    Dense {
        /// Gate and up projections, stacked by rows.
        gate_up: WeightId,
        /// Down projection.
        down: WeightId,
    },
    /// Experts.
    Experts(Moe),
}

/// The range in elements, of heads or halves `width` wide that begin at `first`.
fn wide(range: &Range<usize>, width: usize, first: usize) -> Range<usize> {
    first + range.start * width..first + range.end * width
}

/// Lays out layer `index`.
pub(super) fn layer(config: &ModelConfig, shard: &Shard, index: usize, weights: &mut Weights) -> Layer {
    let (hidden, dim) = (config.hidden_size, config.head_dim);
    let (q, kv) = (config.num_attention_heads * dim, config.num_key_value_heads * dim);
    let own_q = wide(&shard.q_heads, dim, 0);
    let own_qkv = [own_q.clone(), wide(&shard.kv_heads, dim, q), wide(&shard.kv_heads, dim, q + kv)];
    let name = |rest: &str| format!("layers.{index}.{rest}");
    let heads = |kind: &str| {
        let part = |head: &str, rows| (name(&format!("self_attn.{head}_proj.{kind}")), rows);
        vec![part("q", q), part("k", kv), part("v", kv)]
    };
    let input_norm = weights.vector(&name("input_layernorm.weight"), hidden, WeightRole::Norm);
    let qkv = weights.stacked(&name("self_attn.qkv_proj.weight"), heads("weight"), hidden);
    weights.keep_rows(qkv, &own_qkv);
    let bias_name = name("self_attn.qkv_proj.bias");
    let qkv_bias = config.qkv_bias.then(|| {
        let bias = weights.biases(&bias_name, heads("bias"));
        weights.keep_cols(bias, &own_qkv)
    });
    let mut head_norm = |which: &str| {
        let name = name(&format!("self_attn.{which}_norm.weight"));
        config.qk_norm.then(|| weights.vector(&name, config.head_dim, WeightRole::Norm))
    };
    let (q_norm, k_norm) = (head_norm("q"), head_norm("k"));
    let o_proj = weights.matrix(&name("self_attn.o_proj.weight"), hidden, q, WeightRole::Linear);
    weights.keep_cols(o_proj, std::slice::from_ref(&own_q));
    let o_bias =
        config.o_bias.then(|| weights.vector(&name("self_attn.o_proj.bias"), hidden, WeightRole::Bias));
    let o_bias = o_bias.filter(|_| shard.adds_row_bias());
    let post_norm = weights.vector(&name("post_attention_layernorm.weight"), hidden, WeightRole::Norm);
    let sinks_name = name("self_attn.sinks");
    let sinks = config.sinks.then(|| {
        let sinks = weights.vector(&sinks_name, config.num_attention_heads, WeightRole::Bias);
        weights.keep_cols(sinks, std::slice::from_ref(&shard.q_heads))
    });
    let mlp = mlp(config, shard, index, weights);
    let attention = Attention {
        kv_layer: index,
        q_heads: shard.q_heads.len(),
        kv_heads: shard.kv_heads.len(),
        head_dim: config.head_dim,
        scale: 1.0 / (config.head_dim as f32).sqrt(),
        window: config.windows[index],
        rope: 0,
        q_norm,
        k_norm,
        eps: config.rms_norm_eps,
        sinks,
    };
    Layer { input_norm, qkv, qkv_bias, attention, o_proj, o_bias, post_norm, mlp }
}

fn mlp(config: &ModelConfig, shard: &Shard, index: usize, weights: &mut Weights) -> Mlp {
    let (hidden, inter) = (config.hidden_size, config.intermediate_size);
    if let Some(experts) = config.experts.as_ref().filter(|experts| experts.layers[index]) {
        let earlier = experts.layers[..index].iter().filter(|has| **has).count();
        let model = (config.architecture, experts, hidden);
        return Mlp::Experts(expert_weights::moe(model, shard, (index, earlier), weights));
    }
    let name = |rest: &str| format!("layers.{index}.mlp.{rest}.weight");
    let halves = vec![(name("gate_proj"), inter), (name("up_proj"), inter)];
    let gate_up = weights.stacked(&name("gate_up_proj"), halves, hidden);
    weights.keep_rows(gate_up, &[wide(&shard.inter, 1, 0), wide(&shard.inter, 1, inter)]);
    let down = weights.matrix(&name("down_proj"), hidden, inter, WeightRole::Linear);
    weights.keep_cols(down, std::slice::from_ref(&shard.inter));
    Mlp::Dense { gate_up, down }
}
