//! Hugging Face `config.json`, in both dialects, to a [`ModelConfig`]; rules and defaults are those of transformers 5.17.

use std::path::Path;

use serde_json::{Map, Value};

use super::architecture::Architecture;
use super::experts::{self, Experts};
use super::fields::{Fields, ModelError};
use super::{overrides, presets, rope};
use crate::backend::{Dtype, Rope};

/// A decoder, checked: sizes are not zero, fit each other, and no product of two overflows.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The preset's name or the folder's.
    pub name: String,
    /// The family.
    pub architecture: Architecture,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of gate and of up in layers without experts.
    pub intermediate_size: usize,
    /// Query heads of a layer.
    pub num_attention_heads: usize,
    /// Key heads of a layer, and value heads; they divide the query heads.
    pub num_key_value_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Epsilon of all norms.
    pub rms_norm_eps: f32,
    /// Positions that the model was made for.
    pub max_position_embeddings: u32,
    /// Whether the head shares the embedding (the forward has no head).
    pub tie_word_embeddings: bool,
    /// Bias on query, key and value.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub o_bias: bool,
    /// Norms on query and key heads.
    pub qk_norm: bool,
    /// The rotary embedding of all layers.
    pub rope: Rope,
    /// `[num_hidden_layers]` the sliding window of each layer, if it has one.
    pub windows: Vec<Option<u32>>,
    /// One learned logit for each query head in the softmax's denominator.
    pub sinks: bool,
    /// The experts, if any layer has them.
    pub experts: Option<Experts>,
    /// The type that the checkpoint says it is in.
    pub dtype: Option<Dtype>,
    /// The configuration that all this was read from, overrides merged in.
    pub json: Map<String, Value>,
}

/// The fields that are read, besides those of [`rope::ROPE_FIELDS`].
pub(super) const FIELDS: &[&str] = &[
    "architectures",
    "attention_bias",
    "decoder_sparse_step",
    "dtype",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "mlp_only_layers",
    "model_type",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_local_experts",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "swiglu_limit",
    "tie_word_embeddings",
    "torch_dtype",
    "use_sliding_window",
    "vocab_size",
];

impl ModelConfig {
    /// A preset, or the folder of a checkpoint; a folder whose name is a preset's is reached as `./NAME`.
    /// `overrides` is a JSON object that is merged over its configuration.
    pub fn resolve(name: &str, overrides: Option<&str>) -> Result<Self, ModelError> {
        if let Some(json) = presets::json(name) {
            return Self::from_json(name, json, overrides);
        }
        if Path::new(name).is_dir() {
            return Self::from_dir(Path::new(name), overrides);
        }
        Err(ModelError::Unknown { name: name.to_owned(), presets: presets::names().join(", ") })
    }

