//! From a plan to the batch that a device sees, within the limits of a step.

use super::{Batch, BatchError, BatchPlan, GroupTables, KvGroup, random};

/// What a step has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Blocks of the pool, the null block included.
    pub num_kv_blocks: u32,
    /// Query tokens a step.
    pub max_num_batched_tokens: u32,
    /// Requests a step.
    pub max_num_seqs: u32,
    /// Tokens in a request's KV cache after the step.
    pub max_model_len: u32,
    /// Draft tokens a request.
    pub num_speculative_tokens: u32,
}

/// The most entries of one group's block tables: 1 GiB of them.
const MAX_TABLE_ENTRIES: u64 = 1 << 28;

impl Batch {
    /// The batch of `plan`, with token ids below `vocab_size` that depend on `seed`, the request's index and the position
    /// alone.
    ///
    /// # Errors
    /// What the step has no room for, before anything is allocated: draft tokens, length, requests, tokens, blocks.
    pub fn build(plan: &BatchPlan, limits: &Limits, seed: u64, vocab_size: u32) -> Result<Self, BatchError> {
        plan.fits(limits)?;
        let order = plan.order();
        let rows = || order.iter().map(|&index| (index, &plan.schedules[index]));
        let mut batch = Self {
            query_start: vec![0],
            kv_lens: rows().map(|(_, row)| row.request.kv_len).collect(),
            num_decodes: rows().filter(|(_, row)| row.is_decode).count(),
            positions: Vec::new(),
            token_ids: Vec::new(),
            groups: Vec::new(),
            blocks_used: plan.blocks_used() as u32, // within the pool, as checked
            order: Vec::new(),
        };
        for (index, row) in rows() {
            let token = |position: u32| {
                (random(seed, (index as u64) << 32 | u64::from(position)) % u64::from(vocab_size.max(1)))
                    as u32
            };
            let positions = row.computed..row.computed + row.scheduled;
            batch.token_ids.extend(positions.clone().map(token));
            batch.positions.extend(positions);
            batch.query_start.push(batch.positions.len() as u32);
        }
        batch.groups = plan
            .groups
            .iter()
            .enumerate()
            .map(|(index, group)| tables(plan, &order, index, *group))
            .collect();
        batch.order = order;
        Ok(batch)
    }
}

/// The block tables and slots of group `index`, whose rows are in `order`.
fn tables(plan: &BatchPlan, order: &[usize], index: usize, group: KvGroup) -> GroupTables {
    let entries = |row: &usize| plan.schedules[*row].blocks[index].entries();
    let stride = order.iter().map(entries).max().unwrap_or(0) as usize;
    let mut block_tables = vec![0; order.len() * stride];
    let mut slots = Vec::with_capacity(plan.num_tokens().0 as usize);
    for (row, schedule) in order.iter().map(|&row| &plan.schedules[row]).enumerate() {
        let table = &mut block_tables[row * stride..][..stride];
        for (entry, block) in table.iter_mut().zip(schedule.blocks[index].block_ids()) {
            *entry = block as u32;
        }
        slots.extend((schedule.computed..schedule.computed + schedule.scheduled).map(|position| {
            let block = table[(position / group.block_size) as usize];
            i64::from(block) * i64::from(group.block_size) + i64::from(position % group.block_size)
        }));
    }
    GroupTables { group, block_tables, stride, slots }
}

