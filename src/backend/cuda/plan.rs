//! Work lists of the attention kernels: which block works on which queries and positions. Fixed per batch.
//!
//! Decode: every (request, KV head, tile of rows) is a run of units of [`UNIT`] positions. All runs, one after the other,
//! are cut into equal shares, one a block: a share may cover the end of one run, whole runs, and the start of another. A run
//! that lies in one share is written out directly; the pieces of the others are combined in order of position.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::batch::Batch;

/// What a tile of the persistent prefill kernel costs beside its positions, in positions.
const TILE_SETUP: usize = 96;

/// Positions that are not split between blocks.
const UNIT: usize = 64;

/// What the kernels need to know of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Heads {
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads a KV head.
    pub group: usize,
    /// Sliding window.
    pub window: Option<u32>,
}

/// Rows `tile * rows ..` of a request's queries × heads of a group: one tile.
#[derive(Debug, Clone, Copy)]
struct Tile {
    request: usize,
    tile: usize,
    /// First position that is attended to.
    begin: usize,
    /// Behind the last one.
    end: usize,
}

/// The decode kernel's work.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct DecodePlan {
    /// `{request, kv_head, tile, slot, kv_begin, kv_end, 0, 0}`; a negative slot writes the result itself.
    pub items: Vec<[i32; 8]>,
    /// `[blocks + 1]`: the items of each block.
    pub block_items: Vec<i32>,
    /// `{request, kv_head, tile, 0, first slot, slots, 0, 0}`.
    pub combines: Vec<[i32; 8]>,
    /// Parts that are kept for combining.
    pub slots: usize,
}

/// The requests of `batch` in `requests`, cut into tiles of `rows` rows.
fn tiles<'a>(
    batch: &'a Batch,
    requests: &'a [usize],
    heads: Heads,
    rows: usize,
) -> impl Iterator<Item = Tile> + 'a {
    requests.iter().flat_map(move |&request| {
        let query_len = (batch.query_start[request + 1] - batch.query_start[request]) as usize;
        let prefix = batch.kv_lens[request] as usize - query_len;
        (0..(query_len * heads.group).div_ceil(rows)).map(move |tile| {
            let first = prefix + tile * rows / heads.group;
            let last = prefix + ((tile * rows + rows - 1) / heads.group).min(query_len - 1);
            let begin = heads.window.map_or(0, |window| (first + 1).saturating_sub(window as usize));
            Tile { request, tile, begin, end: last + 1 }
        })
    })
}

/// Splits the attention of `requests` over `blocks` blocks.
pub(super) fn decode(
    batch: &Batch,
    requests: &[usize],
    heads: Heads,
    rows: usize,
    blocks: usize,
) -> DecodePlan {
    let aligned = |tile: Tile| Tile { begin: tile.begin / 16 * 16, ..tile };
    let tiles: Vec<Tile> = tiles(batch, requests, heads, rows).map(aligned).collect();
    // A request's heads follow each other, all tiles of one head together.
    let mut runs = Vec::new();
    for of_request in tiles.chunk_by(|a, b| a.request == b.request) {
        for head in 0..heads.kv_heads {
            runs.extend(of_request.iter().map(|tile| (head, *tile)));
        }
    }
    let units = |tile: &Tile| (tile.end - tile.begin).div_ceil(UNIT);
    let total: usize = runs.iter().map(|(_, tile)| units(tile)).sum();
    let blocks = blocks.clamp(1, total.max(1));
    let cut = |block: usize| total * block / blocks;
    let mut plan = DecodePlan { block_items: vec![0], ..DecodePlan::default() };
    let (mut at, mut block) = (0, 0);
    for (head, tile) in runs {
        let (mut left, mut position, first_item) = (units(&tile), tile.begin, plan.items.len());
        let name = [tile.request as i32, head as i32, tile.tile as i32];
        while left > 0 {
            let take = left.min(cut(block + 1) - at);
            let stop = tile.end.min(position + take * UNIT);
            plan.items.push([name[0], name[1], name[2], -1, position as i32, stop as i32, 0, 0]);
            (position, left, at) = (stop, left - take, at + take);
            while block < blocks && at == cut(block + 1) {
                plan.block_items.push(plan.items.len() as i32);
                block += 1;
            }
        }
        let pieces = plan.items.len() - first_item;
        if pieces > 1 {
            plan.combines.push([name[0], name[1], name[2], 0, plan.slots as i32, pieces as i32, 0, 0]);
            for item in &mut plan.items[first_item..] {
                item[3] = plan.slots as i32;
                plan.slots += 1;
            }
        }
    }
    plan
}

