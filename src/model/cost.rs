//! The least that a step must read and compute, per kind of operation, and the least time in which that can be done.
//!
//! Read: every weight of the layers once, of the embedding only the gathered rows, and for each request and layer the keys
//! and values that are attended to (under a window W of a query of Q tokens at most W + Q − 1). Computed: two operations for
//! each token and weight of a linear layer, and 4 × heads × head_dim for each pair of a query and a position that it attends
//! to. Of experts only those that are reached count as read, and two operations for each weight and token that reaches it.
//! All sums are closed forms in 128 bits, so that no length is too long.

use super::config::ModelConfig;
use super::decoder::widths;
use super::experts::Experts;
use crate::case::Request;
use crate::units::{Bytes, Flops, Nanos};

/// Bytes of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementBytes {
    /// Of a weight.
    pub weight: usize,
    /// Of a key or value.
    pub kv: usize,
}

/// What a device can do at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ceilings {
    /// Bytes read a second.
    pub read: Bytes,
    /// Operations of a matrix product a second.
    pub gemm: Flops,
}

/// How many experts of a layer a step reaches.
#[derive(Debug, Clone, PartialEq)]
pub enum Reached {
    /// `[MoE layers]`: the routing is made.
    Exactly(Vec<usize>),
    /// The gates decide: the expected number if every choice were uniform, `E (1 − (1 − k / E)^tokens)`.
    Expected,
}

/// All instances of one kind of operation in a step; instances of a kind cost the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpCost {
    /// `embedding`, `norm`, `qkv`, `qk_norm`, `attention`, `window_attention`, `sinks`, `o_proj`, `gate_up`, `down`, `router` or
    /// `experts`. Of `experts`, whose layers may differ, the sum stands for its instances: a floor stays one.
    pub op: &'static str,
    /// Instances, such as one a layer.
    pub count: u64,
    /// Read by all instances.
    pub bytes: Bytes,
    /// Computed by all instances.
    pub flops: Flops,
}

impl OpCost {
    fn scaled(op: &'static str, count: usize, bytes: u128, flops: u128) -> Self {
        let n = count as u128;
        let (bytes, flops) = (Bytes(bytes.saturating_mul(n)), Flops(flops.saturating_mul(n)));
        Self { op, count: count as u64, bytes, flops }
    }
}

/// The operations of a step of these requests; kinds that the model does not have are left out.
#[must_use]
pub fn costs(
    config: &ModelConfig,
    requests: &[Request],
    element: ElementBytes,
    reached: &Reached,
) -> Vec<OpCost> {
    let tokens: u128 = requests.iter().map(|request| u128::from(request.query_len)).sum();
    let weight = element.weight as u128;
    let (hidden, inter) = (config.hidden_size as u128, config.intermediate_size as u128);
    let (q, kv) = widths(config);
    let (q, kv) = (q as u128, kv as u128);
    let layers = config.windows.len();
    let sparse = config.experts.as_ref().map_or(0, Experts::num_layers);
    let linear = |op, layers, inputs: u128, outputs: u128, bias: bool| {
        let bias = if bias { outputs } else { 0 };
        OpCost::scaled(op, layers, (inputs * outputs + bias) * weight, 2 * tokens * inputs * outputs)
    };
    let gathered = tokens.min(config.vocab_size as u128);
    let mut costs = vec![
        OpCost::scaled("embedding", 1, gathered * hidden * weight, 0),
        OpCost::scaled("norm", 2 * layers + 1, hidden * weight, 0),
        linear("qkv", layers, hidden, q + 2 * kv, config.qkv_bias),
        linear("o_proj", layers, q, hidden, config.o_bias),
    ];
    if sparse < layers {
        costs.push(linear("gate_up", layers - sparse, hidden, 2 * inter, false));
        costs.push(linear("down", layers - sparse, inter, hidden, false));
    }
    if let Some(experts) = &config.experts {
        costs.push(linear("router", sparse, hidden, experts.count as u128, experts.bias));
        costs.push(of_experts(experts, hidden, tokens, weight, reached));
    }
    if config.sinks {
        costs.push(OpCost::scaled("sinks", layers, config.num_attention_heads as u128 * weight, 0));
    }
    if config.qk_norm {
        costs.push(OpCost::scaled("qk_norm", layers, 2 * config.head_dim as u128 * weight, 0));
    }
    let mut windows = config.windows.clone();
    windows.sort_unstable();
    windows.dedup();
    for window in windows {
        let count = config.windows.iter().filter(|&&w| w == window).count();
        let op = if window.is_some() { "window_attention" } else { "attention" };
        let positions: u128 = requests.iter().map(|request| attended(request, window)).sum();
        let pairs: u128 = requests.iter().map(|request| pairs(request, window)).sum();
        costs.push(OpCost::scaled(op, count, 2 * positions * kv * element.kv as u128, 4 * q * pairs));
    }
    costs
}

