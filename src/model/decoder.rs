//! A decoder: its weights, its KV groups, and its forward, written once over [`Ops`].

use super::config::ModelConfig;
use super::experts;
use super::fields::ModelError;
use super::weights::Weights;
use crate::backend::{Act, Attention, BackendError, KvLayer, Moe, Ops, StepSpec, WeightId, WeightRole};
use crate::batch::KvGroup;

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
    /// Its bias.
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

/// A decoder that devices can hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// What it was made from.
    pub config: ModelConfig,
    /// What a device must know.
    pub spec: StepSpec,
    /// The embedding.
    pub embedding: WeightId,
    /// The layers.
    pub layers: Vec<Layer>,
    /// Scale of the last norm.
    pub final_norm: WeightId,
}

impl Model {
    /// Lays out weights and KV groups for KV blocks of `block_size` tokens and requests of up to `max_model_len` tokens.
    pub fn new(config: ModelConfig, block_size: u32, max_model_len: u32) -> Result<Self, ModelError> {
        let limit = |flag: &str, value: u32, most: u32| match value {
            1.. if value <= most => Ok(()),
            _ => Err(ModelError::Field {
                model: config.name.clone(),
                field: flag.to_owned(),
                value: value.to_string(),
                supported: format!("it must be from 1 to {most}"),
            }),
        };
        limit("--block-size", block_size, 1 << 16)?;
        limit("--max-model-len", max_model_len, u32::MAX)?;
        let mut weights = Weights(Vec::new());
        let hidden = config.hidden_size;
        let embedding =
            weights.matrix("embed_tokens.weight", config.vocab_size, hidden, WeightRole::Embedding);
        let groups = groups(&config);
        let layers: Vec<Layer> = (0..config.windows.len()).map(|i| layer(&config, i, &mut weights)).collect();
        let final_norm = weights.vector("norm.weight", hidden, WeightRole::Norm);
        let (q, kv) = widths(&config);
        let mut acts = vec![
            (Act::Residual, hidden),
            (Act::Normed, hidden),
            (Act::Qkv, q + 2 * kv),
            (Act::Context, q),
            (Act::Delta, hidden),
        ];
        if layers.iter().any(|layer| matches!(layer.mlp, Mlp::Dense { .. })) {
            let inter = config.intermediate_size;
            acts.extend([(Act::GateUp, 2 * inter), (Act::Gated, inter)]);
        }
        let spec = StepSpec {
            weights: weights.0,
            acts,
            kv_groups: groups.iter().map(|&window| KvGroup { block_size, window, replay: None }).collect(),
            kv_layers: config
                .windows
                .iter()
                .map(|window| KvLayer {
                    group: groups.iter().position(|group| group == window).unwrap_or(0),
                    kv_heads: config.num_key_value_heads,
                    head_dim: config.head_dim,
                })
                .collect(),
            ropes: vec![config.rope.clone()],
            max_model_len,
        };
        Ok(Self { config, spec, embedding, layers, final_norm })
    }

    /// The forward: embedding, layers, last norm. The result is in [`Act::Normed`].
    pub fn forward(&self, ops: &mut dyn Ops) -> Result<(), BackendError> {
        let eps = self.config.rms_norm_eps;
        ops.embed_gather(self.embedding, Act::Residual)?;
        let mut delta = None;
        for layer in &self.layers {
            ops.add_rmsnorm(delta, Act::Residual, layer.input_norm, eps, Act::Normed)?;
            ops.linear(Act::Normed, layer.qkv, layer.qkv_bias, Act::Qkv)?;
            ops.qk_norm_rope_kvwrite(Act::Qkv, &layer.attention)?;
            ops.attention(Act::Qkv, &layer.attention, Act::Context)?;
            ops.linear(Act::Context, layer.o_proj, layer.o_bias, Act::Delta)?;
            ops.add_rmsnorm(Some(Act::Delta), Act::Residual, layer.post_norm, eps, Act::Normed)?;
            match layer.mlp {
                Mlp::Dense { gate_up, down } => {
                    ops.linear(Act::Normed, gate_up, None, Act::GateUp)?;
                    ops.silu_mul(Act::GateUp, Act::Gated)?;
                    ops.linear(Act::Gated, down, None, Act::Delta)?;
                }
                Mlp::Experts(moe) => ops.moe(Act::Normed, &moe, Act::Delta)?,
            }
            delta = Some(Act::Delta);
        }
        ops.add_rmsnorm(delta, Act::Residual, self.final_norm, eps, Act::Normed)
    }
}

/// Columns of all query heads, and of all key heads.
pub(super) fn widths(config: &ModelConfig) -> (usize, usize) {
    (config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim)
}

/// The kinds of layers that exist, full attention first.
fn groups(config: &ModelConfig) -> Vec<Option<u32>> {
    let mut groups: Vec<Option<u32>> = config.windows.clone();
    groups.sort_unstable();
    groups.dedup();
    groups
}

fn layer(config: &ModelConfig, index: usize, weights: &mut Weights) -> Layer {
    let ((q, kv), hidden) = (widths(config), config.hidden_size);
    let name = |rest: &str| format!("layers.{index}.{rest}");
    let heads = |kind: &str| {
        let part = |head: &str, rows| (name(&format!("self_attn.{head}_proj.{kind}")), rows);
        vec![part("q", q), part("k", kv), part("v", kv)]
    };
    let input_norm = weights.vector(&name("input_layernorm.weight"), hidden, WeightRole::Norm);
    let qkv = weights.stacked(&name("self_attn.qkv_proj.weight"), heads("weight"), hidden);
    let bias_name = name("self_attn.qkv_proj.bias");
    let qkv_bias = config.qkv_bias.then(|| weights.biases(&bias_name, heads("bias")));
    let mut head_norm = |which: &str| {
        let name = name(&format!("self_attn.{which}_norm.weight"));
        config.qk_norm.then(|| weights.vector(&name, config.head_dim, WeightRole::Norm))
    };
    let (q_norm, k_norm) = (head_norm("q"), head_norm("k"));
    let o_proj = weights.matrix(&name("self_attn.o_proj.weight"), hidden, q, WeightRole::Linear);
    let o_bias =
        config.o_bias.then(|| weights.vector(&name("self_attn.o_proj.bias"), hidden, WeightRole::Bias));
    let post_norm = weights.vector(&name("post_attention_layernorm.weight"), hidden, WeightRole::Norm);
    let sinks_name = name("self_attn.sinks");
    let sinks =
        config.sinks.then(|| weights.vector(&sinks_name, config.num_attention_heads, WeightRole::Bias));
    let mlp = mlp(config, index, weights);
    let attention = Attention {
        kv_layer: index,
        q_heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
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

fn mlp(config: &ModelConfig, index: usize, weights: &mut Weights) -> Mlp {
    let (hidden, inter) = (config.hidden_size, config.intermediate_size);
    if let Some(experts) = config.experts.as_ref().filter(|experts| experts.layers[index]) {
        let earlier = experts.layers[..index].iter().filter(|has| **has).count();
        return Mlp::Experts(experts::moe(config.architecture, experts, hidden, (index, earlier), weights));
    }
    let name = |rest: &str| format!("layers.{index}.mlp.{rest}.weight");
    let halves = vec![(name("gate_proj"), inter), (name("up_proj"), inter)];
    let gate_up = weights.stacked(&name("gate_up_proj"), halves, hidden);
    let down = weights.matrix(&name("down_proj"), hidden, inter, WeightRole::Linear);
    Mlp::Dense { gate_up, down }
}
