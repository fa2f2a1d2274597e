//! Whole runs on several CPU ranks: layouts, launchers, and ranks that go wrong.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Bench, QUICK, Run, read_json};
use serde_json::Value;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The longest that a failing run may take: the ten seconds that are promised, and as much again for a busy machine.
const PROMISED: Duration = Duration::from_secs(20);

fn moe() -> String {
    QUICK.replace("llama-tiny", "qwen3-moe-tiny")
}

/// A run of this layout on a case of three decodes and a prefill; its results file.
fn measured(flags: &str, quick: &str) -> Value {
    let bench = Bench::new();
    let json = bench.home.path().join("results.json");
    let arguments = format!("{quick} --case d=3*1@32,5 {flags} --output-json {}", json.display());
    bench.run(&arguments).expect(0);
    read_json(&json)[0].clone()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

#[test]
fn a_replay_takes_as_long_as_on_the_slowest_rank() {
    let result = measured("-tp 2", QUICK);
    assert_eq!(result["id"], "case/llama-tiny-tp2/d");
    assert_eq!(result["configuration"]["layout"]["tensor_parallel_size"], 2);
    let times: Vec<Vec<f64>> = list(&result, "ranks")
        .iter()
        .map(|rank| list(&rank["latency_us"], "samples_us").iter().map(|us| us.as_f64().unwrap()).collect())
        .collect();
    assert_eq!(times.iter().map(Vec::len).collect::<Vec<_>>(), [20, 20]);
    let mut slowest: Vec<f64> = (0..20).map(|i| times[0][i].max(times[1][i])).collect();
    for (i, skew) in list(&result, "skew_us").iter().enumerate() {
        assert!((skew.as_f64().unwrap() - (times[0][i] - times[1][i]).abs()).abs() < 1e-6);
    }
    slowest.sort_by(f64::total_cmp);
    let median = (slowest[9] + slowest[10]) / 2.0;
    assert!((result["median_us"].as_f64().unwrap() - median).abs() < 1e-6, "{result}");
    // 4 query heads of 16 over 8 tokens of 64 numbers: after the embedding and twice in each of the layers.
    let layers = 2 * result["configuration"]["model"]["config"]["num_hidden_layers"].as_u64().unwrap() + 1;
    assert_eq!(result["traffic_bytes"]["all_reduce"].as_u64(), Some(layers * 8 * 64 * 4));
}

#[test]
fn data_parallel_ranks_each_have_the_requests() {
    let (one, two) = (measured("", QUICK), measured("-dp 2", QUICK));
    assert_eq!(two["id"], "case/llama-tiny-dp2/d");
    let rate = |result: &Value| {
        result["tokens_per_second"].as_f64().unwrap() * result["median_us"].as_f64().unwrap() / 1e6
    };
    assert!((rate(&one) - 8.0).abs() < 1e-6 && (rate(&two) - 16.0).abs() < 1e-6);
    assert_eq!(list(&two, "ranks")[1]["num_tokens"], 8);
}

#[test]
fn experts_are_counted_on_every_rank() {
    for (flags, ranks, id) in [
        ("-dp 2 -ep", 2, "dp2-ep"),
        ("-dp 2 -ep --all2all-backend all_to_all", 2, "dp2-ep"),
        ("-tp 2 -dp 2 -ep --routing zipf:1", 4, "tp2-dp2-ep"),
        ("-tp 2 -ep --routing real", 2, "tp2-ep"),
        ("-dp 2 --routing real", 2, "dp2"),
    ] {
        let result = measured(flags, &moe());
        assert_eq!(result["id"], format!("case/qwen3-moe-tiny-{id}/d"), "{flags}");
        assert_eq!(list(&result, "ranks").len(), ranks, "{flags}");
        let config = &result["configuration"]["model"]["config"];
        let top_k = config["num_experts_per_tok"].as_u64().unwrap();
        let data = result["configuration"]["layout"]["data_parallel_size"].as_u64().unwrap();
        let whole = flags.contains("-ep");
        let rows = |rank: &Value| -> u64 {
            list(&list(rank, "expert_loads")[0], "counts").iter().map(|count| count.as_u64().unwrap()).sum()
        };
        let all: u64 = list(&result, "ranks").iter().map(rows).sum();
        let shares = if whole { 1 } else { ranks as u64 };
        assert_eq!(all, 8 * data * top_k * shares, "{flags}: {result}");
    }
}

#[test]
fn a_baseline_has_all_ranks_and_is_compared_as_one() {
    let bench = Bench::new();
    bench.run(&format!("{QUICK} --case d=2*1@32 -tp 2 --save-baseline a --runs 2")).expect(0);
    let sidecar = read_json(&bench.home.path().join("case/llama-tiny-tp2/d/a/forward.json"));
    let runs = list(&sidecar, "runs");
    assert_eq!(runs.iter().map(|run| list(run, "ranks").len()).collect::<Vec<_>>(), [2, 2]);
    let run = bench.run(&format!("{QUICK} --case d=2*1@32 -tp 2 --baseline a")).expect(0);
    assert!(run.stderr.contains("by rank: medians") && run.stderr.contains("against a"), "{}", run.stderr);
}

#[test]
fn two_executables_are_compared_rank_by_rank() {
    let bench = Bench::new();
    let other = crate::common::EXECUTABLE.display();
    let run = bench.run(&format!("{QUICK} --case d=2*1@32 -tp 2 --against {other} --runs 2")).expect(0);
    assert!(
        run.stderr.contains("case/llama-tiny-tp2/d: ") && !run.stderr.contains("could not compare"),
        "{}",
        run.stderr
    );
    assert!(run.stdout.contains("change:"), "{}", run.stdout);
}

#[test]
fn every_rank_is_traced() {
    let bench = Bench::new();
    let folder = bench.home.path().join("profiles");
    let arguments = format!("{QUICK} --case d=2*1@32 -tp 2 --profile-dir {}", folder.display());
    let run = bench.run(&arguments).expect(0);
    for rank in 0..2 {
        let file = read_json(&folder.join(format!("case/llama-tiny-tp2/d.rank{rank}.kernels.json")));
        assert_eq!(file["rank"], rank);
        let collective = |kernel: &&Value| kernel["name"].as_str().unwrap().contains("all_reduce");
        assert!(list(&file, "kernels").iter().any(|kernel| collective(&kernel)), "{file}");
    }
    assert!(run.stderr.contains("in the first one ranks wait"), "{}", run.stderr);
}

#[test]
fn test_mode_runs_each_case_once_on_all_ranks() {
    let run =
        Bench::new().run("--test --model tests/data/llama-tiny -tp 2 --case d=1@8 --case e=4").expect(0);
    assert_eq!(run.stdout.matches("Success").count(), 2, "{}", run.stdout);
    assert_eq!(run.stderr, "");
}

#[test]
fn what_does_not_divide_is_refused_with_the_numbers() {
    let refused = |flags: &str, words: &[&str]| {
        Bench::new().run(&format!("--bench --backend cpu --case d=1@8 {flags}")).refused(2, words);
    };
    refused("--model smollm2-135m -tp 2", &["num_attention_heads", "9", "1 or 3"]);
    refused("--model tests/data/llama-tiny -tp 2 -ep", &["--enable-expert-parallel", "no experts"]);
    refused("--model tests/data/llama-tiny -pp 2", &["--pipeline-parallel-size 2"]);
    refused("--model tests/data/llama-tiny -tp 0", &["--tensor-parallel-size 0"]);
    refused("--model tests/data/llama-tiny --nnodes 2 -tp 2", &["--node-rank"]);
    refused("--model tests/data/llama-tiny --nnodes 2 --node-rank 0 -tp 2", &["--master-addr"]);
    refused(
        "--model tests/data/llama-tiny --nnodes 2 --node-rank 0 -tp 2 --master-addr 127.0.0.1",
        &["export FORWARD_BENCH_TOKEN"],
    );
}

/// A run with faults ends in time, with one line and no process left.
fn with_fault(fault: &str, flags: &str, status: i32, words: &[&str]) {
    let bench = Bench::new();
    let mut command = bench.command(&format!("{QUICK} --case d=2*1@32 {flags}"));
    let begin = Instant::now();
    let run = Run::of(command.env("FORWARD_BENCH_FAULT", fault).output().unwrap()).expect(status);
    assert!(begin.elapsed() < PROMISED, "{fault}: {:?}", begin.elapsed());
    let errors: Vec<&str> = run.stderr.lines().filter(|line| line.starts_with("error:")).collect();
    assert_eq!(errors.len(), 1, "{fault}: {}", run.stderr);
    assert!(words.iter().all(|word| errors[0].contains(word)), "{fault}: {}", run.stderr);
    let home = format!("CRITERION_HOME={}", bench.home.path().display());
    let alive = |entry: std::fs::DirEntry| {
        std::fs::read(entry.path().join("environ"))
            .is_ok_and(|text| text.split(|byte| *byte == 0).any(|variable| variable == home.as_bytes()))
    };
    let left = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok).any(alive);
    assert!(!left, "{fault}: a process is left");
    let saved = ["tp2", "dp2", "dp4"].map(|layout| format!("case/llama-tiny-{layout}/d/new/forward.json"));
    assert!(!saved.iter().any(|file| bench.home.path().join(file).exists()), "{fault}");
}

