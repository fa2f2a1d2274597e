//! What ranks send each other in a step.

use super::super::config::ModelConfig;
use super::super::experts::Experts;
use super::super::shard::Shard;
use crate::units::Bytes;

/// Bytes of one rank's collectives in a step, by kind. Of each the longer side counts, as NCCL's tests count a message: what
/// an all-reduce sums, what an all-gather leaves, what a reduce-scatter sums, what an all-to-all sends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Traffic {
    /// Sums of activations over tensor-parallel ranks.
    pub all_reduce: Bytes,
    /// Tokens and logits on their way to experts.
    pub all_gather: Bytes,
    /// Results on their way back.
    pub reduce_scatter: Bytes,
    /// Both ways, where tokens are sent only to their experts.
    pub all_to_all: Bytes,
}

impl Traffic {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> Bytes {
        [self.all_reduce, self.all_gather, self.reduce_scatter, self.all_to_all].into_iter().sum()
    }
}

/// The traffic of a rank in a step of so many tokens of its own, activations taking `element` bytes.
#[must_use]
pub fn traffic(config: &ModelConfig, shard: &Shard, tokens: u64, element: usize) -> Traffic {
    let layout = shard.place.layout;
    let (tokens, element) = (u128::from(tokens), element as u128);
    let row = config.hidden_size as u128 * element;
    let mut traffic = Traffic::default();
    if layout.tensor > 1 {
        // After the embedding and twice a layer.
        traffic.all_reduce = Bytes(tokens * row * (1 + 2 * config.windows.len() as u128));
    }
    let Some(experts) = config.experts.as_ref().filter(|_| layout.data > 1) else { return traffic };
    let all = tokens * layout.data as u128 * Experts::num_layers(experts) as u128;
    if shard.all2all == crate::backend::All2All::AllToAll {
        // An expert's number and its weight are four bytes each.
        traffic.all_to_all = Bytes(all * (2 * row + 8 * experts.top_k as u128));
    } else {
        traffic.all_gather = Bytes(all * (row + experts.count as u128 * element));
        traffic.reduce_scatter = Bytes(all * row);
    }
    traffic
}
