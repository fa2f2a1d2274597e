//! The page of a case.

use std::path::Path;

use maud::{Markup, html};

use super::gather::Benchmark;
use super::layout::{details, page as shell};
use super::timing::{self, Replays, spread};
use super::{Options, kernels, ranks, requests, text, trend};
use crate::baseline::{SIDECAR, Sidecar};
use crate::stats::median;

/// From a case's page to Criterion's folder.
const HOME: &str = "../../../../";

/// Sections in order: the fragment and the title.
const SECTIONS: [(&str, &str); 7] = [
    ("replays", "Replays over time"),
    ("distribution", "Distribution"),
    ("ranks", "Ranks"),
    ("kernels", "Kernels"),
    ("requests", "Requests drawn"),
    ("trend", "Trend"),
    ("measured-on", "Measured on"),
];

/// The page; a benchmark without any sidecar that could be read has an empty one, which nothing links to.
pub fn page(benchmark: &Benchmark, options: &Options) -> Markup {
    let Some((name, sidecar)) = benchmark.current() else { return html! {} };
    let [group, model, case] = &benchmark.parts;
    let section = |fragment: &str| match fragment {
        "replays" => timing::over_time(sidecar, options),
        "distribution" => timing::distribution(benchmark, (name, sidecar), options),
        "ranks" => ranks::section(sidecar, options),
        "kernels" => kernels::section(benchmark, (name, sidecar), options),
        "requests" => requests::section(sidecar),
        "trend" => trend::section(benchmark, sidecar, options),
        _ => measured_on(sidecar),
    };
    let body = html! {
        header {
            nav.crumbs aria-label="Where this page is" {
                a href="../../../index.html" { "All cases" } " / " (group) " / " (model)
            }
            h1 { (case) }
            (links(benchmark, name))
        }
        main #main tabindex="-1" {
            (problems(benchmark))
            (figures(name, sidecar))
            (verdict(name, sidecar))
            nav.sections aria-label="Sections" {
                @for (fragment, title) in SECTIONS { a href={ "#" (fragment) } { (title) } }
            }
            @for (fragment, title) in SECTIONS {
                section #(fragment) aria-labelledby={ (fragment) "-title" } {
                    h2 #{ (fragment) "-title" } { (title) }
                    (section(fragment))
                }
            }
        }
    };
    shell(&format!("{} – forward-bench", benchmark.id()), &body)
}

fn links(benchmark: &Benchmark, name: &str) -> Markup {
    let to = |rest: &str| {
        let path = benchmark.parts.iter().fold(Path::new("").to_owned(), |path, part| path.join(part));
        format!("{HOME}{}", text::href(&path.join(rest)))
    };
    html! {
        p.links {
            @if benchmark.criterion { a href=(to("report/index.html")) { "Criterion’s report" } " " }
            a href=(to(&format!("{name}/{SIDECAR}"))) { "Sidecar (" (name) "/" (SIDECAR) ")" }
        }
    }
}

/// Sidecars that could not be read.
pub fn problems(benchmark: &Benchmark) -> Markup {
    html! { @for problem in &benchmark.problems {
        p.problem { b { "Not shown: " } code { (problem.path) } ": " (problem.what) }
    } }
}

/// The figures at the top.
fn figures(name: &str, sidecar: &Sidecar) -> Markup {
    let replays = Replays::of(sidecar);
    let mut list: Vec<(&str, String)> = vec![("median", format!("{} µs", text::micros(sidecar.median_us)))];
    if let Some(latency) = replays.latency() {
        list.push(("min", format!("{} µs", text::micros(latency.min))));
        list.push(("90th percentile", format!("{} µs", text::micros(latency.p90))));
    }
    list.extend(spread(sidecar).map(|pct| ("spread", format!("{pct:.2} %"))));
    if let Some(floors) = &sidecar.around.floors {
        list.push(("floor/median", format!("{:.3}", floors.floor_us / sidecar.median_us)));
        list.push(("floor", format!("{} µs", text::micros(floors.floor_us))));
        list.push(("serial floor", format!("{} µs", text::micros(floors.serial_floor_us))));
    }
    let rate = requests::tokens(sidecar).map(|tokens| tokens / sidecar.median_us * 1e6);
    list.extend(rate.map(|rate| ("tokens a second", text::si(rate))));
    list.extend(median(&replays.clocks).map(|mhz| ("clock", format!("{mhz:.0} MHz"))));
    let telemetry = sidecar.around.telemetry.as_ref();
    list.extend(
        telemetry.and_then(|telemetry| telemetry.power_w).map(|watts| ("power", format!("{watts:.0} W"))),
    );
    list.extend(
        telemetry
            .and_then(|telemetry| telemetry.temperature_c)
            .map(|degrees| ("temperature", format!("{degrees} °C"))),
    );
    list.push(("replays", replays.times.len().to_string()));
    list.push(("runs", sidecar.runs.len().to_string()));
    html! {
        dl.figures aria-label={ "Figures of " (name) } {
            @for (title, value) in list { div { dt { (title) } dd { (value) } } }
        }
        (warnings(sidecar))
    }
}

