//! A sidecar's replays: over time and as a histogram.

use maud::{Markup, html};

use super::gather::Benchmark;
use super::layout::{beside, details, figure, maybe, number, table};
use super::picture::{histogram, replays};
use super::{Options, ranks, text};
use crate::baseline::{Run, Sidecar};
use crate::stats::{Latency, median};
use crate::units::Nanos;

/// Longer lists of replays are not written out: they are in the sidecar.
const MAX_ROWS: usize = 2000;

/// All runs of a sidecar, one after the other.
#[derive(Debug)]
pub struct Replays {
    /// Times in microseconds, each the maximum over ranks.
    pub times: Vec<f64>,
    /// The clock over each in MHz; empty where it cannot be read.
    pub clocks: Vec<f64>,
    /// Where each run begins.
    pub starts: Vec<usize>,
}

impl Replays {
    pub fn of(sidecar: &Sidecar) -> Self {
        let mut all = Self { times: Vec::new(), clocks: Vec::new(), starts: Vec::new() };
        for run in sidecar.runs.iter().map(Run::for_verdict) {
            all.starts.push(all.times.len());
            all.times.extend(run.times_us);
            all.clocks.extend(run.clock_mhz);
        }
        if all.clocks.len() != all.times.len() {
            all.clocks.clear();
        }
        all
    }

    /// What all replays amount to; a sidecar that was read has one at least.
    pub fn latency(&self) -> Option<Latency> {
        let nanos: Vec<Nanos> = self.times.iter().map(|us| Nanos(us * 1e3)).collect();
        (!nanos.is_empty()).then(|| Latency::of("", &nanos, nanos.len()))
    }
}

/// Medians of a sidecar's samples, over all runs.
pub fn sample_medians(sidecar: &Sidecar) -> Vec<f64> {
    let medians = |run: &Run| -> Vec<f64> {
        run.for_verdict().times_us.chunks(run.iters.max(1)).filter_map(median).collect()
    };
    sidecar.runs.iter().flat_map(medians).collect()
}

/// The largest spread of any run, in percent.
pub fn spread(sidecar: &Sidecar) -> Option<f64> {
    sidecar.runs.iter().map(|run| run.spread_pct).max_by(f64::total_cmp)
}

/// Replays over time with the clock under them, and the samples as a table.
pub fn over_time(sidecar: &Sidecar, options: &Options) -> Markup {
    let replays = Replays::of(sidecar);
    let median = sidecar.median_us;
    let count = replays.times.len();
    let runs = sidecar.runs.len();
    let series =
        replays::Series { times: &replays.times, clocks: &replays.clocks, starts: &replays.starts, median };
    let alternative = format!(
        "{count} replays in the order in which they were measured, median {} µs{}",
        text::micros(median),
        if replays.clocks.is_empty() { "" } else { ", and the clock over each" }
    );
    let mut caption =
        format!("Every replay in order; the level line is the median, {} µs.", text::micros(median));
    if count > replays::MAX_POINTS {
        caption.push_str(
            " Neighbours are drawn as one range from the fastest to the slowest, and their median.",
        );
    }
    if runs > 1 {
        caption.push_str(&format!(" {runs} processes measured one after the other; lines part them."));
    }
    let shown = html! {
        (figure(&alternative, &caption, options.pictures.then(|| replays::picture(&series))))
        @if replays.clocks.is_empty() { p.note { "This device's clock cannot be read replay by replay." } }
    };
    let tables = html! {
        (samples(sidecar))
        @if count <= MAX_ROWS { (details(&format!("All {count} replays"), &every(sidecar, &replays))) }
        @else { p.note { "All " (count) " replays are in the sidecar, forward.json." } }
    };
    beside(&shown, &tables)
}

fn samples(sidecar: &Sidecar) -> Markup {
    let mut rows = Vec::new();
    for (run, of) in sidecar.runs.iter().enumerate() {
        let verdict = of.for_verdict();
        let size = of.iters.max(1);
        for (sample, times) in verdict.times_us.chunks(size).enumerate() {
            let clocks = verdict.clock_mhz.chunks(size).nth(sample).and_then(median);
            let (low, high) = times.iter().fold((f64::MAX, f64::MIN), |(l, h), t| (l.min(*t), h.max(*t)));
            let middle = median(times).unwrap_or(low);
            rows.push(html! {
                (number(run as f64, &(run + 1).to_string()))
                (number(sample as f64, &(sample + 1).to_string()))
                (number(times.len() as f64, &times.len().to_string()))
                (number(middle, &text::micros(middle)))
                (number(low, &text::micros(low)))
                (number(high, &text::micros(high)))
                (maybe(clocks.map(|clock| (clock, format!("{clock:.0}")))))
            });
        }
    }
    let columns = [
        ("Run", true),
        ("Sample", true),
        ("Replays", true),
        ("Median, µs", true),
        ("Min, µs", true),
        ("Max, µs", true),
        ("Clock, MHz", true),
    ];
    table("Samples: consecutive replays, whose median is one figure", &columns, &rows)
}