    /// The `config.json` of a folder.
    pub fn from_dir(dir: &Path, overrides: Option<&str>) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let file = |reason: String| ModelError::File { path: path.display().to_string(), reason };
        let metadata = std::fs::metadata(&path).map_err(|error| file(error.to_string()))?;
        if !metadata.is_file() {
            return Err(file("this is no regular file".into()));
        }
        let size = metadata.len();
        if size > 1 << 24 {
            return Err(file(format!("{size} bytes are no model configuration")));
        }
        let text = std::fs::read_to_string(&path).map_err(|error| file(error.to_string()))?;
        let whole = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let name = whole.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy());
        Self::from_json(&name, &text, overrides).map_err(|error| match error {
            ModelError::File { reason, .. } => file(reason),
            other => other,
        })
    }

    /// A configuration as text.
    pub fn from_json(name: &str, text: &str, overrides: Option<&str>) -> Result<Self, ModelError> {
        let file = |reason: String| ModelError::File { path: name.to_owned(), reason };
        let value: Value =
            serde_json::from_str(text).map_err(|error| file(format!("not valid JSON: {error}")))?;
        let Value::Object(mut json) = value else {
            return Err(file("a model configuration must be a JSON object".into()));
        };
        if let Some(overrides) = overrides {
            overrides::merge(&mut json, overrides)?;
        }
        Self::read(name, json)
    }

    fn read(name: &str, json: Map<String, Value>) -> Result<Self, ModelError> {
        let fields = Fields { model: name, prefix: "", map: &json };
        let architecture = Architecture::of(fields)?;
        refuse_unsupported(fields, architecture)?;
        let hidden_size = fields.size("hidden_size", None, 1 << 20)?;
        let num_attention_heads = fields.size("num_attention_heads", None, 1 << 14)?;
        let num_key_value_heads = kv_heads(fields, architecture, num_attention_heads)?;
        let head_dim = head_dim(fields, architecture, hidden_size, num_attention_heads)?;
        let default_positions = match architecture {
            Architecture::Llama => 2048,
            Architecture::Mistral | Architecture::Mixtral | Architecture::GptOss => 131_072,
            Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Qwen3Moe => 32_768,
        };
        let positions = fields.size("max_position_embeddings", Some(default_positions), u32::MAX as usize)?;
        let bias = fields.flag("attention_bias", architecture == Architecture::GptOss)?;
        let attention_bias = bias && architecture != Architecture::Qwen2;
        let windows = windows(fields, architecture)?;
        let experts = experts::read(fields, architecture, windows.len())?;
        let intermediate_size = match &experts {
            Some(experts) if architecture != Architecture::Qwen3Moe => experts.inter,
            _ => fields.size("intermediate_size", None, 1 << 22)?,
        };
        let default_eps = match architecture {
            Architecture::Mixtral | Architecture::GptOss => 1e-5,
            _ => 1e-6,
        };
        Ok(Self {
            name: name.to_owned(),
            architecture,
            vocab_size: fields.size("vocab_size", None, 1 << 26)?,
            hidden_size,
            intermediate_size,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: fields.positive("rms_norm_eps", Some(default_eps))? as f32,
            max_position_embeddings: u32::try_from(positions).unwrap_or(u32::MAX),
            tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
            qkv_bias: attention_bias || architecture == Architecture::Qwen2,
            o_bias: attention_bias,
            qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Qwen3Moe),
            rope: rope::rope(fields, architecture.rope_defaults(), head_dim, positions)?,
            windows,
            sinks: architecture == Architecture::GptOss,
            experts,
            dtype: dtype(fields)?,
            json,
        })
    }
}

/// Whatever would change the forward and is not implemented.
fn refuse_unsupported(fields: Fields<'_>, architecture: Architecture) -> Result<(), ModelError> {
    if fields.flag("mlp_bias", false)? {
        return Err(fields.error("mlp_bias", "supported is false"));
    }
    if matches!(architecture, Architecture::Mistral | Architecture::Mixtral)
        && fields.flag("attention_bias", false)?
    {
        return Err(fields.error("attention_bias", "this model_type has none: supported is false"));
    }
    let activation = fields.text("hidden_act")?.unwrap_or("silu");
    if !matches!(activation, "silu" | "swish") {
        return Err(fields.error("hidden_act", "supported is silu"));
    }
    quantization(fields, architecture)?;
    let others: &[&str] =
        if architecture.has_experts() { &[] } else { &["num_experts", "num_local_experts"] };
    for field in others.iter().chain(&["n_routed_experts", "kv_lora_rank"]) {
        if fields.get(field).is_some_and(|value| value.as_u64() != Some(0)) {
            let names =
                "supported are models without that field, and experts of mixtral, qwen3_moe and gpt_oss";
            return Err(fields.error(field, names));
        }
    }
    Ok(())
}

/// Only MXFP4 experts of gpt-oss: they are dequantised on loading.
fn quantization(fields: Fields<'_>, architecture: Architecture) -> Result<(), ModelError> {
    let Some(quantization) = fields.get("quantization_config") else { return Ok(()) };
    let method = quantization.get("quant_method").and_then(Value::as_str);
    if architecture == Architecture::GptOss && method == Some("mxfp4") {
        return Ok(());
    }
    Err(fields.error("quantization_config", "supported are unquantised checkpoints, and mxfp4 of gpt_oss"))
}

