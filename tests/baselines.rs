//! Baselines by the bench executable: saving, comparing, refusing, and surviving a kill.

mod common;

use common::{Bench, QUICK, Run, git};
use std::path::Path;
use std::time::Duration;

const DEEP: &str = "--hf-overrides {\"num_hidden_layers\":256}";

#[test]
fn many_more_layers_are_a_regression() {
    let bench = Bench::new();
    bench.measure("--hf-overrides {\"num_hidden_layers\":4} --save-baseline a");
    let compare = format!("{QUICK} --case d=2*1@32 --baseline a {DEEP}");
    bench.run(&compare).refused(
        2,
        &["baseline a", "(model: config num_hidden_layers 4 there, 256 here", "--allow-mismatch model"],
    );
    let run = bench.measure(&format!("--baseline a --allow-mismatch model {DEEP}"));
    assert!(run.stdout.contains("Performance has regressed."), "{}", run.stdout);
    assert!(run.stderr.contains("compared with baseline a (commit "), "{}", run.stderr);
    assert!(
        bench.json("a/forward.json")["configuration"]["model"]
            .to_string()
            .contains("\"num_hidden_layers\":4")
    );
    bench.run(&format!("{compare} --allow-mismatch model --fail-on-regression 20")).expect(1);
    bench.run(&format!("{compare} --allow-mismatch model --fail-on-regression 100000")).expect(0);
}

#[test]
fn without_a_name_an_unlike_base_is_set_aside() {
    let bench = Bench::new();
    bench.measure("");
    let run = bench.measure(DEEP);
    assert!(run.stderr.contains("baseline base is set aside"), "{}", run.stderr);
    assert!(run.stderr.contains("(model: "), "{}", run.stderr);
    assert!(!run.stdout.contains("change:"), "{}", run.stdout);
    assert!(bench.file("forward-aside-base-1.json").exists());
    let run = bench.measure("--seed 9 --kv-init zeros --hf-overrides {\"num_hidden_layers\":256}");
    assert!(run.stderr.contains("(draws: "), "{}", run.stderr);
}

#[test]
fn a_missing_baseline_lists_those_that_exist() {
    let bench = Bench::new();
    bench.measure("--save-baseline one");
    bench.measure("--save-baseline two");
    let run = bench.run(&format!("{QUICK} --case d=2*1@32 --baseline three"));
    run.refused(2, &["three", "one, two", "--baseline-lenient", "case/llama-tiny/d"]);
    bench.measure("--baseline-lenient three");
    bench.measure("--baseline-lenient two");
    std::fs::remove_file(bench.file("one/estimates.json")).unwrap();
    bench.run(&format!("{QUICK} --case d=2*1@32 --baseline one")).refused(2, &["one"]);
}

#[test]
fn two_saved_baselines_compare_without_measuring() {
    let bench = Bench::new();
    bench.measure("--save-baseline one");
    bench.measure("--save-baseline two");
    let before = std::fs::read(bench.file("new/sample.json")).unwrap();
    let run = bench.measure("--load-baseline two --baseline one");
    assert!(run.stdout.contains("change:"), "{}", run.stdout);
    assert!(run.stderr.contains("compared with baseline one"), "{}", run.stderr);
    assert_eq!(before, std::fs::read(bench.file("new/sample.json")).unwrap());
    bench
        .run(&format!("{QUICK} --case d=2*1@32 --load-baseline x --baseline one"))
        .refused(2, &["--load-baseline x"]);
}

/// Runs the bench in another folder than the package's.
fn run_in(bench: &Bench, folder: &Path, flags: &str) -> Run {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/llama-tiny");
    let quick = QUICK.replace("tests/data/llama-tiny", &model.to_string_lossy());
    let mut command = bench.command(&format!("{quick} --case d=2*1@32 {flags}"));
    Run::of(command.current_dir(folder).output().unwrap())
}

