//! All cases under the ceilings of their device.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::gather::Book;
use super::layout::{beside, figure, number, table};
use super::picture::roofline::{Point, Roof, picture};
use super::{Options, text};
use crate::baseline::Sidecar;
use crate::measure::limits::Floors;

/// A case that has all that a roofline needs.
struct Case<'a> {
    id: String,
    link: String,
    sidecar: &'a Sidecar,
    floors: &'a Floors,
}

impl Case<'_> {
    fn intensity(&self) -> f64 {
        self.floors.flops / self.floors.bytes
    }

    /// FLOPs a second.
    fn rate(&self) -> f64 {
        self.floors.flops / self.sidecar.median_us * 1e6
    }

    /// What the ceilings of its own measurement allow, and whether that is memory's.
    fn bound(&self) -> (f64, bool) {
        let memory = self.intensity() * self.floors.ceilings.read_bytes_per_second;
        let compute = self.floors.ceilings.gemm_flops_per_second();
        (memory.min(compute), memory < compute)
    }
}

/// Quantities of work and rates that a logarithmic axis can show.
fn usable(floors: &Floors) -> bool {
    let ceilings = &floors.ceilings;
    [floors.bytes, floors.flops, ceilings.read_bytes_per_second, ceilings.gemm_flops_per_second()]
        .into_iter()
        .all(|value| (1.0..1e30).contains(&value))
}

/// A roofline for each device and type of weights.
pub fn section(book: &Book, options: &Options) -> Markup {
    let mut devices: BTreeMap<(&str, &str), Vec<Case<'_>>> = BTreeMap::new();
    let (mut without, mut old) = (0, 0);
    for benchmark in &book.benchmarks {
        let Some((_, sidecar)) = benchmark.current() else { continue };
        match &sidecar.around.floors {
            None => without += 1,
            Some(floors) if !usable(floors) => old += 1,
            Some(floors) => {
                let configuration = &sidecar.configuration;
                let key = (configuration.device.as_str(), configuration.dtype.as_str());
                let case = Case { id: benchmark.id(), link: text::href(&benchmark.page()), sidecar, floors };
                devices.entry(key).or_default().push(case);
            }
        }
    }
    html! {
        @for ((device, dtype), cases) in &devices { (roofline(&format!("{device}, {dtype}"), cases, options)) }
        @if without > 0 {
            p.note {
                (without) @if without == 1 { " case has" } @else { " cases have" }
                " no place in it: the ceilings of the device (read bandwidth, rate of a matrix product) are not measured, \
                 as on a CPU, or there was no room to measure them."
            }
        }
        @if old > 0 {
            p.note { (old) " of an earlier version, which did not keep bytes and FLOPs: measure again to see them here." }
        }
    }
}

fn roofline(title: &str, cases: &[Case<'_>], options: &Options) -> Markup {
    let most = |of: &dyn Fn(&Floors) -> f64| cases.iter().map(|case| of(case.floors)).fold(0.0, f64::max);
    let roof = Roof {
        bytes: most(&|floors| floors.ceilings.read_bytes_per_second),
        flops: most(&|floors| floors.ceilings.gemm_flops_per_second()),
    };
    let points: Vec<Point> = cases
        .iter()
        .enumerate()
        .map(|(at, case)| Point { number: at + 1, intensity: case.intensity(), rate: case.rate() })
        .collect();
    let caption = format!(
        "{title}. The roof is what was measured beside the cases, at its highest: {}B/s read, {}FLOP/s in a large matrix product. Numbers are those of the table.",
        text::si(roof.bytes),
        text::si(roof.flops)
    );
    let alternative =
        format!("Roofline of {} cases; the table below has the numbers. {caption}", cases.len());
    let rows: Vec<Markup> = cases.iter().enumerate().map(|(at, case)| row(at + 1, case)).collect();
    let columns = [
        ("No.", true),
        ("Case", false),
        ("Reached/allowed", true),
        ("Bound by", false),
        ("FLOP/byte", true),
        ("Reached, FLOP/s", true),
        ("Allowed, FLOP/s", true),
        ("FLOP", true),
        ("Bytes", true),
    ];
    beside(
        &figure(&alternative, &caption, options.pictures.then(|| picture(&points, roof))),
        &table(&format!("Roofline: {title}"), &columns, &rows),
    )
}

fn row(at: usize, case: &Case<'_>) -> Markup {
    let (bound, memory) = case.bound();
    let share = case.rate() / bound;
    let si = |value: f64| number(value, &text::si(value));
    html! {
        (number(at as f64, &at.to_string()))
        th scope="row" { a href=(case.link) { (case.id) } }
        (number(share, &format!("{share:.3}")))
        td { @if memory { "memory" } @else { "matrix product" } }
        (number(case.intensity(), &format!("{:.1}", case.intensity())))
        (si(case.rate()))
        (si(bound))
        (si(case.floors.flops))
        (si(case.floors.bytes))
    }
}
