//! `--profile-dir` and `--diff` by the bench executable, on the CPU, which profiles by operation.

mod common;

use std::io::Read;
use std::path::{Path, PathBuf};

use common::{Bench, QUICK, Run, read_json};
use serde_json::Value;

const CASES: &str = "--case d=2*1@32 --case m=1@32,12";

/// A folder for profiles that does not exist yet, within the bench's own.
fn folder(bench: &Bench) -> PathBuf {
    bench.home.path().join("profiles/of this run")
}

fn profiled(bench: &Bench, flags: &str) -> Run {
    let mut command = bench.command(&format!("{QUICK} {CASES} {flags}"));
    Run::of(command.arg("--profile-dir").arg(folder(bench)).output().unwrap())
}

fn kernels(bench: &Bench, case: &str) -> PathBuf {
    folder(bench).join(format!("case/llama-tiny/{case}.rank0.kernels.json"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// The forward's operations by name, each with its calls, as they follow from the configuration: hidden 64, 2 layers, 4 query heads
/// and 2 KV heads of 16, intermediate 96.
fn expected(phase: &str) -> Vec<(String, f64)> {
    let config = read_json(Path::new("tests/data/llama-tiny/config.json"));
    let of = |key: &str| config[key].as_u64().unwrap();
    let (hidden, layers) = (of("hidden_size"), of("num_hidden_layers"));
    let head = hidden / of("num_attention_heads");
    let qkv = hidden + 2 * of("num_key_value_heads") * head;
    let inter = of("intermediate_size");
    let each = layers as f64;
    let mut operations = vec![
        ("embed_gather".to_owned(), 1.0),
        ("add_rmsnorm".to_owned(), 2.0 * each + 1.0),
        (format!("attention {phase}"), each),
        ("qk_norm_rope_kvwrite".to_owned(), each),
        ("silu_mul".to_owned(), each),
        (format!("linear [{qkv}, {hidden}]"), each),
        (format!("linear [{hidden}, {hidden}]"), each),
        (format!("linear [{}, {hidden}]", 2 * inter), each),
        (format!("linear [{hidden}, {inter}]"), each),
    ];
    operations.sort_by(|a, b| a.0.cmp(&b.0));
    operations
}

#[test]
fn each_case_gets_its_files_and_their_numbers_add_up() {
    let bench = Bench::new();
    let run = profiled(&bench, "").expect(0);
    for (case, phase) in [("d", "decode"), ("m", "mixed")] {
        let file = read_json(&kernels(&bench, case));
        let id = format!("case/llama-tiny/{case}");
        assert_eq!(
            (&file["id"], &file["rank"], &file["replays"]),
            (&id.as_str().into(), &0.into(), &10.into())
        );
        assert_eq!(file["model"], "tests/data/llama-tiny");
        assert!(
            file["device"].as_str().unwrap().contains("threads")
                && file["date"].as_str().unwrap().ends_with('Z')
        );
        let list = file["kernels"].as_array().unwrap();
        let sum = |key: &str| list.iter().map(|kernel| number(&kernel[key])).sum::<f64>();
        let (span, busy) = (number(&file["span_us"]), number(&file["busy_us"]));
        assert!((sum("us") - busy).abs() < 1e-6 * busy, "{} of {busy}", sum("us"));
        assert!((sum("pct") - 100.0).abs() < 1e-6);
        assert!(busy > 0.0 && busy <= span && number(&file["pre_forward_us"]) > 0.0);
        assert_eq!(sum("calls"), number(&file["activities"]));
        let mut found: Vec<(String, f64)> = list
            .iter()
            .map(|kernel| (kernel["name"].as_str().unwrap().to_owned(), number(&kernel["calls"])))
            .collect();
        assert!(
            list.windows(2).all(|pair| number(&pair[0]["us"]) >= number(&pair[1]["us"])),
            "the longest first"
        );
        found.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(found, expected(phase));
        let head = format!("{id}: a forward traced, mean of 10 replays: span {span:.1} µs, busy {busy:.1}");
        assert!(run.stderr.contains(&head), "{head} in {}", run.stderr);
        assert!(run.stderr.contains(&format!("2 × attention {phase}\n")), "{}", run.stderr);
    }
    let (last_time, first_profile) =
        (run.stderr.find("m: median").unwrap(), run.stderr.find("traced").unwrap());
    assert!(last_time < first_profile, "no case is traced before all are timed: {}", run.stderr);
}

#[test]
fn the_trace_has_what_the_profile_sums_up() {
    let bench = Bench::new();
    profiled(&bench, "d").expect(0);
    let packed = std::fs::File::open(folder(&bench).join("case/llama-tiny/d.rank0.trace.json.gz")).unwrap();
    let mut text = String::new();
    flate2::read::GzDecoder::new(packed).read_to_string(&mut text).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |thread: u64| {
        let is_it = move |event: &&Value| event["ph"] == "X" && event["tid"] == thread;
        events
            .iter()
            .filter(is_it)
            .map(|event| (number(&event["ts"]), number(&event["dur"])))
            .collect::<Vec<_>>()
    };
    let total = |events: &[(f64, f64)]| events.iter().map(|(_, length)| length).sum::<f64>() / 10.0;
    let file = read_json(&kernels(&bench, "d"));
    let (before, forward) = (of(0), of(1));
    assert_eq!((before.len(), forward.len()), (10, 200));
    assert!((total(&forward) - number(&file["busy_us"])).abs() < 1e-6);
    assert!((total(&before) - number(&file["pre_forward_us"])).abs() < 1e-6);
    assert!(forward.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0 + 1e-9), "one after the other");
    for (replay, (start, length)) in before.iter().enumerate() {
        assert!(start + length <= forward[20 * replay].0 + 1e-9, "restored before the forward starts");
    }
    assert!(!kernels(&bench, "m").exists(), "the filter left it out");
}

#[test]
fn the_baseline_keeps_the_profile() {
    let bench = Bench::new();
    profiled(&bench, "--save-baseline a").expect(0);
    let profile = |bench: &Bench| {
        let mut file = read_json(&kernels(bench, "d"));
        let file = file.as_object_mut().unwrap();
        for key in ["id", "rank", "commit", "date", "device", "model", "replays"] {
            file.remove(key).unwrap();
        }
        Value::Object(file.clone())
    };
    let first = profile(&bench);
    assert_eq!(bench.json("a/forward.json")["profiles"], Value::Array(vec![first.clone()]));
    assert_eq!(bench.json("new/forward.json")["profiles"], Value::Array(vec![first.clone()]));
    // Compared and not saved: only the newest gets the new profile.
    profiled(&bench, "--baseline a").expect(0);
    let second = profile(&bench);
    assert_eq!(bench.json("a/forward.json")["profiles"], Value::Array(vec![first]));
    assert_eq!(bench.json("new/forward.json")["profiles"], Value::Array(vec![second.clone()]));
    // Discarded: no sidecar is of this run.
    let sidecar = bench.json("new/forward.json");
    profiled(&bench, "--discard-baseline").expect(0);
    assert_ne!(profile(&bench), second);
    assert_eq!(bench.json("new/forward.json"), sidecar);
    // Saved again without one: it would not be of the same run.
    bench.measure("--save-baseline a");
    assert_eq!(bench.json("a/forward.json")["profiles"], Value::Null);
}

#[test]
fn a_case_that_cannot_run_has_no_profile_and_the_others_have() {
    let bench = Bench::new();
    let run = profiled(&bench, "--case big=40 --max-num-batched-tokens 30").expect(3);
    assert!(run.stderr.contains("error: case/llama-tiny/big"), "{}", run.stderr);
    assert!(!run.stderr.contains("its profile"), "{}", run.stderr);
    assert!(
        kernels(&bench, "d").exists() && kernels(&bench, "m").exists() && !kernels(&bench, "big").exists()
    );
}

#[test]
fn a_folder_that_cannot_be_written_to_is_refused_before_anything_runs() {
    let bench = Bench::new();
    let file = bench.home.path().join("file");
    std::fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("below"), PathBuf::from("/proc/here")] {
        let mut command = bench.command(&format!("{QUICK} {CASES}"));
        let run = Run::of(command.arg("--profile-dir").arg(&path).output().unwrap());
        run.refused(2, &["--profile-dir", path.to_str().unwrap()]);
    }
    assert!(!bench.home.path().join("case").exists());
}

#[test]
fn without_a_measurement_there_is_no_profile() {
    let bench = Bench::new();
    let run = profiled(&bench, "--test").expect(0);
    assert!(run.stderr.contains("warning: --profile-dir has no effect"), "{}", run.stderr);
    assert!(!folder(&bench).exists());
    profiled(&bench, "--save-baseline a").expect(0);
    std::fs::remove_dir_all(folder(&bench)).unwrap();
    let run = profiled(&bench, "--load-baseline a --baseline a").expect(0);
    assert!(run.stderr.contains("warning: --profile-dir has no effect"), "{}", run.stderr);
    assert!(!folder(&bench).exists());
}

#[test]
fn two_profiles_are_compared_kernel_by_kernel() {
    let bench = Bench::new();
    profiled(&bench, "").expect(0);
    let (d, m) = (kernels(&bench, "d"), kernels(&bench, "m"));
    let diff = |a: &Path, b: &Path| Run::of(bench.command("--bench --diff").arg(a).arg(b).output().unwrap());
    let same = diff(&d, &d).expect(0);
    assert_eq!(same.stderr, "");
    assert_eq!(same.stdout.matches("+0.00      +0.00").count(), 9 + 2, "{}", same.stdout);
    let run = diff(&d, &m).expect(0);
    assert_eq!(
        run.stderr,
        "warning: these are not of the same: id case/llama-tiny/d and case/llama-tiny/m\n"
    );
    // From the two files themselves.
    let time = |path: &Path, name: &str| {
        let file = read_json(path);
        let found = file["kernels"].as_array().unwrap().iter().find(|kernel| kernel["name"] == name);
        found.map_or(0.0, |kernel| number(&kernel["us"]))
    };
    let rows: Vec<&str> = run.stdout.lines().skip(3).collect();
    let mut last = f64::INFINITY;
    for row in &rows[..10] {
        let name = row[row.rfind("  ").unwrap()..].trim();
        let difference = time(&m, name) - time(&d, name);
        assert!(row.contains(&format!(" {difference:+.2} ")), "{difference} in {row}");
        assert!(difference.abs() <= last, "the most changed first: {}", run.stdout);
        last = difference.abs();
    }
    let total = number(&read_json(&m)["busy_us"]) - number(&read_json(&d)["busy_us"]);
    assert!(
        rows[10].contains(&format!(" {total:+.2} ")) && rows[10].ends_with("all kernels"),
        "{}",
        run.stdout
    );
}

#[test]
fn a_file_that_is_no_profile_is_refused_in_a_line() {
    let bench = Bench::new();
    let path = |name: &str, text: &str| {
        let path = bench.home.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let good = r#"{"id":"a/b/c","rank":0,"commit":null,"date":"","device":"","model":"","replays":1,
        "span_us":1,"busy_us":1,"pre_forward_us":0,"activities":1,"kernels":[]}"#;
    let good = path("good", good);
    let diff = |b: &Path| Run::of(bench.command("--diff").arg(&good).arg(b).output().unwrap());
    diff(&good).expect(0);
    diff(&bench.home.path().join("nothing")).refused(2, &["--diff", "nothing", "No such file"]);
    diff(&path("bad", "{\"id\": 1}\n")).refused(2, &["--diff", "bad", "no kernel profile", "--profile-dir"]);
    diff(&path("half", "{\"id\": \"a\"")).refused(2, &["half", "no kernel profile"]);
    diff(bench.home.path()).refused(2, &["--diff", "directory"]);
    std::fs::write(bench.home.path().join("bytes"), [0xff, 0xfe]).unwrap();
    diff(&bench.home.path().join("bytes")).refused(2, &["bytes"]);
    let one = Run::of(bench.command("--diff").arg(&good).output().unwrap()).expect(2);
    assert!(one.stderr.contains("2 values required"), "{}", one.stderr);
    let both = bench.command("--diff a b --profile-dir c");
    assert!(Run::of({ both }.output().unwrap()).expect(2).stderr.contains("cannot be used with"));
}
