//! The plan of a batch: what each request schedules and which blocks it gets, in memory that does not grow with lengths.

use super::KvGroup;
use crate::case::{Case, Request};
use crate::units::Tokens;

/// The blocks of one request in one KV group: `nulls` times the null block, then `len` consecutive ids from `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRun {
    /// Leading null blocks, which lie wholly before the window.
    pub nulls: u64,
    /// The first id of the request's own blocks.
    pub first: u64,
    /// How many blocks of its own the request has.
    pub len: u64,
}

impl BlockRun {
    /// Entries of the block table, null blocks included.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.nulls + self.len
    }

    /// The block table's entries in order; 0 is the null block.
    pub fn block_ids(&self) -> impl Iterator<Item = u64> + use<> {
        let Self { nulls, first, len } = *self;
        (0..nulls).map(|_| 0).chain(first..first + len)
    }
}

/// What one request of a case does in the step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The request as asked for.
    pub request: Request,
    /// Tokens in the KV cache that the step need not compute.
    pub computed: u32,
    /// Query tokens of the step: those asked for, and those that bounded replay computes again.
    pub scheduled: u32,
    /// Decode or verify.
    pub is_decode: bool,
    /// One entry a KV group.
    pub blocks: Vec<BlockRun>,
}

impl Schedule {
    /// `request` on a model with `groups`; its blocks are handed out from `next`, which moves past them.
    fn new(request: &Request, groups: &[KvGroup], lookahead: u32, next: &mut u64) -> Self {
        let replay = if request.is_prefix_hit() {
            let longest = groups.iter().filter_map(|group| group.replay).max().unwrap_or(0);
            longest.min(request.prefix_len())
        } else {
            0
        };
        let computed = request.prefix_len() - replay;
        let run = |group: &KvGroup| {
            let nulls = group.null_blocks(computed);
            let len = group.table_len(request.kv_len, lookahead) - nulls;
            let first = *next;
            *next += len;
            BlockRun { nulls, first, len }
        };
        Self {
            request: *request,
            computed,
            scheduled: request.query_len + replay,
            is_decode: request.is_decode(),
            blocks: groups.iter().map(run).collect(),
        }
    }

    /// Tokens of the prompt: all that a prefill has after the step, all that a decode had before it.
    #[must_use]
    pub fn num_prompt_tokens(&self) -> u32 {
        if self.is_decode { self.computed } else { self.request.kv_len }
    }

    /// The request's place in the batch: verify, decode, then prefills by query length. Ties keep the case's order.
    pub(super) fn rank(&self) -> (u8, u32) {
        match (self.is_decode, self.request.num_draft_tokens) {
            (true, 0) => (1, 0),
            (true, _) => (0, 0),
            (false, _) => (2, self.scheduled),
        }
    }
}

/// What a case does in one step on a model's KV groups; in the case's order.
///
/// Blocks are counted in 64 bits and never listed, so a plan of any case is small and quick, whatever the pool holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchPlan {
    /// The case's name, for messages.
    pub case: String,
    /// The KV groups, which share one pool of blocks.
    pub groups: Vec<KvGroup>,
    /// Tokens beyond K that each request has blocks for; 0 unless a drafter is timed.
    pub lookahead: u32,
    /// One entry a request of the case.
    pub schedules: Vec<Schedule>,
}

impl BatchPlan {
    /// The plan of `case` on `groups`. Block sizes must be at least 1; a block size of 0 panics.
    #[must_use]
    pub fn new(case: &Case, groups: &[KvGroup], lookahead: u32) -> Self {
        let mut next = 1;
        let schedules = case
            .requests
            .iter()
            .map(|request| Schedule::new(request, groups, lookahead, &mut next))
            .collect();
        Self { case: case.name.clone(), groups: groups.to_vec(), lookahead, schedules }
    }

    /// Query tokens of the step, replayed ones included.
    #[must_use]
    pub fn num_tokens(&self) -> Tokens {
        self.schedules.iter().map(|schedule| Tokens(u64::from(schedule.scheduled))).sum()
    }

    /// Blocks of the pool that are used, the null block included.
    #[must_use]
    pub fn blocks_used(&self) -> u64 {
        1 + self.blocks_per_group().iter().sum::<u64>()
    }

    /// `[groups]` blocks of each KV group, the null block not included.
    #[must_use]
    pub fn blocks_per_group(&self) -> Vec<u64> {
        let total = |group: usize| self.schedules.iter().map(|schedule| schedule.blocks[group].len).sum();
        (0..self.groups.len()).map(total).collect()
    }

    /// Indices of the requests in batch order: verify, decode, prefills by ascending query length; stable.
    #[must_use]
    pub fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.schedules.len()).collect();
        order.sort_by_key(|&index| self.schedules[index].rank());
        order
    }
}
