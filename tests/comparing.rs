//! Runs, verdicts, targets and baseline files by the bench executable.

mod common;

use std::fs;
use std::path::Path;

use common::{Bench, QUICK, Run, read_json};
use serde_json::{Value, json};

/// Makes a baseline's replays so many times as long: a slower or faster past.
fn scale(bench: &Bench, baseline: &str, factor: f64) {
    let path = bench.file(&format!("{baseline}/forward.json"));
    let mut sidecar = read_json(&path);
    let scaled = |value: &Value| json!(value.as_f64().unwrap() * factor);
    sidecar["median_us"] = scaled(&sidecar["median_us"]);
    for run in sidecar["runs"].as_array_mut().unwrap() {
        run["median_us"] = scaled(&run["median_us"]);
        let samples = &mut run["ranks"][0]["samples_us"];
        *samples = samples.as_array().unwrap().iter().map(scaled).collect();
    }
    fs::write(path, sidecar.to_string()).unwrap();
}

#[test]
fn several_runs_are_kept_and_all_count() {
    let bench = Bench::new();
    let run = bench.measure("--runs 3 --save-baseline a");
    assert!(run.stderr.contains("run 3 of 3"), "{}", run.stderr);
    let sidecar = bench.json("a/forward.json");
    let runs = sidecar["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 3);
    let medians: Vec<f64> = runs.iter().map(|run| run["median_us"].as_f64().unwrap()).collect();
    let mut sorted = medians.clone();
    sorted.sort_by(f64::total_cmp);
    assert_eq!(sidecar["median_us"], sorted[1]);
    // Criterion's own files are the last run's.
    let sample = bench.json("a/sample.json");
    let per_sample = sample["iters"][0].as_f64().unwrap() as usize;
    let replays = runs[2]["ranks"][0]["samples_us"].as_array().unwrap();
    let sum: f64 = replays.iter().take(per_sample).map(|us| us.as_f64().unwrap() * 1e3).sum();
    assert!((sum / sample["times"][0].as_f64().unwrap() - 1.0).abs() < 1e-6 || per_sample > replays.len());

    let run = bench.measure("--runs 2 --baseline a");
    assert!(run.stderr.contains("3 and 2 runs"), "{}", run.stderr);
    assert_eq!(bench.json("a/forward.json"), sidecar, "comparing changes no baseline");
    assert_eq!(bench.json("new/forward.json")["compared"]["verdict"]["runs"], json!([3, 2]));
}

#[test]
fn a_series_that_fails_saves_nothing() {
    let bench = Bench::new();
    bench.measure("--save-baseline a");
    let before = bench.json("a/forward.json");
    let line = format!(
        "{QUICK} --case d=2*1@32 --runs 3 --save-baseline a --load-format safetensors --model smollm2-135m"
    );
    bench.run(&line).expect(2);
    assert_eq!(bench.json("a/forward.json"), before);
    bench.run(&format!("{QUICK} --case d=2*1@32 --runs 0")).refused(2, &["--runs 0", "1 to 1000"]);
    bench.run(&format!("{QUICK} --case d=2*1@32 --runs 2 --baseline b")).refused(2, &["--baseline b"]);
}

#[test]
fn slower_and_faster_are_told_apart_and_slower_can_be_fatal() {
    let bench = Bench::new();
    bench.measure("--save-baseline a");
    scale(&bench, "a", 1e-3);
    let compare = format!("{QUICK} --case d=2*1@32 --baseline a");
    let summary = bench.home.path().join("summary.md");
    let run =
        bench.run(&format!("{compare} --fail-on-regression --summary-md {}", summary.display())).expect(1);
    assert!(run.stderr.contains("case/llama-tiny/d: slower: +"), "{}", run.stderr);
    assert!(run.stderr.contains("regression: case/llama-tiny/d"), "{}", run.stderr);
    let text = fs::read_to_string(&summary).unwrap();
    assert!(text.contains("**1 slower**: a (") && text.contains("| **slower** |"), "{text}");
    bench.run(&format!("{compare} --fail-on-regression 10000000")).expect(0);
    bench.run(&compare).expect(0);
    scale(&bench, "a", 1e6);
    let run = bench.run(&format!("{compare} --fail-on-regression")).expect(0);
    assert!(run.stderr.contains("case/llama-tiny/d: faster: -"), "{}", run.stderr);
    let verdict = &bench.json("new/forward.json")["compared"];
    assert_eq!((&verdict["baseline"], &verdict["verdict"]["state"]), (&json!("a"), &json!("faster")));
}

#[test]
fn saved_baselines_are_judged_without_measuring() {
    let bench = Bench::new();
    bench.measure("--save-baseline one");
    bench.measure("--save-baseline two");
    scale(&bench, "two", 1e3);
    let line = format!("{QUICK} --case d=2*1@32 --load-baseline two --baseline one --fail-on-regression");
    let run = bench.run(&line).expect(1);
    assert!(run.stderr.contains("d: slower: +"), "{}", run.stderr);
}

#[test]
fn metrics_and_bencher_lines_are_what_their_readers_take() {
    let bench = Bench::new();
    let file = bench.home.path().join("bmf.json");
    let run = bench.measure(&format!("--output-format bencher --output-bmf {}", file.display()));
    // The pattern of github-action-benchmark's reader for cargo.
    let pattern = r"(?m)^test (.+)\s+\.\.\. bench:\s+([0-9,.]+) (\w+/\w+) \(\+/- ([0-9,.]+)\)$";
    let found = regex::Regex::new(pattern).unwrap().captures(&run.stdout).map(|found| found[1].to_owned());
    assert_eq!(found.as_deref(), Some("case/llama-tiny/d"), "{}", run.stdout);
    assert_eq!(run.stdout.lines().filter(|line| !line.is_empty()).count(), 1, "{}", run.stdout);
    let median = bench.json("base/forward.json")["median_us"].as_f64().unwrap();
    let value = read_json(&file)["case/llama-tiny/d"]["latency"]["value"].as_f64().unwrap();
    assert!((value / median / 1e3 - 1.0).abs() < 1e-9);
}

/// Runs the bench as cargo would in a project of that folder.
fn run_in(bench: &Bench, project: &Path, flags: &str) -> Run {
    let mut command = bench.command(&format!("{QUICK} --case d=2*1@32 {flags}"));
    Run::of(command.env("CARGO_MANIFEST_DIR", project).output().unwrap())
}

fn target_files(project: &Path) -> Vec<std::path::PathBuf> {
    let folders = fs::read_dir(project.join("target-baselines")).unwrap();
    folders
        .flat_map(|folder| fs::read_dir(folder.unwrap().path()).unwrap())
        .map(|file| file.unwrap().path())
        .collect()
}

#[test]
fn targets_are_written_and_checked() {
    let (bench, project) = (Bench::new(), tempfile::tempdir().unwrap());
    let project = project.path();
    fs::create_dir(project.join("target-baselines")).unwrap();
    run_in(&bench, project, "--check-targets")
        .refused(2, &["has no targets", "--update-targets", "llama-tiny.toml"]);
    run_in(&bench, project, "--update-targets").expect(0);
    let files = target_files(project);
    let [file] = files.as_slice() else { panic!("{files:?}") };
    let text = fs::read_to_string(file).unwrap();
    assert!(text.contains("[cases.\"case/d\"]") && text.contains("command = \"cargo bench -- "), "{text}");
    let edited = |tolerance: &str, median: &str| {
        let lines = text.lines().map(|line| match line.split(" = ").next() {
            Some("tolerance_pct") => format!("tolerance_pct = {tolerance} # by hand"),
            Some("median_us") => format!("median_us = {median}"),
            Some("spread_pct") => "spread_pct = 1e9".to_owned(),
            _ => line.to_owned(),
        });
        fs::write(file, lines.collect::<Vec<_>>().join("\n")).unwrap();
    };
    edited("1e6", "10.0");
    let run = run_in(&bench, project, "--check-targets").expect(0);
    assert!(run.stderr.contains("met"), "{}", run.stderr);
    edited("1.0", "0.001");
    let run = run_in(&bench, project, "--check-targets").expect(1);
    assert!(run.stderr.contains("MISSED: slower than it may be"), "{}", run.stderr);
    run_in(&bench, project, "--update-targets").expect(0);
    assert!(fs::read_to_string(file).unwrap().contains("tolerance_pct = 1.0 # by hand"));
    fs::write(file, "[cases.\"case/d\"]\nmedian_us = \"fast\"\n").unwrap();
    run_in(&bench, project, "--check-targets").refused(2, &["line 2", "llama-tiny.toml"]);
}

#[test]
fn a_baseline_travels_in_a_file() {
    let (bench, other, project) = (Bench::new(), Bench::new(), tempfile::tempdir().unwrap());
    bench.measure("--runs 2 --save-baseline a");
    let file = project.path().join("a.json.gz");
    bench.run("--export-baseline b").refused(2, &["--export-baseline b", "there are: a"]);
    bench.run(&format!("--export-baseline a --export-file {}", file.display())).expect(0);
    other.run(&format!("--import-baseline {}", file.display())).expect(0);
    assert_eq!(other.json("a/forward.json"), bench.json("a/forward.json"));
    let run = other.measure("--baseline a");
    assert!(run.stdout.contains("change:") && run.stderr.contains("2 and 1 runs"), "{}", run.stderr);
    let list = other.run("--baselines").expect(0).stdout;
    assert!(list.lines().any(|line| line.starts_with("a ") && line.contains("llama-tiny")), "{list}");

    // Another baseline of that name is not lost.
    other.measure("--save-baseline a");
    let run = other.run(&format!("--import-baseline {}", file.display())).expect(0);
    assert!(run.stderr.contains("is set aside as"), "{}", run.stderr);
    assert!(other.file("forward-aside-a-1.json").exists());

    fs::write(&file, "no gzip").unwrap();
    other
        .run(&format!("--import-baseline {}", file.display()))
        .refused(2, &["a.json.gz", "no baseline file"]);
}

#[test]
fn a_committed_baseline_is_there_for_a_fresh_clone() {
    let (bench, fresh, project) = (Bench::new(), Bench::new(), tempfile::tempdir().unwrap());
    fs::create_dir(project.path().join("target-baselines")).unwrap();
    bench.measure("--save-baseline main");
    let mut export = bench.command("--export-baseline main");
    Run::of(export.env("CARGO_MANIFEST_DIR", project.path()).output().unwrap()).expect(0);
    let run = run_in(&fresh, project.path(), "--baseline main").expect(0);
    assert!(run.stderr.contains("baseline main of 1 cases is here"), "{}", run.stderr);
    assert!(run.stderr.contains("compared with baseline main"), "{}", run.stderr);
}

#[test]
fn a_baseline_file_cannot_reach_outside_the_folder() {
    let (bench, folder) = (Bench::new(), tempfile::tempdir().unwrap());
    let file = folder.path().join("evil.json.gz");
    let files =
        json!({ "benchmark.json": "{}", "estimates.json": "{}", "sample.json": "{}", "tukey.json": "{}" });
    let with = |name: &str, id: &str, extra: &str| {
        let mut files = files.clone();
        if !extra.is_empty() {
            files[extra] = json!("{}");
        }
        json!({ "forward_bench_baseline": 1, "name": name, "benchmarks": { id: files } })
    };
    let cases = [
        (with("a", "../../x", ""), "GROUP/MODEL/CASE"),
        (with("a", "g/../x", ""), "GROUP/MODEL/CASE"),
        (with("a", "g/m/x", "../../../evil"), "none of a baseline's"),
        (with("../a", "g/m/x", ""), "a name is 1 to 64"),
        (with("new", "g/m/x", ""), "keeps this name"),
        (json!({ "forward_bench_baseline": 9, "name": "a", "benchmarks": {} }), "version 9"),
    ];
    for (bundle, word) in cases {
        let mut packed =
            flate2::write::GzEncoder::new(fs::File::create(&file).unwrap(), flate2::Compression::fast());
        serde_json::to_writer(&mut packed, &bundle).unwrap();
        packed.finish().unwrap();
        bench.run(&format!("--import-baseline {}", file.display())).refused(2, &[word]);
    }
    assert!(!bench.home.path().join("g").exists());
}

#[test]
fn replays_that_are_no_times_are_refused_wherever_they_come_from() {
    let bench = Bench::new();
    bench.measure("--save-baseline a");
    let path = bench.file("a/forward.json");
    let good = read_json(&path);
    let compare = format!("{QUICK} --case d=2*1@32 --baseline a --fail-on-regression");
    for broken in [json!([]), json!([0.0]), json!([-5.0]), json!([1e308])] {
        let mut sidecar = good.clone();
        sidecar["runs"][0]["ranks"][0]["samples_us"] = broken;
        fs::write(&path, sidecar.to_string()).unwrap();
        bench.run(&compare).refused(2, &["a/forward.json", "move this file away"]);
        bench.run("--export-baseline a --export-file /dev/null").refused(2, &["a/forward.json"]);
    }
    fs::write(&path, good.to_string()).unwrap();
    bench.run("--export-baseline a --export-file /dev/null").expect(0);
    assert!(!fs::metadata("/dev/null").unwrap().is_file(), "it was written into, not replaced");
}

#[test]
fn a_link_to_targets_stays_a_link() {
    let (bench, project) = (Bench::new(), tempfile::tempdir().unwrap());
    let project = project.path();
    fs::create_dir(project.join("target-baselines")).unwrap();
    run_in(&bench, project, "--check-targets --update-targets").expect(0);
    let file = &target_files(project)[0];
    let real = project.join("real.toml");
    fs::rename(file, &real).unwrap();
    std::os::unix::fs::symlink(&real, file).unwrap();
    fs::write(&real, "cases = { \"case/d\" = { median_us = 1.0 } }\n").unwrap();
    run_in(&bench, project, "--update-targets").expect(0);
    assert!(file.is_symlink());
    assert!(fs::read_to_string(&real).unwrap().contains("tolerance_pct"));
    fs::write(&real, "[cases.\"case/other\"]\nmedian_us = 1.0\n").unwrap();
    let run = run_in(&bench, project, "--check-targets").expect(1);
    assert!(run.stderr.contains("none of the cases has a target"), "{}", run.stderr);
}
