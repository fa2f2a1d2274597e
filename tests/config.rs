//! Model configurations: dialects, defaults, what is refused and how, overrides.

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
        (r#"{"model_type": "qwen3_moe"}"#, "m: model_type is \"qwen3_moe\"; supported are llama"),
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
    assert!(experts.contains("num_local_experts is 8; supported are dense models"), "{experts}");
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
