//! The CPU's paged attention against the definition in float64: every kind of request, windows, grouped heads, split ranges.

use forward_bench::backend::cpu::{CpuDevice, CpuOptions};
use forward_bench::backend::{
    Act, Attention, Device, Dtype, KvInit, KvLayer, Ops, Rope, StepSpec, WeightId, WeightRole, WeightSpec,
    Weights, dummy,
};
use forward_bench::batch::{Batch, GroupTables, KvGroup};
use forward_bench::units::Bytes;

const VOCABULARY: usize = 997;
const BLOCK: u32 = 16;

/// One attention layer over heads that come straight from a table; the values are scaled up so that weights differ.
struct Setup {
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<u32>,
    sinks: bool,
}

impl Setup {
    fn width(&self) -> usize {
        (self.q_heads + 2 * self.kv_heads) * self.head_dim
    }

    fn spec(&self) -> StepSpec {
        let table = WeightSpec {
            name: "table".into(),
            parts: Vec::new(),
            rows: VOCABULARY,
            cols: self.width(),
            role: WeightRole::Embedding,
            cut: None,
        };
        let sinks = WeightSpec {
            name: "sinks".into(),
            parts: Vec::new(),
            rows: 1,
            cols: self.q_heads,
            role: WeightRole::Bias,
            cut: None,
        };
        StepSpec {
            weights: vec![table, sinks],
            acts: vec![(Act::Qkv, self.width()), (Act::Normed, self.q_heads * self.head_dim)],
            kv_groups: vec![KvGroup { block_size: BLOCK, window: self.window, replay: None }],
            kv_layers: vec![KvLayer::whole(0, self.kv_heads, self.head_dim)],
            ropes: vec![Rope { inv_freq: vec![0.0; self.head_dim / 2], factor: 50.0 }],
            max_model_len: 4096,
        }
    }

    fn attention(&self) -> Attention {
        Attention {
            kv_layer: 0,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            window: self.window,
            rope: 0,
            q_norm: None,
            k_norm: None,
            eps: 1e-6,
            sinks: self.sinks.then_some(WeightId(1)),
        }
    }

    /// An element of the query (`which` 0), key (1) or value (2) head of a token; rotation by nothing scales by 50.
    fn element(&self, which: usize, head: usize, i: usize, token: u32) -> f64 {
        let column = [0, self.q_heads, self.q_heads + self.kv_heads][which] + head;
        let at = token as usize * self.width() + column * self.head_dim + i;
        let factor = if which == 2 { 1.0 } else { 50.0 };
        factor * f64::from(dummy::weight(WeightRole::Embedding, dummy::stream(7, 0), at as u64))
    }

    fn exact(&self, request: u32, position: u32, head: usize) -> Vec<f64> {
        let kv_head = head / (self.q_heads / self.kv_heads);
        let first = (position + 1).saturating_sub(self.window.unwrap_or(u32::MAX));
        let query: Vec<f64> =
            (0..self.head_dim).map(|i| self.element(0, head, i, token(request, position))).collect();
        let mut out = vec![0.0; self.head_dim];
        let sink = dummy::weight(WeightRole::Bias, dummy::stream(7, 1), head as u64);
        let mut total = if self.sinks { f64::from(sink).exp() } else { 0.0 };
        for p in first..=position {
            let token = token(request, p);
            let score: f64 =
                query.iter().enumerate().map(|(i, q)| q * self.element(1, kv_head, i, token)).sum();
            let weight = (score / (self.head_dim as f64).sqrt()).exp();
            total += weight;
            for (i, o) in out.iter_mut().enumerate() {
                *o += weight * self.element(2, kv_head, i, token);
            }
        }
        out.iter().map(|o| o / total).collect()
    }
}

fn token(request: u32, position: u32) -> u32 {
    (request * 131 + position * 17 + position / 50) % VOCABULARY as u32
}

/// `(begin, end)` of each request; their blocks lie interleaved in the pool.
fn batch(spec: &StepSpec, requests: &[(u32, u32)]) -> Batch {
    let count = requests.len() as u32;
    let stride = 64;
    let block = |request: u32, i: u32| 1 + i * count + (request + i) % count;
    let tokens = || requests.iter().zip(0..).flat_map(|(&(a, b), r)| (a..b).map(move |p| (r, p)));
    let mut query_start = vec![0];
    for (begin, end) in requests {
        query_start.push(query_start[query_start.len() - 1] + end - begin);
    }
    let slot = |(r, p): (u32, u32)| i64::from(block(r, p / BLOCK) * BLOCK + p % BLOCK);
    Batch {
        order: (0..requests.len()).collect(),
        query_start,
        kv_lens: requests.iter().map(|request| request.1).collect(),
        num_decodes: 0,
        positions: tokens().map(|(_, p)| p).collect(),
        token_ids: tokens().map(|(r, p)| token(r, p)).collect(),
        groups: vec![GroupTables {
            group: spec.kv_groups[0],
            block_tables: (0..count).flat_map(|r| (0..stride).map(move |i| block(r, i))).collect(),
            stride: stride as usize,
            slots: tokens().map(slot).collect(),
        }],
        blocks_used: 1 + count * stride,
    }
}

