//! Races forward-bench's CPU backend against candle's Llama: same weights, same batch, same threads, in turns.
//!
//! The vocabulary is cut to 64 rows and candle's head is the identity on the first 64 columns: the head, which forward-bench
//! does not have, then costs candle next to nothing, and its logits are the hidden state that both must agree on.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device as CandleDevice, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama};
use forward_bench::backend::cpu::{CpuDevice, CpuOptions};
use forward_bench::backend::{BackendError, Device, Dtype, KvInit, Ops, WeightSource, WeightSpec, Weights, dummy};
use forward_bench::batch::{Batch, GroupTables};
use forward_bench::model::{Model, ModelConfig};
use forward_bench::units::Bytes;

const VOCABULARY: usize = 64;
const BLOCK: u32 = 16;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// All tensors by their name in a checkpoint.
struct Tensors(HashMap<String, Vec<f32>>);

impl WeightSource for Tensors {
    fn read(&self, spec: &WeightSpec, out: &mut [f32]) -> Result<(), BackendError> {
        let parts = spec.parts.iter().flat_map(|(name, _)| &self.0[name]);
        out.iter_mut().zip(parts).for_each(|(o, value)| *o = *value);
        Ok(())
    }
}

fn tensors(model: &Model) -> Tensors {
    let mut all = HashMap::new();
    for (id, spec) in model.spec.weights.iter().enumerate() {
        for (part, (name, rows)) in spec.parts.iter().enumerate() {
            let len = if spec.rows == 1 { *rows } else { rows * spec.cols };
            let stream = dummy::stream(part as u64, id as u64);
            let values = (0..len as u64).map(|i| dummy::weight(spec.role, stream, i)).collect();
            all.insert(name.clone(), values);
        }
    }
    Tensors(all)
}

fn candle_model(model: &Model, tensors: &Tensors) -> Result<(Llama, Cache), Error> {
    let c = &model.config;
    let config = Config {
        hidden_size: c.hidden_size,
        intermediate_size: c.intermediate_size,
        vocab_size: c.vocab_size,
        num_hidden_layers: c.windows.len(),
        num_attention_heads: c.num_attention_heads,
        num_key_value_heads: c.num_key_value_heads,
        use_flash_attn: false,
        rms_norm_eps: f64::from(c.rms_norm_eps),
        rope_theta: 100_000.0,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: c.max_position_embeddings as usize,
        tie_word_embeddings: false,
    };
    let device = CandleDevice::Cpu;
    let mut map = HashMap::new();
    for spec in &model.spec.weights {
        for (name, rows) in &spec.parts {
            let values = tensors.0[name].clone();
            let tensor = if spec.rows == 1 {
                Tensor::from_vec(values, *rows, &device)?
            } else {
                Tensor::from_vec(values, (*rows, spec.cols), &device)?
            };
            map.insert(format!("model.{name}"), tensor);
        }
    }
    let head = (0..VOCABULARY * c.hidden_size).map(|i| f32::from(u8::from(i / c.hidden_size == i % c.hidden_size)));
    let head = Tensor::from_vec(head.collect::<Vec<f32>>(), (VOCABULARY, c.hidden_size), &device)?;
    map.insert("lm_head.weight".into(), head);
    let cache = Cache::new(true, DType::F32, &config, &device)?;
    Ok((Llama::load(VarBuilder::from_tensors(map, DType::F32, &device), &config)?, cache))
}

fn token(position: u32) -> u32 {
    position * 37 % VOCABULARY as u32
}

/// One request of the tokens `begin..end`.
fn batch(model: &Model, begin: u32, end: u32) -> Batch {
    let blocks = end.div_ceil(BLOCK);
    let tables = GroupTables {
        group: model.spec.kv_groups[0],
        block_tables: (1..=blocks).collect(),
        stride: blocks as usize,
        slots: (begin..end).map(|t| i64::from(t + BLOCK)).collect(),
    };
    Batch {
        order: vec![0],
        query_start: vec![0, end - begin],
        kv_lens: vec![end],
        num_decodes: usize::from(begin > 0),
        positions: (begin..end).collect(),
        token_ids: (begin..end).map(token).collect(),
        groups: vec![tables],
        blocks_used: blocks + 1,
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Processor time of all threads so far in ms (Linux): what a step costs on a machine that others use too.
fn processor_ms() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let texts = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok());
    texts.filter_map(|text| text.split(' ').next()?.parse::<f64>().ok()).sum::<f64>() / 1e6
}

