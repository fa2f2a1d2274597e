//! The exact batch of a case: paged KV blocks, batch order, positions and slots, and the check of what was built.

mod build;
mod check;
mod error;
mod plan;

pub use build::Limits;
pub use error::BatchError;
pub use plan::{BatchPlan, BlockRun, Schedule};

/// A set of layers that share one kind of block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGroup {
    /// Tokens a block; at least 1.
    pub block_size: u32,
    /// Sliding window: blocks wholly before it are the null block.
    pub window: Option<u32>,
    /// Bounded replay: a prefix hit recomputes this many tokens of the prefix.
    pub replay: Option<u32>,
}

impl KvGroup {
    /// Entries of a request's block table: blocks for `kv_len + lookahead` tokens.
    fn table_len(&self, kv_len: u32, lookahead: u32) -> u64 {
        (u64::from(kv_len) + u64::from(lookahead)).div_ceil(u64::from(self.block_size))
    }

    /// Leading entries that lie wholly before the window of the first query token, at position `computed`.
    fn null_blocks(&self, computed: u32) -> u64 {
        let before = |window: u32| (u64::from(computed) + 1).saturating_sub(u64::from(window.max(1)));
        self.window.map_or(0, before) / u64::from(self.block_size)
    }
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

    /// `[groups]` the blocks whose contents the step may write, ascending: of each request the last
    /// ⌈(scheduled + `lookahead`) / block size⌉ + 2 of its own.
    #[must_use]
    pub fn snapshot_blocks(&self, lookahead: u32) -> Vec<Vec<u32>> {
        let written = |tables: &GroupTables| {
            let mut blocks = Vec::new();
            for (row, kv_len) in self.kv_lens.iter().enumerate() {
                let scheduled = self.query_start[row + 1] - self.query_start[row];
                let entries = (tables.group.table_len(*kv_len, lookahead) as usize).min(tables.stride);
                let last = tables.group.table_len(scheduled, lookahead) as usize + 2;
                let table = &tables.block_tables[row * tables.stride..][..entries];
                blocks.extend(table[entries.saturating_sub(last)..].iter().filter(|block| **block != 0));
            }
            blocks.sort_unstable();
            blocks
        };
        self.groups.iter().map(written).collect()
    }

    /// Renames the blocks by a random permutation of all but the null block, so that no request's blocks are neighbours.
    pub fn shuffle_blocks(&mut self, seed: u64) {
        let mut names: Vec<u32> = (0..self.blocks_used).collect();
        for i in (2..names.len()).rev() {
            // Fisher-Yates over 1..=i; the bias of the remainder does not matter here.
            names.swap(i, 1 + (random(seed, i as u64) % i as u64) as usize);
        }
        for tables in &mut self.groups {
            let block_size = i64::from(tables.group.block_size);
            for block in &mut tables.block_tables {
                *block = names[*block as usize];
            }
            for slot in &mut tables.slots {
                *slot = i64::from(names[(*slot / block_size) as usize]) * block_size + *slot % block_size;
            }
        }
    }
}

/// The seed of the token ids of one data-parallel rank: each has a stream of its own, and the first the one that a single rank has.
#[must_use]
pub fn token_seed(seed: u64, data_rank: usize) -> u64 {
    if data_rank == 0 { seed } else { random(seed, u64::MAX - data_rank as u64) }
}

/// The `index`-th number of a stream: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
/// 2014) at any index.
fn random(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;

    const GROUP: KvGroup = KvGroup { block_size: 16, window: None, replay: None };

    fn batch(text: &str, lookahead: u32) -> Batch {
        let limits = Limits {
            num_kv_blocks: 100,
            max_num_batched_tokens: 100,
            max_num_seqs: 10,
            max_model_len: 200,
            num_speculative_tokens: 3,
        };
        let case: Case = text.parse().expect(text);
        Batch::build(&BatchPlan::new(&case, &[GROUP], lookahead), &limits, 0, 100).expect("there is room")
    }

    #[test]
    fn each_data_parallel_rank_has_tokens_of_its_own() {
        let seeds: std::collections::HashSet<u64> = (0..64).map(|rank| token_seed(9, rank)).collect();
        assert!(seeds.len() == 64 && token_seed(9, 0) == 9);
        assert_ne!(token_seed(9, 1), token_seed(10, 1));
    }

    #[test]
    fn the_snapshot_has_the_last_blocks_of_each_request() {
        // 7 blocks each; one token to schedule: 1 + 2 blocks.
        assert_eq!(batch("a=2*1@100", 0).snapshot_blocks(0), [[5, 6, 7, 12, 13, 14]]);
        // 8 blocks; 20 + 16 tokens: 3 + 2 blocks.
        assert_eq!(batch("a=20@100", 16).snapshot_blocks(16), [[4, 5, 6, 7, 8]]);
        assert_eq!(batch("a=20", 0).snapshot_blocks(0), [[1, 2]], "no more than there are");
    }

    #[test]
    fn shuffling_renames_blocks_and_slots_alike_and_leaves_the_null_block() {
        let plain = batch("a=3*1@160", 0);
        let mut shuffled = plain.clone();
        shuffled.shuffle_blocks(1);
        assert_ne!(plain.groups[0].block_tables, shuffled.groups[0].block_tables);
        let mut sorted = shuffled.groups[0].block_tables.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, plain.groups[0].block_tables);
        for row in 0..3 {
            let last = shuffled.groups[0].block_tables[row * 10 + 9];
            assert_eq!(shuffled.groups[0].slots[row], i64::from(last) * 16 + 15);
        }
    }
}