impl BatchPlan {
    /// Whether a step has room for the plan.
    ///
    /// # Errors
    /// The first limit that is too small, with how much is needed, how much exists and the flag to raise.
    pub fn fits(&self, limits: &Limits) -> Result<(), BatchError> {
        let case = || self.case.clone();
        for (index, request) in self.schedules.iter().map(|schedule| schedule.request).enumerate() {
            let (needed, limit) = (request.num_draft_tokens, limits.num_speculative_tokens);
            if needed > limit {
                return Err(BatchError::Drafts { case: case(), index, needed, limit });
            }
            let (needed, limit) = (request.kv_len, limits.max_model_len);
            if needed > limit {
                return Err(BatchError::ModelLen { case: case(), index, needed, limit });
            }
        }
        let (needed, limit) = (self.schedules.len(), limits.max_num_seqs);
        if needed as u64 > u64::from(limit) {
            return Err(BatchError::Requests { case: case(), needed, limit });
        }
        let (needed, limit) = (self.num_tokens().0, limits.max_num_batched_tokens);
        if needed > u64::from(limit) {
            return Err(BatchError::Tokens { case: case(), needed, limit });
        }
        let (needed, limit) = (self.blocks_used(), limits.num_kv_blocks);
        if needed > u64::from(limit) {
            return Err(BatchError::Blocks { case: case(), needed, limit });
        }
        let entries = |group: usize| self.schedules.iter().map(move |row| row.blocks[group].entries()).max();
        let widest = (0..self.groups.len()).filter_map(entries).max().unwrap_or(0);
        let needed = widest.saturating_mul(self.schedules.len() as u64);
        if needed > MAX_TABLE_ENTRIES {
            return Err(BatchError::Tables { case: case(), needed, limit: MAX_TABLE_ENTRIES });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;

    const ROOM: Limits = Limits {
        num_kv_blocks: u32::MAX,
        max_num_batched_tokens: u32::MAX,
        max_num_seqs: u32::MAX,
        max_model_len: u32::MAX,
        num_speculative_tokens: u32::MAX,
    };
    const FULL: KvGroup = KvGroup { block_size: 16, window: None, replay: None };

    fn build(text: &str, groups: &[KvGroup], limits: &Limits) -> Result<Batch, BatchError> {
        let case: Case = text.parse().expect(text);
        Batch::build(&BatchPlan::new(&case, groups, 0), limits, 0, 1000)
    }

    #[test]
    fn rows_are_verify_then_decode_then_prefills_by_query_length_and_ties_keep_their_order() {
        let batch = build("a=40,1@9,8,2@9:1,4@9:3,8@9,1@5", &[FULL], &ROOM).expect("there is room");
        assert_eq!(batch.order, [3, 4, 1, 6, 2, 5, 0]);
        assert_eq!(batch.num_decodes, 4);
        assert_eq!(batch.query_start, [0, 2, 6, 7, 8, 16, 24, 64]);
        assert_eq!(batch.kv_lens, [9, 9, 9, 5, 8, 9, 40]);
        assert_eq!(batch.positions[..8], [7, 8, 5, 6, 7, 8, 8, 4]);
    }

    #[test]
    fn a_slot_is_the_blocks_id_times_its_size_plus_the_offset() {
        let batch = build("a=3*2@18", &[FULL], &ROOM).expect("there is room");
        assert_eq!(batch.groups[0].block_tables, [1, 2, 3, 4, 5, 6]);
        assert_eq!(batch.groups[0].slots, [32, 33, 64, 65, 96, 97]);
    }

    #[test]
    fn token_ids_do_not_depend_on_the_other_requests_and_stay_in_the_vocabulary() {
        let alone = build("a=40", &[FULL], &ROOM).expect("there is room");
        let mixed = build("a=40,1@9", &[FULL], &ROOM).expect("there is room");
        assert_eq!(alone.token_ids, mixed.token_ids[1..]);
        assert!(mixed.token_ids.iter().all(|token| *token < 1000));
        let distinct: std::collections::HashSet<_> = alone.token_ids.iter().collect();
        assert!(distinct.len() > 30, "{distinct:?}");
    }

    #[test]
    fn an_error_says_what_is_needed_what_exists_and_which_flag_to_raise() {
        let message = |text: &str, limits: Limits| build(text, &[FULL], &limits).expect_err(text).to_string();
        assert_eq!(
            message("a=5*1@64", Limits { max_num_batched_tokens: 4, ..ROOM }),
            "case \"a\": 5 query tokens in one step, and at most 4 are allowed: raise --max-num-batched-tokens to 5"
        );
        let seqs = message("a=5*1@64", Limits { max_num_seqs: 4, ..ROOM });
        assert!(seqs.contains("5 requests") && seqs.contains("--max-num-seqs to 5"), "{seqs}");
        let long = message("a=8,1@64", Limits { max_model_len: 63, ..ROOM });
        assert!(long.contains("request 1: 64 tokens") && long.contains("--max-model-len to 64"), "{long}");
        let drafts = message("a=4@64:3", Limits { num_speculative_tokens: 2, ..ROOM });
        assert!(drafts.contains("3 draft tokens") && drafts.contains("--num-speculative-tokens"), "{drafts}");
        let pool = message("a=5*1@64", Limits { num_kv_blocks: 20, ..ROOM });
        assert!(pool.contains("21 KV blocks") && pool.contains("--kv-cache-memory-bytes"), "{pool}");
    }

    #[test]
    fn the_largest_cases_are_planned_in_little_memory_and_refused() {
        let case: Case = "a=65536*1@4294967295".parse().expect("a case");
        let window = KvGroup { block_size: 1, window: Some(32), replay: None };
        let plan = BatchPlan::new(&case, &[window, KvGroup { block_size: 1, ..FULL }], u32::MAX);
        assert_eq!(plan.blocks_per_group()[1], 65_536 * 2 * u64::from(u32::MAX));
        assert!(matches!(Batch::build(&plan, &ROOM, 0, 8), Err(BatchError::Blocks { .. })));
        let plan = BatchPlan::new(&case, &[window], 0);
        assert!(matches!(Batch::build(&plan, &ROOM, 0, 8), Err(BatchError::Tables { .. })));
    }
}
