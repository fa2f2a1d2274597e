//! Replays in the order in which they were measured, and the clock under them.

use plotters::prelude::*;

use super::{
    Area, Chart, Colour, Drawn, Marks, NEW, OLD, Part, QUIET, SCALE, at_tick, chart, draw, font, line, range,
    ticks,
};
use crate::stats::median;

/// More replays than this are drawn as ranges of neighbours: a picture must not weigh megabytes.
pub const MAX_POINTS: usize = 1200;

/// Neighbours that are drawn as one range, in all.
const RANGES: usize = 300;

/// What is drawn.
pub struct Series<'a> {
    /// Times in microseconds, all runs one after the other.
    pub times: &'a [f64],
    /// The clock over each in MHz; empty where it cannot be read.
    pub clocks: &'a [f64],
    /// Where each run begins.
    pub starts: &'a [usize],
    /// The median of all.
    pub median: f64,
}

/// Times above, clocks below.
pub fn picture(series: &Series<'_>) -> Drawn {
    let clocked = !series.clocks.is_empty();
    draw((480, if clocked { 340 } else { 240 }), |root| {
        if !clocked {
            return panel(root, ("time, µs", "replay"), series.times, NEW, series);
        }
        let (above, below) = root.split_vertically(210 * SCALE);
        panel(&above, ("time, µs", ""), series.times, NEW, series)?;
        panel(&below, ("clock, MHz", "replay"), series.clocks, OLD, series)
    })
}

fn panel<'a>(
    area: &Area<'a>,
    titles: (&str, &str),
    values: &[f64],
    colour: Colour,
    series: &Series<'_>,
) -> Part {
    let y = range(values.iter().copied());
    let x = 0.0..series.times.len() as f64 + 1.0;
    let (x_ticks, y_ticks) = (ticks(&x, 6.0), ticks(&y, 4.0));
    let mut chart = chart(
        area,
        titles,
        Marks { range: x.clone(), ticks: x_ticks, label: &|at| format!("{at:.0}") },
        Marks { range: y.clone(), ticks: y_ticks.clone(), label: &|at| at_tick(*at, &y_ticks) },
    )?;
    for (run, start) in series.starts.iter().enumerate().filter(|_| series.starts.len() > 1) {
        let at = *start as f64 + 0.5;
        chart.draw_series([PathElement::new(vec![(at, y.start), (at, y.end)], line(QUIET, 1))])?;
        let label =
            EmptyElement::at((at, y.end)) + Text::new((run + 1).to_string(), (4 * SCALE, SCALE), font(QUIET));
        chart.draw_series([label])?;
    }
    if colour.0 == NEW.0 {
        let level = vec![(x.start, series.median), (x.end, series.median)];
        chart.draw_series([PathElement::new(level, line(QUIET, 1))])?;
    }
    points(&mut chart, values, colour)
}

fn points(chart: &mut Chart<'_>, values: &[f64], colour: Colour) -> Part {
    if values.len() <= MAX_POINTS {
        let at = |(at, value): (usize, &f64)| {
            Circle::new((at as f64 + 1.0, *value), 2 * SCALE, colour.1.mix(0.6).filled())
        };
        chart.draw_series(values.iter().enumerate().map(at))?;
        return Ok(());
    }
    let size = values.len().div_ceil(RANGES);
    for (at, some) in values.chunks(size).enumerate() {
        let x = (at * size) as f64 + some.len() as f64 / 2.0 + 0.5;
        let (low, high) =
            some.iter().fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(*v), high.max(*v)));
        let range = colour.1.mix(0.35).stroke_width(SCALE.unsigned_abs());
        chart.draw_series([PathElement::new(vec![(x, low), (x, high)], range)])?;
        let middle = median(some).unwrap_or(low);
        chart.draw_series([Circle::new((x, middle), 3, colour.1.filled())])?;
    }
    Ok(())
}