/// The persistent prefill kernel's work: items, and `[blocks + 1]` where each block's begin. Each next item, longest first, goes to
/// the block with the least work so far.
pub(super) fn prefill_shares(
    batch: &Batch,
    requests: &[usize],
    heads: Heads,
    rows: usize,
    blocks: usize,
) -> (Vec<[i32; 4]>, Vec<i32>) {
    let mut tiles: Vec<Tile> = tiles(batch, requests, heads, rows).collect();
    tiles.sort_by_key(|tile| Reverse(tile.end - tile.begin));
    let blocks = blocks.clamp(1, (tiles.len() * heads.kv_heads).max(1));
    let mut shares = vec![Vec::new(); blocks];
    let mut least: BinaryHeap<_> = (0..blocks).map(|block| Reverse((0, block))).collect();
    for (tile, head) in tiles.iter().flat_map(|tile| (0..heads.kv_heads).map(move |head| (tile, head))) {
        let Some(Reverse((cost, block))) = least.pop() else { break };
        shares[block].push([tile.request as i32, head as i32, tile.tile as i32, 0]);
        least.push(Reverse((cost + (tile.end - tile.begin).next_multiple_of(128) + TILE_SETUP, block)));
    }
    let mut starts = vec![0];
    starts.extend(shares.iter().scan(0, |sum, share| {
        *sum += share.len() as i32;
        Some(*sum)
    }));
    (shares.concat(), starts)
}

