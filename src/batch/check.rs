//! The check, before timing, that the batch really built is what was asked for, request by request.
//!
//! It derives everything from the requests anew and reads nothing of the plan that the batch was built from.

use super::{Batch, BatchError, GroupTables, KvGroup};
use crate::case::{Case, Request};

/// Returns an error unless `found` equals `wanted`.
macro_rules! same {
    ($error:expr, $what:literal, $found:expr, $wanted:expr) => {
        let (found, wanted) = (&$found, &$wanted);
        if found != wanted {
            return Err($error(format!("{} {found:?}", $what), format!("{wanted:?}")));
        }
    };
}

/// Query tokens of the step: `(computed, scheduled)`.
fn scheduled(request: &Request, groups: &[KvGroup]) -> (u32, u32) {
    let replays = groups.iter().map(|group| group.replay.unwrap_or(0)).max().unwrap_or(0);
    let replay = if request.is_prefix_hit() { replays.min(request.prefix_len()) } else { 0 };
    let computed = request.kv_len - request.query_len - replay;
    (computed, request.kv_len - computed)
}

impl Batch {
    /// Checks the batch against `case` on `groups`, each request with blocks for `lookahead` tokens beyond its K: batch
    /// order, query and KV lengths, positions, block tables (null blocks, padding, no block shared), slots.
    ///
    /// # Errors
    /// The first difference, with the request's index in the case.
    pub fn check(&self, case: &Case, groups: &[KvGroup], lookahead: u32) -> Result<(), BatchError> {
        self.check_shape(case, groups)?;
        self.check_order(case, groups)?;
        self.check_queries(case, groups)?;
        let mut owned = vec![false; self.blocks_used as usize];
        for tables in &self.groups {
            self.check_tables(tables, case, groups, lookahead, &mut owned)?;
            self.check_slots(tables, case)?;
        }
        let unowned = owned.iter().skip(1).filter(|owned| !**owned).count();
        same!(batch_error(case), "blocks in use without an owner:", unowned, 0);
        Ok(())
    }

    /// The lengths of all arrays.
    fn check_shape(&self, case: &Case, groups: &[KvGroup]) -> Result<(), BatchError> {
        let error = batch_error(case);
        let requests = case.requests.len();
        let tokens: u64 = case.requests.iter().map(|request| u64::from(scheduled(request, groups).1)).sum();
        same!(error, "rows in its order:", self.order.len(), requests);
        same!(error, "KV lengths:", self.kv_lens.len(), requests);
        same!(error, "query starts:", self.query_start.len(), requests + 1);
        same!(error, "positions:", self.positions.len() as u64, tokens);
        same!(error, "token ids:", self.token_ids.len() as u64, tokens);
        same!(error, "KV groups", self.groups.iter().map(|t| t.group).collect::<Vec<_>>(), groups);
        for tables in &self.groups {
            same!(error, "slots:", tables.slots.len() as u64, tokens);
            same!(error, "block table entries:", tables.block_tables.len(), requests * tables.stride);
        }
        Ok(())
    }

    /// Each request once: verify, decode, prefills by ascending query length, the case's order among equals.
    fn check_order(&self, case: &Case, groups: &[KvGroup]) -> Result<(), BatchError> {
        let error = batch_error(case);
        let mut sorted = self.order.clone();
        sorted.sort_unstable();
        same!(error, "each request once:", sorted.into_iter().eq(0..case.requests.len()), true);
        let place = |&index: &usize| {
            let request = &case.requests[index];
            let phase = match (request.is_decode(), request.num_draft_tokens > 0) {
                (true, true) => 0,
                (true, false) => 1,
                (false, _) => 2,
            };
            (phase, if phase == 2 { scheduled(request, groups).1 } else { 0 }, index)
        };
        same!(error, "rows in batch order:", self.order.is_sorted_by_key(place), true);
        let decodes = case.requests.iter().filter(|request| request.is_decode()).count();
        same!(error, "decode rows:", self.num_decodes, decodes);
        Ok(())
    }

    /// Query length, KV length and positions of each row.
    fn check_queries(&self, case: &Case, groups: &[KvGroup]) -> Result<(), BatchError> {
        let mut start = 0;
        for (row, &index) in self.order.iter().enumerate() {
            let error = request_error(case, index);
            let request = &case.requests[index];
            let (computed, length) = scheduled(request, groups);
            same!(error, "a first query token of", self.query_start[row], start);
            start += length;
            same!(error, "an end of its query tokens of", self.query_start[row + 1], start);
            same!(error, "a KV length of", self.kv_lens[row], request.kv_len);
            let positions = &self.positions[(start - length) as usize..start as usize];
            if !positions.iter().copied().eq(computed..request.kv_len) {
                let shown = (positions.first(), positions.last());
                let found = format!("positions {shown:?} that are not consecutive or not its own");
                return Err(error(found, format!("{computed}..{}", request.kv_len)));
            }
        }
        Ok(())
    }

    /// One group's tables: null blocks, blocks of its own that nobody else has, and padding.
    fn check_tables(
        &self,
        tables: &GroupTables,
        case: &Case,
        groups: &[KvGroup],
        lookahead: u32,
        owned: &mut [bool],
    ) -> Result<(), BatchError> {
        let block_size = tables.group.block_size;
        for (row, &index) in self.order.iter().enumerate() {
            let error = request_error(case, index);
            let request = &case.requests[index];
            let (computed, _) = scheduled(request, groups);
            let table = &tables.block_tables[row * tables.stride..][..tables.stride];
            let entries = (u64::from(request.kv_len) + u64::from(lookahead)).div_ceil(block_size.into());
            if entries > table.len() as u64 {
                return Err(error(format!("room for {} blocks", table.len()), format!("room for {entries}")));
            }
            let window = tables.group.window.map_or(u64::MAX, |window| u64::from(window.max(1)));
            let out_of_window = |entry: u64| {
                // The first query token attends to positions above computed - window.
                u64::from(block_size) * (entry + 1) + window <= u64::from(computed) + 1
            };
            for (entry, &block) in table.iter().enumerate() {
                let null = entry as u64 >= entries || window < u64::MAX && out_of_window(entry as u64);
                same!(error, "a null block, true or false:", block == 0, null);
                if let (false, Some(owner)) = (null, owned.get_mut(block as usize)) {
                    same!(error, "a block with another owner:", *owner, false);
                    *owner = true;
                } else if !null {
                    same!(error, "a block id beyond those in use:", block, self.blocks_used);
                }
            }
        }
        Ok(())
    }

    /// Each query token's slot is its position's place in its own request's blocks.
    fn check_slots(&self, tables: &GroupTables, case: &Case) -> Result<(), BatchError> {
        let block_size = tables.group.block_size;
        for (row, &index) in self.order.iter().enumerate() {
            let error = request_error(case, index);
            let table = &tables.block_tables[row * tables.stride..][..tables.stride];
            for token in self.query_start[row] as usize..self.query_start[row + 1] as usize {
                let position = self.positions[token];
                let block = i64::from(table[(position / block_size) as usize]);
                let slot = block * i64::from(block_size) + i64::from(position % block_size);
                same!(error, "a slot of", tables.slots[token], slot);
            }
        }
        Ok(())
    }
}

fn batch_error(case: &Case) -> impl Fn(String, String) -> BatchError + '_ {
    |found, wanted| BatchError::Batch { case: case.name.clone(), found, wanted }
}

fn request_error(case: &Case, index: usize) -> impl Fn(String, String) -> BatchError + '_ {
    move |found, wanted| BatchError::Request { case: case.name.clone(), index, found, wanted }
}
