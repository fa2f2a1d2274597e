//! How often which time was measured, on one side or both.

use plotters::prelude::*;

use super::{Drawn, Marks, NEW, OLD, at_tick, chart, draw, line, ticks};

/// Counts of a side's replays in bins of equal width.
pub struct Bins {
    /// Where the first bin begins, in microseconds.
    pub start: f64,
    /// Width of a bin in microseconds.
    pub width: f64,
    /// Of the new side.
    pub new: Vec<usize>,
    /// Of the old side; empty if it is not there any more.
    pub old: Vec<usize>,
}

/// Bars for the new side, an outline for the old one; both as shares, so that unlike numbers of replays compare.
pub fn picture(bins: &Bins) -> Drawn {
    let share = |counts: &[usize]| -> Vec<f64> {
        let all = counts.iter().sum::<usize>().max(1) as f64;
        counts.iter().map(|count| *count as f64 / all * 100.0).collect()
    };
    let (new, old) = (share(&bins.new), share(&bins.old));
    let top = new.iter().chain(&old).fold(1.0_f64, |top, share| top.max(*share)) * 1.05;
    let edge = |at: usize| bins.start + at as f64 * bins.width;
    draw((480, 240), |root| {
        let (x, y) = (bins.start..edge(bins.new.len()), 0.0..top);
        let (x_ticks, y_ticks) = (ticks(&x, 5.0), ticks(&y, 4.0));
        let mut chart = chart(
            root,
            ("share of replays, %", "time, µs"),
            Marks { range: x, ticks: x_ticks.clone(), label: &|at| at_tick(*at, &x_ticks) },
            Marks { range: y, ticks: y_ticks.clone(), label: &|at| at_tick(*at, &y_ticks) },
        )?;
        let bar = |(at, share): (usize, &f64)| {
            Rectangle::new([(edge(at), 0.0), (edge(at + 1), *share)], NEW.1.mix(0.55).filled())
        };
        chart.draw_series(new.iter().enumerate().filter(|(_, share)| **share > 0.0).map(bar))?;
        if !old.is_empty() {
            let corners = |(at, share): (usize, &f64)| [(edge(at), *share), (edge(at + 1), *share)];
            let mut outline = vec![(edge(0), 0.0)];
            outline.extend(old.iter().enumerate().flat_map(corners));
            outline.push((edge(old.len()), 0.0));
            chart.draw_series([PathElement::new(outline, line(OLD, 2))])?;
        }
        Ok(())
    })
}
