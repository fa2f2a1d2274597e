//! Medians of all saved baselines, in the order of their commits.

use plotters::prelude::*;

use super::{Drawn, INK, Marks, NEW, OTHER, QUIET, SCALE, at_tick, chart, draw, font, line, range, ticks};

/// One measurement.
pub struct Point {
    /// Median in microseconds.
    pub median: f64,
    /// The least and the largest of its samples' medians.
    pub low: f64,
    /// See `low`.
    pub high: f64,
    /// What is written beside it; nothing for most.
    pub label: String,
    /// Whether it was measured on what the last measurement was; others are drawn hollow and not connected.
    pub alike: bool,
}

/// A line of medians with ranges; points are numbered as in the table.
pub fn picture(points: &[Point]) -> Drawn {
    draw((480, 250), |root| {
        let x = 0.5..points.len() as f64 + 0.5;
        let y = range(points.iter().flat_map(|point| [point.low, point.high, point.median]));
        let y = y.start..y.end + (y.end - y.start) * 0.12; // room for labels
        let x_ticks: Vec<f64> = ticks(&x, 10.0).into_iter().filter(|at| at.fract() == 0.0).collect();
        let y_ticks = ticks(&y, 4.0);
        let mut chart = chart(
            root,
            ("median, µs", "number in the table"),
            Marks { range: x, ticks: x_ticks, label: &|at| format!("{at:.0}") },
            Marks { range: y, ticks: y_ticks.clone(), label: &|at| at_tick(*at, &y_ticks) },
        )?;
        let at = |at: usize| at as f64 + 1.0;
        let numbered = || points.iter().enumerate();
        let connected: Vec<_> =
            numbered().filter(|(_, point)| point.alike).map(|(n, point)| (at(n), point.median)).collect();
        chart.draw_series([PathElement::new(connected, NEW.1.mix(0.5).stroke_width(3))])?;
        let bars = numbered().map(|(n, point)| {
            PathElement::new(
                vec![(at(n), point.low), (at(n), point.high)],
                line(if point.alike { NEW } else { OTHER }, 1),
            )
        });
        chart.draw_series(bars)?;
        for (n, point) in numbered() {
            let style = if point.alike { NEW.1.filled() } else { line(OTHER, 1) };
            chart.draw_series([Circle::new((at(n), point.median), 4 * SCALE, style)])?;
            let colour = if point.alike { INK } else { QUIET };
            let anchor = plotters::style::text_anchor::Pos::new(
                plotters::style::text_anchor::HPos::Center,
                plotters::style::text_anchor::VPos::Bottom,
            );
            let label = EmptyElement::at((at(n), point.high.max(point.median)))
                + Text::new(point.label.clone(), (0, -7 * SCALE), font(colour).pos(anchor));
            chart.draw_series([label])?;
        }
        Ok(())
    })
}
