//! The requests of a case as they were drawn.

use maud::{Markup, html};

use super::layout::{number, table};
use crate::baseline::Sidecar;
use crate::case::{Case, MAX_REQUESTS, Request};

/// More rows than this help nobody; the sidecar has them all.
const MAX_ROWS: usize = 1000;

/// The texts of the requests, as the sidecar has them.
fn texts(sidecar: &Sidecar) -> Vec<&str> {
    let list = sidecar.configuration.draws.get("requests").and_then(|list| list.as_array());
    list.into_iter().flatten().take(MAX_REQUESTS).filter_map(|text| text.as_str()).collect()
}

/// A request from its text. An item that stands for several is none.
fn parse(text: &str) -> Option<Request> {
    if text.contains(['*', ',', '=']) {
        return None;
    }
    text.parse::<Case>().ok()?.requests.first().copied()
}

/// Query tokens of a step; none if a request cannot be read.
pub fn tokens(sidecar: &Sidecar) -> Option<f64> {
    let texts = texts(sidecar);
    let sum = texts.iter().map(|text| Some(f64::from(parse(text)?.query_len))).sum::<Option<f64>>();
    sum.filter(|tokens| *tokens > 0.0)
}

/// Equal neighbours are one row.
pub fn section(sidecar: &Sidecar) -> Markup {
    let texts = texts(sidecar);
    let groups: Vec<&[&str]> = texts.chunk_by(|a, b| a == b).collect();
    if groups.is_empty() {
        return html! { p.note { "The sidecar does not say which requests were drawn." } };
    }
    let rows: Vec<Markup> = groups.iter().take(MAX_ROWS).map(|group| row(group)).collect();
    let columns = [
        ("Count", true),
        ("Request", false),
        ("Query tokens", true),
        ("KV tokens", true),
        ("Drafts", true),
        ("Kind", false),
    ];
    let caption = format!(
        "{} requests after jitter, in the order of the case; equal neighbours are one row",
        texts.len()
    );
    html! {
        (table(&caption, &columns, &rows))
        @if groups.len() > MAX_ROWS {
            p.note { (groups.len() - MAX_ROWS) " more rows are in the sidecar, forward.json." }
        }
    }
}

fn row(group: &[&str]) -> Markup {
    let request = group.first().and_then(|text| parse(text));
    let cell = |of: fn(Request) -> u32| match request.map(of) {
        Some(value) => number(f64::from(value), &value.to_string()),
        None => html! { td.n data-value="" {} },
    };
    html! {
        (number(group.len() as f64, &group.len().to_string()))
        td { code { (group.first().copied().unwrap_or_default()) } }
        (cell(|request| request.query_len))
        (cell(|request| request.kv_len))
        (cell(|request| request.num_draft_tokens))
        td { (request.map_or("", kind)) }
    }
}

fn kind(request: Request) -> &'static str {
    match () {
        () if request.num_draft_tokens > 0 => "verify",
        () if request.is_decode() => "decode",
        () if request.chunked => "chunk of a prefill",
        () if request.is_prefix_hit() => "prefix hit",
        () => "prefill",
    }
}
