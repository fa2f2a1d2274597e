//! `--plan`: what would run, as a table or as JSON.

use std::io::{self, Write};

use serde::ser::SerializeSeq;
use serde::{Serialize, Serializer};

use crate::batch::{BatchPlan, BlockRun, Schedule};
use crate::units::{Bytes, Flops, Tokens};

/// Requests are cut to this many characters in the table; the JSON has them all.
const REQUESTS_WIDTH: usize = 48;

/// One operation's share of a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OpRow {
    /// The operation.
    pub op: &'static str,
    /// Bytes that it must read.
    pub bytes: Bytes,
    /// Its floating point operations.
    pub flops: Flops,
}

/// One case.
#[derive(Debug, Clone)]
pub struct PlanRow {
    /// The benchmark's id.
    pub id: String,
    /// The case's name.
    pub name: String,
    /// Its requests after jitter, as one text.
    pub requests: String,
    /// What each request schedules, and its blocks.
    pub plan: BatchPlan,
    /// Bytes and FLOPs, by operation.
    pub ops: Vec<OpRow>,
}

impl PlanRow {
    fn bytes(&self, of: impl Fn(&OpRow) -> bool) -> Bytes {
        self.ops.iter().filter(|op| of(op)).map(|op| op.bytes).sum()
    }

    fn flops(&self, of: impl Fn(&OpRow) -> bool) -> Flops {
        self.ops.iter().filter(|op| of(op)).map(|op| op.flops).sum()
    }
}

/// Attention alone reads KV; every other operation reads weights.
fn is_attention(op: &OpRow) -> bool {
    op.op.ends_with("attention")
}

/// Writes the table: one row a case.
///
/// # Errors
/// If the writer fails.
pub fn write_table(out: &mut impl Write, rows: &[PlanRow]) -> io::Result<()> {
    let header =
        ["id", "requests", "tokens", "KV blocks", "bytes", "weights", "KV", "FLOPs", "linear", "attention"];
    let mut table: Vec<Vec<String>> = vec![header.map(str::to_owned).to_vec()];
    table.extend(rows.iter().map(cells));
    let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    for row in &table {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(
                |(column, (cell, &width))| {
                    if column < 2 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                },
            )
            .collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    writeln!(
        out,
        "bytes, as the backend that would run it stores them: each weight that the step touches once, and the K and V that its tokens attend to; KV blocks: by KV group, \
         without the null block; FLOPs: 2 a weight and token, and 4 × head size a head, query position and position attended to"
    )
}

fn cells(row: &PlanRow) -> Vec<String> {
    let blocks: Vec<String> = row.plan.blocks_per_group().iter().map(u64::to_string).collect();
    vec![
        row.id.clone(),
        shorten(&row.requests),
        row.plan.num_tokens().to_string(),
        blocks.join(" + "),
        row.bytes(|_| true).to_string(),
        row.bytes(|op| !is_attention(op)).to_string(),
        row.bytes(is_attention).to_string(),
        row.flops(|_| true).to_string(),
        row.flops(|op| !is_attention(op)).to_string(),
        row.flops(is_attention).to_string(),
    ]
}

fn shorten(text: &str) -> String {
    if text.chars().count() <= REQUESTS_WIDTH {
        return text.to_owned();
    }
    format!("{}…", text.chars().take(REQUESTS_WIDTH - 1).collect::<String>())
}

#[derive(Serialize)]
struct Document<'a> {
    cases: Vec<CaseJson<'a>>,
}

#[derive(Serialize)]
struct CaseJson<'a> {
    name: &'a str,
    requests: Requests<'a>,
    id: &'a str,
    num_tokens: Tokens,
    kv_blocks: Vec<u64>,
    bytes: Bytes,
    flops: Flops,
    ops: &'a [OpRow],
}

/// Requests are written one by one and block ids number by number: a case may have billions of blocks.
struct Requests<'a>(&'a [Schedule]);

impl Serialize for Requests<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.0.len()))?;
        for schedule in self.0 {
            list.serialize_element(&RequestJson::from(schedule))?;
        }
        list.end()
    }
}

#[derive(Serialize)]
struct RequestJson<'a> {
    query_len: u32,
    kv_len: u32,
    num_draft_tokens: u32,
    chunked: bool,
    computed: u32,
    scheduled: u32,
    is_decode: bool,
    block_ids: Groups<'a>,
}

impl<'a> From<&'a Schedule> for RequestJson<'a> {
    fn from(schedule: &'a Schedule) -> Self {
        let request = &schedule.request;
        Self {
            query_len: request.query_len,
            kv_len: request.kv_len,
            num_draft_tokens: request.num_draft_tokens,
            chunked: request.chunked,
            computed: schedule.computed,
            scheduled: schedule.scheduled,
            is_decode: schedule.is_decode,
            block_ids: Groups(&schedule.blocks),
        }
    }
}

struct Groups<'a>(&'a [BlockRun]);

impl Serialize for Groups<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(BlockIds))
    }
}

struct BlockIds<'a>(&'a BlockRun);

impl Serialize for BlockIds<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.block_ids())
    }
}

/// Writes one JSON document.
///
/// # Errors
/// If the writer fails.
pub fn write_json(out: &mut impl Write, rows: &[PlanRow]) -> io::Result<()> {
    let cases = rows.iter().map(|row| CaseJson {
        name: &row.name,
        requests: Requests(&row.plan.schedules),
        id: &row.id,
        num_tokens: row.plan.num_tokens(),
        kv_blocks: row.plan.blocks_per_group(),
        bytes: row.bytes(|_| true),
        flops: row.flops(|_| true),
        ops: &row.ops,
    });
    serde_json::to_writer(&mut *out, &Document { cases: cases.collect() })?;
    writeln!(out)
}
