//! Whether a model on a device computes what another implementation says: one sequence, fed in every way that a step can.

use std::path::Path;

use safetensors::{Dtype as Stored, SafeTensors};

use super::decoder::Model;
use crate::backend::{BackendError, Device, Routing, dummy};
use crate::batch::{Batch, GroupTables};

/// Token by token, at most this many last tokens are fed.
const TOKEN_STEPS: usize = 64;

/// Fewer tokens than this cannot be cut into all the pieces.
const MIN_TOKENS: usize = 8;

/// A sequence of tokens and the hidden states that another implementation computed for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    /// `[tokens]`
    pub input_ids: Vec<u32>,
    /// `[tokens, width]` after the last norm.
    pub hidden: Vec<f32>,
    /// Columns of `hidden`.
    pub width: usize,
}

/// How far one way of feeding the sequence is off.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Row {
    /// The way.
    pub phase: &'static str,
    /// Rows (tokens) that were compared.
    pub rows: usize,
    /// The token whose row is furthest off.
    pub worst_row: usize,
    /// ‖found − expected‖ / ‖expected‖ of that row; infinite if not a number.
    pub relative_rms: f64,
    /// The same of every row.
    pub distances: Vec<f64>,
}

impl Expected {
    /// Reads `input_ids [T]` (I64 or I32) and `hidden [T, hidden_size]` (F32) of a safetensors file.
    pub fn read(path: &Path) -> Result<Self, BackendError> {
        let fail = |reason: String| BackendError::Weights(format!("{}: {reason}", path.display()));
        let bytes = std::fs::read(path).map_err(|error| fail(error.to_string()))?;
        let file = SafeTensors::deserialize(&bytes)
            .map_err(|error| fail(format!("not a whole safetensors file: {error}")))?;
        let tensor = |name: &str| file.tensor(name).map_err(|_| fail(format!("tensor {name} is missing")));
        let (ids, hidden) = (tensor("input_ids")?, tensor("hidden")?);
        let input_ids: Option<Vec<u32>> = match ids.dtype() {
            Stored::I64 => {
                ids.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b).try_into().ok()).collect()
            }
            Stored::I32 => {
                ids.data().as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).try_into().ok()).collect()
            }
            _ => None,
        };
        let bad_ids = || fail("input_ids must be I64 or I32, none negative".into());
        let input_ids = input_ids.filter(|_| ids.shape().len() == 1).ok_or_else(bad_ids)?;
        let &[rows, width] = hidden.shape() else {
            return Err(fail(format!("hidden is {:?}, not [tokens, hidden_size]", hidden.shape())));
        };
        if rows != input_ids.len() || hidden.dtype() != Stored::F32 {
            let (dtype, tokens) = (hidden.dtype(), input_ids.len());
            return Err(fail(format!(
                "hidden is {dtype:?} [{rows}, {width}], not F32 [{tokens}, hidden_size]"
            )));
        }
        let hidden = hidden.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        Ok(Self { input_ids, hidden, width })
    }
}

/// Runs the phases `prefill`, `chunk`, `prefix_hit`, `decode`, `verify` and `mixed`, each from fresh KV blocks in shuffled
/// order, each step recorded and replayed. Fails if the device does; judging the distances is up to the caller.
pub fn verify(model: &Model, device: &mut dyn Device, expected: &Expected) -> Result<Vec<Row>, BackendError> {
    verify_routed(model, device, expected, None)
}

/// As [`verify`], each token choosing its experts by the row of `routing` at its position, where one is given: rounding cannot
/// change who is chosen then.
pub fn verify_routed(
    model: &Model,
    device: &mut dyn Device,
    expected: &Expected,
    routing: Option<&Routing>,
) -> Result<Vec<Row>, BackendError> {
    let tokens = expected.input_ids.len();
    if expected.width != model.config.hidden_size || tokens < MIN_TOKENS {
        let (width, wanted) = (expected.width, model.config.hidden_size);
        return Err(BackendError::Weights(format!(
            "hidden states of {tokens} tokens, {width} wide; needed are {MIN_TOKENS} or more, {wanted} wide"
        )));
    }
    let mut run = Run { model, device, expected, routing, row: Row::default() };
    let phases: [(&'static str, Phase<'_>); 6] = [
        ("prefill", Run::prefill),
        ("chunk", Run::chunk),
        ("prefix_hit", Run::prefix_hit),
        ("decode", Run::decode),
        ("verify", Run::verify),
        ("mixed", Run::mixed),
    ];
    let mut rows = Vec::new();
    for (phase, feed) in phases {
        run.row = Row { phase, ..Row::default() };
        feed(&mut run)?;
        rows.push(std::mem::take(&mut run.row));
    }
    Ok(rows)
}

/// One way of feeding the sequence.
type Phase<'a> = fn(&mut Run<'a>) -> Result<(), BackendError>;

