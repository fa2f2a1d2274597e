//! A dense decoder: its weights, its KV groups, and its forward, written once over [`Ops`].

use super::config::ModelConfig;
use super::fields::ModelError;
use crate::backend::{
    Act, Attention, BackendError, KvLayer, Ops, StepSpec, WeightId, WeightRole, WeightSpec,
};
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
    /// Gate and up projections, stacked by rows.
    pub gate_up: WeightId,
    /// Down projection.
    pub down: WeightId,
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
        let table = vec![("embed_tokens.weight".to_owned(), config.vocab_size)];
        let embedding = weights.add("embed_tokens.weight", table, hidden, WeightRole::Embedding);
        let groups = groups(&config);
        let layers = (0..config.windows.len()).map(|i| layer(&config, i, &mut weights)).collect();
        let final_norm = weights.vector("norm.weight", hidden, WeightRole::Norm);
        let (q, kv) = widths(&config);
        let spec = StepSpec {
            weights: weights.0,
            acts: vec![
                (Act::Residual, hidden),
                (Act::Normed, hidden),
                (Act::Qkv, q + 2 * kv),
                (Act::Context, q),
                (Act::Delta, hidden),
                (Act::GateUp, 2 * config.intermediate_size),
                (Act::Gated, config.intermediate_size),
            ],
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
            ops.linear(Act::Normed, layer.gate_up, None, Act::GateUp)?;
            ops.silu_mul(Act::GateUp, Act::Gated)?;
            ops.linear(Act::Gated, layer.down, None, Act::Delta)?;
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
    let ((q, kv), hidden, inter) = (widths(config), config.hidden_size, config.intermediate_size);
    let name = |rest: &str| format!("layers.{index}.{rest}");
    let heads = |kind: &str| {
        let part = |head: &str, rows| (name(&format!("self_attn.{head}_proj.{kind}")), rows);
        vec![part("q", q), part("k", kv), part("v", kv)]
    };
    let linear = WeightRole::Linear;
    let input_norm = weights.vector(&name("input_layernorm.weight"), hidden, WeightRole::Norm);
    let qkv = weights.add(&name("self_attn.qkv_proj.weight"), heads("weight"), hidden, linear);
    let bias_name = name("self_attn.qkv_proj.bias");
    let qkv_bias =
        config.qkv_bias.then(|| weights.add(&bias_name, heads("bias"), q + 2 * kv, WeightRole::Bias));
    let mut head_norm = |which: &str| {
        let name = name(&format!("self_attn.{which}_norm.weight"));
        config.qk_norm.then(|| weights.vector(&name, config.head_dim, WeightRole::Norm))
    };
    let (q_norm, k_norm) = (head_norm("q"), head_norm("k"));
    let o_proj = weights.matrix(&name("self_attn.o_proj.weight"), hidden, q);
    let o_bias =
        config.o_bias.then(|| weights.vector(&name("self_attn.o_proj.bias"), hidden, WeightRole::Bias));
    let post_norm = weights.vector(&name("post_attention_layernorm.weight"), hidden, WeightRole::Norm);
    let halves = vec![(name("mlp.gate_proj.weight"), inter), (name("mlp.up_proj.weight"), inter)];
    let gate_up = weights.add(&name("mlp.gate_up_proj.weight"), halves, hidden, linear);
    let down = weights.matrix(&name("mlp.down_proj.weight"), hidden, inter);
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
    };
    Layer { input_norm, qkv, qkv_bias, attention, o_proj, o_bias, post_norm, gate_up, down }
}

/// The weights so far.
struct Weights(Vec<WeightSpec>);

impl Weights {
    fn add(&mut self, name: &str, parts: Vec<(String, usize)>, cols: usize, role: WeightRole) -> WeightId {
        let rows = match role {
            WeightRole::Norm | WeightRole::Bias => 1,
            WeightRole::Linear | WeightRole::Embedding => parts.iter().map(|(_, rows)| rows).sum(),
        };
        self.0.push(WeightSpec { name: name.to_owned(), parts, rows, cols, role });
        WeightId(self.0.len() - 1)
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> WeightId {
        self.add(name, vec![(name.to_owned(), rows)], cols, WeightRole::Linear)
    }

    fn vector(&mut self, name: &str, len: usize, role: WeightRole) -> WeightId {
        self.add(name, vec![(name.to_owned(), len)], len, role)
    }
}
