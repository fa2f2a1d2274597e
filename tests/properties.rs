//! What holds for every case: it reads back as written, jitter keeps its bounds, and its batch is what was asked for.

use std::collections::HashSet;

use forward_bench::batch::{Batch, BatchPlan, KvGroup, Limits};
use forward_bench::case::{Case, Request};
use proptest::prelude::*;

/// Any valid request whose query and prefix are up to `longest` tokens.
fn request(longest: u32) -> impl Strategy<Value = Request> {
    (1..=longest, 0..=longest, 0..3).prop_map(|(query, prefix, kind)| {
        let drafts = if kind == 1 && prefix > 0 { query - 1 } else { 0 };
        let chunked = kind == 2 && prefix > 0 && query > 1;
        Request::new(query, query + prefix, drafts, chunked).expect("a valid request")
    })
}

/// Cases with runs of equal requests, named by any text that has no `=`.
fn case(longest: u32) -> impl Strategy<Value = Case> {
    let runs = prop::collection::vec((request(longest), 1_usize..4), 1..8);
    ("[^=]{1,12}", runs).prop_map(|(name, runs)| {
        let requests = runs.iter().flat_map(|(request, count)| vec![*request; *count]).collect();
        Case::new(name, requests).expect("a valid case")
    })
}

/// One to three KV groups: full attention, windows, windows with bounded replay.
fn groups() -> impl Strategy<Value = Vec<KvGroup>> {
    let group =
        (1_u32..40, prop::option::of(1_u32..100), any::<bool>()).prop_map(|(block_size, window, replays)| {
            KvGroup { block_size, window, replay: window.filter(|_| replays) }
        });
    prop::collection::vec(group, 1..4)
}

const ROOM: Limits = Limits {
    num_kv_blocks: u32::MAX,
    max_num_batched_tokens: u32::MAX,
    max_num_seqs: u32::MAX,
    max_model_len: u32::MAX,
    num_speculative_tokens: u32::MAX,
};

/// Changes one thing of a batch; `at` picks where. Every change makes it another batch than was asked for.
fn mutate(batch: &mut Batch, kind: usize, at: usize) {
    let token = at % batch.positions.len();
    let row = at % batch.kv_lens.len();
    let group = at % batch.groups.len();
    match kind {
        0 => batch.positions[token] += 1,
        1 => batch.kv_lens[row] += 1,
        2 => batch.groups[group].slots[token] += 1,
        3 => batch.query_start[row + 1] += 1,
        4 => batch.num_decodes += 1,
        5 => batch.order.push(0),
        6 => batch.groups[group].group.block_size += 1,
        7 => batch.blocks_used += 1,
        8 => {
            batch.token_ids.pop();
        }
        _ => {
            let entry = at % batch.groups[group].block_tables.len();
            let block = &mut batch.groups[group].block_tables[entry];
            *block = if *block == 1 { 2 } else { 1 };
        }
    }
}

proptest! {
    #[test]
    fn a_case_reads_back_as_it_was_written(case in case(u32::MAX / 2)) {
        prop_assert_eq!(case.to_string().parse::<Case>(), Ok(case));
    }

    #[test]
    fn no_text_makes_the_parser_panic_and_every_error_is_one_line(text in "\\PC*|[0-9*@c:,= ]{0,40}") {
        match text.parse::<Case>() {
            Ok(case) => prop_assert!(!case.requests.is_empty() && !case.name.is_empty()),
            Err(error) => prop_assert_eq!(error.to_string().lines().count(), 1),
        }
    }

    #[test]
    fn jitter_keeps_its_bounds(case in case(5000), jitter in 0.0..0.999_f64, seed: u64, room in 0_u32..5000) {
        let longest = case.requests.iter().map(|request| request.kv_len).max().expect("a request");
        let drawn = case.with_jitter(jitter, seed, longest + room).expect("nothing is too long");
        prop_assert_eq!(&drawn, &case.with_jitter(jitter, seed, longest + room).expect("as before"));
        prop_assert_eq!(&drawn.name, &case.name);
        for (before, after) in case.requests.iter().zip(&drawn.requests) {
            let (old, new) = (f64::from(before.prefix_len()), f64::from(after.prefix_len()));
            prop_assert!(after.kv_len <= longest + room);
            prop_assert!(new <= (old * (1.0 + jitter)).round_ties_even().max(1.0));
            let capped = after.kv_len == longest + room;
            prop_assert!(capped || new >= (old * (1.0 - jitter)).round_ties_even());
            prop_assert_eq!(old == 0.0, new == 0.0, "an empty prefix stays empty, another stays one");
            prop_assert_eq!(Request { kv_len: before.kv_len, ..*after }, *before);
            prop_assert!(old > 0.0 || after == before);
        }
    }

    #[test]
    fn a_batch_is_what_was_asked_for_and_shares_nothing(
        case in case(120), groups in groups(), lookahead in 0_u32..20, seed: u64
    ) {
        let plan = BatchPlan::new(&case, &groups, lookahead);
        let mut batch = Batch::build(&plan, &ROOM, seed, 100).expect("there is room");
        prop_assert_eq!(batch.check(&case, &groups, lookahead), Ok(()));
        let plain = batch.clone();
        batch.shuffle_blocks(seed);
        prop_assert_eq!(batch.check(&case, &groups, lookahead), Ok(()), "shuffled");
        prop_assert_eq!(&plain.positions, &batch.positions);

        prop_assert_eq!(u64::from(batch.blocks_used), plan.blocks_used());
        let mut blocks = HashSet::new();
        for tables in &batch.groups {
            for block in tables.block_tables.iter().filter(|block| **block != 0) {
                prop_assert!(*block < batch.blocks_used && blocks.insert(*block), "block {} twice", block);
            }
            let slots: HashSet<i64> = tables.slots.iter().copied().collect();
            prop_assert_eq!(slots.len(), batch.num_tokens());
        }
        prop_assert_eq!(blocks.len() as u32 + 1, batch.blocks_used);
    }

    #[test]
    fn what_a_step_writes_is_in_the_snapshot(case in case(120), groups in groups(), lookahead in 0_u32..20, seed: u64) {
        let mut batch = Batch::build(&BatchPlan::new(&case, &groups, lookahead), &ROOM, seed, 100).expect("there is room");
        batch.shuffle_blocks(seed);
        for (tables, blocks) in batch.groups.iter().zip(batch.snapshot_blocks(lookahead)) {
            prop_assert!(blocks.is_sorted_by(|a, b| a < b) && !blocks.contains(&0));
            for slot in &tables.slots {
                let block = (*slot / i64::from(tables.group.block_size)) as u32;
                prop_assert!(blocks.binary_search(&block).is_ok(), "block {} is written", block);
            }
        }
    }

    #[test]
    fn another_batch_than_was_asked_for_fails_the_check(
        case in case(120), groups in groups(), lookahead in 0_u32..20, kind in 0_usize..10, at: usize
    ) {
        let mut batch = Batch::build(&BatchPlan::new(&case, &groups, lookahead), &ROOM, 0, 100).expect("there is room");
        mutate(&mut batch, kind, at);
        prop_assert!(batch.check(&case, &groups, lookahead).is_err(), "change {}", kind);
    }
}