fn run(setup: &Setup, requests: &[(u32, u32)], threads: usize) -> Vec<f32> {
    let spec = setup.spec();
    let options = CpuOptions {
        kv_bytes: Bytes(64 << 20),
        dtype: Dtype::Float32,
        kv_init: KvInit::Random,
        seed: 0,
        threads: Some(threads),
    };
    let mut device = CpuDevice::new(&spec, &Weights::Dummy { seed: 7 }, &options).unwrap();
    let attention = setup.attention();
    let forward = |ops: &mut dyn Ops| {
        ops.embed_gather(WeightId(0), Act::Qkv)?;
        ops.qk_norm_rope_kvwrite(Act::Qkv, &attention)?;
        ops.attention(Act::Qkv, &attention, Act::Normed)
    };
    let whole: Vec<(u32, u32)> = requests.iter().map(|&(_, end)| (0, end)).collect();
    let (prefix, step) = (batch(&spec, &whole), batch(&spec, requests));
    device.init_kv(&prefix).unwrap();
    device.capture(&prefix, &forward).unwrap().eager().unwrap();
    let mut capture = device.capture(&step, &forward).unwrap();
    capture.record().unwrap();
    capture.replay().unwrap();
    let first = capture.output().unwrap();
    capture.eager().unwrap();
    assert_eq!(first, capture.output().unwrap(), "the step does not repeat");
    first
}

fn agrees(setup: &Setup, requests: &[(u32, u32)]) {
    let output = run(setup, requests, 2);
    assert_eq!(output, run(setup, requests, 1), "the result depends on the number of threads");
    let tokens = requests.iter().zip(0..).flat_map(|(&(a, b), r)| (a..b).map(move |p| (r, p)));
    for (row, (request, position)) in output.chunks_exact(setup.q_heads * setup.head_dim).zip(tokens) {
        // All positions of short queries, some of long ones.
        if position % 23 != 0 && requests[request as usize].1 - requests[request as usize].0 > 8 {
            continue;
        }
        for head in 0..setup.q_heads {
            let found = &row[head * setup.head_dim..][..setup.head_dim];
            let exact = setup.exact(request, position, head);
            let off: f64 = found.iter().zip(&exact).map(|(f, e)| (f64::from(*f) - e).powi(2)).sum();
            let size: f64 = exact.iter().map(|e| e * e).sum();
            assert!((off / size).sqrt() < 1e-5, "request {request}, position {position}, head {head}");
        }
    }
}

const REQUESTS: [(u32, u32); 6] = [(596, 600), (700, 701), (0, 5), (1, 2), (300, 400), (0, 150)];

#[test]
fn grouped_heads() {
    agrees(&Setup { q_heads: 6, kv_heads: 2, head_dim: 64, window: None, sinks: false }, &REQUESTS);
}

#[test]
fn one_key_head_for_all() {
    agrees(&Setup { q_heads: 8, kv_heads: 1, head_dim: 80, window: None, sinks: false }, &REQUESTS);
}

#[test]
fn a_head_each_with_windows() {
    for window in [1, 20, 64, 650] {
        agrees(
            &Setup { q_heads: 2, kv_heads: 2, head_dim: 18, window: Some(window), sinks: false },
            &REQUESTS,
        );
    }
}

#[test]
fn one_long_decode_is_split() {
    agrees(&Setup { q_heads: 4, kv_heads: 2, head_dim: 128, window: None, sinks: false }, &[(1000, 1001)]);
    agrees(
        &Setup { q_heads: 4, kv_heads: 2, head_dim: 128, window: Some(500), sinks: false },
        &[(1000, 1001)],
    );
}

#[test]
fn sinks_take_a_share_of_whole_and_of_split_ranges() {
    for window in [None, Some(20), Some(650)] {
        let setup = Setup { q_heads: 6, kv_heads: 2, head_dim: 64, window, sinks: true };
        agrees(&setup, &REQUESTS);
        agrees(&setup, &[(1000, 1001)]);
    }
}