fn every(sidecar: &Sidecar, replays: &Replays) -> Markup {
    let skews = ranks::skews(sidecar);
    let mut rows = Vec::new();
    for (at, us) in replays.times.iter().enumerate() {
        let run = replays.starts.partition_point(|start| *start <= at);
        let mhz = replays.clocks.get(at).map(|mhz| (*mhz, format!("{mhz:.0}")));
        let skew = skews.get(at).map(|us| (*us, text::micros(*us)));
        rows.push(html! {
            (number(at as f64, &(at + 1).to_string()))
            (number(run as f64, &run.to_string()))
            (number(*us, &text::micros(*us)))
            (maybe(mhz))
            (maybe(skew))
        });
    }
    let columns =
        [("Replay", true), ("Run", true), ("Time, µs", true), ("Clock, MHz", true), ("Rank skew, µs", true)];
    table("Every replay, the maximum over ranks", &columns, &rows)
}

/// How often which time was measured, on both sides where the old one is still there.
pub fn distribution(benchmark: &Benchmark, (name, sidecar): (&str, &Sidecar), options: &Options) -> Markup {
    let new = Replays::of(sidecar).times;
    let compared = sidecar.compared.as_ref();
    let old_side = compared.and_then(|compared| Some((compared, benchmark.old_side(compared)?)));
    let old = old_side.map(|(_, old)| Replays::of(old).times).unwrap_or_default();
    let bins = bins(&new, &old);
    let this = text::side(name, sidecar.commit.as_deref(), &sidecar.date);
    let caption = match (compared, old_side) {
        (Some(compared), Some((_, old))) => {
            let old = text::side(&compared.baseline, old.commit.as_deref(), &old.date);
            format!("Filled: {this}. Outline: {old}.")
        }
        (Some(compared), None) => {
            let old = text::side(&compared.baseline, compared.commit.as_deref(), &compared.date);
            format!("{this}. The other side, {old}, has been replaced since.")
        }
        (None, _) => format!("{this}. It was compared with nothing."),
    };
    let caption = format!("{caption} The outermost bars have all that lies beyond.");
    let alternative =
        format!("Histogram of {} replays; the table below has the counts. {caption}", new.len());
    beside(
        &figure(&alternative, &caption, options.pictures.then(|| histogram::picture(&bins))),
        &counts(&bins),
    )
}

fn counts(bins: &histogram::Bins) -> Markup {
    let last = bins.new.len().saturating_sub(1);
    let edge = |at: usize| text::with_step(bins.start + at as f64 * bins.width, bins.width);
    let row = |(at, new): (usize, &usize)| {
        let range = match at {
            0 => format!("below {}", edge(1)),
            at if at == last => format!("{} and more", edge(at)),
            _ => format!("{} – {}", edge(at), edge(at + 1)),
        };
        html! {
            (number(at as f64, &range))
            (number(*new as f64, &new.to_string()))
            @if let Some(old) = bins.old.get(at) { (number(*old as f64, &old.to_string())) }
        }
    };
    let rows: Vec<Markup> = bins.new.iter().enumerate().map(row).collect();
    let columns = [("Time, µs", true), ("New side", true), ("Old side", true)];
    let columns = if bins.old.is_empty() { &columns[..2] } else { &columns };
    table("Replays by time", columns, &rows)
}

/// A side's quartiles, and the width that Freedman and Diaconis' rule gives its bins: 2·IQR/∛n.
fn quartiles(times: &[f64]) -> Option<(f64, f64, f64)> {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |part: usize| sorted.get((sorted.len() * part / 4).min(sorted.len().saturating_sub(1))).copied();
    let (first, third) = (at(1)?, at(3)?);
    Some((first, third, 2.0 * (third - first) / (sorted.len() as f64).cbrt()))
}

/// The finer width of both sides. Far outliers go to the outermost bins, so that they do not leave one bar to all others.
fn bins(new: &[f64], old: &[f64]) -> histogram::Bins {
    let sides: Vec<(f64, f64, f64)> = [new, old].into_iter().filter_map(quartiles).collect();
    let reach = |(first, third, _): &(f64, f64, f64)| 4.0 * (third - first).max(third * 1e-4);
    let low = sides.iter().map(|side| side.0 - reach(side)).fold(f64::MAX, f64::min);
    let high = sides.iter().map(|side| side.1 + reach(side)).fold(0.0, f64::max);
    let (least, most) =
        new.iter().chain(old).fold((f64::MAX, 0.0_f64), |(l, m), us| (l.min(*us), m.max(*us)));
    let (start, end) = (least.max(low), most.min(high));
    let width = sides.iter().map(|side| side.2).filter(|width| *width > 0.0).fold(f64::MAX, f64::min);
    let count = ((end - start) / width).ceil().clamp(8.0, 50.0);
    let width = ((end - start) / count).max(end * 2e-5);
    let count = count as usize;
    let fill = |times: &[f64]| {
        let mut counts = vec![0; count];
        for us in times {
            counts[(((us - start) / width).max(0.0) as usize).min(count - 1)] += 1;
        }
        counts
    };
    let old = if old.is_empty() { Vec::new() } else { fill(old) };
    histogram::Bins { start, width, new: fill(new), old }
}
