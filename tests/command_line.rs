//! What the command line says, takes and refuses, asked of the bench executable itself.

mod common;

use common::{Bench, QUICK, Run};
use std::fs;

fn refused(arguments: &str, words: &[&str]) {
    Bench::new().run(arguments).refused(2, words);
}

#[test]
fn help_has_our_flags_and_criterions() {
    let help = Bench::new().run("--help").expect(0).stdout;
    for flag in [
        "--model",
        "--case",
        "--shapes",
        "--kv-len-jitter",
        "--seed",
        "--kv-init",
        "--routing",
        "--iters",
        "--samples",
        "--output-json",
        "--load-format",
        "--dtype",
        "--block-size",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--num-speculative-tokens",
        "--backend",
        "--hf-overrides",
        "--verify",
        "--plan",
        "--allow-mismatch",
        "--save-baseline",
        "--baseline",
        "--baseline-lenient",
        "--load-baseline",
        "--list",
        "--sample-size",
        "--warm-up-time",
        "--measurement-time",
        "--profile-time",
        "--noplot",
        "--quick",
        "--exact",
        "--discard-baseline",
        "--nresamples",
        "--noise-threshold",
        "--confidence-level",
        "--significance-level",
        "--output-format",
        "--plotting-backend",
        "--color",
        "--verbose",
        "--quiet",
        "--format",
        "--ignored",
    ] {
        assert!(help.contains(flag), "{flag}");
    }
}

#[test]
fn lists_ids_with_x_for_a_star() {
    let run = Bench::new().run("--bench --list --case 64*1@8192 --case mix=8,2*1@9").expect(0);
    assert_eq!(run.stdout, "case/smollm2-135m/64x1@8192: benchmark\ncase/smollm2-135m/mix: benchmark\n\n");
    assert_eq!(run.stderr, "");
    let run = Bench::new().run("--bench --list --format terse decode").expect(0);
    assert!(run.stdout.lines().count() >= 2, "{}", run.stdout);
    assert!(
        run.stdout.lines().all(|line| line.starts_with("decode/smollm2-135m/") || line.is_empty()),
        "{}",
        run.stdout
    );
}

#[test]
fn a_list_without_a_match_is_empty_and_fine() {
    let run = Bench::new().run("--bench --list nothing_like_it").expect(0);
    assert_eq!((run.stdout.as_str(), run.stderr.as_str()), ("", ""));
}

#[test]
fn a_filter_without_a_match_names_the_groups() {
    refused("--bench nothing", &["\"nothing\"", "decode", "prefill", "`x` for `*`"]);
    refused("--bench --case 64*1@64 64*1@64", &["\"64*1@64\"", "try \"64x1@64\""]);
    refused("--bench --exact decode", &["\"decode\""]);
}

#[test]
fn a_bad_regular_expression_is_one_line() {
    refused("--bench decode[", &["\"decode[\"", "regular expression", "--exact"]);
    refused("--bench *1", &["\"*1\"", "regular expression"]);
}

#[test]
fn values_that_criterion_asserts_on_are_refused() {
    refused("--bench --sample-size 9", &["--sample-size 9", "10"]);
    refused("--bench --warm-up-time 0", &["--warm-up-time 0"]);
    refused("--bench --measurement-time 0", &["--measurement-time 0"]);
    refused("--bench --profile-time 0.1", &["--profile-time 0.1"]);
    refused("--bench --nresamples 1", &["--nresamples 1"]);
    refused("--bench --noise-threshold=-1", &["--noise-threshold -1"]);
    refused("--bench --confidence-level 2", &["--confidence-level 2"]);
}

#[test]
fn bad_settings_are_refused_by_name() {
    refused("--bench --kv-len-jitter 1", &["--kv-len-jitter 1", "[0, 1)"]);
    refused("--bench --case a=4@3", &["a=4@3"]);
    refused("--bench --case =3", &["=3", "name"]);
    refused("--bench --shapes no/such/file.yaml", &["no/such/file.yaml"]);
    refused("--bench --model no-such-model", &["no-such-model", "smollm2-135m", "qwen3-8b"]);
    refused("--bench --hf-overrides [1]", &["--hf-overrides", "object"]);
    refused("--bench --hf-overrides {", &["--hf-overrides"]);
    refused("--bench --load-format safetensors", &["safetensors", "--model"]);
    refused("--bench --routing balanced", &["--routing", "no experts"]);
    refused("--bench -tp 2", &["--tensor-parallel-size 2", "9"]);
    refused("--bench -pp 2", &["--pipeline-parallel-size 2", "one stage"]);
    refused("--bench --kv-cache-memory-bytes 1X", &["--kv-cache-memory-bytes"]);
    refused("--bench --output-json no/such/folder/x.json", &["--output-json", "no/such/folder"]);
    refused("--bench --output-json src", &["--output-json", "folder"]);
    refused("--bench --load-baseline a --baseline b", &["b", "none yet"]);
}

