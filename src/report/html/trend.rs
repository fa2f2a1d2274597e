//! A benchmark over all its saved baselines, in the order of their commits.

use std::path::Path;

use maud::{Markup, html};

use super::gather::Benchmark;
use super::layout::{beside, figure, maybe, number, table};
use super::picture::trend::{Point, picture};
use super::timing::{sample_medians, spread};
use super::{Options, text};
use crate::baseline::{Sidecar, commit};

/// A measurement under all names that it was saved by.
pub struct Row<'a> {
    /// `new` and `base` first, then the others by the alphabet.
    pub names: Vec<&'a str>,
    pub sidecar: &'a Sidecar,
    /// Whether git knows the commit.
    pub known: bool,
}

/// Every measurement once, in commit order. Those whose commit git does not know stand where their date puts them.
pub fn rows<'a>(benchmark: &'a Benchmark, repository: &Path) -> Vec<Row<'a>> {
    let mut rows: Vec<Row<'a>> = Vec::new();
    for (name, sidecar) in &benchmark.sidecars {
        match rows.iter_mut().find(|row| same(row.sidecar, sidecar)) {
            Some(row) => row.names.push(name),
            None => rows.push(Row { names: vec![name], sidecar, known: false }),
        }
    }
    for row in &mut rows {
        row.names.sort_by_key(|name| (*name != "new", *name != "base", *name));
    }
    sort(rows, repository)
}

/// A save writes one measurement under several names.
fn same(a: &Sidecar, b: &Sidecar) -> bool {
    (&a.date, &a.commit, &a.runs) == (&b.date, &b.commit, &b.runs)
}

/// The commit without `-dirty`, and whether it had it.
fn clean(sidecar: &Sidecar) -> (Option<&str>, bool) {
    let commit = sidecar.commit.as_deref();
    match commit.and_then(|commit| commit.strip_suffix("-dirty")) {
        Some(clean) => (Some(clean), true),
        None => (commit, false),
    }
}

fn sort<'a>(rows: Vec<Row<'a>>, repository: &Path) -> Vec<Row<'a>> {
    let commits: Vec<&str> = rows.iter().filter_map(|row| clean(row.sidecar).0).collect();
    let order = commit::order(repository, &commits);
    let position = |row: &Row<'a>| clean(row.sidecar).0.and_then(|commit| order.get(commit).copied());
    let (mut known, mut unknown): (Vec<_>, Vec<_>) =
        rows.into_iter().partition(|row| position(row).is_some());
    known.sort_by_key(|row| (position(row), clean(row.sidecar).1, &row.sidecar.date));
    unknown.sort_by_key(|row| &row.sidecar.date);
    let mut sorted: Vec<Row<'a>> = Vec::new();
    let mut unknown = unknown.into_iter().peekable();
    for row in known {
        while let Some(earlier) = unknown.next_if(|other| other.sidecar.date < row.sidecar.date) {
            sorted.push(earlier);
        }
        sorted.push(Row { known: true, ..row });
    }
    sorted.extend(unknown);
    sorted
}

/// The section on the trend.
pub fn section(benchmark: &Benchmark, current: &Sidecar, options: &Options) -> Markup {
    let rows = rows(benchmark, &options.repository);
    let unknown = rows.iter().filter(|row| !row.known).count();
    let mut caption = match unknown {
        0 => "In the order of the commits.".to_owned(),
        all if all == rows.len() => "By date: git knows none of the commits here.".to_owned(),
        some => format!("In the order of the commits; {some} that git does not know here by date."),
    };
    caption.push_str(" Bars reach from the least to the largest median of a sample.");
    let unlike: Vec<Vec<&str>> = rows.iter().map(|row| unlike(current, row.sidecar)).collect();
    if unlike.iter().any(|fields| !fields.is_empty()) {
        caption.push_str(" Hollow: measured with another configuration than the last measurement, so not comparable with it.");
    }
    let points: Vec<Point> =
        rows.iter().zip(&unlike).map(|(row, unlike)| point(row, unlike.is_empty())).collect();
    let alternative =
        format!("Medians of {} measurements; the table below has the numbers. {caption}", rows.len());
    let several = rows.len() > 1;
    let lines: Vec<Markup> =
        rows.iter().zip(&unlike).enumerate().map(|(at, (row, unlike))| line(at + 1, row, unlike)).collect();
    let columns = [
        ("No.", true),
        ("Saved as", false),
        ("Commit", false),
        ("Measured", false),
        ("Median, µs", true),
        ("Spread, %", true),
        ("Runs", true),
        ("Configuration", false),
    ];
    let shown = html! {
        @if several { (figure(&alternative, &caption, options.pictures.then(|| picture(&points)))) }
        @else { p.note { "One measurement so far: " code { "--save-baseline @HEAD" } " keeps one for each commit." } }
    };
    let title = if several && options.pictures {
        "All measurements"
    } else {
        &format!("All measurements. {caption}")
    };
    beside(&shown, &table(title, &columns, &lines))
}

/// The fields in which a measurement's configuration is not the last one's.
fn unlike(current: &Sidecar, other: &Sidecar) -> Vec<&'static str> {
    current.configuration.differences(&other.configuration).into_iter().map(|(field, _)| field).collect()
}

fn point(row: &Row<'_>, alike: bool) -> Point {
    let medians = sample_medians(row.sidecar);
    let fold = |start: f64, pick: fn(f64, f64) -> f64| medians.iter().copied().fold(start, pick);
    let median = row.sidecar.median_us;
    let marked: Vec<&str> = row.names.iter().copied().filter(|name| ["new", "base"].contains(name)).collect();
    Point {
        median,
        low: fold(median, f64::min),
        high: fold(median, f64::max),
        label: marked.join(", "),
        alike,
    }
}

fn line(at: usize, row: &Row<'_>, unlike: &[&str]) -> Markup {
    let Sidecar { commit, date, median_us, runs, .. } = row.sidecar;
    html! {
        (number(at as f64, &at.to_string()))
        th scope="row" {
            @for (at, name) in row.names.iter().enumerate() {
                @if at > 0 { ", " }
                @if ["new", "base"].contains(name) { b { (name) } } @else { (name) }
            }
        }
        td { @match commit { Some(commit) => code { (commit) }, None => span.quiet { "none" } } }
        td data-value=(date) { time datetime=(date) { (text::date(date)) } }
        (number(*median_us, &text::micros(*median_us)))
        (maybe(spread(row.sidecar).map(|pct| (pct, format!("{pct:.2}")))))
        (number(runs.len() as f64, &runs.len().to_string()))
        td { @if unlike.is_empty() { "as the last" } @else { "other " (unlike.join(", ")) } }
    }
}