/// All layers' experts.
fn of_experts(experts: &Experts, hidden: u128, tokens: u128, weight: u128, reached: &Reached) -> OpCost {
    let (count, layers) = (experts.count as f64, experts.num_layers());
    let reached = match reached {
        Reached::Exactly(reached) => reached.iter().map(|&experts| experts as f64).sum(),
        Reached::Expected => {
            let missed = (1.0 - experts.top_k as f64 / count).powf(tokens as f64);
            layers as f64 * count * (1.0 - missed)
        }
    };
    let matrices = 3 * hidden * experts.inter as u128;
    let biases = if experts.bias { 2 * experts.inter as u128 + hidden } else { 0 };
    // Below 2⁵³ bytes the product is exact for whole numbers of experts.
    let bytes = (reached * ((matrices + biases) * weight) as f64).round() as u128;
    let slots = tokens.saturating_mul((experts.top_k * layers) as u128);
    let flops = slots.saturating_mul(2 * matrices);
    OpCost { op: "experts", count: layers as u64, bytes: Bytes(bytes), flops: Flops(flops) }
}

/// Positions whose keys are needed.
fn attended(request: &Request, window: Option<u32>) -> u128 {
    let kv_len = u128::from(request.kv_len);
    window.map_or(kv_len, |w| kv_len.min(u128::from(w) + u128::from(request.query_len).saturating_sub(1)))
}

/// Pairs of a query and a position that it attends to: the sum of `min(p + 1, W)` over the query's positions p.
fn pairs(request: &Request, window: Option<u32>) -> u128 {
    let upto = |len: u128| {
        let ramp = window.map_or(len, |w| len.min(u128::from(w)));
        ramp * (ramp + 1) / 2 + (len - ramp) * ramp
    };
    let kv_len = u128::from(request.kv_len);
    upto(kv_len) - upto(kv_len.saturating_sub(u128::from(request.query_len)))
}

/// Read in all.
#[must_use]
pub fn total_bytes(costs: &[OpCost]) -> Bytes {
    costs.iter().map(|cost| cost.bytes).sum()
}

/// Computed in all.
#[must_use]
pub fn total_flops(costs: &[OpCost]) -> Flops {
    costs.iter().map(|cost| cost.flops).sum()
}

/// The least time if reading and computing overlap over the whole step.
#[must_use]
pub fn floor(costs: &[OpCost], ceilings: Ceilings) -> Nanos {
    least(total_bytes(costs), total_flops(costs), ceilings)
}

/// The least time if they overlap within an operation, but one operation follows the other.
#[must_use]
pub fn serial_floor(costs: &[OpCost], ceilings: Ceilings) -> Nanos {
    // The instances of a kind cost the same, so the sum of their maxima is the maximum of their sums.
    costs.iter().map(|cost| least(cost.bytes, cost.flops, ceilings)).sum()
}