#[test]
fn clap_explains_what_it_refuses() {
    for arguments in ["--bench --no-such-flag", "--bench --iters x", "--bench a b", "--load-baseline a"] {
        let run = Bench::new().run(arguments).expect(2);
        assert!(run.stderr.starts_with("error: "), "{}", run.stderr);
    }
    let run = Bench::new().run("--bench --allow-mismatch colour").expect(2);
    for field in ["backend", "device", "dtype", "model", "layout", "draws"] {
        assert!(run.stderr.contains(field), "{}", run.stderr);
    }
}

#[test]
fn ids_that_cannot_be_folders_are_refused() {
    let long = "x".repeat(65);
    refused(&format!("--bench --case {long}=8"), &["65 bytes", "shorter"]);
    for name in ["new", "base", "change", "report", "forward", ".", ".."] {
        refused(&format!("--bench --case {name}=8"), &[name, "choose another"]);
    }
    refused("--bench --case a/b=8 --case a_b=8", &["a/b", "a_b", "same id"]);
    let plan = Bench::new().run(&format!("--plan --case {long}=8 --case new=8")).expect(0);
    assert!(plan.stdout.contains(&long));
}

#[test]
fn baseline_names_are_plain() {
    for name in ["new", "change", "report", "a/b", "..", "é", "forward-kept.json"] {
        refused(&format!("--bench --case 8 --save-baseline {name}"), &["baseline"]);
    }
}

#[test]
fn without_bench_it_is_test_mode() {
    let run = Bench::new().run("--model tests/data/llama-tiny --case d=1@8").expect(0);
    assert!(run.stdout.contains("Testing case/llama-tiny/d"), "{}", run.stdout);
    assert!(run.stderr.contains("test mode"), "{}", run.stderr);
    let run = Bench::new().run("--bench --test --model tests/data/llama-tiny --case d=1@8").expect(0);
    assert!(run.stdout.contains("Success"), "{}", run.stdout);
    assert_eq!(run.stderr, "");
}

