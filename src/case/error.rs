//! What can be wrong with a case: each error is one line that says what was found and what to change.

use super::MAX_REQUESTS;

/// `text` in quotes with control characters escaped, cut after 60 characters: fit for one line of a message.
#[must_use]
pub fn quoted(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}… ({} bytes)", &text[..end], text.len()),
    }
}

/// A rule that one request breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// Q = 0.
    #[error("a query length of 0: a request has at least one query token")]
    NoQuery,
    /// K < Q.
    #[error(
        "a KV length of {kv_len} with a query length of {query_len}: the KV length includes the query, so give {query_len} or more"
    )]
    KvBelowQuery {
        /// Q.
        query_len: u32,
        /// K.
        kv_len: u32,
    },
    /// D > 0 and Q ≠ 1 + D.
    #[error(
        "{num_draft_tokens} draft tokens with a query length of {query_len}: a verify request's query is one token plus \
         the drafts, so the query length must be {}", u64::from(*num_draft_tokens) + 1
    )]
    DraftsAndQuery {
        /// Q.
        query_len: u32,
        /// D.
        num_draft_tokens: u32,
    },
    /// D > 0 and K = Q.
    #[error(
        "{num_draft_tokens} draft tokens without a prefix: give a KV length above the query length of {query_len}"
    )]
    DraftsWithoutPrefix {
        /// Q.
        query_len: u32,
        /// D.
        num_draft_tokens: u32,
    },
    /// `chunked` and K = Q.
    #[error(
        "a chunk without a prefix: give a KV length above the query length of {query_len}, or leave out `c` (chunked)"
    )]
    ChunkWithoutPrefix {
        /// Q.
        query_len: u32,
    },
    /// `chunked` on a decode or verify request.
    #[error(
        "a chunked decode or verify request (query length {query_len}): leave out `c` (chunked), which is for prefills with a prefix"
    )]
    ChunkedDecode {
        /// Q.
        query_len: u32,
    },
}

/// What is wrong with a case.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CaseError {
    /// A case must have a name.
    #[error("the name before `=` is empty: write NAME=REQS, or REQS alone, which is then its own name")]
    EmptyName,
    /// A case must have a request.
    #[error("no request: give at least one, such as 1@8192")]
    NoRequests,
    /// Over [`MAX_REQUESTS`].
    #[error("{found} requests at item {}: a case has at most {MAX_REQUESTS}", quoted(item))]
    TooManyRequests {
        /// The item that goes over.
        item: String,
        /// Requests up to there, as text since it may be beyond any integer.
        found: String,
    },
    /// `0*…`.
    #[error(
        "item {} repeats its request 0 times: give a count of 1 or more, or leave the item out",
        quoted(item)
    )]
    ZeroCount {
        /// The item.
        item: String,
    },
    /// Not of the form `[N*]Q[@K][c][:D]`.
    #[error("item {} is not [N*]Q[@K][c][:D]: {what}", quoted(item))]
    Syntax {
        /// The item.
        item: String,
        /// What stands in the way.
        what: String,
    },
    /// Beyond 32 bits.
    #[error("{} in item {} is too large: lengths go up to {}", quoted(number), quoted(item), u32::MAX)]
    TooLarge {
        /// The item.
        item: String,
        /// The number.
        number: String,
    },
    /// A rule of requests.
    #[error("item {} has {rule}", quoted(item))]
    Request {
        /// The item.
        item: String,
        /// The rule.
        rule: RequestError,
    },
    /// A jitter outside [0, 1).
    #[error(
        "a KV length jitter of {jitter}: give --kv-len-jitter (kv_len_jitter in a shape file) from 0 up to, not including, 1"
    )]
    Jitter {
        /// What was asked for.
        jitter: f64,
    },
    /// K above the model's reach.
    #[error(
        "case {}: a KV length of {kv_len} is above the model's maximum of {max_model_len}: shorten the request or raise \
         --max-model-len to {kv_len}",
        quoted(case)
    )]
    AboveModelLen {
        /// The case's name.
        case: String,
        /// K before jitter.
        kv_len: u32,
        /// The limit.
        max_model_len: u32,
    },
}