#[test]
fn a_baseline_can_be_named_after_the_commit() {
    let bench = Bench::new();
    let repository = tempfile::tempdir().unwrap();
    let folder = repository.path();
    run_in(&bench, folder, "--save-baseline @HEAD").refused(2, &["@HEAD", "not a git repository"]);
    git(folder, "init -q");
    std::fs::write(folder.join("file"), "1").unwrap();
    git(folder, "add file");
    git(folder, "commit -q -m one");
    let commit = git(folder, "rev-parse HEAD")[..12].to_owned();
    run_in(&bench, folder, "--save-baseline @HEAD").expect(0);
    assert_eq!(bench.json(&format!("{commit}/forward.json"))["commit"], commit.as_str());
    std::fs::write(folder.join("untracked"), "1").unwrap();
    std::fs::write(folder.join("file"), "2").unwrap();
    run_in(&bench, folder, "--save-baseline @HEAD").expect(0);
    assert!(bench.file(&format!("{commit}-dirty")).is_dir());
    let run = run_in(&bench, folder, "--baseline @HEAD").expect(0);
    assert!(run.stderr.contains(&format!("baseline {commit} (commit {commit}")), "{}", run.stderr);
    run_in(&bench, folder, &format!("--baseline {}", &commit[..7])).refused(2, &["-dirty", "more digits"]);
    run_in(&bench, folder, "--baseline @nothing").refused(2, &["@nothing", "no such commit"]);
    std::fs::remove_dir_all(bench.file(&format!("{commit}-dirty"))).unwrap();
    run_in(&bench, folder, &format!("--baseline {}", &commit[..7])).expect(0);
}

/// What a baseline's four Criterion files and its sidecar say, if they agree.
fn whole(bench: &Bench, baseline: &str) -> bool {
    let sidecar = bench.json(&format!("{baseline}/forward.json"));
    let sample = bench.json(&format!("{baseline}/sample.json"));
    let mean = bench.json(&format!("{baseline}/estimates.json"))["mean"]["point_estimate"].as_f64().unwrap();
    bench.json(&format!("{baseline}/benchmark.json"));
    bench.json(&format!("{baseline}/tukey.json"));
    let list = |key: &str| -> Vec<f64> {
        sample[key].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
    };
    let times = list("times");
    let average = times.iter().zip(list("iters")).map(|(time, n)| time / n).sum::<f64>() / times.len() as f64;
    let replays = sidecar["runs"][0]["ranks"][0]["samples_us"].as_array().unwrap().len();
    (average / mean - 1.0).abs() < 1e-9 && replays == 20
}

#[test]
fn a_kill_at_any_moment_leaves_the_old_baseline_or_the_new() {
    let bench = Bench::new();
    bench.measure("--save-baseline a");
    let begin = std::time::Instant::now();
    bench.measure("--save-baseline a");
    let run = begin.elapsed();
    for moment in 0..20_u32 {
        let old = bench.json("a/forward.json");
        let mut child = bench
            .command(&format!("{QUICK} --case d=2*1@32 --save-baseline a"))
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // From the start to a little after the end, twice as dense in the second half, where files are written.
        let fraction = (f64::from(moment) / 19.0).sqrt() * 1.1;
        std::thread::sleep(Duration::from_secs_f64(run.as_secs_f64() * fraction));
        let _ = child.kill();
        child.wait().unwrap();
        bench.run(&format!("{QUICK} --case other=1@8")).expect(0);
        assert!(whole(&bench, "a"), "moment {moment}");
        let now = bench.json("a/forward.json");
        assert!(now == old || now["date"].as_str() >= old["date"].as_str());
        assert!(!bench.file("forward-kept.json").exists());
    }
}

