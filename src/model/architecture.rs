//! The families of decoders, and how a configuration names them.

use serde_json::{Map, Value, json};

use super::fields::{Fields, ModelError};

/// A family of decoders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama and what follows its layout, SmolLM2 among them.
    Llama,
    /// Qwen2 and Qwen2.5: biases on query, key and value.
    Qwen2,
    /// Qwen3: norms on query and key heads.
    Qwen3,
    /// Mistral: a sliding window in all layers, or in none.
    Mistral,
    /// Mixtral: Mistral with experts in all layers.
    Mixtral,
    /// Qwen3 with experts, in all layers or some.
    Qwen3Moe,
    /// gpt-oss: experts with biases, attention sinks, a sliding window in every other layer.
    GptOss,
}

/// `model_type`, the stem of the classes, the family.
const KNOWN: [(&str, &str, Architecture); 7] = [
    ("llama", "Llama", Architecture::Llama),
    ("qwen2", "Qwen2", Architecture::Qwen2),
    ("qwen3", "Qwen3", Architecture::Qwen3),
    ("mistral", "Mistral", Architecture::Mistral),
    ("mixtral", "Mixtral", Architecture::Mixtral),
    ("qwen3_moe", "Qwen3Moe", Architecture::Qwen3Moe),
    ("gpt_oss", "GptOss", Architecture::GptOss),
];

/// What a rotary embedding is where a configuration does not say.
pub(super) struct RopeDefaults {
    /// Its base.
    pub theta: f64,
    /// Its parameters, if neither dialect gives any.
    pub parameters: Map<String, Value>,
}

impl Architecture {
    /// From `model_type`, which `architectures` must not contradict; either may be missing.
    pub(super) fn of(fields: Fields<'_>) -> Result<Self, ModelError> {
        let names = "supported are llama, mistral, mixtral, qwen2, qwen3, qwen3_moe and gpt_oss";
        let model_type = fields.text("model_type")?;
        let by_type = model_type
            .map(|text| {
                KNOWN.iter().find(|known| known.0 == text).ok_or_else(|| fields.error("model_type", names))
            })
            .transpose()?;
        let classes = "supported are LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM, \
                       Qwen3ForCausalLM, Qwen3MoeForCausalLM, GptOssForCausalLM, and the same with Model";
        let class =
            fields.get("architectures").and_then(|value| value.as_array()).and_then(|list| list.first());
        let by_class = class
            .map(|class| {
                let stem =
                    class.as_str().and_then(|c| c.strip_suffix("ForCausalLM").or(c.strip_suffix("Model")));
                let known = KNOWN.iter().find(|known| Some(known.1) == stem);
                known.ok_or_else(|| fields.error("architectures", classes))
            })
            .transpose()?;
        match (by_type, by_class) {
            (Some(a), Some(b)) if a.2 != b.2 => {
                Err(fields.error("architectures", format!("model_type says {}", a.0)))
            }
            (Some(known), _) | (None, Some(known)) => Ok(known.2),
            (None, None) => Err(fields.error("model_type", names)),
        }
    }

    /// Whether its layers may have experts.
    pub(super) fn has_experts(self) -> bool {
        matches!(self, Self::Mixtral | Self::Qwen3Moe | Self::GptOss)
    }

    /// The rotary embedding that transformers gives it.
    pub(super) fn rope_defaults(self) -> RopeDefaults {
        let theta = match self {
            Self::Mixtral => 1e6,
            Self::GptOss => 150_000.0,
            _ => 10_000.0,
        };
        let yarn = json!({
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096,
        });
        let parameters = match yarn {
            Value::Object(yarn) if self == Self::GptOss => yarn,
            _ => Map::new(),
        };
        RopeDefaults { theta, parameters }
    }
}