fn main() -> Result<(), Error> {
    let rounds: usize = std::env::args().nth(1).map_or(Ok(40), |n| n.parse())?;
    let overrides = format!("{{\"vocab_size\": {VOCABULARY}}}");
    let model = Model::new(ModelConfig::resolve("smollm2-135m", Some(&overrides))?, BLOCK, 8192)?;
    let tensors = tensors(&model);
    let options = CpuOptions {
        kv_bytes: Bytes(1 << 28),
        dtype: Dtype::Float32,
        kv_init: KvInit::Zeros,
        seed: 0,
        threads: std::env::var("RAYON_NUM_THREADS").ok().and_then(|n| n.parse().ok()),
    };
    let mut ours = CpuDevice::new(&model.spec, &Weights::Read(&tensors), &options)?;
    let (llama, cache) = candle_model(&model, &tensors)?;
    println!("{} with {} threads, {rounds} rounds", ours.info().name, ours.info().units);
    println!("{:<16}{:>21}{:>9}{:>21}{:>9}{:>14}", "", "median ms", "", "processor ms", "", "");
    println!(
        "{:<16}{:>10}{:>11}{:>9}{:>10}{:>11}{:>9}{:>14}",
        "case", "ours", "candle", "ratio", "ours", "candle", "ratio", "relative RMS"
    );
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    for (name, begin, end) in [
        ("decode 1@513", 0x200_u32, 0x201_u32),
        ("decode 1@2049", 2048, 2049),
        ("verify 4@516", 512, 516),
        ("prefill 16", 0, 16),
        ("prefill 32", 0, 32),
        ("prefill 128", 0, 128),
        ("prefill 512", 0, 512),
        ("chunk 128@640", 512, 640),
    ] {
        let ids = |from: u32, to: u32| Tensor::from_iter((from..to).map(token), &CandleDevice::Cpu)?.unsqueeze(0);
        let mut primed = cache.clone();
        if begin > 0 {
            let prefix = batch(&model, 0, begin);
            ours.capture(&prefix, &forward)?.eager()?;
            llama.forward(&ids(0, begin)?, 0, &mut primed)?;
        }
        let (step, input) = (batch(&model, begin, end), ids(begin, end)?);
        let mut capture = ours.capture(&step, &forward)?;
        capture.snapshot()?;
        capture.eager()?;
        capture.record()?;
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let (mut cpu_a, mut cpu_b) = (Vec::new(), Vec::new());
        let mut logits = None;
        for _ in 0..rounds {
            let before = processor_ms();
            a.push(capture.replay()?.time.0 / 1e6);
            cpu_a.push(processor_ms() - before);
            let mut cache = primed.clone();
            let before = processor_ms();
            let start = Instant::now();
            logits = Some(llama.forward(&input, begin as usize, &mut cache)?);
            b.push(start.elapsed().as_secs_f64() * 1e3);
            cpu_b.push(processor_ms() - before);
        }
        let logits = logits.ok_or("no round")?.flatten_all()?.to_vec1::<f32>()?;
        let output = capture.output()?;
        let last = &output[output.len() - model.config.hidden_size..][..VOCABULARY];
        let off: f32 = last.iter().zip(&logits).map(|(x, y)| (x - y).powi(2)).sum();
        let size: f32 = logits.iter().map(|y| y * y).sum();
        let (a, b, cpu_a, cpu_b) = (median(a), median(b), median(cpu_a), median(cpu_b));
        print!("{name:<16}{a:>10.2}{b:>11.2}{:>9.2}{cpu_a:>10.2}{cpu_b:>11.2}{:>9.2}", a / b, cpu_a / cpu_b);
        println!("{:>14.1e}", (off / size).sqrt());
    }
    Ok(())
}
