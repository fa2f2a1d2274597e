//! Experts: attention sinks and a block of experts against their definitions in float64, replaced routing on a device and by the
//! bench executable, and the loads that are counted.

mod common;

use std::path::Path;

use common::{Bench, QUICK, read_json};
use forward_bench::backend::cpu::{CpuDevice, CpuOptions};
use forward_bench::backend::{
    Activation, Capture, Device, Dtype, KvInit, Ops, Routing, Scoring, WeightId, Weights, dummy,
};
use forward_bench::batch::{Batch, BatchPlan, Limits};
use forward_bench::measure::loads::{self, Wanted};
use forward_bench::model::routing::{Choices, Layout, Rule, Slice};
use forward_bench::model::{Mlp, Model, ModelConfig};
use forward_bench::units::Bytes;
use serde_json::json;

const MODEL: &str = "tests/data/qwen3-moe-tiny";

fn model(folder: &str) -> Model {
    Model::new(ModelConfig::from_dir(Path::new(folder), None).unwrap(), 16, 256).unwrap()
}

fn device(model: &Model, threads: Option<usize>) -> CpuDevice {
    let (kv_bytes, dtype, kv_init, seed) = (Bytes(8 << 20), Dtype::Float32, KvInit::Random, 0);
    let options = CpuOptions { kv_bytes, dtype, kv_init, seed, threads };
    CpuDevice::new(&model.spec, &Weights::Dummy { seed: 5 }, &options).unwrap()
}

fn batch(model: &Model, case: &str) -> Batch {
    let plan = BatchPlan::new(&case.parse().unwrap(), &model.spec.kv_groups, 0);
    let limits = Limits {
        num_kv_blocks: 200,
        max_num_batched_tokens: 4096,
        max_num_seqs: 64,
        max_model_len: 256,
        num_speculative_tokens: 0,
    };
    Batch::build(&plan, &limits, 0, 128).unwrap()
}

/// Runs a step on a device and hands its capture over.
fn on_capture<T>(
    (model, device): (&Model, &mut CpuDevice),
    case: &str,
    routing: Option<Routing>,
    check: impl FnOnce(&mut dyn Capture) -> T,
) -> T {
    let batch = batch(model, case);
    device.set_routing(routing).unwrap();
    device.init_kv(&batch).unwrap();
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let mut capture = device.capture(&batch, &forward).unwrap();
    capture.snapshot().unwrap();
    capture.record().unwrap();
    capture.replay().unwrap();
    check(&mut *capture)
}

fn choices(model: &Model, rule: Rule, tokens: usize) -> Choices {
    let layout = Layout::of(&model.config, forward_bench::layout::Layout::ONE).unwrap();
    Choices::of(rule, layout, Slice { first: 0, tokens }, 3).unwrap().unwrap()
}

#[test]
fn a_replaced_routing_reaches_the_experts() {
    for folder in
        [MODEL, "tests/data/gpt-oss-tiny", "tests/data/qwen3-moe-sparse-tiny", "tests/data/mixtral-tiny"]
    {
        let model = model(folder);
        let mut device = device(&model, None);
        for rule in [Rule::Balanced, Rule::Zipf(1.5)] {
            let choices = choices(&model, rule, 21);
            let wanted = Wanted::Exactly(choices.loads());
            let found =
                on_capture((&model, &mut device), "a=5*1@30,16", Some(choices.routing()), |capture| {
                    loads::check(capture, &wanted).unwrap()
                });
            let top_k = model.config.experts.as_ref().unwrap().top_k;
            assert!(found.iter().all(|layer| layer.counts.iter().sum::<u32>() as usize == 21 * top_k));
        }
    }
}

#[test]
fn a_routing_that_has_no_effect_is_an_error() {
    let model = model(MODEL);
    let mut device = device(&model, None);
    let choices = choices(&model, Rule::Balanced, 21);
    let wanted = Wanted::Exactly(choices.loads());
    // The gates were left alone.
    let error = on_capture((&model, &mut device), "a=5*1@30,16", None, |capture| {
        loads::check(capture, &wanted).unwrap_err().to_string()
    });
    assert!(error.contains("the routing had no effect: expert") && error.contains("rows, not"), "{error}");
    // One slot of one token went elsewhere.
    let mut routing = choices.routing();
    routing.logits[1][..8].copy_from_slice(&[-8.0, -8.0, -8.0, -8.0, -8.0, -8.0, 2.0, 1.0]);
    let error = on_capture((&model, &mut device), "a=5*1@30,16", Some(routing), |capture| {
        loads::check(capture, &wanted).unwrap_err().to_string()
    });
    assert!(error.contains("of MoE layer 1 computed"), "{error}");
    // The gates decide: only the sum is known.
    on_capture((&model, &mut device), "a=5*1@30,16", None, |capture| {
        assert!(loads::check(capture, &Wanted::InAll { layers: 2, rows: 42 }).is_ok());
        let error = loads::check(capture, &Wanted::InAll { layers: 2, rows: 43 }).unwrap_err().to_string();
        assert!(error.contains("computed 42 rows, not 43"), "{error}");
    });
}

