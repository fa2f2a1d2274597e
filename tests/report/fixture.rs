//! A Criterion folder with sidecars of every kind that the pages must show. Times are made up around those of real runs.

use std::fs;
use std::path::Path;

use forward_bench::baseline::{SIDECAR, Sidecar, Store};
use serde_json::{Value, json};

/// A name that would do harm if a page did not escape it, as far as a folder can have it.
pub const HOSTILE: &str = r#""><img src=x onerror=alert(1)>&'%41#?<script>alert(2)"#;

/// Text for everything else that a sidecar may say.
pub const HARM: &str = "</title><script>alert(3)</script><b>\"'&";

/// What a measurement is made of.
pub struct Made {
    pub id: String,
    pub median: f64,
    pub runs: usize,
    pub ranks: usize,
    pub replays: usize,
    /// Relative width of the noise; none makes all replays alike.
    pub noise: f64,
    pub clock: bool,
    pub commit: Option<&'static str>,
    pub date: String,
}

impl Made {
    pub fn new(id: &str, median: f64) -> Self {
        Self {
            id: id.to_owned(),
            median,
            runs: 1,
            ranks: 1,
            replays: 100,
            noise: 0.004,
            clock: true,
            commit: Some("9a1c0de7f3b2"),
            date: "2026-11-30T12:00:00Z".to_owned(),
        }
    }

    /// The sidecar as JSON, to be changed where a test needs it.
    pub fn json(&self) -> Value {
        let mut random = Random(self.median.to_bits() ^ self.id.len() as u64);
        let runs: Vec<Value> = (0..self.runs).map(|run| self.run(run, &mut random)).collect();
        let difference = json!({"max_abs": 0.0, "relative_rms": 0.0});
        json!({
            "id": self.id, "date": self.date, "commit": self.commit, "version": "0.1.0", "seed": 0,
            "configuration": {
                "backend": "cuda", "device": "NVIDIA H200", "dtype": "bfloat16",
                "model": {"config": {"hidden_size": 4096, "num_hidden_layers": 36}, "load_format": "dummy"},
                "layout": {"tensor_parallel_size": self.ranks, "block_size": 16},
                "draws": {"requests": vec!["1@8192"; 64], "kv_init": "random"},
            },
            "driver": "580.159.04", "kernels": "2f6c", "telemetry": null, "floors": null,
            "median_us": self.median, "runs": runs,
            "checks": {
                "eager_repeat": difference, "graph_vs_eager": difference, "graph_deterministic": true,
                "finite": true, "state_reset_bytes": 4096,
            },
        })
    }

    fn run(&self, run: usize, random: &mut Random) -> Value {
        let offset = 1.0 + self.noise * 0.6 * run as f64;
        let rank = |rank: usize, random: &mut Random| {
            let time = |at: usize, random: &mut Random| {
                let swing = (at as f64 / 17.0).sin() * self.noise * 0.7;
                let tail = if random.next() > 0.97 { 6.0 * self.noise } else { 0.0 };
                let slower = 1.0 + 0.003 * rank as f64;
                self.median * slower * (offset + swing + tail + self.noise * (random.next() - 0.5))
            };
            let times: Vec<f64> = (0..self.replays).map(|at| time(at, random)).collect();
            let clock = |at: usize| 1623.0 - 12.0 * (at as f64 / 17.0).sin() - run as f64;
            let clocks: Option<Vec<f64>> = self.clock.then(|| (0..self.replays).map(clock).collect());
            json!({"timer": "CUDA events in the graph", "samples_us": times, "clock_mhz": clocks})
        };
        let ranks: Vec<Value> = (0..self.ranks).map(|at| rank(at, random)).collect();
        json!({
            "date": self.date, "iters": 20, "median_us": self.median * offset, "spread_pct": self.noise * 45.0,
            "telemetry": null, "ranks": ranks,
        })
    }
}

/// A generator good enough to make times look like times (xorshift; Marsaglia 2003).
struct Random(u64);

