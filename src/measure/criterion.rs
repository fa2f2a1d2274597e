//! Criterion: our measurement, and a group of benchmarks whose closures replay a prepared case.
//!
//! The only module that names the criterion crate. How Criterion calls a closure shapes it: the warm-up calls it with 1, 2, 4, …
//! iterations until its time is up, then `sample_size` calls of equally many iterations are measured. Nothing tells the two
//! apart from inside, so every call is noted, and the measured ones are the last `sample_size`.

use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};

use crate::backend::Replay;
use crate::units::{Nanos, Tokens};

/// The in-graph interval of a step, in nanoseconds: what critcmp and other readers of Criterion's files expect.
#[derive(Debug, Clone, Copy, Default)]
pub struct GraphEventTime;

impl Measurement for GraphEventTime {
    type Intermediate = ();
    type Value = Nanos;

    fn start(&self) {}

    fn end(&self, (): ()) -> Nanos {
        Nanos::default()
    }

    fn add(&self, a: &Nanos, b: &Nanos) -> Nanos {
        *a + *b
    }

    fn zero(&self) -> Nanos {
        Nanos::default()
    }

    fn to_f64(&self, value: &Nanos) -> f64 {
        value.0
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &Format
    }
}

/// Times as Criterion's wall clock prints them; throughput as query tokens per second.
#[derive(Debug, Clone, Copy)]
struct Format;

impl ValueFormatter for Format {
    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_values(typical, values)
    }

    fn scale_throughputs(&self, typical: f64, throughput: &Throughput, values: &mut [f64]) -> &'static str {
        let Throughput::Elements(tokens) = throughput else {
            return WallTime.formatter().scale_throughputs(typical, throughput, values);
        };
        let per_second = |nanos: f64| *tokens as f64 * 1e9 / nanos;
        let (divisor, unit) = match per_second(typical) {
            rate if rate < 1e3 => (1.0, " tok/s"),
            rate if rate < 1e6 => (1e3, "ktok/s"),
            _ => (1e6, "Mtok/s"),
        };
        for value in values {
            *value = per_second(*value) / divisor;
        }
        unit
    }

    fn scale_for_machines(&self, _values: &mut [f64]) -> &'static str {
        "ns"
    }
}

/// Replays shorter than this are cheap, and their mean can move several-fold in a short warm-up.
const SHORT: Duration = Duration::from_millis(5);

/// How Criterion is to sample a case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Criterion samples, at least 10.
    pub sample_size: usize,
    /// Criterion's own warm-up.
    pub warm_up: Duration,
    /// What Criterion derives the replays of a sample from.
    pub measurement: Duration,
}

impl Sampling {
    /// Enough for `replays` replays of `wall` each in samples of equally many, at least two a sample, or eight of short ones:
    /// Criterion warns about samples of one. It takes ceil(measurement / samples / mean wall time of its own warm-up), so
    /// aiming at half a replay less than a whole number leaves the most room for a mean that moves.
    #[must_use]
    pub fn of(replays: u64, sample_size: usize, warm_up: Duration, wall: Duration) -> Self {
        let least = if wall < SHORT { 8 } else { 2 };
        let a_sample = replays.div_ceil(sample_size as u64).max(least);
        let measurement =
            wall.max(Duration::from_nanos(1)).mul_f64((a_sample as f64 - 0.5) * sample_size as f64);
        Self { sample_size, warm_up, measurement }
    }
}

/// One call of a closure by Criterion.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The replays that it made.
    pub replays: Vec<Replay>,
}

/// Criterion, set up from the process's command line.
pub struct Harness(Criterion<GraphEventTime>);

impl Harness {
    /// Reads the command line that Criterion knows.
    #[must_use]
    pub fn from_process_arguments() -> Self {
        Self(Criterion::default().with_measurement(GraphEventTime).configure_from_args())
    }

    /// Starts a group of benchmarks.
    pub fn group(&mut self, name: &str) -> Group<'_> {
        let mut group = self.0.benchmark_group(name);
        group.sampling_mode(SamplingMode::Flat);
        Group(group)
    }

    /// Writes the index of all reports.
    pub fn finish(&self) {
        self.0.final_summary();
    }
}

/// A group of benchmarks: the cases of one shape file.
pub struct Group<'a>(BenchmarkGroup<'a, GraphEventTime>);

