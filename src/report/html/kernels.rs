//! Which kernels the time goes to, on both sides.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::gather::Benchmark;
use super::layout::{beside, details, figure, maybe, number, table_with_sums};
use super::picture::{KERNEL_COLOURS, kernel_variable, kernels};
use super::{Options, text};
use crate::baseline::Sidecar;
use crate::profile::{KernelTime, Profile};

/// A kernel on both sides.
struct Pair<'a> {
    name: &'a str,
    old: Option<&'a KernelTime>,
    new: Option<&'a KernelTime>,
}

impl Pair<'_> {
    fn longest(&self) -> f64 {
        [self.old, self.new].into_iter().flatten().map(|kernel| kernel.us).fold(0.0, f64::max)
    }
}

/// A figure of a whole profile and its title.
type Total = (&'static str, fn(&Profile) -> f64);

/// Both sides' profiles and what they are called.
struct Sides<'a> {
    new: &'a [Profile],
    old: &'a [Profile],
    new_name: String,
    old_name: Option<String>,
}

/// The section on kernels.
pub fn section(benchmark: &Benchmark, (name, sidecar): (&str, &Sidecar), options: &Options) -> Markup {
    let compared = sidecar.compared.as_ref();
    let sides = Sides {
        new: &sidecar.profiles,
        old: compared.map(|compared| benchmark.old_profiles(compared)).unwrap_or_default(),
        new_name: text::side(name, sidecar.commit.as_deref(), &sidecar.date),
        old_name: compared.map(|side| text::side(&side.baseline, side.commit.as_deref(), &side.date)),
    };
    if sides.new.is_empty() {
        return html! { p.note {
            "No kernels were traced. " code { "--profile-dir DIR" } " traces them after all timing is done, on a device that can."
        } };
    }
    let ranks: Vec<Vec<Pair<'_>>> = (0..sides.new.len()).map(|rank| pairs(&sides, rank)).collect();
    let caption = match (&sides.old_name, sides.old.is_empty()) {
        (Some(old), false) => {
            format!("Below: {}. Above: {old}. The outline is time in which no kernel ran.", sides.new_name)
        }
        (Some(old), true) => format!("{}. There is no trace of the other side, {old}.", sides.new_name),
        (None, _) => format!("{}. It was compared with nothing.", sides.new_name),
    };
    let alternative = format!("Stacked bars of kernel times; the table below has the numbers. {caption}");
    let bars = || kernels::picture(&bars(&sides, &ranks));
    let tables = html! {
        @for (rank, pairs) in ranks.iter().enumerate() {
            @if rank == 0 { (kernel_table(&sides, rank, pairs)) }
            @else { (details(&format!("Kernels of rank {rank}"), &kernel_table(&sides, rank, pairs))) }
        }
    };
    beside(&figure(&alternative, &caption, options.pictures.then(bars)), &tables)
}

/// The kernels of a rank on both sides, the longest first.
fn pairs<'a>(sides: &Sides<'a>, rank: usize) -> Vec<Pair<'a>> {
    let mut named: BTreeMap<&str, Pair<'a>> = BTreeMap::new();
    let kernels = |profiles: &'a [Profile]| {
        profiles.get(rank).map(|profile| profile.kernels.as_slice()).unwrap_or_default()
    };
    for kernel in kernels(sides.old) {
        named.entry(&kernel.name).or_insert(Pair { name: &kernel.name, old: None, new: None }).old =
            Some(kernel);
    }
    for kernel in kernels(sides.new) {
        named.entry(&kernel.name).or_insert(Pair { name: &kernel.name, old: None, new: None }).new =
            Some(kernel);
    }
    let mut pairs: Vec<Pair<'a>> = named.into_values().collect();
    pairs.sort_by(|a, b| b.longest().total_cmp(&a.longest()));
    pairs
}