fn least(bytes: Bytes, flops: Flops, ceilings: Ceilings) -> Nanos {
    let seconds = |amount: u128, rate: u128| if amount == 0 { 0.0 } else { amount as f64 / rate as f64 };
    Nanos(seconds(bytes.0, ceilings.read.0).max(seconds(flops.0, ceilings.gemm.0)) * 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: ElementBytes = ElementBytes { weight: 4, kv: 4 };

    fn request(query_len: u32, kv_len: u32) -> Request {
        Request { query_len, kv_len, num_draft_tokens: 0, chunked: false }
    }

    fn preset(name: &str) -> ModelConfig {
        ModelConfig::resolve(name, None).unwrap()
    }

    fn of<'a>(costs: &'a [OpCost], op: &str) -> &'a OpCost {
        costs.iter().find(|cost| cost.op == op).unwrap()
    }

    #[test]
    fn a_decode_step_reads_all_weights_and_the_cache() {
        let costs = costs(&preset("smollm2-135m"), &[request(1, 513)], FOUR, &Reached::Expected);
        let layer: u128 = 576 * 960 + 576 * 576 + 576 * 3072 + 1536 * 576;
        let norms = 61 * 576;
        let kv = 30 * 513 * 2 * 192;
        assert_eq!(total_bytes(&costs).0, 4 * (30 * layer + norms + kv + 576));
        assert_eq!(total_flops(&costs).0, 2 * 30 * layer + 30 * 4 * 576 * 513);
    }

    #[test]
    fn the_closed_forms_are_the_sums() {
        for window in [None, Some(1), Some(5), Some(64)] {
            for (q, k) in [(1, 1), (1, 40), (7, 7), (7, 12), (30, 64)] {
                let least = |p: u32| window.map_or(p + 1, |w: u32| w.min(p + 1));
                let sum: u32 = (k - q..k).map(least).sum();
                assert_eq!(pairs(&request(q, k), window), u128::from(sum), "{q}@{k} {window:?}");
                let first = (k - q + 1).saturating_sub(window.unwrap_or(u32::MAX));
                assert_eq!(attended(&request(q, k), window), u128::from(k - first), "{q}@{k} {window:?}");
            }
        }
    }

    #[test]
    fn no_length_is_too_long() {
        let long = vec![request(u32::MAX, u32::MAX); 1000];
        let costs = costs(&preset("qwen3-32b"), &long, FOUR, &Reached::Expected);
        assert!(total_flops(&costs).0 > u128::from(u64::MAX));
        let rates = Ceilings { read: Bytes(1), gemm: Flops(1) };
        assert!(floor(&costs, rates).0.is_finite());
    }

    #[test]
    fn a_window_bounds_what_is_read() {
        let costs = costs(&preset("mistral-7b"), &[request(16, 100_000)], FOUR, &Reached::Expected);
        assert_eq!(of(&costs, "window_attention").bytes.0, 32 * 2 * (4096 + 15) * 1024 * 4);
    }

    #[test]
    fn the_serial_floor_is_no_less_than_the_floor() {
        let costs =
            costs(&preset("qwen3-8b"), &[request(3000, 4000), request(1, 900_000)], FOUR, &Reached::Expected);
        let rates = Ceilings { read: Bytes(4_000_000_000_000), gemm: Flops(700_000_000_000_000) };
        let (low, serial) = (floor(&costs, rates), serial_floor(&costs, rates));
        assert!(low.0 > 0.0 && serial.0 > low.0 * 1.1, "{low} {serial}");
    }

    #[test]
    fn experts_that_are_reached_are_read_and_slots_computed() {
        let config = preset("qwen3-30b-a3b");
        let requests = [request(1, 100); 4];
        let expert = 3 * 2048 * 768;
        let exactly = costs(&config, &requests, FOUR, &Reached::Exactly(vec![32; 48]));
        let experts = of(&exactly, "experts");
        assert_eq!((experts.count, experts.bytes.0), (48, 48 * 32 * expert * 4));
        assert_eq!(experts.flops.0, 48 * 4 * 8 * 2 * expert);
        assert_eq!(of(&exactly, "router").bytes.0, 48 * 2048 * 128 * 4);
        assert_eq!(of(&exactly, "router").flops.0, 48 * 2 * 4 * 2048 * 128);
        assert!(exactly.iter().all(|cost| cost.op != "gate_up" && cost.op != "sinks"));
        let expected = costs(&config, &requests, FOUR, &Reached::Expected);
        let reached = 128.0 * (1.0 - (1.0_f64 - 8.0 / 128.0).powi(4));
        let bytes = of(&expected, "experts").bytes.0 as f64;
        assert!((bytes / (48.0 * reached * expert as f64 * 4.0) - 1.0).abs() < 1e-12, "{bytes}");
    }

    #[test]
    fn biases_and_sinks_are_read() {
        let config = preset("gpt-oss-20b");
        let costs = costs(&config, &[request(3, 3)], FOUR, &Reached::Exactly(vec![5; 24]));
        assert_eq!(of(&costs, "experts").bytes.0, 24 * 5 * (3 * 2880 * 2880 + 3 * 2880) * 4);
        assert_eq!(of(&costs, "experts").flops.0, 24 * 3 * 4 * 2 * 3 * 2880 * 2880);
        assert_eq!(of(&costs, "router").bytes.0, 24 * (2880 * 32 + 32) * 4);
        assert_eq!(of(&costs, "sinks").bytes.0, 24 * 64 * 4);
        assert_eq!((of(&costs, "attention").count, of(&costs, "window_attention").count), (12, 12));
    }

    #[test]
    fn layers_without_experts_have_an_mlp() {
        let overrides = r#"{"decoder_sparse_step": 2, "mlp_only_layers": [1]}"#;
        let config = ModelConfig::resolve("qwen3-30b-a3b", Some(overrides)).unwrap();
        let costs = costs(&config, &[request(1, 1)], FOUR, &Reached::Exactly(vec![8; 23]));
        assert_eq!((of(&costs, "gate_up").count, of(&costs, "experts").count), (25, 23));
        assert_eq!(of(&costs, "gate_up").bytes.0, 25 * 2048 * 2 * 6144 * 4);
    }
}