#[test]
fn an_interrupted_save_is_put_back_by_the_next_start() {
    let bench = Bench::new();
    bench.measure("--save-baseline a");
    let old = bench.json("a/forward.json");
    let read = |name: &str| std::fs::read_to_string(bench.file(&format!("a/{name}"))).unwrap();
    let names = ["benchmark.json", "estimates.json", "forward.json", "sample.json", "tukey.json"];
    let files: serde_json::Map<String, serde_json::Value> =
        names.iter().map(|name| ((*name).to_owned(), read(name).into())).collect();
    std::fs::write(
        bench.file("forward-kept.json"),
        serde_json::json!({"folders": {"a": files, "new": null}}).to_string(),
    )
    .unwrap();
    std::fs::write(bench.file("a/sample.json"), "{\"half").unwrap();
    let run = bench.measure("--baseline a");
    assert!(run.stderr.contains("a save was interrupted here; the older baseline is back"), "{}", run.stderr);
    assert_eq!(bench.json("a/forward.json"), old);
    assert!(whole(&bench, "a"));
}

#[test]
fn a_kill_while_an_unlike_baseline_is_replaced_brings_it_back() {
    let bench = Bench::new();
    bench.measure("--save-baseline a");
    let old = bench.json("a/forward.json");
    let mut child = bench
        .command(&format!(
            "{QUICK} --case d=2*1@32 --save-baseline a --seed 7 --kv-init zeros --warm-up-time 30"
        ))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let begin = std::time::Instant::now();
    while bench.file("a").exists() && begin.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!bench.file("a").exists(), "the unlike baseline is out of sight while its successor is measured");
    child.kill().unwrap();
    child.wait().unwrap();
    let run = bench.measure("--baseline a");
    assert!(run.stderr.contains("the older baseline is back"), "{}", run.stderr);
    assert_eq!(bench.json("a/forward.json"), old);
}

#[test]
fn discarding_leaves_an_unlike_baseline_where_it_is() {
    let bench = Bench::new();
    bench.measure("");
    let old = bench.json("base/forward.json");
    let run = bench.measure("--kv-init zeros --discard-baseline");
    assert!(run.stderr.contains("not compared: baseline base was measured with another"), "{}", run.stderr);
    assert_eq!(bench.json("base/forward.json"), old);
    assert!(whole(&bench, "base") && !bench.file("forward-kept.json").exists());
}

#[test]
fn what_was_kept_cannot_name_other_folders() {
    let bench = Bench::new();
    bench.measure("");
    let victim = tempfile::tempdir().unwrap();
    for name in [victim.path().to_str().unwrap(), "../../../victim", ".."] {
        let text = serde_json::json!({"folders": {name: null}}).to_string();
        std::fs::write(bench.file("forward-kept.json"), text).unwrap();
        bench.run(&format!("{QUICK} --case d=1@8")).refused(2, &["forward-kept.json", "move this file away"]);
    }
    assert!(victim.path().is_dir());
}

#[test]
fn a_baseline_that_cannot_be_read_or_does_not_say_what_it_is_is_refused() {
    let bench = Bench::new();
    bench.measure("--save-baseline one");
    bench.measure("--save-baseline two");
    std::fs::remove_file(bench.file("one/forward.json")).unwrap();
    let load = format!("{QUICK} --case d=2*1@32 --load-baseline one --baseline two");
    bench.run(&load).refused(2, &["baseline one", "no forward.json"]);
    bench.run(&format!("{load} --allow-mismatch backend,device,dtype,model,layout,draws")).expect(0);
    let run = bench.run(&format!("{QUICK} --case d=2*1@32 --baseline one"));
    run.refused(2, &["baseline one", "no forward.json"]);
    std::fs::write(bench.file("one/sample.json"), "{").unwrap();
    bench.run(&load).refused(2, &["--load-baseline one", "incomplete"]);
}

#[test]
fn a_regression_check_without_a_baseline_says_so() {
    let run = Bench::new().measure("--fail-on-regression 1");
    assert!(run.stderr.contains("--fail-on-regression had no baseline"), "{}", run.stderr);
}
