//! A case: a named list of requests, its rules, its grammar `NAME=REQS` and the jitter of its lengths.

mod error;
mod grammar;
mod jitter;
mod numpy;

pub use error::{CaseError, RequestError, quoted};

use crate::units::Tokens;

/// The most requests that one case may have.
pub const MAX_REQUESTS: usize = 65_536;

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
    /// A request that keeps every rule: Q ≥ 1; K ≥ Q; D > 0 only with Q = 1 + D and a prefix; `chunked` only on a
    /// prefill with a prefix.
    pub fn new(
        query_len: u32,
        kv_len: u32,
        num_draft_tokens: u32,
        chunked: bool,
    ) -> Result<Self, RequestError> {
        if query_len == 0 {
            return Err(RequestError::NoQuery);
        }
        if kv_len < query_len {
            return Err(RequestError::KvBelowQuery { query_len, kv_len });
        }
        let request = Self { query_len, kv_len, num_draft_tokens, chunked };
        if num_draft_tokens > 0 && query_len - 1 != num_draft_tokens {
            return Err(RequestError::DraftsAndQuery { query_len, num_draft_tokens });
        }
        if num_draft_tokens > 0 && request.prefix_len() == 0 {
            return Err(RequestError::DraftsWithoutPrefix { query_len, num_draft_tokens });
        }
        if chunked && request.prefix_len() == 0 {
            return Err(RequestError::ChunkWithoutPrefix { query_len });
        }
        if chunked && request.is_decode() {
            return Err(RequestError::ChunkedDecode { query_len });
        }
        Ok(request)
    }

    /// Tokens in the KV cache before the step.
    #[must_use]
    pub fn prefix_len(&self) -> u32 {
        self.kv_len - self.query_len
    }

    /// Decode or verify: a prefix, and a query of one token plus the drafts.
    #[must_use]
    pub fn is_decode(&self) -> bool {
        self.prefix_len() > 0 && self.query_len - 1 == self.num_draft_tokens
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
    /// At least one, at most [`MAX_REQUESTS`].
    pub requests: Vec<Request>,
}

impl Case {
    /// A case with a name and from 1 to [`MAX_REQUESTS`] requests.
    pub fn new(name: impl Into<String>, requests: Vec<Request>) -> Result<Self, CaseError> {
        let name = name.into();
        if name.is_empty() {
            return Err(CaseError::EmptyName);
        }
        if requests.is_empty() {
            return Err(CaseError::NoRequests);
        }
        if requests.len() > MAX_REQUESTS {
            return Err(CaseError::TooManyRequests { item: name, found: requests.len().to_string() });
        }
        Ok(Self { name, requests })
    }

    /// Query tokens in all, as asked for; a model with bounded replay schedules more.
    #[must_use]
    pub fn num_tokens(&self) -> Tokens {
        self.requests.iter().map(|request| Tokens(u64::from(request.query_len))).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_of_a_request_has_its_own_error() {
        use RequestError as E;
        assert_eq!(Request::new(0, 0, 0, false), Err(E::NoQuery));
        assert_eq!(Request::new(4, 3, 0, false), Err(E::KvBelowQuery { query_len: 4, kv_len: 3 }));
        assert_eq!(
            Request::new(4, 8, 2, false),
            Err(E::DraftsAndQuery { query_len: 4, num_draft_tokens: 2 })
        );
        assert_eq!(
            Request::new(2, 2, 1, false),
            Err(E::DraftsWithoutPrefix { query_len: 2, num_draft_tokens: 1 })
        );
        assert_eq!(Request::new(8, 8, 0, true), Err(E::ChunkWithoutPrefix { query_len: 8 }));
        assert_eq!(Request::new(1, 8, 0, true), Err(E::ChunkedDecode { query_len: 1 }));
        assert_eq!(Request::new(2, 8, 1, true), Err(E::ChunkedDecode { query_len: 2 }));
        assert_eq!(
            Request::new(1, 1, u32::MAX, false),
            Err(E::DraftsAndQuery { query_len: 1, num_draft_tokens: u32::MAX })
        );
    }

    #[test]
    fn a_case_has_a_name_and_a_bounded_number_of_requests() {
        let request = Request::new(1, 8, 0, false).expect("a decode");
        assert_eq!(Case::new("", vec![request]), Err(CaseError::EmptyName));
        assert_eq!(Case::new("a", vec![]), Err(CaseError::NoRequests));
        assert!(Case::new("a", vec![request; MAX_REQUESTS]).is_ok());
        assert!(Case::new("a", vec![request; MAX_REQUESTS + 1]).is_err());
    }

    #[test]
    fn tokens_are_counted_beyond_32_bits() {
        let request = Request::new(u32::MAX, u32::MAX, 0, false).expect("a prefill");
        let case = Case::new("big", vec![request; 3]).expect("three requests");
        assert_eq!(case.num_tokens(), Tokens(3 * u64::from(u32::MAX)));
    }
}