#[test]
fn ranks_that_go_wrong_end_all() {
    with_fault("panic@prepare:1", "-tp 2", 4, &["rank 1", "panic"]);
    with_fault("kill@replay:1", "-tp 2", 4, &["rank 1 was killed by SIGKILL"]);
    with_fault("kill@check:0", "-tp 2", 4, &["rank 0 was killed by SIGKILL"]);
    with_fault("hang@prepare:1", "-tp 2 --prepare-timeout 1", 4, &["rank 1 did not end prepare within 1 s"]);
    with_fault("exit@replay:2", "-dp 4", 4, &["rank 2"]);
    with_fault("exit@replay:0", "-dp 2", 4, &["rank 0 ended with exit status 7"]);
    with_fault("memory@prepare:1", "-tp 2", 4, &["rank 1 was killed by SIGABRT"]);
    with_fault("hang@connect:1", "-tp 2 --connect-timeout 1", 4, &["rank 1 did not join within 1 s"]);
    with_fault("stop@replay:1", "-tp 2", 4, &["rank 1 was stopped by SIGSTOP"]);
}

#[test]
fn a_case_that_one_rank_cannot_run_is_passed_over() {
    with_fault("fail@check:1", "-tp 2", 3, &["rank 1"]);
    with_fault("fail@finish:1", "-dp 2", 3, &["rank 1: asked to fail at finish"]);
    // No room for the KV blocks, on any rank: the next case still runs.
    let bench = Bench::new();
    let run =
        bench.run(&format!("{QUICK} -tp 2 --case d=9000*1@32 --case e=1@8 --max-num-seqs 10000")).expect(3);
    assert!(
        run.stderr.contains("error: case/llama-tiny-tp2/d")
            && run.stderr.contains("case/llama-tiny-tp2/e: median")
    );
}

