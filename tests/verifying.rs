//! `--verify` by the bench executable: agreement, disagreement, and files that are no such thing.

mod common;

use common::Bench;
use std::path::Path;

#[test]
fn a_checkpoint_that_agrees_passes_in_every_phase() {
    let run = Bench::new()
        .run("--verify tests/data/qwen3-tiny/expected.safetensors --model tests/data/qwen3-tiny")
        .expect(0);
    for phase in ["prefill", "chunk", "prefix_hit", "decode", "verify", "mixed"] {
        assert!(run.stdout.lines().any(|line| line.starts_with(phase)), "{}", run.stdout);
    }
}

#[test]
fn one_that_does_not_exits_3_with_the_table() {
    let run = Bench::new()
        .run("--verify tests/data/llama-tiny/expected.safetensors --model tests/data/mistral-swa-tiny")
        .expect(3);
    assert!(run.stdout.lines().count() == 7, "{}", run.stdout);
    assert!(run.stderr.contains("--verify-tolerance"), "{}", run.stderr);
    let arguments = "--verify tests/data/llama-tiny/expected.safetensors --model tests/data/llama-tiny";
    Bench::new().run(&format!("{arguments} --verify-tolerance 1e-12")).expect(3);
}

#[test]
fn what_cannot_be_verified_is_one_line() {
    let refused = |arguments: &str, words: &[&str]| Bench::new().run(arguments).refused(2, words);
    refused("--verify tests/data/llama-tiny/expected.safetensors", &["--verify", "--model DIR"]);
    refused("--verify no-such-file --model tests/data/llama-tiny", &["--verify", "no-such-file"]);
    refused("--verify Cargo.toml --model tests/data/llama-tiny", &["--verify", "Cargo.toml"]);
    refused("--verify tests/data/llama-tiny/model.safetensors --model tests/data/llama-tiny", &["input_ids"]);
    let truncated = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        let bytes = std::fs::read(Path::new("tests/data/llama-tiny").join(file)).unwrap();
        std::fs::write(truncated.path().join(file), &bytes[..bytes.len().min(100_000)]).unwrap();
    }
    let arguments = "--verify tests/data/llama-tiny/expected.safetensors --model";
    refused(&format!("{arguments} {}", truncated.path().display()), &["model.safetensors", "safetensors"]);
}

#[test]
fn a_real_checkpoint_is_timed_with_its_own_weights() {
    let bench = Bench::new();
    bench.measure("--load-format safetensors");
    assert_eq!(bench.json("base/forward.json")["configuration"]["model"]["load_format"], "safetensors");
}