fn warnings(sidecar: &Sidecar) -> Markup {
    let Some(telemetry) = &sidecar.around.telemetry else { return html! {} };
    let (limits, others) = (&telemetry.throttled, &telemetry.other_processes);
    html! {
        @if !limits.is_empty() { p.note { "The clock was held back by: " (limits.join(", ")) "." } }
        @if !others.is_empty() { p.note { "Others computed on this device: " (others.join(", ")) "." } }
    }
}

/// What the last measurement was compared with, and what came of it. Both sides are named in any case.
fn verdict(name: &str, sidecar: &Sidecar) -> Markup {
    let this = text::side(name, sidecar.commit.as_deref(), &sidecar.date);
    let Some(compared) = &sidecar.compared else {
        return html! { p.verdict { b { (this) } " was compared with nothing: there was no baseline, or not with the same configuration." } };
    };
    let found = &compared.verdict;
    let old = text::side(&compared.baseline, compared.commit.as_deref(), &compared.date);
    let (class, ..) = text::state(found.state);
    html! {
        div.verdict.(class) {
            p { (text::verdict(found)) " " b { (text::effect(&found.time)) } " in time"
                @if let Some(cycles) = &found.cycles { ", " b { (text::effect(cycles)) } " in clock cycles" }
            }
            p { b { (this) } ", " (text::micros(sidecar.median_us)) " µs, against "
                b { (old) } ", " (text::micros(compared.median_us)) " µs." }
            p.quiet {
                "A change must exceed " (format!("{:.2} %", found.margin_pct)) ". Two sides of the same code may differ by "
                (format!("{:.2} %", found.noise_pct)) ". Runs: " (found.runs.0) " old, " (found.runs.1) " new. Brackets: the interval."
            }
        }
    }
}

/// Everything that comparisons hold against each other, and what else is known.
fn measured_on(sidecar: &Sidecar) -> Markup {
    let configuration = &sidecar.configuration;
    let mut rows = vec![
        ("Backend", configuration.backend.clone()),
        ("Device", configuration.device.clone()),
        ("Type", configuration.dtype.clone()),
        ("Driver", sidecar.driver.clone().unwrap_or_else(|| "–".to_owned())),
        ("Timer", timers(sidecar)),
        ("Commit", sidecar.commit.clone().unwrap_or_else(|| "none".to_owned())),
        (
            "Differences from the commit",
            sidecar.dirty_diff.clone().unwrap_or_else(|| "none known".to_owned()),
        ),
        ("Measured", text::date(&sidecar.date)),
        ("Version", sidecar.version.clone()),
        ("Seed", sidecar.seed.to_string()),
        ("Kernels", sidecar.around.kernels.clone().unwrap_or_else(|| "–".to_owned())),
        ("Checks", checks(sidecar)),
    ];
    if let Some(floors) = &sidecar.around.floors {
        rows.push(("Read bandwidth", format!("{}B/s", text::si(floors.ceilings.read_bytes_per_second))));
        rows.push(("Matrix product", format!("{}FLOP/s", text::si(floors.ceilings.gemm_flops_per_second()))));
    }
    let values =
        [("Layout", &configuration.layout), ("Draws", &configuration.draws), ("Model", &configuration.model)];
    html! {
        div.scroll tabindex="0" role="region" aria-label="What it was measured on" {
            table.facts {
                caption { "What it was measured on" }
                tbody {
                    @for (title, value) in rows { tr { th scope="row" { (title) } td { (value) } } }
                    @for (what, choice) in &sidecar.choices { tr { th scope="row" { "Choice: " (what) } td { (choice) } } }
                }
            }
        }
        @for (title, value) in values {
            (details(title, &html! { pre tabindex="0" { (serde_json::to_string_pretty(value).unwrap_or_default()) } }))
        }
    }
}

fn timers(sidecar: &Sidecar) -> String {
    let mut timers: Vec<&str> =
        sidecar.runs.iter().flat_map(|run| &run.ranks).map(|rank| rank.timer.as_str()).collect();
    timers.sort_unstable();
    timers.dedup();
    timers.join(", ")
}

fn checks(sidecar: &Sidecar) -> String {
    let checks = &sidecar.checks;
    let difference = |rms: f64| if rms == 0.0 { "not at all".to_owned() } else { format!("by {rms:.1e}") };
    format!(
        "two eager runs differ {}, the recorded step from the eager one {} (relative RMS); replays {}; outputs {}",
        difference(checks.eager_repeat.relative_rms),
        difference(checks.graph_vs_eager.relative_rms),
        if checks.graph_deterministic { "agree bit for bit" } else { "differ" },
        if checks.finite { "finite" } else { "not finite" }
    )
}