fn bars(sides: &Sides<'_>, ranks: &[Vec<Pair<'_>>]) -> Vec<kernels::Bar> {
    let mut bars = Vec::new();
    for (rank, pairs) in ranks.iter().enumerate() {
        let of_rank = if ranks.len() > 1 { format!("rank {rank}, ") } else { String::new() };
        for (profiles, name, is_old) in
            [(sides.old, sides.old_name.as_deref(), true), (sides.new, Some(sides.new_name.as_str()), false)]
        {
            let (Some(profile), Some(name)) = (profiles.get(rank), name) else { continue };
            let us =
                |pair: &Pair<'_>| if is_old { pair.old } else { pair.new }.map_or(0.0, |kernel| kernel.us);
            let mut parts: Vec<f64> = pairs.iter().take(KERNEL_COLOURS).map(us).collect();
            parts.resize(KERNEL_COLOURS, 0.0);
            parts.push(pairs.iter().skip(KERNEL_COLOURS).map(us).sum());
            let label = format!("{of_rank}{name}: {} µs", text::micros(profile.span_us));
            bars.push(kernels::Bar { label, parts, span: profile.span_us });
        }
    }
    bars
}

fn kernel_table(sides: &Sides<'_>, rank: usize, pairs: &[Pair<'_>]) -> Markup {
    let row = |(at, pair): (usize, &Pair<'_>)| {
        let us = |kernel: Option<&KernelTime>| kernel.map(|kernel| (kernel.us, text::micros(kernel.us)));
        let calls = |kernel: Option<&KernelTime>| {
            kernel.map_or("–".to_owned(), |kernel| format!("{:.0}", kernel.calls))
        };
        let colour = kernel_variable(Some(at));
        html! {
            th scope="row" {
                span.swatch style={ "background:" (colour) } {} " "
                span.kernel title=[pair.new.or(pair.old).map(|kernel| &kernel.example)] { (pair.name) }
            }
            @if !sides.old.is_empty() { (maybe(us(pair.old))) }
            (maybe(us(pair.new)))
            @if !sides.old.is_empty() { (difference(pair.old.map(|kernel| kernel.us), pair.new.map(|kernel| kernel.us))) }
            td.n data-value=(pair.new.map_or(0.0, |kernel| kernel.pct)) { (pair.new.map_or("–".to_owned(), |kernel| format!("{:.1}", kernel.pct))) }
            td.n data-value=(pair.new.map_or(0.0, |kernel| kernel.calls)) {
                @if !sides.old.is_empty() && calls(pair.old) != calls(pair.new) { (calls(pair.old)) " → " }
                (calls(pair.new))
            }
        }
    };
    let rows: Vec<Markup> = pairs.iter().enumerate().map(row).collect();
    let total = |profiles: &[Profile], of: fn(&Profile) -> f64| profiles.get(rank).map(of);
    let totals: [Total; 3] = [
        ("All kernels (busy)", |profile| profile.busy_us),
        ("First start to last end (span)", |profile| profile.span_us),
        ("Before the forward, not in it", |profile| profile.pre_forward_us),
    ];
    let mut sums = Vec::new();
    for (title, of) in totals {
        let (old, new) = (total(sides.old, of), total(sides.new, of));
        let cell = |us: Option<f64>| maybe(us.map(|us| (us, text::micros(us))));
        sums.push(html! {
            th scope="row" { (title) }
            @if !sides.old.is_empty() { (cell(old)) }
            (cell(new))
            @if !sides.old.is_empty() { (difference(old, new)) }
            td.n data-value="" {} td.n data-value="" {}
        });
    }
    let mut columns = vec![("Kernel", false), ("New, µs", true), ("% of busy", true), ("Calls", true)];
    if !sides.old.is_empty() {
        columns.insert(1, ("Old, µs", true));
        columns.insert(3, ("Difference, µs", true));
    }
    let of_rank = if sides.new.len() > 1 { format!("Kernels of rank {rank}") } else { "Kernels".to_owned() };
    let caption = match (&sides.old_name, sides.old.is_empty()) {
        (Some(old), false) => format!("{of_rank}. Old: {old}; new: {}", sides.new_name),
        _ => format!("{of_rank} of {}", sides.new_name),
    };
    table_with_sums(&caption, &columns, &rows, &sums)
}

/// What a kernel that is on one side only took is all of its difference.
fn difference(old: Option<f64>, new: Option<f64>) -> Markup {
    let difference = new.unwrap_or(0.0) - old.unwrap_or(0.0);
    let mut shown = format!("{difference:+.1}").replace('-', "−");
    match (old, new) {
        (Some(old), Some(_)) if old > 0.0 => {
            shown.push_str(&format!(" ({})", text::change(difference / old * 100.0)))
        }
        (None, Some(_)) => shown.push_str(" (only new)"),
        (Some(_), None) => shown.push_str(" (only old)"),
        _ => {}
    }
    number(difference, &shown)
}
