//! Whether a batch is one that a device can run: what the kernels rely on is checked here, once a capture.

use crate::backend::{BackendError, StepSpec, WeightRole};
use crate::batch::{Batch, GroupTables};

fn bad(message: String) -> BackendError {
    BackendError::Device(format!("the batch cannot run: {message}"))
}

fn expect(ok: bool, message: impl FnOnce() -> String) -> Result<(), BackendError> {
    if ok { Ok(()) } else { Err(bad(message())) }
}

/// Fails if the batch is inconsistent or needs what a pool of `blocks` blocks does not have.
pub(in crate::backend) fn batch(batch: &Batch, spec: &StepSpec, blocks: u32) -> Result<(), BackendError> {
    let (requests, tokens) = (batch.num_requests(), batch.num_tokens());
    expect(tokens > 0, || "it has no query token".into())?;
    let ends = (batch.query_start.first(), batch.query_start.last().map(|&end| end as usize));
    expect(batch.query_start.len() == requests + 1 && ends == (Some(&0), Some(tokens)), || {
        format!("query_start {ends:?} does not span {requests} requests of {tokens} tokens")
    })?;
    expect(batch.token_ids.len() == tokens, || format!("{} token ids", batch.token_ids.len()))?;
    let embeddings = spec.weights.iter().filter(|weight| weight.role == WeightRole::Embedding);
    let vocabulary = embeddings.map(|weight| weight.full().0).min().unwrap_or(usize::MAX);
    if let Some(id) = batch.token_ids.iter().find(|&&id| id as usize >= vocabulary) {
        return Err(bad(format!("token id {id} is outside the vocabulary of {vocabulary}")));
    }
    for request in 0..requests {
        positions(batch, request, spec.max_model_len)?;
    }
    expect(batch.groups.len() == spec.kv_groups.len(), || {
        format!("{} KV groups, the model has {}", batch.groups.len(), spec.kv_groups.len())
    })?;
    for (tables, group) in batch.groups.iter().zip(&spec.kv_groups) {
        expect(tables.group.block_size == group.block_size, || {
            format!("blocks of {}, the pool has blocks of {}", tables.group.block_size, group.block_size)
        })?;
        blocks_and_slots(batch, tables, blocks)?;
    }
    distinct_slots(batch)
}

fn positions(batch: &Batch, request: usize, max_model_len: u32) -> Result<(), BackendError> {
    let (start, end) = (batch.query_start[request], batch.query_start[request + 1]);
    let kv_len = batch.kv_lens[request];
    expect(start < end && end - start <= kv_len && end as usize <= batch.num_tokens(), || {
        format!("request {request} has query tokens {start}..{end} of {kv_len}")
    })?;
    expect(kv_len <= max_model_len, || {
        format!("a request reaches {kv_len} tokens, more than --max-model-len {max_model_len}")
    })?;
    let first = kv_len - (end - start);
    let found = &batch.positions[start as usize..end as usize];
    expect(found.iter().copied().eq(first..kv_len), || format!("positions of request {request} have gaps"))
}

fn blocks_and_slots(batch: &Batch, tables: &GroupTables, blocks: u32) -> Result<(), BackendError> {
    let size = tables.group.block_size as usize;
    let longest = batch.kv_lens.iter().map(|&len| (len as usize).div_ceil(size)).max().unwrap_or(0);
    expect(tables.stride >= longest, || format!("block tables of {} columns, not {longest}", tables.stride))?;
    expect(tables.block_tables.len() == tables.stride * batch.num_requests(), || {
        format!("block tables of {} entries", tables.block_tables.len())
    })?;
    let greatest = tables.block_tables.iter().copied().max().unwrap_or(0);
    if greatest >= blocks {
        return Err(BackendError::NoRoom(format!(
            "the batch needs {} KV blocks, the pool has {blocks}; give it more memory or lower the lengths",
            u64::from(greatest) + 1
        )));
    }
    expect(tables.slots.len() == batch.num_tokens(), || format!("{} slots", tables.slots.len()))?;
    let valid = size as i64..i64::from(blocks) * size as i64;
    let outside = tables.slots.iter().find(|slot| !valid.contains(slot));
    expect(outside.is_none(), || format!("slot {outside:?} is outside the pool or in the null block"))
}

/// No two tokens may write one slot, in any group: the groups share the pool.
fn distinct_slots(batch: &Batch) -> Result<(), BackendError> {
    let mut slots: Vec<i64> = batch.groups.iter().flat_map(|tables| tables.slots.iter().copied()).collect();
    slots.sort_unstable();
    let twice = slots.windows(2).find(|pair| pair[0] == pair[1]);
    expect(twice.is_none(), || format!("slot {} is written twice", twice.map_or(0, |pair| pair[0])))
}
