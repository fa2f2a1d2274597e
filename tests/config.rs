//! Model configurations: dialects, defaults, what is refused and how, overrides.

use forward_bench::backend::{Activation, Scoring};
use forward_bench::model::{Model, ModelConfig};

/// A llama of ordinary sizes with `fields` merged in.
fn llama(fields: &str) -> Result<ModelConfig, String> {
    let base = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128}"#;
    ModelConfig::from_json("m", base, Some(fields)).map_err(|error| error.to_string())
}

/// A configuration of its own.
fn config(json: &str) -> Result<ModelConfig, String> {
    let sizes = r#""hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 128"#;
    ModelConfig::from_json("m", &format!("{{{sizes}, {json}}}"), None).map_err(|error| error.to_string())
}

#[test]
fn both_dialects_say_the_same() {
    let old = config(
        r#""architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "torch_dtype": "bfloat16", "max_position_embeddings": 256,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}"#,
    );
    let new = config(
        r#""architectures": ["LlamaModel"], "model_type": "llama", "dtype": "bfloat16", "max_position_embeddings": 256,
        "rope_scaling": null, "rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 64}"#,
    );
    let (mut old, new) = (old.unwrap(), new.unwrap());
    old.json = new.json.clone();
    assert_eq!(old, new);
    assert!(old.rope.factor > 1.1);
}

#[test]
fn presets_have_the_sizes_of_their_models() {
    let of = |name: &str| ModelConfig::resolve(name, None).unwrap();
    for (name, billions) in [
        ("smollm2-135m", 0.1345),
        ("llama-3.1-8b", 7.504),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 7.568),
        ("qwen3-32b", 31.98),
        ("mistral-7b", 7.11),
    ] {
        let model = Model::new(of(name), 16, 4096).unwrap();
        let parameters: usize = model.spec.weights.iter().map(|w| w.rows * w.cols).sum();
        assert!((parameters as f64 / 1e9 / billions - 1.0).abs() < 1e-3, "{name}: {parameters}");
    }
    assert_eq!(of("mistral-7b").windows, vec![Some(4096); 32]);
    // With the head, which the forward does not have, as the models' makers count.
    for (name, billions) in
        [("mixtral-8x7b", 46.70), ("qwen3-30b-a3b", 30.53), ("gpt-oss-20b", 20.91), ("gpt-oss-120b", 116.83)]
    {
        let config = of(name);
        let head = config.vocab_size * config.hidden_size;
        let model = Model::new(config, 16, 4096).unwrap();
        let parameters: usize = model.spec.weights.iter().map(|w| w.rows * w.cols).sum();
        assert!(((parameters + head) as f64 / 1e9 - billions).abs() < 0.006, "{name}: {parameters}");
    }
    let experts = of("gpt-oss-120b").experts.unwrap();
    assert_eq!((experts.count, experts.top_k, experts.num_layers()), (128, 4, 36));
}

