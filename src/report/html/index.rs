//! The page of all cases.

use maud::{Markup, html};

use super::gather::{Benchmark, Book};
use super::layout::{maybe, number, page as shell, table};
use super::timing::spread;
use super::{Options, roofline, text};
use crate::baseline::Sidecar;
use crate::stats::verdict::State;

/// The page.
pub fn page(book: &Book, options: &Options) -> Markup {
    let shown: Vec<(&Benchmark, &str, &Sidecar)> = book
        .benchmarks
        .iter()
        .filter_map(|benchmark| benchmark.current().map(|(name, sidecar)| (benchmark, name, sidecar)))
        .collect();
    let body = html! {
        header {
            h1 { "Forward passes" }
            p.lead { (summary(&shown)) }
            p.links { @if book.criterion { a href="../report/index.html" { "Criterion’s report of all benchmarks" } } }
        }
        main #main tabindex="-1" {
            (problems(book))
            @if shown.is_empty() { (nothing()) } @else {
                section aria-labelledby="cases" {
                    h2 #cases { "Cases" }
                    (cases(&shown))
                    p.note {
                        "Time is the median of all replays; spread, (max − min of the samples’ medians) / median, the largest of any run. "
                        "Floor/median is how near the time is to the least that the measured ceilings allow. "
                        "A change is of the median in time, with its interval."
                    }
                }
                section aria-labelledby="roofline" {
                    h2 #roofline { "Roofline" }
                    (roofline::section(book, options))
                }
            }
        }
    };
    shell("Forward passes – forward-bench", &body)
}

fn nothing() -> Markup {
    html! { p.note {
        "There is no measurement here yet. " code { "cargo bench -- decode" } " measures the cases of the group " code { "decode" } "."
    } }
}

/// How many cases there are, and how many of each state.
fn summary(shown: &[(&Benchmark, &str, &Sidecar)]) -> Markup {
    let count = |state: Option<State>| {
        let of = |sidecar: &Sidecar| sidecar.compared.as_ref().map(|compared| compared.verdict.state);
        shown.iter().filter(|(_, _, sidecar)| of(sidecar) == state).count()
    };
    let states = [Some(State::Slower), Some(State::Faster), Some(State::Same), Some(State::Ambiguous), None];
    let mut devices: Vec<&str> =
        shown.iter().map(|(_, _, sidecar)| sidecar.configuration.device.as_str()).collect();
    devices.sort_unstable();
    devices.dedup();
    html! {
        (shown.len()) @if shown.len() == 1 { " case" } @else { " cases" }
        @for state in states { @if count(state) > 0 {
            " · " (count(state)) " "
            @match state {
                Some(state) => { @let (class, _, word) = text::state(state); span.state.(class) { (word) } }
                None => "not compared",
            }
        } }
        @for device in devices { " · " (device) }
    }
}

fn problems(book: &Book) -> Markup {
    let of_benchmarks = book.benchmarks.iter().flat_map(|benchmark| &benchmark.problems);
    let all: Vec<_> = of_benchmarks.chain(&book.problems).collect();
    html! { @if !all.is_empty() {
        section.problem aria-labelledby="problems" {
            h2 #problems { "Not shown" }
            p { "These could not be read. Delete them, or measure again." }
            ul { @for problem in all { li { code { (problem.path) } ": " (problem.what) } } }
        }
    } }
}

fn cases(shown: &[(&Benchmark, &str, &Sidecar)]) -> Markup {
    let rows: Vec<Markup> =
        shown.iter().map(|(benchmark, name, sidecar)| row(benchmark, name, sidecar)).collect();
    let columns = [
        ("Case", false),
        ("Time, µs", true),
        ("Verdict", false),
        ("Change", true),
        ("Spread, %", true),
        ("Floor/median", true),
        ("Measured", false),
        ("Compared with", false),
        ("Criterion", false),
    ];
    table("Every case, as it was measured last", &columns, &rows)
}

fn row(benchmark: &Benchmark, name: &str, sidecar: &Sidecar) -> Markup {
    let [group, model, case] = &benchmark.parts;
    let compared = sidecar.compared.as_ref();
    let floors = sidecar.around.floors.as_ref();
    let share = floors.map(|floors| floors.floor_us / sidecar.median_us);
    let time = compared.map(|compared| compared.verdict.time);
    html! {
        th.case scope="row" data-value=(benchmark.id()) {
            a href=(text::href(&benchmark.page())) { span.quiet { (group) "/" (model) "/" } wbr; (case) }
        }
        (number(sidecar.median_us, &text::micros(sidecar.median_us)))
        td.wrap data-value=(compared.map_or("", |compared| text::state(compared.verdict.state).2)) {
            @match compared {
                Some(compared) => (text::verdict(&compared.verdict)),
                None => span.quiet { "not compared" },
            }
        }
        @match time {
            Some(time) => td.n data-value=(time.pct) {
                (text::change(time.pct))
                br; span.quiet { (text::interval(&time)) }
            },
            None => (maybe(None)),
        }
        (maybe(spread(sidecar).map(|pct| (pct, format!("{pct:.2}")))))
        (maybe(share.map(|share| (share, format!("{share:.3}")))))
        td.side data-value=(sidecar.date) { (text::side_cell(name, sidecar.commit.as_deref(), &sidecar.date)) }
        td.side data-value=(compared.map_or("", |compared| compared.baseline.as_str())) {
            @if let Some(side) = compared { (text::side_cell(&side.baseline, side.commit.as_deref(), &side.date)) }
            @else { span.quiet { "–" } }
        }
        td {
            @if benchmark.criterion {
                @let id = benchmark.id();
                a href={ "../" (text::href(std::path::Path::new(&id))) "/report/index.html" } aria-label={ "Criterion’s report of " (id) } { "report" }
            }
        }
    }
}
