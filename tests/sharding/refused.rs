//! Layouts that a model does not divide over, each refused in one line with the numbers.

use forward_bench::layout::{Layout, Place};

use super::*;

fn refused(config: &ModelConfig, spread: Spread) -> String {
    let of =
        |place| Model::shard(config.clone(), 16, 256, place, spread.all2all).err().map(|e| e.to_string());
    let errors: Vec<_> = spread.layout.places().map(of).collect();
    let first = errors[0].clone().unwrap_or_else(|| panic!("{} {spread:?} must be refused", config.name));
    assert!(!first.contains('\n'), "{first}");
    assert!(
        errors.iter().all(|error| error.as_ref() == Some(&first)),
        "every rank says the same: {errors:?}"
    );
    first
}

fn says(found: &str, words: &[&str]) {
    for word in words {
        assert!(found.contains(word), "{word:?} is missing in: {found}");
    }
}

#[test]
fn heads_that_do_not_divide() {
    let smollm = ModelConfig::resolve("smollm2-135m", None).unwrap();
    let words = ["smollm2-135m: num_attention_heads is 9", "--tensor-parallel-size 2", "1 or 3 would"];
    says(&refused(&smollm, spread(1, 2, false)), &words);
    let of = |place| Model::shard(smollm.clone(), 16, 256, place, All2All::default());
    let three = Layout { tensor: 3, ..Layout::ONE };
    assert!(three.places().all(|place| of(place).is_ok()), "its 3 KV heads divide over 3 ranks");
    // 12 heads over 4: six ranks could share the query heads, not the KV heads.
    let six = config(
        "llama-tiny",
        Some(r#"{"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16}"#),
    );
    let words =
        ["num_key_value_heads is 4", "--tensor-parallel-size 6", "neither divides it nor is a multiple"];
    says(&refused(&six, spread(1, 6, false)), &words);
}

#[test]
fn inner_sizes_that_do_not_divide() {
    let odd = config("llama-tiny", Some(r#"{"intermediate_size": 98}"#));
    says(
        &refused(&odd, spread(1, 4, false)),
        &["intermediate_size is 98", "--tensor-parallel-size 4", "2 would"],
    );
    // Experts are shared by data × tensor ranks.
    let moe = config("gpt-oss-deep-tiny", None);
    let words = ["intermediate size is 40", "data × tensor parallel ranks = 3 × 1", "2 or 4 would"];
    says(&refused(&moe, spread(3, 1, false)), &words);
    // The size of an MLP that no layer has does not matter.
    let unused = config("qwen3-moe-tiny", Some(r#"{"intermediate_size": 97}"#));
    assert!(
        Model::shard(
            unused,
            16,
            256,
            Place { layout: spread(1, 2, false).layout, rank: 1 },
            All2All::default()
        )
        .is_ok()
    );
}

#[test]
fn experts_that_do_not_divide() {
    let words = ["the number of experts is 5", "data × tensor parallel ranks = 2 × 1", "1 or 5 would"];
    says(&refused(&config("mixtral-stacked-tiny", None), spread(2, 1, true)), &words);
    says(&refused(&config("qwen3-moe-tiny", None), spread(8, 2, true)), &["is 8", "8 × 2", "8 would"]);
}

#[test]
fn vocabularies_with_too_few_rows() {
    let few = config("llama-tiny", Some(r#"{"vocab_size": 5}"#));
    says(&refused(&few, spread(1, 4, false)), &["vocab_size is 5", "leaves a rank without rows"]);
}

#[test]
fn stages_and_tokens_that_would_travel_twice() {
    let stages = Spread { layout: Layout { pipeline: 2, ..Layout::ONE }, all2all: All2All::default() };
    says(
        &refused(&config("llama-tiny", None), stages),
        &["--pipeline-parallel-size is 2", "not in this version"],
    );
    let twice = Spread { all2all: All2All::AllToAll, ..spread(2, 2, true) };
    let words = ["--tensor-parallel-size is 2", "each token 2 times", "allgather_reducescatter"];
    says(&refused(&config("qwen3-moe-tiny", None), twice), &words);
    let parts = Spread { all2all: All2All::AllToAll, ..spread(2, 1, false) };
    let words = ["--data-parallel-size is 2", "--all2all-backend all_to_all", "--enable-expert-parallel"];
    says(&refused(&config("qwen3-moe-tiny", None), parts), &words);
}

#[test]
fn dense_models_do_not_mind_how_tokens_would_travel() {
    let place = Place { layout: spread(2, 2, false).layout, rank: 3 };
    assert!(Model::shard(config("llama-tiny", None), 16, 256, place, All2All::AllToAll).is_ok());
}

#[test]
fn the_names_of_the_ways_are_vllms() {
    use clap::ValueEnum;
    for way in [All2All::AllgatherReducescatter, All2All::AllToAll] {
        let name = way.to_possible_value().unwrap().get_name().to_owned();
        assert_eq!(serde_json::to_value(way).unwrap(), name);
        assert!(["allgather_reducescatter", "all_to_all"].contains(&name.as_str()), "{name}");
    }
}
