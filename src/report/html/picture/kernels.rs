//! Where the time of a forward goes: one stacked bar a side and rank.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Area, Drawn, GRID, INK, KERNELS, OTHER, Part, QUIET, SCALE, at_tick, draw, font, line, ticks};

/// One bar.
pub struct Bar {
    /// What it is of.
    pub label: String,
    /// Microseconds by kernel: first those with a colour of their own, in the order of the palette, then all others.
    pub parts: Vec<f64>,
    /// From the first kernel's start to the last one's end, in microseconds.
    pub span: f64,
}

const WIDTH: i32 = 480;
/// Height of a bar with its label above it.
const ROW: i32 = 57;

/// Bars below each other on one scale; the outline beyond a bar is time in which no kernel ran.
pub fn picture(bars: &[Bar]) -> Drawn {
    let height = ROW * i32::try_from(bars.len()).unwrap_or(1) + 26;
    let longest = |bar: &Bar| bar.parts.iter().sum::<f64>().max(bar.span);
    let end = bars.iter().map(longest).fold(1e-3, f64::max);
    draw((WIDTH.unsigned_abs(), height.unsigned_abs()), |root| {
        let x = |us: f64| (us / end * f64::from((WIDTH - 20) * SCALE)).round() as i32;
        axis(root, end, height * SCALE, &x)?;
        for (at, bar) in bars.iter().enumerate() {
            let top = i32::try_from(at).unwrap_or(0) * ROW * SCALE;
            row(root, bar, top, &x)?;
        }
        Ok(())
    })
}

fn axis(root: &Area<'_>, end: f64, bottom: i32, x: &dyn Fn(f64) -> i32) -> Part {
    let marks = ticks(&(0.0..end), 4.0);
    let base = bottom - 22 * SCALE;
    let below = Pos::new(HPos::Center, VPos::Top);
    for (at, us) in marks.iter().enumerate() {
        root.draw(&PathElement::new(vec![(x(*us), 20 * SCALE), (x(*us), base)], line(GRID, 1)))?;
        let pos = if at == 0 { Pos::new(HPos::Left, VPos::Top) } else { below };
        let unit = if at == 0 { " µs" } else { "" };
        let text = format!("{}{unit}", at_tick(*us, &marks));
        root.draw(&Text::new(text, (x(*us), base + 4 * SCALE), font(QUIET).pos(pos)))?;
    }
    Ok(())
}

fn row(root: &Area<'_>, bar: &Bar, top: i32, x: &dyn Fn(f64) -> i32) -> Part {
    root.draw(&Text::new(bar.label.clone(), (0, top), font(INK)))?;
    let (from, to) = (top + 20 * SCALE, top + 44 * SCALE);
    let mut start = 0.0;
    for (at, us) in bar.parts.iter().enumerate().filter(|(_, us)| **us > 0.0) {
        let colour = KERNELS.get(at).unwrap_or(&OTHER).1;
        let (left, right) = (x(start), x(start + us));
        start += us;
        // A hair's breadth of page between neighbours.
        let right = if right - left > 4 { right - SCALE } else { right };
        root.draw(&Rectangle::new([(left, from), (right, to)], colour.filled()))?;
    }
    if x(bar.span) > x(start) + SCALE {
        let corners = [(x(start), from), (x(bar.span), to)];
        root.draw(&Rectangle::new(corners, line(OTHER, 1)))?;
    }
    Ok(())
}
