//! How far apart the ranks were in each replay.

use plotters::prelude::*;

use super::replays::MAX_POINTS;
use super::{Drawn, Marks, NEW, SCALE, at_tick, chart, draw, line, range, ticks};

/// The difference of the slowest and the fastest rank in microseconds, replay by replay.
pub fn picture(skews: &[f64]) -> Drawn {
    draw((480, 220), |root| {
        let x = 0.0..skews.len() as f64 + 1.0;
        let y = 0.0..range(skews.iter().copied()).end.max(1e-3);
        let (x_ticks, y_ticks) = (ticks(&x, 6.0), ticks(&y, 4.0));
        let mut chart = chart(
            root,
            ("slowest − fastest rank, µs", "replay"),
            Marks { range: x, ticks: x_ticks, label: &|at| format!("{at:.0}") },
            Marks { range: y, ticks: y_ticks.clone(), label: &|at| at_tick(*at, &y_ticks) },
        )?;
        if skews.len() <= MAX_POINTS {
            let stem = |(at, skew): (usize, &f64)| {
                let x = at as f64 + 1.0;
                PathElement::new(vec![(x, 0.0), (x, *skew)], line(NEW, 1))
            };
            chart.draw_series(skews.iter().enumerate().map(stem))?;
            let dot =
                |(at, skew): (usize, &f64)| Circle::new((at as f64 + 1.0, *skew), 2 * SCALE, NEW.1.filled());
            chart.draw_series(skews.iter().enumerate().map(dot))?;
            return Ok(());
        }
        let size = skews.len().div_ceil(MAX_POINTS / 4);
        let worst = skews.chunks(size).map(|some| some.iter().copied().fold(0.0, f64::max)).enumerate();
        let stem = |(at, skew): (usize, f64)| {
            let x = (at * size) as f64 + 1.0;
            PathElement::new(vec![(x, 0.0), (x, skew)], line(NEW, 1))
        };
        chart.draw_series(worst.map(stem))?;
        Ok(())
    })
}
