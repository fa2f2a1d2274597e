//! A measurement end to end on the CPU: what is printed, what is saved, and when it is refused.

mod common;

use common::{Bench, QUICK, read_json};

#[test]
fn a_run_prints_saves_and_the_next_compares() {
    let bench = Bench::new();
    let first = bench.measure("");
    assert!(first.stdout.contains("case/llama-tiny/d"), "{}", first.stdout);
    assert!(first.stdout.contains("time:   ["), "{}", first.stdout);
    assert!(first.stdout.contains("tok/s"), "{}", first.stdout);
    assert!(first.stderr.contains("case/llama-tiny/d: median "), "{}", first.stderr);
    assert!(!first.stderr.contains("compared with"), "{}", first.stderr);
    let sidecar = bench.json("base/forward.json");
    assert_eq!(sidecar, bench.json("new/forward.json"));
    assert_eq!(sidecar["configuration"]["backend"], "cpu");
    assert_eq!(sidecar["runs"][0]["ranks"][0]["samples_us"].as_array().unwrap().len(), 20);
    let second = bench.measure("");
    assert!(second.stdout.contains("change:"), "{}", second.stdout);
    assert!(second.stderr.contains("compared with baseline base (commit "), "{}", second.stderr);
}

#[test]
fn nothing_but_our_lines_reaches_the_console() {
    let run = Bench::new().measure("");
    // Criterion tells its own progress on stderr.
    for line in run.stderr.lines().filter(|line| !line.starts_with("Benchmarking case/")) {
        let beginnings = ["case/llama-tiny/d: ", "warning: case/llama-tiny/d: ", "report: "];
        let ours = beginnings.iter().any(|beginning| line.starts_with(beginning));
        assert!(ours, "{line}");
    }
    assert!(!run.stdout.contains("Warning"), "{}", run.stdout);
}

#[test]
fn criterion_is_fed_nanoseconds_of_the_replays_that_we_count() {
    let bench = Bench::new();
    bench.measure("--iters 10 --samples 4");
    let sample = bench.json("base/sample.json");
    let list = |value: &serde_json::Value| -> Vec<f64> {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let (iters, times) = (list(&sample["iters"]), list(&sample["times"]));
    assert_eq!(times.len(), 10);
    let sidecar = bench.json("base/forward.json");
    // Ours are the first 40 replays that Criterion measured; each of its samples is the sum of equally many.
    let (replays, n) = (list(&sidecar["runs"][0]["ranks"][0]["samples_us"]), iters[0] as usize);
    assert_eq!(replays.len(), 40);
    assert!((2..=40).contains(&n), "{n} replays in a sample");
    for (ours, criterions) in replays.chunks_exact(n).zip(&times) {
        let nanos = ours.iter().sum::<f64>() * 1e3;
        assert!((nanos / criterions - 1.0).abs() < 1e-6, "{nanos} {criterions}");
    }
}

#[test]
fn results_have_vllms_keys() {
    let bench = Bench::new();
    let path = bench.home.path().join("results.json");
    bench.measure(&format!("--case mix=8,2*1@20,4@12c --kv-len-jitter 0 --output-json {}", path.display()));
    let results = read_json(&path);
    assert_eq!(results.as_array().unwrap().len(), 2);
    let case = &results[1];
    assert_eq!(case["case"], "mix");
    assert_eq!(case["requests"].as_array().unwrap().len(), 4);
    assert!(case["median_us"].as_f64().unwrap() > 0.0);
    let rank = case["ranks"][0].as_object().unwrap();
    for key in [
        "num_tokens",
        "kv_blocks",
        "routing",
        "num_local_tokens",
        "num_tokens_after_padding",
        "batch_order",
        "timing_scope",
        "eager_repeat",
        "graph_vs_eager",
        "graph_deterministic",
        "finite",
        "state_reset_bytes",
        "latency_us",
    ] {
        assert!(rank.contains_key(key), "{key}");
    }
    assert_eq!(rank["batch_order"], serde_json::json!([1, 2, 3, 0]));
    assert_eq!(rank["num_tokens"], 14);
    assert_eq!(rank["eager_repeat"], serde_json::json!({"max_abs": 0.0, "relative_rms": 0.0}));
    for key in ["timer", "median", "sample_spread_pct", "mean", "std", "min", "p90", "count", "samples_us"] {
        assert!(rank["latency_us"].get(key).is_some(), "{key}");
    }
}

#[test]
fn criterions_own_settings_win() {
    let bench = Bench::new();
    bench.measure("--sample-size 12 --measurement-time 0.05");
    assert_eq!(bench.json("base/sample.json")["iters"].as_array().unwrap().len(), 12);
    bench.measure("--quick");
    assert_eq!(bench.json("base/sample.json")["iters"].as_array().unwrap().len(), 2);
    let run = bench.measure("--profile-time 1");
    assert!(run.stderr.contains("Profiling"), "{}", run.stderr);
    let run = bench.measure("--output-format bencher");
    assert!(run.stdout.contains("bench:"), "{}", run.stdout);
}

#[test]
fn discarding_saves_nothing() {
    let bench = Bench::new();
    bench.measure("--discard-baseline");
    assert!(!bench.file("base").exists() && !bench.file("new").exists());
}

#[test]
fn a_case_that_has_no_room_does_not_stop_the_others() {
    let bench = Bench::new();
    let arguments =
        format!("{QUICK} --kv-len-jitter 0 --kv-cache-memory-bytes 64K --case big=8*1@200 --case d=1@8");
    let run = bench.run(&arguments).expect(3);
    let line = run.stderr.lines().find(|line| line.starts_with("error: case/llama-tiny/big")).unwrap();
    assert!(line.contains("105 KV blocks") && line.contains("--kv-cache-memory-bytes"), "{line}");
    assert!(bench.file("base/forward.json").exists());
    assert!(!bench.home.path().join("case/llama-tiny/big/base").exists());
    for (flag, words) in [
        ("--max-num-seqs 1", "--max-num-seqs to 2"),
        ("--max-num-batched-tokens 1", "--max-num-batched-tokens to 2"),
        ("--kv-len-jitter 0 --max-model-len 16", "--max-model-len"),
    ] {
        let run = bench.run(&format!("{QUICK} --case d=2*1@32 {flag}"));
        assert!([2, 3].contains(&run.status), "{flag}");
        assert!(run.stderr.contains(words), "{flag}: {}", run.stderr);
    }
    let run = bench.run(&format!("{QUICK} --kv-len-jitter 0 --case d=4@32:3")).expect(3);
    assert!(run.stderr.contains("--num-speculative-tokens to 3"), "{}", run.stderr);
}

#[test]
fn one_process_measures_into_a_folder_at_a_time() {
    let bench = Bench::new();
    let lock = std::fs::File::create(bench.home.path().join("forward.lock")).unwrap();
    lock.lock().unwrap();
    bench.run(&format!("{QUICK} --case d=1@8")).refused(2, &["another forward-bench", "CRITERION_HOME"]);
}

#[test]
fn a_rounded_type_is_another_configuration() {
    let bench = Bench::new();
    bench.measure("--dtype bfloat16 --save-baseline a");
    assert_eq!(bench.json("a/forward.json")["configuration"]["dtype"], "bfloat16");
    bench
        .run(&format!("{QUICK} --case d=2*1@32 --baseline a"))
        .refused(2, &["dtype", "--allow-mismatch dtype"]);
}
