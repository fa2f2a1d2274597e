//! `--output-json`: the structure of `vllm bench forward`, key for key, with ours added.

use serde::Serialize;

use crate::baseline::Configuration;
use crate::case::Request;
use crate::measure::Checks;
use crate::measure::limits::Surroundings;
use crate::measure::loads::ExpertLoads;
use crate::model::cost::Traffic;
use crate::stats::Latency;

/// One case.
#[derive(Debug, Clone, Serialize)]
pub struct CaseResult {
    /// The case's name.
    pub case: String,
    /// Its requests after jitter, in the order in which they were asked for.
    pub requests: Vec<RequestResult>,
    /// Median of the replays, each the maximum over ranks.
    pub median_us: f64,
    /// How far ranks lay apart in each replay (max − min), in microseconds; none of one rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skew_us: Option<Vec<f64>>,
    /// What a rank sends and gets in a step; none of one rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traffic_bytes: Option<Traffic>,
    /// One entry a rank.
    pub ranks: Vec<RankResult>,
    /// The benchmark's id.
    pub id: String,
    /// Query tokens a second at the median.
    pub tokens_per_second: f64,
    /// What it was measured on.
    pub configuration: Configuration,
    /// The commit, if there is one.
    pub commit: Option<String>,
    /// When, RFC 3339 in UTC.
    pub date: String,
    /// The command line's seed.
    pub seed: u64,
}

/// One request.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct RequestResult {
    /// Q.
    pub query_len: u32,
    /// K, the query included.
    pub kv_len: u32,
    /// D.
    pub num_draft_tokens: u32,
    /// Whether it continues its own prompt.
    pub chunked: bool,
}

impl From<&Request> for RequestResult {
    fn from(request: &Request) -> Self {
        let Request { query_len, kv_len, num_draft_tokens, chunked } = *request;
        Self { query_len, kv_len, num_draft_tokens, chunked }
    }
}

/// One rank.
#[derive(Debug, Clone, Serialize)]
pub struct RankResult {
    /// Query tokens of the step.
    pub num_tokens: usize,
    /// Blocks of the KV pool that the step uses, the null block included.
    pub kv_blocks: u32,
    /// How tokens choose experts; none for a dense model.
    pub routing: Option<String>,
    /// Rows that each expert really computed, by MoE layer; none for a dense model.
    pub expert_loads: Option<Vec<ExpertLoads>>,
    /// Query tokens that this rank computes.
    pub num_local_tokens: usize,
    /// Query tokens with padding; there is none.
    pub num_tokens_after_padding: usize,
    /// Index in `requests` of each row of the batch.
    pub batch_order: Vec<usize>,
    /// What the times cover.
    pub timing_scope: &'static str,
    /// The protocol's checks.
    #[serde(flatten)]
    pub checks: Checks,
    /// Times.
    pub latency_us: Latency,
    /// The device's clock over each replay, where it can be read.
    pub clock_mhz: Option<Vec<f64>>,
    /// The device's kernels, sensors and limits.
    #[serde(flatten)]
    pub around: Surroundings,
}
