//! A case: a named list of requests, and its grammar `NAME=REQS`.

/// One request of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request {
    /// Query tokens of this step, Q.
    pub query_len: u32,
    /// Tokens in the KV cache after the step, K; includes the query.
    pub kv_len: u32,
    /// Draft tokens among the query tokens, D.
    pub num_draft_tokens: u32,
    /// Whether a prefill with a prefix continues its own prompt, rather than hitting a cached prefix.
    pub chunked: bool,
}

impl Request {
    /// Tokens in the KV cache before the step.
    #[must_use]
    pub fn prefix_len(&self) -> u32 {
        self.kv_len - self.query_len
    }

    /// Decode or verify: a prefix, and a query of one token plus the drafts.
    #[must_use]
    pub fn is_decode(&self) -> bool {
        self.prefix_len() > 0 && self.query_len == 1 + self.num_draft_tokens
    }

    /// A prefill whose prefix another request left in the cache.
    #[must_use]
    pub fn is_prefix_hit(&self) -> bool {
        self.prefix_len() > 0 && !self.is_decode() && !self.chunked
    }
}

/// A named list of requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Any non-empty text.
    pub name: String,
    /// At least one.
    pub requests: Vec<Request>,
}
