//! The least that a step must read and compute, per kind of operation, and the least time in which that can be done.
//!
//! Read: every weight of the layers once, of the embedding only the gathered rows, and for each request and layer the keys
//! and values that are attended to (under a window W of a query of Q tokens at most W + Q − 1). Computed: two operations for
//! each token and weight of a linear layer, and 4 × heads × head_dim for each pair of a query and a position that it attends
//! to. Of experts only those that are reached count as read, and two operations for each weight and token that reaches it.
//! All sums are closed forms in 128 bits, so that no length is too long.
//!
//! All is one rank's own part; the step's floor is the greatest of the ranks'. What they send each other is [`Traffic`].

mod traffic;

use super::config::ModelConfig;
use super::experts::Experts;
use super::shard::Shard;
use crate::case::Request;
use crate::units::{Bytes, Flops, Nanos};

pub use traffic::{Traffic, traffic};

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

/// What a rank's experts have to do in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit {
    /// Experts that have any row.
    pub experts: usize,
    /// Rows of all of them.
    pub rows: u64,
}

/// How many of a rank's experts a step reaches, with the tokens of all data-parallel ranks.
#[derive(Debug, Clone, PartialEq)]
pub enum Reached {
    /// `[MoE layers]`: the routing is made.
    Exactly(Vec<Hit>),
    /// The gates decide: the expected number if every choice were uniform, `local (1 − (1 − k / E)^tokens)`.
    Expected,
}

impl Reached {
    /// That of loads, `[MoE layers][local experts]` rows.
    #[must_use]
    pub fn of(loads: &[Vec<u32>]) -> Self {
        let hit = |loads: &Vec<u32>| Hit {
            experts: loads.iter().filter(|load| **load > 0).count(),
            rows: loads.iter().map(|load| u64::from(*load)).sum(),
        };
        Self::Exactly(loads.iter().map(hit).collect())
    }
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

/// The operations of a rank's part of a step of these requests; kinds that the model does not have are left out.
#[must_use]
pub fn costs(
    config: &ModelConfig,
    shard: &Shard,
    requests: &[Request],
    element: ElementBytes,
    reached: &Reached,
) -> Vec<OpCost> {
    let tokens: u128 = requests.iter().map(|request| u128::from(request.query_len)).sum();
    let weight = element.weight as u128;
    let (hidden, dim) = (config.hidden_size as u128, config.head_dim as u128);
    let (q, kv) = (shard.q_heads.len() as u128 * dim, shard.kv_heads.len() as u128 * dim);
    let inter = shard.inter.len() as u128;
    let layers = config.windows.len();
    let sparse = config.experts.as_ref().map_or(0, Experts::num_layers);
    let linear = |op, layers, inputs: u128, outputs: u128, bias: bool| {
        let bias = if bias { outputs } else { 0 };
        OpCost::scaled(op, layers, (inputs * outputs + bias) * weight, 2 * tokens * inputs * outputs)
    };
    let mut costs = vec![
        OpCost::scaled("embedding", 1, gathered(config, shard, tokens) * hidden * weight, 0),
        OpCost::scaled("norm", 2 * layers + 1, hidden * weight, 0),
        linear("qkv", layers, hidden, q + 2 * kv, config.qkv_bias),
        linear("o_proj", layers, q, hidden, config.o_bias && shard.adds_row_bias()),
    ];
    if sparse < layers {
        costs.push(linear("gate_up", layers - sparse, hidden, 2 * inter, false));
        costs.push(linear("down", layers - sparse, inter, hidden, false));
    }
    if let Some(experts) = &config.experts {
        costs.push(linear("router", sparse, hidden, experts.count as u128, experts.bias));
        costs.push(of_experts((experts, shard), hidden, tokens, weight, reached));
    }
    if config.sinks {
        costs.push(OpCost::scaled("sinks", layers, shard.q_heads.len() as u128 * weight, 0));
    }
    if config.qk_norm {
        costs.push(OpCost::scaled("qk_norm", layers, 2 * dim * weight, 0));
    }
    costs.extend(attentions(config, (q, kv), requests, element));
    costs
}

/// Rows of the embedding that a rank gathers: its part of all if ids were spread evenly, the parts adding up to all.
fn gathered(config: &ModelConfig, shard: &Shard, tokens: u128) -> u128 {
    let vocabulary = config.vocab_size as u128;
    let all = tokens.min(vocabulary);
    let before = |row: usize| all * row as u128 / vocabulary;
    before(shard.vocabulary.end) - before(shard.vocabulary.start)
}

/// The attention of each kind of layer, over heads that are so wide together.
fn attentions(
    config: &ModelConfig,
    (q, kv): (u128, u128),
    requests: &[Request],
    element: ElementBytes,
) -> Vec<OpCost> {
    let mut windows = config.windows.clone();
    windows.sort_unstable();
    windows.dedup();
    let of = |window: Option<u32>| {
        let count = config.windows.iter().filter(|&&w| w == window).count();
        let op = if window.is_some() { "window_attention" } else { "attention" };
        let positions: u128 = requests.iter().map(|request| attended(request, window)).sum();
        let pairs: u128 = requests.iter().map(|request| pairs(request, window)).sum();
        OpCost::scaled(op, count, 2 * positions * kv * element.kv as u128, 4 * q * pairs)
    };
    windows.into_iter().map(of).collect()
}

/// All layers' experts.
fn of_experts(
    (experts, shard): (&Experts, &Shard),
    hidden: u128,
    tokens: u128,
    weight: u128,
    reached: &Reached,
) -> OpCost {
    let (count, local, layers) = (experts.count, shard.experts.len(), experts.num_layers());
    let tokens = tokens.saturating_mul(shard.place.layout.data as u128);
    let (reached, rows) = match reached {
        Reached::Exactly(hits) => (
            hits.iter().map(|hit| hit.experts as f64).sum(),
            hits.iter().map(|hit| u128::from(hit.rows)).sum(),
        ),
        Reached::Expected => {
            let missed = (1.0 - experts.top_k as f64 / count as f64).powf(tokens as f64);
            let slots = tokens.saturating_mul((experts.top_k * layers) as u128);
            (
                layers as f64 * local as f64 * (1.0 - missed),
                slots.saturating_mul(local as u128) / count as u128,
            )
        }
    };
    let inter = shard.expert_inter.len() as u128;
    let matrices = 3 * hidden * inter;
    let second_bias = if shard.adds_expert_bias() { hidden } else { 0 };
    let biases = if experts.bias { 2 * inter + second_bias } else { 0 };
    // Below 2⁵³ bytes the product is exact for whole numbers of experts.
    let bytes = (reached * ((matrices + biases) * weight) as f64).round() as u128;
    let flops = rows.saturating_mul(2 * matrices);
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
mod tests;