/// A rank that "a launcher" started, by torchrun's variables.
fn rank(bench: &Bench, rank: usize, world: usize, port: u16, flags: &str) -> Child {
    let quick = QUICK.replace("--bench ", "");
    let mut command: Command = bench.command(&format!("{quick} --case d=2*1@32 {flags}"));
    command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
    command.env("WORLD_SIZE", world.to_string()).env("MASTER_PORT", port.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A port whose successor is free.
fn free_port() -> u16 {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    taken.local_addr().unwrap().port() - 1
}

#[test]
fn under_a_launcher_rank_0_speaks() {
    let (bench, port) = (Bench::new(), free_port());
    let all = [0, 1].map(|r| rank(&bench, r, 2, port, "-tp 2"));
    let [zero, one] = all.map(|child| Run::of(child.wait_with_output().unwrap()).expect(0));
    assert!(zero.stdout.contains("time:") && zero.stderr.contains("by rank"), "{}", zero.stderr);
    assert_eq!((one.stdout.as_str(), one.stderr.as_str()), ("", ""));
    // Lists and refusals come from rank 0 as well.
    let all = [0, 1].map(|r| rank(&bench, r, 2, port, "-tp 2 --list"));
    let [zero, one] = all.map(|child| Run::of(child.wait_with_output().unwrap()).expect(0));
    assert!(zero.stdout.contains("benchmark") && one.stdout.is_empty());
    let all = [0, 1].map(|r| rank(&bench, r, 2, port, "-tp 4"));
    let [zero, one] = all.map(|child| Run::of(child.wait_with_output().unwrap()));
    zero.refused(2, &["WORLD_SIZE is 2", "4 ranks"]);
    assert_eq!(
        (one.expect(2).stderr.as_str(), bench.home.path().join("case/llama-tiny-tp4").exists()),
        ("", false)
    );
    let all = [0, 1].map(|r| rank(&bench, r, 2, port, "-tp 2 --runs 2"));
    let [zero, one] = all.map(|child| Run::of(child.wait_with_output().unwrap()));
    zero.refused(2, &["--runs", "without a launcher"]);
    assert_eq!(one.expect(2).stderr, "");
}

#[test]
fn two_hosts_run_as_one() {
    let (bench, port) = (Bench::new(), free_port());
    let node = |node: usize, more: &str| {
        let flags = format!(
            "-tp 2 -dp 2 --nnodes 2 --node-rank {node} --master-addr 127.0.0.1 --master-port {port} {more}"
        );
        let mut command = bench.command(&format!("{QUICK} --case d=2*1@32 {flags}"));
        command
            .env("FORWARD_BENCH_TOKEN", TOKEN)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let all = [node(0, ""), node(1, "")];
    let [zero, one] = all.map(|child| Run::of(child.wait_with_output().unwrap()).expect(0));
    assert!(zero.stdout.contains("time:") && zero.stderr.contains("by rank"), "{}", zero.stderr);
    assert_eq!((one.stdout.as_str(), one.stderr.as_str()), ("", ""));
    // They must run the same.
    let all = [node(0, "--iters 4"), node(1, "--iters 5")];
    let [zero, one] = all.map(|child| Run::of(child.wait_with_output().unwrap()).expect(2));
    assert!(zero.stderr.contains("start all ranks alike"), "{} {}", zero.stderr, one.stderr);
}