#[test]
fn logits_of_another_batch_are_refused() {
    let model = model(MODEL);
    let mut device = device(&model, None);
    let routing = choices(&model, Rule::Balanced, 20).routing();
    let batch = batch(&model, "a=21");
    device.set_routing(Some(routing)).unwrap();
    device.init_kv(&batch).unwrap();
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let error = device.capture(&batch, &forward).unwrap().eager().unwrap_err().to_string();
    assert!(error.contains("168 replaced logits, there are 160"), "{error}");
}

#[test]
fn threads_do_not_change_a_bit() {
    let model = model("tests/data/gpt-oss-tiny");
    // More than 256 rows an expert go through the other product.
    let mut outputs = [1, 3].map(|threads| {
        let mut device = device(&model, Some(threads));
        on_capture((&model, &mut device), "a=3*250,5*1@30", None, |capture| capture.output().unwrap())
    });
    let [one, three] = &mut outputs;
    assert!(one == three && one.iter().all(|value| value.is_finite()));
}

/// A block of experts in float64, from its definition.
fn exact(model: &Model, logits: &[f32], x: &[f64]) -> Vec<f64> {
    let Mlp::Experts(moe) = model.layers[0].mlp else { panic!("no experts") };
    let hidden = x.len();
    let at = |id: WeightId, index: usize| {
        let role = model.spec.weights[id.0].role;
        f64::from(dummy::weight(role, dummy::stream(5, id.0 as u64), index as u64))
    };
    let mut order: Vec<usize> = (0..moe.experts).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let chosen = &order[..moe.top_k];
    let e = |expert: usize| f64::from(logits[expert]).exp();
    let total: f64 = match moe.scoring {
        Scoring::SoftmaxThenTopK { renormalize: false } => order.iter().map(|i| e(*i)).sum(),
        _ => chosen.iter().map(|i| e(*i)).sum(),
    };
    let mut out = vec![0.0; hidden];
    for &expert in chosen {
        let row = |i: usize| {
            let row = expert * 2 * moe.inter + i;
            let bias = moe.w13_bias.map_or(0.0, |bias| at(bias, row));
            bias + (0..hidden).map(|h| x[h] * at(moe.w13, row * hidden + h)).sum::<f64>()
        };
        let gated = |i: usize| match moe.activation {
            Activation::SiluMul => {
                let (gate, up) = (row(i), row(moe.inter + i));
                gate / (1.0 + (-gate).exp()) * up
            }
            Activation::ClampedSwiglu { limit, alpha, .. } => {
                let (limit, alpha) = (f64::from(limit), f64::from(alpha));
                let (gate, up) = (row(2 * i).min(limit), row(2 * i + 1).clamp(-limit, limit));
                (up + 1.0) * gate / (1.0 + (-alpha * gate).exp())
            }
        };
        let gated: Vec<f64> = (0..moe.inter).map(gated).collect();
        for (h, o) in out.iter_mut().enumerate() {
            let row = expert * hidden + h;
            let bias = moe.w2_bias.map_or(0.0, |bias| at(bias, row));
            let value =
                bias + (0..moe.inter).map(|i| gated[i] * at(moe.w2, row * moe.inter + i)).sum::<f64>();
            *o += e(expert) / total * value;
        }
    }
    out
}

