//! Models known by name, as the essential fields of their `config.json`.

/// Name and configuration of each preset.
const PRESETS: [(&str, &str); 10] = [
    (
        "smollm2-135m",
        r#"{"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": true, "torch_dtype": "bfloat16"}"#,
    ),
    (
        "llama-3.1-8b",
        r#"{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3",
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    ),
    (
        "qwen3-0.6b",
        r#"{"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": true, "torch_dtype": "bfloat16"}"#,
    ),
    (
        "qwen3-8b",
        r#"{"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    ),
    (
        "qwen3-32b",
        r#"{"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    ),
    (
        "mistral-7b",
        r#"{"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 32000,
        "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    ),
    (
        "mixtral-8x7b",
        r#"{"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
        "sliding_window": null, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false,
        "torch_dtype": "bfloat16"}"#,
    ),
    (
        "qwen3-30b-a3b",
        r#"{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    ),
    (
        "gpt-oss-20b",
        r#"{"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "swiglu_limit": 7.0, "vocab_size": 201088, "max_position_embeddings": 131072,
        "attention_bias": true, "sliding_window": 128, "rope_theta": 150000.0, "rope_scaling": {"rope_type": "yarn",
        "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
        "original_max_position_embeddings": 4096}, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    ),
    (
        "gpt-oss-120b",
        r#"{"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
        "num_experts_per_tok": 4, "swiglu_limit": 7.0, "vocab_size": 201088, "max_position_embeddings": 131072,
        "attention_bias": true, "sliding_window": 128, "rope_theta": 150000.0, "rope_scaling": {"rope_type": "yarn",
        "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
        "original_max_position_embeddings": 4096}, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    ),
];

/// The names, in the order in which messages list them.
#[must_use]
pub fn names() -> Vec<&'static str> {
    PRESETS.iter().map(|(name, _)| *name).collect()
}

/// The configuration of a preset.
pub(super) fn json(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|(known, _)| *known == name).map(|(_, json)| *json)
}
