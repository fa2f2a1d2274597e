//! Experts: what a configuration says of them.

use super::architecture::Architecture;
use super::fields::{Fields, ModelError};
use crate::backend::{Activation, Scoring};

/// The experts of a model, the same in all layers that have any.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// How many there are in a layer.
    pub count: usize,
    /// How many of them a token uses.
    pub top_k: usize,
    /// Width of gate and of up of one expert.
    pub inter: usize,
    /// How the chosen ones are weighted.
    pub scoring: Scoring,
    /// What lies between an expert's products.
    pub activation: Activation,
    /// Whether the gate and both products have biases.
    pub bias: bool,
    /// `[num_hidden_layers]` whether a layer has experts rather than one MLP.
    pub layers: Vec<bool>,
}

impl Experts {
    /// Layers that have experts.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.layers.iter().filter(|has| **has).count()
    }
}

/// Experts of a layer at most: routing that is replaced writes `top_k` as a bfloat16, and kernels sort by expert.
const MOST: usize = 1024;

/// More chosen experts than this cannot be told apart by bfloat16 logits.
const MOST_CHOSEN: usize = 256;

/// The slope of gpt-oss's sigmoid; no configuration has it.
const ALPHA: f32 = 1.702;

/// The experts of a configuration of `layers` layers; none for a dense model.
pub(super) fn read(
    fields: Fields<'_>,
    architecture: Architecture,
    layers: usize,
) -> Result<Option<Experts>, ModelError> {
    if !architecture.has_experts() {
        return Ok(None);
    }
    let defaults = match architecture {
        Architecture::Mixtral => (8, 2),
        Architecture::Qwen3Moe => (128, 8),
        _ => (128, 4),
    };
    let count = count(fields, defaults.0)?;
    let top_k = fields.size("num_experts_per_tok", Some(defaults.1), MOST_CHOSEN)?;
    if top_k > count {
        return Err(fields.error("num_experts_per_tok", format!("there are {count} experts")));
    }
    let inter = match architecture {
        Architecture::Qwen3Moe => fields.size("moe_intermediate_size", Some(768), 1 << 22)?,
        _ => fields.size("intermediate_size", None, 1 << 22)?,
    };
    let gpt_oss = architecture == Architecture::GptOss;
    let scoring = match architecture {
        Architecture::GptOss => Scoring::TopKThenSoftmax,
        Architecture::Qwen3Moe => {
            Scoring::SoftmaxThenTopK { renormalize: fields.flag("norm_topk_prob", false)? }
        }
        _ => Scoring::SoftmaxThenTopK { renormalize: true },
    };
    let activation = if gpt_oss {
        let limit = fields.positive("swiglu_limit", Some(7.0))? as f32;
        Activation::ClampedSwiglu { limit, alpha: ALPHA, interleaved: true }
    } else {
        Activation::SiluMul
    };
    let layers = match architecture {
        Architecture::Qwen3Moe => sparse_layers(fields, layers)?,
        _ => vec![true; layers],
    };
    let experts = Experts { count, top_k, inter, scoring, activation, bias: gpt_oss, layers };
    Ok((experts.num_layers() > 0).then_some(experts))
}

/// Either name; transformers takes one for the other.
fn count(fields: Fields<'_>, default: usize) -> Result<usize, ModelError> {
    let local = fields.size("num_local_experts", Some(default), MOST)?;
    let count = fields.size("num_experts", Some(local), MOST)?;
    if count != local && fields.get("num_local_experts").is_some() {
        return Err(fields.error("num_experts", format!("num_local_experts is {local}")));
    }
    Ok(count)
}

/// Every `decoder_sparse_step`th layer, unless it is one of `mlp_only_layers`.
fn sparse_layers(fields: Fields<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let step = fields.size("decoder_sparse_step", Some(1), 1 << 12)?;
    let bad = || fields.error("mlp_only_layers", "it must be a list of layer numbers");
    let dense: Vec<u64> = match fields.get("mlp_only_layers") {
        None => Vec::new(),
        Some(list) => list
            .as_array()
            .and_then(|list| list.iter().map(serde_json::Value::as_u64).collect())
            .ok_or_else(bad)?,
    };
    Ok((0..layers).map(|i| (i + 1).is_multiple_of(step) && !dense.contains(&(i as u64))).collect())
}