#[test]
fn a_block_of_experts_is_its_definition() {
    use forward_bench::backend::Act;
    for (folder, limit) in
        [(MODEL, None), ("tests/data/gpt-oss-tiny", Some(0.05)), ("tests/data/qwen3-moe-sparse-tiny", None)]
    {
        let mut model = model(folder);
        let sparse = model.layers.iter().position(|layer| matches!(layer.mlp, Mlp::Experts(_))).unwrap();
        model.layers.swap(0, sparse);
        // A clamp that dummy values, which are small, really reach.
        if let (Mlp::Experts(moe), Some(small)) = (&mut model.layers[0].mlp, limit)
            && let Activation::ClampedSwiglu { limit, .. } = &mut moe.activation
        {
            *limit = small;
        }
        let Mlp::Experts(moe) = model.layers[0].mlp else { panic!("no experts") };
        let routing = choices(&model, Rule::Zipf(0.5), 9).routing();
        let mut device = device(&model, None);
        let batch = batch(&model, "a=9");
        device.set_routing(Some(routing.clone())).unwrap();
        device.init_kv(&batch).unwrap();
        let run = |ops: &mut dyn Ops, through: bool| {
            ops.embed_gather(model.embedding, Act::Residual)?;
            ops.add_rmsnorm(None, Act::Residual, model.final_norm, 1e-6, Act::Normed)?;
            if through {
                ops.moe(Act::Normed, &moe, Act::Delta)?;
                // The output is Normed: norm of nothing but the experts' sum would hide its size, so add it to what is known.
                ops.add_rmsnorm(Some(Act::Delta), Act::Residual, model.final_norm, 1e-6, Act::Normed)?;
            }
            Ok(())
        };
        let mut output = |through: bool| {
            let forward = |ops: &mut dyn Ops| run(ops, through);
            let mut capture = device.capture(&batch, &forward).unwrap();
            capture.eager().unwrap();
            capture.output().unwrap()
        };
        let (before, after) = (output(false), output(true));
        let hidden = model.config.hidden_size;
        let norm = |h: usize| {
            let (id, role) = (model.final_norm.0, model.spec.weights[model.final_norm.0].role);
            f64::from(dummy::weight(role, dummy::stream(5, id as u64), h as u64))
        };
        for (t, (x, found)) in before.chunks(hidden).zip(after.chunks(hidden)).enumerate() {
            let x64: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            let logits = &routing.logits[moe.index][t * moe.experts..][..moe.experts];
            let delta = exact(&model, logits, &x64);
            let id = model.embedding.0;
            let token = batch.token_ids[t] as usize;
            let residual = (0..hidden).map(|h| {
                let at = (token * hidden + h) as u64;
                f64::from(dummy::weight(model.spec.weights[id].role, dummy::stream(5, id as u64), at))
                    + delta[h]
            });
            let residual: Vec<f64> = residual.collect();
            let mean = residual.iter().map(|r| r * r).sum::<f64>() / hidden as f64;
            for (h, (r, found)) in residual.iter().zip(found).enumerate() {
                let wanted = r / (mean + 1e-6).sqrt() * norm(h);
                assert!(
                    (wanted - f64::from(*found)).abs() < 2e-5,
                    "{folder} [{t}, {h}]: {found}, not {wanted}"
                );
            }
        }
    }
}

#[test]
fn results_and_sidecars_have_the_loads() {
    let bench = Bench::new();
    let results = bench.home.path().join("results.json");
    let arguments = format!("{QUICK} --model {MODEL} --case d=6*1@32 --output-json {}", results.display());
    bench.run(&arguments).expect(0);
    let rank = &read_json(&results)[0]["ranks"][0];
    let sidecar = read_json(&bench.home.path().join("case/qwen3-moe-tiny/d/base/forward.json"));
    for found in [rank, &sidecar] {
        assert_eq!(found["routing"], "balanced");
        let layer = json!({"min": 1, "max": 2, "mean": 1.5, "counts": [2, 2, 2, 2, 1, 1, 1, 1]});
        assert_eq!(found["expert_loads"], json!([layer, layer]));
    }
    assert_eq!(sidecar["configuration"]["draws"]["routing"], "balanced");
    bench.run(&format!("{arguments} --routing zipf:2 --allow-mismatch draws")).expect(0);
    let rank = &read_json(&results)[0]["ranks"][0];
    let counts = |layer: usize| rank["expert_loads"][layer]["counts"].clone();
    assert!(rank["routing"] == "zipf:2" && counts(0) != counts(1), "{rank}");
    bench.run(&format!("{arguments} --routing real --load-format safetensors")).expect(0);
    assert_eq!(read_json(&results)[0]["ranks"][0]["routing"], "real");
    let dense = bench.home.path().join("dense.json");
    bench.measure(&format!("--output-json {}", dense.display()));
    let rank = &read_json(&dense)[0]["ranks"][0];
    assert!(rank["routing"].is_null() && rank["expert_loads"].is_null());
}

#[test]
fn unlike_routings_are_not_compared() {
    let bench = Bench::new();
    let arguments = format!("{QUICK} --model {MODEL} --case d=2*1@32");
    bench.run(&format!("{arguments} --save-baseline a")).expect(0);
    let words = ["baseline a", "routing", "balanced", "zipf:1"];
    bench.run(&format!("{arguments} --baseline a --routing zipf:1")).refused(2, &words);
}

#[test]
fn routings_that_cannot_be_are_one_line() {
    let refused = |arguments: &str, words: &[&str]| {
        Bench::new().run(&format!("--bench --case d=2*1@32 {arguments}")).refused(2, words);
    };
    refused(
        &format!("--model {MODEL} --routing uniform"),
        &["case/qwen3-moe-tiny/d", "--routing uniform", "zipf:S"],
    );
    refused(&format!("--model {MODEL} --routing zipf:-1"), &["--routing zipf:-1", "from 0 to 100"]);
    refused("--model tests/data/llama-tiny --routing real", &["--routing real", "no experts"]);
}

#[test]
fn a_model_that_does_not_fit_says_how_many_layers_do() {
    // 467 GB in float32: no machine that runs tests has that.
    let run = Bench::new().run("--bench --backend cpu --model gpt-oss-120b --case d=1@32").expect(3);
    assert!(
        run.stderr.contains("the weights, held in float32") && run.stderr.contains("num_hidden_layers\": "),
        "{}",
        run.stderr
    );
}