#[test]
fn under_a_launcher_it_measures() {
    let quick = QUICK.replace("--bench ", "");
    let torchrun = [("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "29650")];
    let slurm =
        [("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_JOB_ID", "1")];
    let prefix = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"].map(|name| (name, "0"));
    let open_mpi = [prefix[0], prefix[1], ("OMPI_COMM_WORLD_SIZE", "1"), ("MASTER_PORT", "29652")];
    for variables in [torchrun, slurm, open_mpi] {
        let bench = Bench::new();
        let mut command = bench.command(&format!("{quick} --case d=1@8"));
        let run = Run::of(command.envs(variables).output().unwrap()).expect(0);
        assert!(run.stdout.contains("time:"), "{}", run.stdout);
    }
}

#[test]
fn what_carries_the_command_line_over_is_not_for_users() {
    let bench = Bench::new();
    let mut command = bench.command("--bench");
    let run = Run::of(command.env("FORWARD_BENCH_HANDED_OVER", "x").output().unwrap());
    run.refused(2, &["FORWARD_BENCH_HANDED_OVER"]);
}

#[test]
fn a_plan_builds_no_model() {
    let begin = std::time::Instant::now();
    let run =
        Bench::new().run("--plan --model qwen3-32b --case big=64*1@8192,8192 --kv-len-jitter 0").expect(0);
    assert!(begin.elapsed().as_secs() < 5);
    let row = run.stdout.lines().nth(1).unwrap();
    // 64 × 512 + 512 blocks of 16; 31.2 G linear weights and 64 layers.
    for cell in ["case/qwen3-32b/big", "64*1@8192,8192", "8256", "33280"] {
        assert!(row.contains(cell), "{cell} in {row}");
    }
}

#[test]
fn a_plan_as_json_has_requests_as_asked() {
    let arguments =
        "--plan=json --case mix=20,2*1@33 --kv-len-jitter 0 --kv-cache-memory-bytes 1 --max-num-seqs 1";
    let plan = Bench::new().run(arguments).expect(0);
    let plan: serde_json::Value = serde_json::from_str(&plan.stdout).unwrap();
    let case = &plan["cases"][0];
    assert_eq!(case["name"], "mix");
    let expected = serde_json::json!({
        "query_len": 20, "kv_len": 20, "num_draft_tokens": 0, "chunked": false,
        "computed": 0, "scheduled": 20, "is_decode": false, "block_ids": [[1, 2]],
    });
    assert_eq!(case["requests"][0], expected);
    assert_eq!(case["requests"][2]["block_ids"], serde_json::json!([[6, 7, 8]]));
}

#[test]
fn a_plan_of_absurd_lengths_is_quick_and_exact() {
    let arguments = "--plan=json --max-model-len 20000000 --case big=10000000 --hf-overrides {\"num_hidden_layers\":1000}";
    let run = Bench::new().run(arguments);
    let run = run.expect(0);
    assert!(run.stderr.contains("--max-model-len 20000000"), "{}", run.stderr);
    let flops = run.stdout.split("\"flops\":").nth(1).unwrap().split(',').next().unwrap();
    let flops: f64 = flops.parse().unwrap();
    // 4 × 9 heads × 64 × (n² + n) / 2 × 1000 layers, beyond 64 bits.
    assert!(flops > 4.0 * 9.0 * 64.0 * 5e13 * 1000.0, "{flops}");
}

#[test]
fn a_shape_file_decides_what_the_command_line_leaves_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.yaml");
    fs::write(&path, "model: qwen3-8b\nkv_len_jitter: 0\nnum_speculative_tokens: 3\ncases: [v=2*4@40:3]\n")
        .unwrap();
    let plan = |flags: &str| {
        Bench::new().run(&format!("--plan --shapes {} {flags}", path.display())).expect(0).stdout
    };
    assert!(plan("").contains("mine/qwen3-8b/v  2*4@40:3"), "{}", plan(""));
    assert!(plan("--model qwen3-0.6b").contains("mine/qwen3-0.6b/v"));
    assert!(!plan("--kv-len-jitter 0.9").contains("2*4@40:3"));
}

#[test]
fn bad_files_name_file_line_and_case() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.yaml");
    fs::write(&path, "cases:\n  - name: one\n    requests:\n      - query_len: 4\n        kv_len: 3\n")
        .unwrap();
    refused(&format!("--bench --shapes {}", path.display()), &["bad.yaml", "one", "4", "3"]);
    fs::write(&path, "cases:\n  - name: one\n    requsts: []\n").unwrap();
    refused(&format!("--bench --shapes {}", path.display()), &["bad.yaml:3", "requsts", "requests"]);
    fs::write(&path, "cases: [a=8]").unwrap();
    fs::write(folder.path().join("bad.json"), "{\"cases\": [\"a=8\"]}").unwrap();
    refused(&format!("--bench --shapes {}", folder.path().display()), &["bad.json", "bad.yaml"]);
}

#[test]
fn a_reader_that_goes_away_ends_it_in_silence() {
    for arguments in ["--bench --list", "--plan=json --max-model-len 2000000 --case 1*1@2000000"] {
        let bench = Bench::new();
        let mut child = bench
            .command(arguments)
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!text.contains("bug") && !text.contains("panic"), "{text}");
    }
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = Bench::new().command("--bench --list").stdout(full).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("error: stdout: No space left on device"), "{text}");
}

#[test]
fn a_number_below_zero_is_a_bad_value_not_an_unknown_flag() {
    for arguments in ["--bench --iters -1", "--bench --seed -1"] {
        let run = Bench::new().run(arguments).expect(2);
        assert!(run.stderr.contains("invalid value '-1'"), "{}", run.stderr);
    }
    refused("--bench --kv-len-jitter -1", &["--kv-len-jitter -1"]);
}

#[test]
fn what_has_no_effect_is_said() {
    let arguments =
        "--bench --test --model tests/data/llama-tiny --case d=1@8 --output-json x.json --save-baseline a";
    let run = Bench::new().run(arguments).expect(0);
    assert_eq!(run.stderr.lines().filter(|line| line.contains("has no effect")).count(), 2, "{}", run.stderr);
}

#[test]
fn control_characters_do_not_reach_the_terminal() {
    let bench = Bench::new();
    let run = Run::of(bench.command("--bench --model").arg("a\n\u{1b}[31mb").output().unwrap());
    run.refused(2, &["a\\n\\u{1b}[31mb"]);
}
