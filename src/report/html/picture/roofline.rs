//! All cases of a device under what its memory and its matrix units allow.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::super::text;
use super::{Drawn, INK, Marks, NEW, QUIET, SCALE, chart, draw, font, line};

/// A case.
pub struct Point {
    /// Its number in the table.
    pub number: usize,
    /// FLOPs a byte.
    pub intensity: f64,
    /// FLOPs a second.
    pub rate: f64,
}

/// The ceilings, the highest that any case's measurement saw.
#[derive(Clone, Copy)]
pub struct Roof {
    /// Bytes a second.
    pub bytes: f64,
    /// FLOPs a second.
    pub flops: f64,
}

/// Both axes are logarithms; the roof bends where reading and computing take equally long.
pub fn picture(points: &[Point], roof: Roof) -> Drawn {
    let ridge = roof.flops / roof.bytes;
    let x = decades(points.iter().map(|point| point.intensity).chain([ridge * 4.0, ridge / 4.0]));
    let y = decades(points.iter().map(|point| point.rate).chain([roof.flops * 1.3]));
    draw((480, 330), |root| {
        let mut chart = chart(
            root,
            ("reached, FLOP/s", "FLOP a byte read"),
            Marks { range: x.clone(), ticks: marks(&x), label: &|at| text::si_tick(10_f64.powf(*at)) },
            Marks { range: y.clone(), ticks: marks(&y), label: &|at| text::si_tick(10_f64.powf(*at)) },
        )?;
        // From where memory's slope enters the picture to the ridge, then level.
        let slope = |at: f64| at + roof.bytes.log10();
        let start = x.start.max(y.start - roof.bytes.log10());
        let corners =
            vec![(start, slope(start)), (ridge.log10(), roof.flops.log10()), (x.end, roof.flops.log10())];
        chart.draw_series([PathElement::new(corners, line(INK, 2))])?;
        let level = format!("{}FLOP/s matrix product", text::si(roof.flops));
        let above = font(QUIET).pos(Pos::new(HPos::Right, VPos::Bottom));
        chart
            .draw_series([EmptyElement::at((x.end, roof.flops.log10()))
                + Text::new(level, (-4 * SCALE, -5 * SCALE), above)])?;
        let slanted = format!("{}B/s read", text::si(roof.bytes));
        let middle = start + (ridge.log10() - start) * 0.75;
        let beside = font(QUIET).pos(Pos::new(HPos::Right, VPos::Bottom));
        chart
            .draw_series([EmptyElement::at((middle, slope(middle)))
                + Text::new(slanted, (-6 * SCALE, -4 * SCALE), beside)])?;
        let place = |point: &Point| (point.intensity.log10(), point.rate.log10());
        chart.draw_series(
            points.iter().map(|point| Circle::new(place(point), 4 * SCALE, NEW.1.mix(0.85).filled())),
        )?;
        let mut taken: Vec<(i32, i32)> =
            points.iter().map(|point| chart.backend_coord(&place(point))).collect();
        for point in points {
            let at = chart.backend_coord(&place(point));
            let Some((dx, dy)) = free(at, &taken) else { continue };
            taken.push((at.0 + dx, at.1 + dy));
            let number = font(INK).pos(Pos::new(HPos::Center, VPos::Center));
            chart.draw_series([
                EmptyElement::at(place(point)) + Text::new(point.number.to_string(), (dx, dy), number)
            ])?;
        }
        Ok(())
    })
}

/// A place for a number beside its point that no other point or number is in; none if all are taken.
fn free(at: (i32, i32), taken: &[(i32, i32)]) -> Option<(i32, i32)> {
    let places = [(13, 5), (-13, 5), (0, 15), (13, -9), (-13, -9), (13, 17), (-13, 17), (26, 5), (0, 27)];
    let clear = |(dx, dy): &(i32, i32)| {
        let (x, y) = (at.0 + dx, at.1 + dy);
        taken.iter().all(|other| (other.0 - x).abs() > 9 * SCALE || (other.1 - y).abs() > 8 * SCALE)
    };
    places.map(|(dx, dy)| (dx * SCALE, dy * SCALE)).into_iter().find(clear)
}

/// Logarithms of the range of positive values, a quarter of a decade wider on each side.
fn decades(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let logs = values.map(f64::log10).filter(|log| log.is_finite());
    let (low, high) = logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
    if low > high { 0.0..1.0 } else { low - 0.25..high + 0.25 }
}

/// Powers of ten, and twice and five times them where there are few.
fn marks(range: &std::ops::Range<f64>) -> Vec<f64> {
    let times: &[f64] = if range.end - range.start < 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let powers = (range.start.floor() as i32)..=(range.end.ceil() as i32);
    let all = powers.flat_map(|power| times.iter().map(move |times| f64::from(power) + times.log10()));
    all.filter(|at| range.contains(at)).collect()
}