/// The prefill kernel's work: `{request, kv_head, tile, 0}`, those with the most positions first; heads of one tile stay together.
pub(super) fn prefill(batch: &Batch, requests: &[usize], heads: Heads, rows: usize) -> Vec<[i32; 4]> {
    let mut tiles: Vec<Tile> = tiles(batch, requests, heads, rows).collect();
    tiles.sort_by_key(|tile| Reverse(tile.end - tile.begin));
    let item = |tile: &Tile, head: usize| [tile.request as i32, head as i32, tile.tile as i32, 0];
    tiles.iter().flat_map(|tile| (0..heads.kv_heads).map(move |head| item(tile, head))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(requests: &[(u32, u32)]) -> Batch {
        let mut query_start = vec![0];
        for (q, _) in requests {
            query_start.push(query_start[query_start.len() - 1] + q);
        }
        Batch {
            order: (0..requests.len()).collect(),
            query_start,
            kv_lens: requests.iter().map(|(_, k)| *k).collect(),
            num_decodes: requests.len(),
            positions: Vec::new(),
            token_ids: Vec::new(),
            groups: Vec::new(),
            blocks_used: 0,
        }
    }

    #[test]
    fn every_position_of_every_tile_is_covered_once_and_in_order() {
        let cases: [&[(u32, u32)]; 4] =
            [&[(1, 1)], &[(1, 8192)], &[(4, 4096), (1, 17), (1, 1024)], &[(9, 9), (3, 700), (2, 65)]];
        for requests in cases {
            for window in [None, Some(7), Some(100)] {
                for (group, rows) in [(4, 16), (3, 16), (16, 32), (1, 16)] {
                    for blocks in [1, 5, 264, 100_000] {
                        check(requests, Heads { kv_heads: 3, group, window }, rows, blocks);
                    }
                }
            }
        }
    }

    fn check(requests: &[(u32, u32)], heads: Heads, rows: usize, blocks: usize) {
        let batch = batch(requests);
        let all: Vec<usize> = (0..requests.len()).collect();
        let plan = decode(&batch, &all, heads, rows, blocks);
        let text = || format!("{requests:?} {heads:?} {rows} {blocks}");
        assert_eq!(plan.block_items.first(), Some(&0));
        assert_eq!(plan.block_items.last(), Some(&(plan.items.len() as i32)), "{}", text());
        assert!(plan.block_items.windows(2).all(|pair| pair[0] < pair[1]), "{}", text());
        let mut expected = 0;
        for tile in tiles(&batch, &all, heads, rows) {
            for head in 0..heads.kv_heads {
                let name = [tile.request as i32, head as i32, tile.tile as i32];
                let mine: Vec<_> = plan.items.iter().filter(|item| item[..3] == name).collect();
                assert_eq!(mine[0][4], (tile.begin / 16 * 16) as i32, "{}", text());
                assert!(mine.windows(2).all(|pair| pair[0][5] == pair[1][4] && pair[0][5] % 16 == 0));
                assert_eq!(mine[mine.len() - 1][5], tile.end as i32);
                let combine = plan.combines.iter().find(|c| c[..3] == name);
                assert_eq!(combine.map_or(1, |c| c[5] as usize), mine.len());
                for (i, item) in mine.iter().enumerate() {
                    assert_eq!(item[3], combine.map_or(-1, |c| c[4] + i as i32));
                }
                expected += mine.len();
            }
        }
        assert_eq!(expected, plan.items.len(), "{}", text());
        assert_eq!(plan.slots, plan.combines.iter().map(|c| c[5] as usize).sum::<usize>());
    }

    #[test]
    fn shares_differ_by_one_unit_at_most() {
        let batch = batch(&[(1, 8192)]);
        let plan = decode(&batch, &[0], Heads { kv_heads: 8, group: 4, window: None }, 16, 264);
        let share = |pair: &[i32]| -> i32 {
            plan.items[pair[0] as usize..pair[1] as usize].iter().map(|i| (i[5] - i[4] + 63) / 64).sum()
        };
        let shares: Vec<i32> = plan.block_items.windows(2).map(share).collect();
        assert_eq!(shares.len(), 264);
        assert!(shares.iter().all(|s| (3..=4).contains(s)), "{shares:?}");
    }

    #[test]
    fn shares_of_a_prefill_are_even_and_whole() {
        let batch = batch(&[(8192, 8192), (100, 4000)]);
        let heads = Heads { kv_heads: 8, group: 4, window: None };
        let (items, starts) = prefill_shares(&batch, &[0, 1], heads, 128, 132);
        let mut sorted = items.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), (256 + 4) * 8);
        assert_eq!((starts.len(), starts[132]), (133, items.len() as i32));
        let cost = |item: &[i32; 4]| if item[0] == 0 { (item[2] as usize + 1) * 32 + 96 } else { 4096 };
        let costs: Vec<usize> =
            starts.windows(2).map(|s| items[s[0] as usize..s[1] as usize].iter().map(cost).sum()).collect();
        let (least, most) = (costs.iter().min().unwrap(), costs.iter().max().unwrap());
        assert!(*most as f64 <= 1.1 * *least as f64, "{least} {most}");
        assert_eq!(prefill_shares(&batch, &[1], heads, 128, 1000).1.len(), 4 * 8 + 1);
    }

    #[test]
    fn long_prefill_tiles_come_first() {
        let batch = batch(&[(40, 40), (3, 500)]);
        let items = prefill(&batch, &[0, 1], Heads { kv_heads: 2, group: 4, window: None }, 128);
        assert_eq!(items[..2], [[1, 0, 0, 0], [1, 1, 0, 0]]);
        assert_eq!(items.len(), 2 + 2 * 2);
    }
}
