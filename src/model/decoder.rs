//! A decoder: its weights, its KV groups, and its forward, written once over [`Ops`].

use super::config::ModelConfig;
use super::fields::ModelError;
use super::layers::{Layer, Mlp, layer};
use super::shard::Shard;
use super::weights::Weights;
use crate::backend::{Act, All2All, BackendError, KvLayer, Ops, StepSpec, WeightId, WeightRole};
use crate::batch::KvGroup;
use crate::layout::{Group, Place};

/// A decoder, or one rank's part of it, that a device can hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// What it was made from.
    pub config: ModelConfig,
    /// The part that this is.
    pub shard: Shard,
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
    /// The whole model: lays out weights and KV groups for KV blocks of `block_size` tokens and requests of up to `max_model_len`
    /// tokens.
    ///
    /// # Errors
    /// If one of the two is out of range.
    pub fn new(config: ModelConfig, block_size: u32, max_model_len: u32) -> Result<Self, ModelError> {
        Self::shard(config, block_size, max_model_len, Place::ONE, All2All::default())
    }

    /// What one rank holds of the model. Weights have the same numbers on all ranks, also those that a rank does not use.
    ///
    /// # Errors
    /// As for [`Model::new`], and, with the numbers, if something of the model does not divide over the ranks.
    pub fn shard(
        config: ModelConfig,
        block_size: u32,
        max_model_len: u32,
        place: Place,
        all2all: All2All,
    ) -> Result<Self, ModelError> {
        check_limit(&config, "--block-size", block_size, 1 << 16)?;
        check_limit(&config, "--max-model-len", max_model_len, u32::MAX)?;
        let shard = Shard::of(&config, place, all2all)?;
        let mut weights = Weights(Vec::new());
        let (hidden, vocabulary) = (config.hidden_size, config.vocab_size);
        let embedding = weights.matrix("embed_tokens.weight", vocabulary, hidden, WeightRole::Embedding);
        weights.keep_rows(embedding, std::slice::from_ref(&shard.vocabulary));
        let layers: Vec<Layer> =
            (0..config.windows.len()).map(|i| layer(&config, &shard, i, &mut weights)).collect();
        let final_norm = weights.vector("norm.weight", hidden, WeightRole::Norm);
        let groups = groups(&config);
        let spec = StepSpec {
            weights: weights.0,
            acts: acts(&config, &shard, &layers),
            kv_groups: groups.iter().map(|&window| KvGroup { block_size, window, replay: None }).collect(),
            kv_layers: kv_layers(&config, &shard, &groups),
            ropes: vec![config.rope.clone()],
            max_model_len,
        };
        Ok(Self { config, shard, spec, embedding, layers, final_norm })
    }

    /// The forward: embedding, layers, last norm. The result is in [`Act::Normed`].
    pub fn forward(&self, ops: &mut dyn Ops) -> Result<(), BackendError> {
        let eps = self.config.rms_norm_eps;
        let shared = self.shard.place.layout.tensor > 1;
        let sum = |ops: &mut dyn Ops, act| if shared { ops.all_reduce(act, Group::Tensor) } else { Ok(()) };
        ops.embed_gather(self.embedding, Act::Residual)?;
        sum(ops, Act::Residual)?;
        let mut delta = None;
        for layer in &self.layers {
            ops.add_rmsnorm(delta, Act::Residual, layer.input_norm, eps, Act::Normed)?;
            ops.linear(Act::Normed, layer.qkv, layer.qkv_bias, Act::Qkv)?;
            ops.qk_norm_rope_kvwrite(Act::Qkv, &layer.attention)?;
            ops.attention(Act::Qkv, &layer.attention, Act::Context)?;
            ops.linear(Act::Context, layer.o_proj, layer.o_bias, Act::Delta)?;
            sum(ops, Act::Delta)?;
            ops.add_rmsnorm(Some(Act::Delta), Act::Residual, layer.post_norm, eps, Act::Normed)?;
            match layer.mlp {
                Mlp::Dense { gate_up, down } => {
                    ops.linear(Act::Normed, gate_up, None, Act::GateUp)?;
                    ops.silu_mul(Act::GateUp, Act::Gated)?;
                    ops.linear(Act::Gated, down, None, Act::Delta)?;
                }
                Mlp::Experts(moe) => ops.moe(Act::Normed, &moe, Act::Delta)?,
            }
            sum(ops, Act::Delta)?;
            delta = Some(Act::Delta);
        }
        ops.add_rmsnorm(delta, Act::Residual, self.final_norm, eps, Act::Normed)
    }
}

/// The kinds of layers that exist, full attention first.
fn groups(config: &ModelConfig) -> Vec<Option<u32>> {
    let mut groups: Vec<Option<u32>> = config.windows.clone();
    groups.sort_unstable();
    groups.dedup();
    groups
}

fn check_limit(config: &ModelConfig, flag: &str, value: u32, most: u32) -> Result<(), ModelError> {
    if (1..=most).contains(&value) {
        return Ok(());
    }
    let (model, field, value) = (config.name.clone(), flag.to_owned(), value.to_string());
    Err(ModelError::Field { model, field, value, supported: format!("it must be from 1 to {most}") })
}

/// The activation buffers that the layers need.
fn acts(config: &ModelConfig, shard: &Shard, layers: &[Layer]) -> Vec<(Act, usize)> {
    let (hidden, dim) = (config.hidden_size, config.head_dim);
    let (q, kv) = (shard.q_heads.len() * dim, shard.kv_heads.len() * dim);
    let mut acts = vec![
        (Act::Residual, hidden),
        (Act::Normed, hidden),
        (Act::Qkv, q + 2 * kv),
        (Act::Context, q),
        (Act::Delta, hidden),
    ];
    if layers.iter().any(|layer| matches!(layer.mlp, Mlp::Dense { .. })) {
        let inter = shard.inter.len();
        acts.extend([(Act::GateUp, 2 * inter), (Act::Gated, inter)]);
    }
    acts
}

fn kv_layers(config: &ModelConfig, shard: &Shard, groups: &[Option<u32>]) -> Vec<KvLayer> {
    let of_window = |window: &Option<u32>| KvLayer {
        group: groups.iter().position(|group| group == window).unwrap_or(0),
        kv_heads: shard.kv_heads.len(),
        head_dim: config.head_dim,
        all_heads: config.num_key_value_heads,
        first_head: shard.kv_heads.start,
    };
    config.windows.iter().map(of_window).collect()
}