impl Group<'_> {
    /// Registers a case and lets Criterion run it, if its mode and filter say so; returns every call that it made.
    ///
    /// `replay` makes so many replays; once it has failed, `None`, it is not called again.
    pub fn bench(
        &mut self,
        (model, case): (&str, &str),
        tokens: Tokens,
        sampling: Option<Sampling>,
        mut replay: impl FnMut(u64) -> Option<Vec<Replay>>,
    ) -> Vec<Call> {
        if let Some(Sampling { sample_size, warm_up, measurement }) = sampling {
            self.0.sample_size(sample_size).warm_up_time(warm_up).measurement_time(measurement);
        }
        self.0.throughput(Throughput::Elements(tokens.0));
        let mut calls: Vec<Call> = Vec::new();
        let mut failed = false;
        self.0.bench_function(BenchmarkId::new(model, case), |bencher| {
            bencher.iter_custom(|n| {
                let replays = if failed { None } else { replay(n) };
                let Some(replays) = replays else {
                    failed = true;
                    return Nanos(n as f64 * (1.0 + calls.len() as f64));
                };
                let sum = distinct(&replays, calls.len());
                calls.push(Call { replays });
                sum
            });
        });
        calls
    }

    /// Writes the group's summary.
    pub fn finish(self) {
        self.0.finish();
    }
}

/// The sum of a call's intervals, made distinct by a relative 10⁻⁹ a call: Criterion's density estimate panics on samples
/// that are all equal, which event times in steps of 32 ns can be.
fn distinct(replays: &[Replay], call: usize) -> Nanos {
    let sum: Nanos = replays.iter().map(|replay| replay.time).sum();
    Nanos(sum.0.max(1e-3) * (1.0 + call as f64 * 1e-9))
}

/// The replays of the last `sample_size` calls: those that Criterion measured.
#[must_use]
pub fn measured(calls: &[Call], sample_size: usize) -> Vec<Replay> {
    let first = calls.len().saturating_sub(sample_size);
    calls[first..].iter().flat_map(|call| call.replays.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replay(nanos: f64) -> Replay {
        Replay { time: Nanos(nanos), clock_mhz: None }
    }

    #[test]
    fn a_sample_has_two_replays_or_more() {
        let wall = Duration::from_millis(10);
        let sampling = Sampling::of(100, 10, Duration::from_millis(500), wall);
        assert_eq!(sampling.measurement, Duration::from_millis(950));
        let sampling = Sampling::of(1, 10, Duration::from_millis(500), wall);
        assert_eq!(sampling.measurement, Duration::from_millis(150));
    }

    #[test]
    fn criterions_rule_turns_the_aim_into_the_count() {
        for (replays, samples, wall_us) in [(100, 10, 43_000), (100, 10, 17), (7, 10, 5), (1000, 50, 900)] {
            let wall = Duration::from_micros(wall_us);
            let sampling = Sampling::of(replays, samples, Duration::ZERO, wall);
            let per_sample = sampling.measurement.as_secs_f64() / samples as f64 / wall.as_secs_f64();
            let least = if wall_us < 5_000 { 8 } else { 2 };
            assert_eq!(per_sample.ceil() as u64, replays.div_ceil(samples as u64).max(least));
        }
    }

    #[test]
    fn only_the_last_calls_were_measured() {
        let calls: Vec<Call> =
            [1.0, 2.0, 3.0].iter().map(|&time| Call { replays: vec![replay(time); 2] }).collect();
        let times: Vec<f64> = measured(&calls, 2).iter().map(|replay| replay.time.0).collect();
        assert_eq!(times, [2.0, 2.0, 3.0, 3.0]);
        assert_eq!(measured(&calls, 10).len(), 6);
    }

    #[test]
    fn equal_times_reach_criterion_as_unequal_ones() {
        let same = [replay(1_280.0)];
        assert!(distinct(&same, 0) < distinct(&same, 1));
        assert!(distinct(&[replay(0.0)], 3).0 > 0.0);
    }

    #[test]
    fn throughput_is_in_tokens_a_second() {
        let text = Format.format_throughput(&Throughput::Elements(64), 2e6);
        assert_eq!(text, "32.000 ktok/s");
        assert_eq!(Format.format_value(43_210_000.0), "43.210 ms");
    }
}
