//! What can keep a batch from being built: how much is needed, how much exists and which flag to raise.

use crate::case::quoted;

/// Why a batch could not be built, or is not what was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// More query tokens than a step takes.
    #[error(
        "case {}: {needed} query tokens in one step, and at most {limit} are allowed: raise --max-num-batched-tokens to \
         {needed}",
        quoted(case)
    )]
    Tokens { case: String, needed: u64, limit: u32 },
    /// More requests than a step takes.
    #[error(
        "case {}: {needed} requests in one step, and at most {limit} are allowed: raise --max-num-seqs to {needed}",
        quoted(case)
    )]
    Requests { case: String, needed: usize, limit: u32 },
    /// A request longer than the model's reach.
    #[error(
        "case {}, request {index}: {needed} tokens in the KV cache, and a request has at most {limit}: shorten it or raise \
         --max-model-len to {needed}",
        quoted(case)
    )]
    ModelLen { case: String, index: usize, needed: u32, limit: u32 },
    /// More draft tokens than there is capacity for.
    #[error(
        "case {}, request {index}: {needed} draft tokens, and there is capacity for {limit}: raise --num-speculative-tokens \
         to {needed}",
        quoted(case)
    )]
    Drafts { case: String, index: usize, needed: u32, limit: u32 },
    /// More blocks than the pool has.
    #[error(
        "case {}: {needed} KV blocks (the null block included), and the pool has {limit}: raise --kv-cache-memory-bytes, or \
         ask for fewer or shorter requests",
        quoted(case)
    )]
    Blocks { case: String, needed: u64, limit: u32 },
    /// Block tables that would not fit in memory, since null blocks take entries too.
    #[error(
        "case {}: block tables of {needed} entries, and at most {limit} are allowed: raise --block-size, or ask for fewer or \
         shorter requests",
        quoted(case)
    )]
    Tables { case: String, needed: u64, limit: u64 },
    /// The batch that was built is not what was asked for.
    #[error(
        "case {}, request {index}: the batch has {found}, and {wanted} was asked for: this is a bug, please report it",
        quoted(case)
    )]
    Request { case: String, index: usize, found: String, wanted: String },
    /// As [`BatchError::Request`], of the batch as a whole.
    #[error(
        "case {}: the batch has {found}, and {wanted} was asked for: this is a bug, please report it",
        quoted(case)
    )]
    Batch { case: String, found: String, wanted: String },
}
