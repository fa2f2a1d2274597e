//! The exact batch of a case: paged KV blocks, batch order, positions and slots, and the check of what was built.

/// A set of layers that share one kind of block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGroup {
    /// Tokens a block.
    pub block_size: u32,
    /// Sliding window: blocks wholly before it are the null block.
    pub window: Option<u32>,
    /// Bounded replay: a prefix hit recomputes this many tokens of the prefix.
    pub replay: Option<u32>,
}

/// One KV group's metadata of a [`Batch`]; rows are in batch order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupTables {
    /// The group.
    pub group: KvGroup,
    /// `[requests, stride]` block ids, row-major; 0 is the null block and the padding.
    pub block_tables: Vec<u32>,
    /// Columns of `block_tables`.
    pub stride: usize,
    /// `[tokens]` slot of each query token: block id × block size + offset.
    pub slots: Vec<i64>,
}

/// A step's batch as a device sees it: requests in batch order (verify, decode, prefills by ascending query length; stable).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// `[requests]` index in the case of each row.
    pub order: Vec<usize>,
    /// `[requests + 1]` first query token of each row; the last entry is the number of tokens.
    pub query_start: Vec<u32>,
    /// `[requests]` tokens in the KV cache after the step.
    pub kv_lens: Vec<u32>,
    /// The first rows that are decode or verify requests.
    pub num_decodes: usize,
    /// `[tokens]` position of each query token.
    pub positions: Vec<u32>,
    /// `[tokens]` token ids.
    pub token_ids: Vec<u32>,
    /// One entry a KV group.
    pub groups: Vec<GroupTables>,
    /// Blocks of the pool that are used, the null block included.
    pub blocks_used: u32,
}

impl Batch {
    /// Query tokens in all.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    /// Requests.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.kv_lens.len()
    }
}
