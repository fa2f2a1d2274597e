//! The lines about a case's floors, clock, power, heat and neighbours.

use super::sidecar::Measured;
use crate::backend::{Replay, Sensors, Telemetry};
use crate::measure::clock_span;
use crate::measure::limits::{Floors, Surroundings};
use crate::stats::median;

/// Clocks that move by more than this are told of.
const CLOCK_LIMIT: f64 = 0.02;

/// Reads the sensors once, directly after the last timed sample: a reading takes long enough for a GPU to change its clock.
pub struct Reading {
    /// Criterion's measured calls, which all make equally many replays; those of its warm-up double.
    calls: usize,
    alike: usize,
    last: u64,
    /// What was read.
    pub telemetry: Option<Telemetry>,
}

impl Reading {
    /// Of a measurement of so many calls.
    pub fn new(calls: usize) -> Self {
        Self { calls, alike: 0, last: 0, telemetry: None }
    }

    /// To be told of each call and its replays.
    pub fn after_call(&mut self, replays: u64, sensors: Option<&Sensors>) {
        self.alike = if replays == self.last { self.alike + 1 } else { 1 };
        self.last = replays;
        if self.alike == self.calls {
            self.telemetry = sensors.map(|read| read());
        }
    }
}

/// One line with the numbers that there are, and one for each thing to be warned of.
pub fn lines(around: &Surroundings, median_us: f64, replays: &[Replay]) -> Vec<String> {
    let mut parts = Vec::new();
    if let Some(Floors { floor_us, serial_floor_us, .. }) = &around.floors {
        let share = floor_us / median_us;
        parts.push(format!("floor {floor_us:.1} µs, serial {serial_floor_us:.1}, floor/median {share:.3}"));
    }
    let clocks: Vec<f64> = replays.iter().filter_map(|replay| replay.clock_mhz).collect();
    parts.extend(median(&clocks).map(|clock| format!("SM clock {clock:.0} MHz")));
    if let Some(telemetry) = &around.telemetry {
        parts.extend(telemetry.power_w.map(|watts| format!("{watts:.0} W")));
        parts.extend(telemetry.temperature_c.map(|degrees| format!("{degrees} °C")));
    }
    let mut lines = if parts.is_empty() { Vec::new() } else { vec![parts.join(", ")] };
    lines.extend(warnings(around, replays).into_iter().map(|line| format!("warning: {line}")));
    lines
}

/// Each rank's median, how far they lay apart, and what they send; none of one rank.
pub fn of_ranks(measured: &Measured) -> Option<String> {
    let skew = measured.skew_us()?;
    let times = |replays: &Vec<Replay>| replays.iter().map(|replay| replay.time.micros()).collect::<Vec<_>>();
    let medians: Vec<String> = measured
        .ranks
        .iter()
        .filter_map(|replays| Some(format!("{:.1}", median(&times(replays))?)))
        .collect();
    let most = skew.iter().copied().fold(0.0, f64::max);
    Some(format!(
        "by rank: medians {} µs; skew (max − min of a replay): median {:.1} µs, most {most:.1}; a rank's traffic {}",
        medians.join(", "),
        median(&skew)?,
        measured.traffic.total()
    ))
}

fn warnings(around: &Surroundings, replays: &[Replay]) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(span) = clock_span(replays).filter(|span| *span > CLOCK_LIMIT) {
        lines.push(format!("the clock moved by {:.1} % while this was timed", span * 100.0));
    }
    if let Some((before, after)) = around.floors.as_ref().and_then(|floors| floors.ceilings.unlike()) {
        lines.push(format!(
            "a large matrix product ran at {before:.0} TFLOP/s before and {after:.0} after; the floor uses the mean"
        ));
    }
    let Some(Telemetry { throttled, other_processes, .. }) = &around.telemetry else { return lines };
    if !throttled.is_empty() {
        lines.push(format!("the clock was held back by: {}", throttled.join(", ")));
    }
    if !other_processes.is_empty() {
        lines.push(format!("others compute on this GPU: {}", other_processes.join(", ")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Nanos;

    fn replays(clocks: &[f64]) -> Vec<Replay> {
        clocks.iter().map(|&clock| Replay { time: Nanos(1.0), clock_mhz: Some(clock) }).collect()
    }

    #[test]
    fn a_device_without_sensors_says_nothing() {
        let silent = [Replay { time: Nanos(1.0), clock_mhz: None }];
        assert!(lines(&Surroundings::default(), 1.0, &silent).is_empty());
    }

    #[test]
    fn the_sensors_are_read_after_the_last_sample_only() {
        let sensors: Sensors = Box::new(|| Telemetry { power_w: Some(1.0), ..Telemetry::default() });
        let mut reading = Reading::new(3);
        for replays in [1, 2, 4, 8, 10, 10] {
            reading.after_call(replays, Some(&sensors));
            assert_eq!(reading.telemetry, None);
        }
        reading.after_call(10, Some(&sensors));
        assert_eq!(reading.telemetry.and_then(|telemetry| telemetry.power_w), Some(1.0));
    }

    #[test]
    fn a_clock_that_moved_and_neighbours_are_named() {
        let telemetry = Telemetry {
            power_w: Some(500.0),
            other_processes: vec!["train (pid 7)".into()],
            ..Telemetry::default()
        };
        let around = Surroundings { telemetry: Some(telemetry), ..Surroundings::default() };
        let lines = lines(&around, 1.0, &replays(&[1000.0, 1025.0]));
        assert_eq!(lines[0], "SM clock 1012 MHz, 500 W");
        assert!(lines[1].starts_with("warning: the clock moved by 2.5 %"), "{lines:?}");
        assert!(lines[2].ends_with("train (pid 7)"), "{lines:?}");
    }
}