impl Random {
    /// From 0 to 1.
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

pub fn floors(floor: f64, bytes: f64, flops: f64) -> Value {
    let rate = json!({"flops_per_second": 7.2e14, "clock_mhz": 1380.0});
    json!({
        "floor_us": floor, "serial_floor_us": floor * 1.01, "bytes": bytes, "flops": flops,
        "ceilings": {"read_bytes_per_second": 4.26e12, "gemm": [rate]},
    })
}

pub fn compared(baseline: &str, old: &Value, state: &str, pct: f64) -> Value {
    let effect = |pct: f64| json!({"pct": pct, "low": pct - 0.4, "high": pct + 0.4});
    json!({
        "baseline": baseline, "commit": old["commit"], "date": old["date"], "median_us": old["median_us"],
        "verdict": {
            "state": state, "time": effect(pct), "cycles": effect(pct - 0.1), "margin_pct": 1.0, "noise_pct": 0.35,
            "runs": [3, 3], "why": if state == "ambiguous" { Some("clock") } else { None },
        },
    })
}

/// Kernels whose times add up to `busy`; `stretch` is what the first one takes more.
pub fn profile(busy: f64, stretch: f64, extra: Option<&str>) -> Value {
    let parts = [
        ("attention_decode", 0.46, 36.0),
        ("nvjet gate_up", 0.2, 36.0),
        ("nvjet down", 0.11, 36.0),
        ("nvjet qkv", 0.08, 36.0),
        ("nvjet o", 0.05, 36.0),
        ("rms_norm", 0.03, 73.0),
        ("rope_and_store", 0.025, 36.0),
        ("silu_mul", 0.02, 36.0),
        ("embed", 0.015, 1.0),
        ("residual_add", 0.01, 72.0),
    ];
    let kernel = |name: &str, us: f64, calls: f64| {
        let pct = us / (busy * stretch) * 100.0;
        json!({"name": name, "us": us, "pct": pct, "calls": calls, "example": format!("void {name}<bf16>(…)")})
    };
    let mut kernels: Vec<Value> = parts
        .iter()
        .enumerate()
        .map(|(at, (name, share, calls))| {
            kernel(name, busy * share * if at == 0 { stretch } else { 1.0 }, *calls)
        })
        .collect();
    kernels.extend(extra.map(|name| kernel(name, busy * 0.04, 2.0)));
    json!({"span_us": busy * 1.03, "busy_us": busy, "pre_forward_us": 41.0, "activities": 362.0, "kernels": kernels})
}

/// Writes a sidecar, as the harness does.
pub fn put(store: &Store, baseline: &str, sidecar: &Value) {
    let sidecar: Sidecar = serde_json::from_value(sidecar.clone()).unwrap();
    fs::create_dir_all(store.folder(&sidecar.id).join(baseline)).unwrap();
    store.write_sidecar(baseline, &sidecar).unwrap();
}

/// Writes any text where a sidecar should be.
pub fn put_text(store: &Store, folder: &str, text: &str) {
    fs::create_dir_all(store.home.join(folder)).unwrap();
    fs::write(store.home.join(folder).join(SIDECAR), text).unwrap();
}

fn criterions(store: &Store, folder: &str) {
    let folder = store.home.join(folder).join("report");
    fs::create_dir_all(&folder).unwrap();
    fs::write(
        folder.join("index.html"),
        "<!doctype html><title>Criterion</title><link rel=icon href='data:,'>",
    )
    .unwrap();
}

/// Everything at once.
pub fn store(home: &Path) -> Store {
    let store = Store { home: home.to_owned() };
    decode(&store);
    faster_and_same(&store);
    two_ranks(&store);
    odd(&store);
    unusual(&store);
    broken(&store);
    criterions(&store, "");
    criterions(&store, "decode/qwen3-8b/64x1@8192");
    criterions(&store, &format!("case/odd/{HOSTILE}"));
    store
}

/// The fullest one: three runs, clocks, floors, kernels of both sides, seven baselines.
fn decode(store: &Store) {
    let id = "decode/qwen3-8b/64x1@8192";
    let commits = ["0aa11bb22cc3", "1bb22cc33dd4", "2cc33dd44ee5", "3dd44ee55ff6"];
    for (at, commit) in commits.into_iter().enumerate() {
        let date = format!("2026-11-{:02}T09:30:00Z", 10 + at);
        let median = 23_400.0 - 430.0 * at as f64;
        put(store, commit, &Made { commit: Some(commit), date, ..Made::new(id, median) }.json());
    }
    let date = "2026-11-12T10:00:00Z".to_owned();
    let mut other = Made { commit: Some("2cc33dd44ee5-dirty"), date, ..Made::new(id, 22_950.0) }.json();
    other["configuration"]["dtype"] = json!("float16");
    put(store, "half", &other);
    let date = "2026-11-29T16:20:00Z".to_owned();
    let mut base = Made { runs: 3, commit: Some("4ee55ff66aa7"), date, ..Made::new(id, 22_002.7) }.json();
    base["profiles"] = json!([profile(21_300.0, 1.0, None)]);
    put(store, "base", &base);
    let mut new = Made { runs: 3, commit: Some("9a1c0de7f3b2-dirty"), ..Made::new(id, 22_738.1) }.json();
    new["profiles"] = json!([profile(22_050.0, 1.04, Some("convert_scales"))]);
    new["floors"] = floors(20_180.0, 8.597e10, 3.6e12);
    new["compared"] = compared("base", &base, "slower", 3.34);
    new["dirty_diff"] = json!("51fe0c");
    new["telemetry"] = json!({
        "power_w": 693.0, "temperature_c": 60, "sm_clock_mhz": 1620, "max_sm_clock_mhz": 1980,
        "throttled": ["power limit"], "other_processes": ["python3 (pid 71)"],
    });
    put(store, "new", &new);
}

fn faster_and_same(store: &Store) {
    for (id, median, state, pct, floor, bytes, flops, requests) in [
        ("decode/qwen3-8b/8x1@1024", 4661.1, "faster", -2.18, 3341.2, 1.42e10, 1.2e11, vec!["1@1024"; 8]),
        (
            "decode/qwen3-8b/256x1@1024",
            16_199.7,
            "faster",
            -1.4,
            11_627.4,
            4.95e10,
            4.1e12,
            vec!["1@1024"; 256],
        ),
        ("prefill/qwen3-8b/512", 12_628.9, "same", 0.12, 10_396.9, 1.41e10, 7.48e12, vec!["512"]),
        ("prefill/qwen3-8b/8192", 218_997.3, "same", -0.05, 192_423.0, 1.53e10, 1.385e14, vec!["8192"]),
    ] {
        let old =
            Made { date: "2026-11-29T16:20:00Z".to_owned(), ..Made::new(id, median / (1.0 + pct / 100.0)) };
        let mut new = Made { noise: 0.0015, ..Made::new(id, median) }.json();
        new["floors"] = floors(floor, bytes, flops);
        new["compared"] = compared("base", &old.json(), state, pct);
        new["configuration"]["draws"]["requests"] = json!(requests);
        // As after a run without names: the baseline that it was compared with is gone.
        put(store, "base", &new);
        put(store, "new", &new);
    }
}

/// Two ranks; the old side is gone, but its kernels were kept with the comparison.
fn two_ranks(store: &Store) {
    let id = "verify/qwen3-8b-tp2/32x4@4096_3";
    let old = Made { ranks: 2, date: "2026-11-28T08:00:00Z".to_owned(), ..Made::new(id, 5_610.0) }.json();
    let mut new = Made { ranks: 2, runs: 2, ..Made::new(id, 5_702.4) }.json();
    new["compared"] = compared("base", &old, "ambiguous", 1.6);
    new["compared"]["profiles"] = json!([profile(5_300.0, 1.0, None), profile(5_280.0, 1.0, None)]);
    new["profiles"] = json!([profile(5_390.0, 1.03, None), profile(5_420.0, 1.05, None)]);
    new["floors"] = floors(4_800.0, 2.05e10, 1.9e12);
    new["configuration"]["draws"]["requests"] =
        json!(["4@4096:3", "4@3071:3", "4@5120:3", "4@5120:3", "9@1c", "odd"]);
    put(store, "base", &new);
    put(store, "new", &new);
}

/// Text that must be escaped, and a name of 200 characters.
fn odd(store: &Store) {
    let id = format!("case/odd/{HOSTILE}");
    let mut odd = Made { clock: false, commit: None, ..Made::new(&id, 812.5) }.json();
    for field in ["backend", "device", "dtype"] {
        odd["configuration"][field] = json!(HARM);
    }
    odd["configuration"]["draws"]["requests"] = json!([HARM]);
    odd["configuration"]["model"] = json!({HARM: HARM});
    odd["choices"] = json!({HARM: HARM});
    odd["driver"] = json!(HARM);
    odd["runs"][0]["ranks"][0]["timer"] = json!(HARM);
    odd["telemetry"] = json!({
        "power_w": null, "temperature_c": null, "sm_clock_mhz": null, "max_sm_clock_mhz": null,
        "throttled": [HARM], "other_processes": [HARM],
    });
    odd["profiles"] = json!([profile(800.0, 1.0, Some(HARM))]);
    odd["compared"] =
        compared(HARM, &json!({"commit": HARM, "date": HARM, "median_us": 800.0}), "ambiguous", 1.5);
    odd["compared"]["verdict"]["why"] = json!(HARM);
    put(store, "new", &odd);
    put(store, "a <b> & 'c'", &odd);
    put(store, "new", &Made::new(&format!("case/odd/{}", "x".repeat(200)), 77.25).json());
}

/// A processor, a long measurement, and one whose times are all alike.
fn unusual(store: &Store) {
    let mut cpu = Made { clock: false, ..Made::new("decode/smollm2-135m/4x1@256", 39_353.8) }.json();
    cpu["configuration"]["device"] = json!("Xeon, 2 cores");
    cpu["configuration"]["backend"] = json!("cpu");
    cpu["configuration"]["draws"]["requests"] = json!(vec!["1@256"; 4]);
    put(store, "base", &cpu);
    put(store, "new", &cpu);
    put(store, "new", &Made { replays: 5000, runs: 2, ..Made::new("long/qwen3-8b/1x1@8192", 4308.7) }.json());
    put(store, "saved", &Made { noise: 0.0, ..Made::new("long/qwen3-8b/alike", 0.5) }.json());
}

fn broken(store: &Store) {
    put_text(store, "decode/qwen3-8b/64x1@8192/cut-short", "{\"id\": \"decode/qwen3");
    put_text(store, "case/broken/alone/new", "[]");
    put_text(store, "case/broken/elsewhere/new", &Made::new("case/broken/other", 1.0).json().to_string());
    let mut zero = Made::new("case/broken/zero", 1.0).json();
    zero["runs"][0]["ranks"][0]["samples_us"][3] = json!(0.0);
    put_text(store, "case/broken/zero/new", &zero.to_string());
    fs::create_dir_all(store.home.join("case/broken/folder/new").join(SIDECAR)).unwrap();
}