#[test]
fn windows_follow_each_architecture() {
    let windows = |json: &str| config(json).map(|config| config.windows);
    let (none, some) = (None, Some(16));
    assert_eq!(windows(r#""model_type": "llama", "sliding_window": 16"#).unwrap(), [none; 4]);
    assert_eq!(windows(r#""model_type": "mistral", "sliding_window": 16"#).unwrap(), [some; 4]);
    assert_eq!(windows(r#""model_type": "mistral", "sliding_window": null"#).unwrap(), [none; 4]);
    assert_eq!(windows(r#""model_type": "mistral""#).unwrap(), [Some(4096); 4]);
    let qwen = r#""model_type": "qwen2", "sliding_window": 16"#;
    assert_eq!(windows(qwen).unwrap(), [none; 4]);
    let used = format!("{qwen}, \"use_sliding_window\": true");
    assert_eq!(windows(&used).unwrap(), [none; 4], "max_window_layers is 28");
    assert_eq!(windows(&format!("{used}, \"max_window_layers\": 1")).unwrap(), [none, some, some, some]);
    let types =
        r#""layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]"#;
    assert_eq!(windows(&format!("{used}, {types}")).unwrap(), [some, none, some, none]);
    let error = windows(&format!("{qwen}, {types}")).unwrap_err();
    assert!(error.contains("layer_types") && error.contains("sliding_window"), "{error}");
    assert!(windows(&format!("\"model_type\": \"llama\", {types}")).unwrap_err().contains("layer_types"));
    let short = windows(&format!("{used}, \"layer_types\": [\"full_attention\"]")).unwrap_err();
    assert!(short.contains("1 entries, num_hidden_layers is 4"), "{short}");
}

#[test]
fn kv_groups_are_those_that_exist() {
    let groups = |json: &str| Model::new(config(json).unwrap(), 8, 64).unwrap().spec.kv_groups;
    let windows = |json: &str| groups(json).iter().map(|group| group.window).collect::<Vec<_>>();
    assert_eq!(windows(r#""model_type": "llama""#), [None]);
    assert_eq!(windows(r#""model_type": "mistral", "sliding_window": 9"#), [Some(9)]);
    let mixed =
        r#""model_type": "qwen3", "sliding_window": 9, "use_sliding_window": true, "max_window_layers": 2"#;
    assert_eq!(windows(mixed), [None, Some(9)]);
}

#[test]
fn biases_and_norms_follow_each_architecture() {
    let flags = |json: &str| config(json).map(|c| (c.qkv_bias, c.o_bias, c.qk_norm)).unwrap();
    assert_eq!(flags(r#""model_type": "llama""#), (false, false, false));
    assert_eq!(flags(r#""model_type": "llama", "attention_bias": true"#), (true, true, false));
    assert_eq!(flags(r#""model_type": "qwen2""#), (true, false, false));
    assert_eq!(flags(r#""model_type": "qwen3""#), (false, false, true));
}

#[test]
fn head_dim_is_given_or_derived() {
    let head_dim = |json: &str| config(json).map(|c| c.head_dim);
    assert_eq!(head_dim(r#""model_type": "llama""#), Ok(16));
    assert_eq!(head_dim(r#""model_type": "llama", "head_dim": null"#), Ok(16));
    assert_eq!(head_dim(r#""model_type": "llama", "head_dim": 32"#), Ok(32));
    assert_eq!(head_dim(r#""model_type": "qwen3""#), Ok(128));
}

#[test]
fn what_is_not_supported_is_named_with_its_value() {
    for (fields, expected) in [
        (r#"{"mlp_bias": true}"#, "m: mlp_bias is true; supported is false"),
        (r#"{"hidden_act": "gelu"}"#, "m: hidden_act is \"gelu\"; supported is silu"),
        (r#"{"model_type": "qwen2_moe"}"#, "m: model_type is \"qwen2_moe\"; supported are llama"),
        (r#"{"architectures": ["GPT2LMHeadModel"]}"#, "m: architectures is [\"GPT2LMHeadModel\"]; supported"),
        (r#"{"architectures": ["Qwen2Model"]}"#, "model_type says llama"),
        (r#"{"quantization_config": {"bits": 4}}"#, "m: quantization_config is {\"bits\":4}"),
        (r#"{"partial_rotary_factor": 0.5}"#, "m: partial_rotary_factor is 0.5; supported is 1"),
        (
            r#"{"rope_scaling": {"rope_type": "dynamic", "factor": 2}}"#,
            "m: rope_scaling.rope_type is \"dynamic\"",
        ),
        (r#"{"rope_scaling": {"type": "longrope"}}"#, "m: rope_scaling.type is \"longrope\""),
        (r#"{"rope_scaling": {"type": "linear"}}"#, "m: rope_scaling.factor is missing; it must be a number"),
        (r#"{"rope_parameters": {"full_attention": {"rope_theta": 1}}}"#, "rope_parameters.full_attention"),
        (r#"{"num_attention_heads": 0}"#, "m: num_attention_heads is 0; it must be a whole number from 1"),
        (
            r#"{"num_key_value_heads": 3}"#,
            "m: num_key_value_heads is 3; it must divide num_attention_heads, 4",
        ),
        (r#"{"num_key_value_heads": 8}"#, "it must divide num_attention_heads, 4"),
        (r#"{"head_dim": 15}"#, "an even one, not 15"),
        (r#"{"hidden_size": 66}"#, "m: hidden_size is 66; without head_dim"),
        (r#"{"hidden_size": 18446744073709551615}"#, "m: hidden_size is 18446744073709551615; it must be"),
        (r#"{"hidden_size": -1}"#, "m: hidden_size is -1"),
        (r#"{"hidden_size": "64"}"#, "m: hidden_size is \"64\""),
        (r#"{"num_hidden_layers": 1000000000000}"#, "num_hidden_layers is 1000000000000"),
        (r#"{"vocab_size": null}"#, "m: vocab_size is null"),
        (r#"{"rms_norm_eps": 0}"#, "m: rms_norm_eps is 0; it must be a number above 0"),
        (r#"{"torch_dtype": "int8"}"#, "m: torch_dtype is \"int8\""),
        (r#"{"tie_word_embeddings": 1}"#, "m: tie_word_embeddings is 1; it must be true or false"),
    ] {
        let error = llama(fields).expect_err(fields);
        assert!(error.contains(expected) && !error.contains('\n'), "{fields}: {error}");
    }
    let experts = config(r#""model_type": "llama", "num_local_experts": 8"#).unwrap_err();
    assert!(experts.contains("num_local_experts is 8; supported are models without that field"), "{experts}");
}

#[test]
fn overrides_are_merged() {
    assert_eq!(llama(r#"{"num_hidden_layers": 2}"#).unwrap().windows.len(), 2);
    let scaled = r#"{"rope_scaling": {"factor": 16.0}}"#;
    let config = ModelConfig::resolve("llama-3.1-8b", Some(scaled)).unwrap();
    assert_eq!(config.json["rope_scaling"]["factor"], 16.0);
    assert_eq!(config.json["rope_scaling"]["low_freq_factor"], 1.0);
    assert_eq!(config.name, "llama-3.1-8b");
}

#[test]
fn overrides_that_do_nothing_are_errors() {
    for (text, expected) in [
        ("[1]", "it must be a JSON object"),
        ("{", "not valid JSON"),
        (r#"{"num_hidden_layer": 2}"#, "the nearest known field is \"num_hidden_layers\""),
        (r#"{"rope_scaling": {"facter": 2}}"#, "the nearest known field is \"factor\""),
    ] {
        let error = llama(text).expect_err(text);
        assert!(error.starts_with("--hf-overrides: ") && error.contains(expected), "{text}: {error}");
    }
    let newer = r#"{"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}}"#;
    let error = ModelConfig::from_json("m", newer, Some(r#"{"rope_theta": 1e5}"#)).unwrap_err().to_string();
    assert!(error.contains("given in rope_parameters"), "{error}");
}

#[test]
fn fewer_layers_keep_the_first_kinds() {
    let json = r#"{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128, "use_sliding_window": true,
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}"#;
    let config = ModelConfig::from_json("m", json, Some(r#"{"num_hidden_layers": 2}"#)).unwrap();
    assert_eq!(config.windows, [Some(8), None]);
    assert!(ModelConfig::from_json("m", json, Some(r#"{"num_hidden_layers": 4}"#)).is_err());
}

#[test]
fn an_unknown_model_lists_the_presets() {
    let error = ModelConfig::resolve("smollm", None).unwrap_err().to_string();
    assert!(
        error.contains("--model smollm: no preset and no folder") && error.contains("qwen3-32b"),
        "{error}"
    );
    let folder = tempfile::tempdir().unwrap();
    let error = ModelConfig::from_dir(folder.path(), None).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
    std::fs::write(folder.path().join("config.json"), "{\"a\": NaN}").unwrap();
    let error = ModelConfig::from_dir(folder.path(), None).unwrap_err().to_string();
    assert!(error.contains("config.json: not valid JSON"), "{error}");
}

#[test]
fn sizes_from_the_command_line_are_checked() {
    let model = |block_size, max_model_len| Model::new(llama("{}").unwrap(), block_size, max_model_len);
    assert!(model(0, 64).unwrap_err().to_string().contains("--block-size is 0"));
    assert!(model(16, 0).unwrap_err().to_string().contains("--max-model-len is 0"));
    assert!(model(u32::MAX, 64).is_err());
    assert!(model(16, u32::MAX).is_ok());
}

#[test]
fn experts_have_the_defaults_of_transformers() {
    let of = |json: &str| config(json).unwrap();
    let renormalize = |renormalize| Scoring::SoftmaxThenTopK { renormalize };
    let mixtral = of(r#""model_type": "mixtral""#);
    assert_eq!((mixtral.rms_norm_eps, mixtral.windows.clone(), mixtral.head_dim), (1e-5, vec![None; 4], 16));
    assert_eq!(mixtral.max_position_embeddings, 131_072);
    let frequency = |config: &ModelConfig, theta: f32| {
        let dim = config.head_dim as f32;
        (config.rope.inv_freq[1] / theta.powf(-2.0 / dim) - 1.0).abs() < 1e-6
    };
    assert!(frequency(&mixtral, 1e6));
    let experts = mixtral.experts.unwrap();
    assert_eq!((experts.count, experts.top_k, experts.inter, experts.scoring), (8, 2, 96, renormalize(true)));
    let qwen = of(r#""model_type": "qwen3_moe", "intermediate_size": 96"#);
    assert_eq!((qwen.rms_norm_eps, qwen.qk_norm, qwen.qkv_bias, qwen.head_dim), (1e-6, true, false, 16));
    assert!(frequency(&qwen, 1e4));
    let experts = qwen.experts.unwrap();
    assert_eq!(
        (experts.count, experts.top_k, experts.inter, experts.scoring),
        (128, 8, 768, renormalize(false))
    );
    let gpt = of(r#""model_type": "gpt_oss""#);
    let windows = [Some(128), None, Some(128), None];
    assert_eq!(
        (gpt.windows, gpt.head_dim, gpt.sinks, gpt.qkv_bias, gpt.o_bias),
        (windows.into(), 64, true, true, true)
    );
    assert!((gpt.rope.factor - (0.1 * 32_f32.ln() + 1.0)).abs() < 1e-6 && gpt.rms_norm_eps == 1e-5);
    let experts = gpt.experts.unwrap();
    assert_eq!(
        (experts.count, experts.top_k, experts.scoring, experts.bias),
        (128, 4, Scoring::TopKThenSoftmax, true)
    );
    let activation = Activation::ClampedSwiglu { limit: 7.0, alpha: 1.702, interleaved: true };
    assert_eq!(experts.activation, activation);
}

#[test]
fn layers_with_experts_follow_step_and_list() {
    let layers = |json: &str| {
        config(&format!("\"model_type\": \"qwen3_moe\", {json}"))
            .unwrap()
            .experts
            .map(|experts| experts.layers)
    };
    assert_eq!(layers(r#""decoder_sparse_step": 2"#), Some(vec![false, true, false, true]));
    assert_eq!(layers(r#""mlp_only_layers": [0, 9]"#), Some(vec![false, true, true, true]));
    assert_eq!(
        layers(r#""decoder_sparse_step": 2, "mlp_only_layers": [1]"#),
        Some(vec![false, false, false, true])
    );
    assert_eq!(layers(r#""mlp_only_layers": [0, 1, 2, 3]"#), None);
}

#[test]
fn experts_that_are_not_supported_are_named() {
    for (fields, expected) in [
        (
            r#""model_type": "mixtral", "num_experts_per_tok": 9"#,
            "num_experts_per_tok is 9; there are 8 experts",
        ),
        (r#""model_type": "mixtral", "num_local_experts": 0"#, "num_local_experts is 0; it must be"),
        (
            r#""model_type": "mixtral", "num_experts": 4, "num_local_experts": 8"#,
            "num_experts is 4; num_local_experts is 8",
        ),
        (
            r#""model_type": "mixtral", "attention_bias": true"#,
            "attention_bias is true; this model_type has none",
        ),
        (
            r#""model_type": "mixtral", "quantization_config": {"quant_method": "mxfp4"}"#,
            "quantization_config is",
        ),
        (r#""model_type": "qwen3_moe", "mlp_only_layers": 3"#, "mlp_only_layers is 3; it must be a list"),
        (r#""model_type": "qwen3_moe", "decoder_sparse_step": 0"#, "decoder_sparse_step is 0"),
        (
            r#""model_type": "qwen3_moe", "norm_topk_prob": 1"#,
            "norm_topk_prob is 1; it must be true or false",
        ),
        (
            r#""model_type": "qwen3_moe", "n_routed_experts": 8"#,
            "n_routed_experts is 8; supported are models without",
        ),
        (r#""model_type": "gpt_oss", "swiglu_limit": -1"#, "swiglu_limit is -1; it must be a number above 0"),
        (
            r#""model_type": "gpt_oss", "quantization_config": {"quant_method": "gptq"}"#,
            "and mxfp4 of gpt_oss",
        ),
        (
            r#""model_type": "gpt_oss", "sliding_window": null, "layer_types": ["sliding_attention", "full_attention",
            "sliding_attention", "full_attention"]"#,
            "layer_types is",
        ),
    ] {
        let error = config(fields).expect_err(fields);
        assert!(error.contains(expected) && !error.contains('\n'), "{fields}: {error}");
    }
    let mxfp4 = r#""model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}"#;
    assert!(config(mxfp4).is_ok());
}
