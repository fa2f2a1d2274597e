//! How far apart the ranks of a measurement are.

use maud::{Markup, html};

use super::layout::{beside, figure, maybe, number, table};
use super::picture::skew;
use super::{Options, text};
use crate::baseline::{Run, Sidecar};
use crate::stats::median;

/// Slowest less fastest rank of each replay in microseconds; empty for one rank.
pub fn skews(sidecar: &Sidecar) -> Vec<f64> {
    let of = |run: &Run| -> Vec<f64> {
        let replays = run.ranks.iter().map(|rank| rank.samples_us.len()).min().unwrap_or_default();
        let at = |replay: usize| run.ranks.iter().map(move |rank| rank.samples_us[replay]);
        let extent =
            |replay| at(replay).fold((f64::MAX, f64::MIN), |(low, high), us| (low.min(us), high.max(us)));
        (0..replays).map(extent).map(|(low, high)| high - low).collect()
    };
    let several = sidecar.runs.iter().all(|run| run.ranks.len() > 1);
    if several { sidecar.runs.iter().flat_map(of).collect() } else { Vec::new() }
}

/// How far apart the ranks are.
pub fn section(sidecar: &Sidecar, options: &Options) -> Markup {
    let skews = skews(sidecar);
    let Some(middle) = median(&skews) else {
        return html! { p.note { "One rank measured this: there is nothing to be skewed." } };
    };
    let worst = skews.iter().copied().fold(0.0, f64::max);
    let caption = format!(
        "Slowest less fastest rank of each replay: median {} µs, at most {} µs.",
        text::micros(middle),
        text::micros(worst)
    );
    beside(&figure(&caption, &caption, options.pictures.then(|| skew::picture(&skews))), &table_of(sidecar))
}

fn table_of(sidecar: &Sidecar) -> Markup {
    let count = sidecar.runs.iter().map(|run| run.ranks.len()).max().unwrap_or_default();
    let row = |rank: usize| {
        let (mut times, mut clocks, mut slowest, mut all) = (Vec::new(), Vec::new(), 0, 0);
        for run in &sidecar.runs {
            let Some(own) = run.ranks.get(rank) else { continue };
            times.extend(&own.samples_us);
            clocks.extend(own.clock_mhz.iter().flatten());
            for (replay, us) in own.samples_us.iter().enumerate() {
                let others = run.ranks.iter().filter_map(|other| other.samples_us.get(replay));
                slowest += usize::from(others.into_iter().all(|other| other <= us));
                all += 1;
            }
        }
        let share = slowest as f64 / f64::from(u32::try_from(all).unwrap_or(u32::MAX).max(1)) * 100.0;
        html! {
            th scope="row" data-value=(rank) { (rank) }
            (maybe(median(&times).map(|us| (us, text::micros(us)))))
            (number(share, &format!("{share:.0} %")))
            (maybe(median(&clocks).map(|mhz| (mhz, format!("{mhz:.0}")))))
        }
    };
    let rows: Vec<Markup> = (0..count).map(row).collect();
    let columns = [("Rank", true), ("Median, µs", true), ("Slowest in", true), ("Clock, MHz", true)];
    table("Ranks, over all runs", &columns, &rows)
}