fn kv_heads(fields: Fields<'_>, architecture: Architecture, q_heads: usize) -> Result<usize, ModelError> {
    let default = match architecture {
        _ if fields.has("num_key_value_heads") => q_heads,
        Architecture::Llama => q_heads,
        Architecture::Mistral | Architecture::Mixtral | Architecture::GptOss => 8,
        Architecture::Qwen2 | Architecture::Qwen3 => 32,
        Architecture::Qwen3Moe => 4,
    };
    let heads = fields.size("num_key_value_heads", Some(default), 1 << 14)?;
    if !q_heads.is_multiple_of(heads) {
        let divides = format!("it must divide num_attention_heads, {q_heads}");
        return Err(fields.error("num_key_value_heads", divides));
    }
    Ok(heads)
}

fn head_dim(
    fields: Fields<'_>,
    architecture: Architecture,
    hidden_size: usize,
    q_heads: usize,
) -> Result<usize, ModelError> {
    let default = match architecture {
        Architecture::Qwen3 => Some(128),
        Architecture::GptOss => Some(64),
        _ => None,
    };
    let derived = default
        .filter(|_| !fields.has("head_dim"))
        .or_else(|| hidden_size.is_multiple_of(q_heads).then_some(hidden_size / q_heads));
    if fields.get("head_dim").is_none() && derived.is_none() {
        let supported = format!("without head_dim it must be a multiple of num_attention_heads, {q_heads}");
        return Err(fields.error("hidden_size", supported));
    }
    let width = fields.size("head_dim", derived, 1 << 13)?;
    if !width.is_multiple_of(2) {
        return Err(fields.error("head_dim", format!("rotary embeddings need an even one, not {width}")));
    }
    Ok(width)
}

/// The sliding window of each layer.
fn windows(fields: Fields<'_>, architecture: Architecture) -> Result<Vec<Option<u32>>, ModelError> {
    use Architecture::{GptOss, Llama, Mixtral, Qwen2, Qwen3, Qwen3Moe};
    let layers = fields.size("num_hidden_layers", None, 1 << 12)?;
    let window = |default| Ok(Some(fields.size("sliding_window", Some(default), u32::MAX as usize)? as u32));
    let given = match architecture {
        Llama => None,
        Qwen2 | Qwen3 | Qwen3Moe if !fields.flag("use_sliding_window", false)? => None,
        _ if fields.has("sliding_window") && fields.get("sliding_window").is_none() => None,
        Mixtral if !fields.has("sliding_window") => None,
        GptOss => window(128)?,
        _ => window(4096)?,
    };
    let from = match (architecture, fields.get("max_window_layers")) {
        (Qwen2 | Qwen3, None) => 28,
        (Qwen2 | Qwen3, Some(value)) => {
            let bad = || fields.error("max_window_layers", "it must be a whole number");
            value.as_u64().ok_or_else(bad)?.min(layers as u64) as usize
        }
        _ => 0,
    };
    let sliding = |i: usize| i >= from && (architecture != GptOss || i.is_multiple_of(2));
    let usual: Vec<Option<u32>> = (0..layers).map(|i| given.filter(|_| sliding(i))).collect();
    let Some(types) = fields.get("layer_types") else { return Ok(usual) };
    let bad = |supported: String| fields.error("layer_types", supported);
    let types = types.as_array().ok_or_else(|| bad("it must be a list".into()))?;
    if types.len() != layers {
        return Err(bad(format!("it has {} entries, num_hidden_layers is {layers}", types.len())));
    }
    let listed = types.iter().map(|kind| match (kind.as_str(), given) {
        (Some("full_attention"), _) => Ok(None),
        (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
        (Some("sliding_attention"), None) => {
            Err(bad("there is no sliding_window (or use_sliding_window is false)".into()))
        }
        _ => Err(bad("supported are full_attention and sliding_attention".into())),
    });
    let listed = listed.collect::<Result<Vec<_>, _>>()?;
    if !matches!(architecture, Qwen2 | Qwen3 | GptOss) && listed != usual {
        return Err(bad("the layers of this model_type are all alike".into()));
    }
    Ok(listed)
}

fn dtype(fields: Fields<'_>) -> Result<Option<Dtype>, ModelError> {
    let field = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match fields.text(field)? {
        None | Some("auto") => Ok(None),
        Some("float32") => Ok(Some(Dtype::Float32)),
        Some("bfloat16") => Ok(Some(Dtype::Bfloat16)),
        Some("float16") => Ok(Some(Dtype::Float16)),
        Some(_) => Err(fields.error(field, "supported are float32, bfloat16 and float16")),
    }
}