/// The blocks of one request: `[groups][blocks of the whole sequence]`.
type Blocks = Vec<Vec<u32>>;

/// The tokens `begin..end` of a request, as one request of a step.
#[derive(Clone, Copy)]
struct Piece<'a> {
    blocks: &'a Blocks,
    begin: usize,
    end: usize,
    /// Decode or verify.
    decode: bool,
}

struct Run<'a> {
    model: &'a Model,
    device: &'a mut dyn Device,
    expected: &'a Expected,
    routing: Option<&'a Routing>,
    row: Row,
}

impl Run<'_> {
    fn tokens(&self) -> usize {
        self.expected.input_ids.len()
    }

    fn prefill(&mut self) -> Result<(), BackendError> {
        let blocks = self.fresh(1)?;
        self.step(&[fill(&blocks[0], 0, self.tokens())])
    }

    fn chunk(&mut self) -> Result<(), BackendError> {
        let (blocks, tokens) = (self.fresh(1)?, self.tokens());
        let size = tokens.div_ceil(5);
        (0..tokens).step_by(size).try_for_each(|t| self.step(&[fill(&blocks[0], t, tokens.min(t + size))]))
    }

    /// Two requests find the blocks of a third.
    fn prefix_hit(&mut self) -> Result<(), BackendError> {
        let (mut blocks, tokens) = (self.fresh(3)?, self.tokens());
        let size = self.block_size();
        // Blocks are shared whole; of a sequence shorter than two blocks there is nothing to share with a second request.
        let prefix = if tokens / 2 >= size { tokens / 2 / size * size } else { tokens / 2 };
        self.step(&[fill(&blocks[0], 0, prefix)])?;
        let (first, others) = blocks.split_at_mut(1);
        for other in others.iter_mut() {
            for (own, found) in other.iter_mut().zip(&first[0]) {
                own[..prefix.div_ceil(size)].copy_from_slice(&found[..prefix.div_ceil(size)]);
            }
        }
        let mut pieces = vec![fill(&others[0], prefix, tokens)];
        if prefix % size == 0 {
            pieces.push(fill(&others[1], prefix, tokens - 1));
        }
        self.step(&pieces)
    }

    fn decode(&mut self) -> Result<(), BackendError> {
        self.continued(1)
    }

    fn verify(&mut self) -> Result<(), BackendError> {
        self.continued(4)
    }

    /// A prompt, then `size` tokens at a time.
    fn continued(&mut self, size: usize) -> Result<(), BackendError> {
        let (blocks, tokens) = (self.fresh(1)?, self.tokens());
        let prompt = tokens.saturating_sub(TOKEN_STEPS).max(1);
        self.step(&[fill(&blocks[0], 0, prompt)])?;
        let starts = (prompt..=tokens - size).step_by(size);
        starts.into_iter().try_for_each(|t| self.step(&[again(&blocks[0], t, t + size)]))
    }

    /// Decodes, a verify, a chunk and a prefill in one step.
    fn mixed(&mut self) -> Result<(), BackendError> {
        let (blocks, t) = (self.fresh(6)?, self.tokens());
        let pieces = [
            fill(&blocks[0], 0, t),
            fill(&blocks[1], t / 3, t - 1),
            again(&blocks[2], t - 1, t),
            again(&blocks[3], t / 2, t / 2 + 1),
            again(&blocks[4], t - 5, t - 1),
            fill(&blocks[5], t / 4, t / 4 + 2),
        ];
        let prefixes = pieces.iter().filter(|piece| piece.begin > 0);
        let prefixes: Vec<Piece<'_>> = prefixes.map(|piece| fill(piece.blocks, 0, piece.begin)).collect();
        self.step(&prefixes)?;
        self.step(&pieces)
    }

    fn block_size(&self) -> usize {
        self.model.spec.kv_groups.first().map_or(1, |group| group.block_size as usize)
    }

    /// Blocks for `requests` whole sequences, in shuffled order, given their initial contents.
    fn fresh(&mut self, requests: usize) -> Result<Vec<Blocks>, BackendError> {
        let groups = &self.model.spec.kv_groups;
        let tokens = self.tokens();
        let sizes: Vec<usize> =
            groups.iter().map(|group| tokens.div_ceil(group.block_size as usize)).collect();
        let needed = requests * sizes.iter().sum::<usize>();
        let pool = self.device.num_kv_blocks();
        if needed >= pool as usize {
            let message =
                format!("verifying {tokens} tokens needs {} KV blocks, the pool has {pool}", needed + 1);
            return Err(BackendError::NoRoom(message));
        }
        let mut ids: Vec<u32> = (1..=needed as u32).collect();
        ids.sort_unstable_by_key(|&id| dummy::mix(u64::from(id)));
        let mut ids = ids.into_iter();
        let mut request = || sizes.iter().map(|&size| ids.by_ref().take(size).collect()).collect();
        let blocks: Vec<Blocks> = (0..requests).map(|_| request()).collect();
        for blocks in &blocks {
            // Decoding's tables: those of a whole prefill leave no block out.
            self.device.init_kv(&self.batch(&[fill(blocks, 0, tokens)]))?;
        }
        Ok(blocks)
    }

    /// Runs one step and compares each of its rows.
    fn step(&mut self, pieces: &[Piece<'_>]) -> Result<(), BackendError> {
        let mut pieces = pieces.to_vec();
        // The model runner's order: verify, decode, then prefills by length.
        pieces.sort_by_key(|piece| match (piece.decode, piece.end - piece.begin) {
            (true, length) => (false, usize::MAX - length),
            (false, length) => (true, length),
        });
        let batch = self.batch(&pieces);
        if let Some(routing) = self.routing {
            self.device.set_routing(Some(rows_of(routing, self.tokens(), &batch.positions)))?;
        }
        let model = self.model;
        let forward = move |ops: &mut dyn crate::backend::Ops| model.forward(ops);
        let mut capture = self.device.capture(&batch, &forward)?;
        capture.snapshot()?;
        capture.eager()?;
        capture.record()?;
        capture.replay()?;
        let output = capture.output()?;
        drop(capture);
        let tokens = pieces.iter().flat_map(|piece| piece.begin..piece.end);
        let width = self.expected.width;
        for (token, found) in tokens.zip(output.chunks_exact(width)) {
            let distance = relative_rms(found, &self.expected.hidden[token * width..][..width]);
            self.row.rows += 1;
            self.row.distances.push(distance);
            if distance > self.row.relative_rms {
                (self.row.worst_row, self.row.relative_rms) = (token, distance);
            }
        }
        Ok(())
    }

    /// The batch of the pieces, in their order.
    fn batch(&self, pieces: &[Piece<'_>]) -> Batch {
        let positions = || pieces.iter().flat_map(|piece| piece.begin..piece.end);
        let mut query_start = vec![0];
        query_start.extend(pieces.iter().scan(0, |sum, piece| {
            *sum += (piece.end - piece.begin) as u32;
            Some(*sum)
        }));
        let groups: Vec<GroupTables> =
            (0..self.model.spec.kv_groups.len()).map(|g| self.tables(g, pieces)).collect();
        let used = groups.iter().flat_map(|tables| &tables.block_tables).max().map_or(1, |block| block + 1);
        Batch {
            order: (0..pieces.len()).collect(),
            query_start,
            kv_lens: pieces.iter().map(|piece| piece.end as u32).collect(),
            num_decodes: pieces.iter().filter(|piece| piece.decode).count(),
            positions: positions().map(|position| position as u32).collect(),
            token_ids: positions().map(|position| self.expected.input_ids[position]).collect(),
            groups,
            blocks_used: used,
        }
    }

    fn tables(&self, group: usize, pieces: &[Piece<'_>]) -> GroupTables {
        let spec = self.model.spec.kv_groups[group];
        let size = spec.block_size as usize;
        let stride = self.tokens().div_ceil(size);
        let mut block_tables = Vec::new();
        let mut slots = Vec::new();
        for piece in pieces {
            let blocks = &piece.blocks[group];
            // Blocks wholly before the window are not kept.
            let dropped =
                spec.window.map_or(0, |window| (piece.begin + 1).saturating_sub(window as usize) / size);
            let kept = blocks.iter().enumerate().map(|(i, &block)| if i < dropped { 0 } else { block });
            block_tables.extend(kept);
            slots.extend(
                (piece.begin..piece.end)
                    .map(|t| i64::from(blocks[t / size]) * size as i64 + (t % size) as i64),
            );
        }
        GroupTables { group: spec, block_tables, stride, slots }
    }
}

fn fill(blocks: &Blocks, begin: usize, end: usize) -> Piece<'_> {
    Piece { blocks, begin, end, decode: false }
}

fn again(blocks: &Blocks, begin: usize, end: usize) -> Piece<'_> {
    Piece { blocks, begin, end, decode: true }
}

/// The rows of these positions out of a routing of `tokens` positions.
fn rows_of(routing: &Routing, tokens: usize, positions: &[u32]) -> Routing {
    let of_layer = |logits: &Vec<f32>| {
        let width = logits.len() / tokens;
        positions.iter().flat_map(|&p| logits[p as usize * width..][..width].iter().copied()).collect()
    };
    Routing { logits: routing.logits.iter().map(of_layer).collect() }
}

/// ‖found − expected‖ / ‖expected‖
fn relative_rms(found: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let off: f64 = found.iter().zip(expected).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let size: f64 = expected.iter().map(|b| square(f64::from(*b))).sum();
    let distance = if off == 0.0 { 0.0 } else { (off / size).sqrt() };
    if distance.is_nan() { f64::INFINITY } else { distance }
}
