//! The timing protocol: a short function of named steps over a [`Capture`], the same for every backend.

pub mod criterion;
pub mod limits;
pub mod loads;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::backend::{BackendError, Capture, Replay};
use crate::stats::{Difference, median};
use crate::units::Nanos;

/// What a prepared case must satisfy, and how long its warm-up may take.
#[derive(Debug, Clone, Copy)]
pub struct Protocol {
    /// Whether two eager runs must agree bit for bit (our own models); else a difference is only reported.
    pub exact_repeat: bool,
    /// Largest relative RMS between the recorded step and the eager one.
    pub graph_tolerance: f64,
    /// Warm-up ends once two windows of replays agree to this.
    pub steady: f64,
    /// Replays of the warm-up go on for at least this long; zero skips the warm-up.
    pub min_warm_up: Duration,
    /// The warm-up stops here even if times still drift.
    pub max_warm_up: Duration,
}

impl Protocol {
    /// For our own models on a backend whose steady replays differ by less than `steady`.
    #[must_use]
    pub fn own_models(steady: f64) -> Self {
        Self {
            exact_repeat: true,
            graph_tolerance: 1e-5,
            steady,
            min_warm_up: Duration::from_millis(300),
            max_warm_up: Duration::from_secs(3),
        }
    }

    /// The same checks without the warm-up, for a run that times nothing.
    #[must_use]
    pub fn without_warm_up(self) -> Self {
        Self { min_warm_up: Duration::ZERO, max_warm_up: Duration::ZERO, ..self }
    }
}

/// What the checks found, as `vllm bench forward` names it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Checks {
    /// Two eager runs from the same state.
    pub eager_repeat: Difference,
    /// The recorded step against the eager one.
    pub graph_vs_eager: Difference,
    /// Whether two replays gave the same bits.
    pub graph_deterministic: bool,
    /// Whether every output is finite.
    pub finite: bool,
    /// Bytes of state that are put back before each replay.
    pub state_reset_bytes: u64,
}

/// A case that is ready to be timed.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared {
    /// What the checks found.
    pub checks: Checks,
    /// Wall time of one replay, restoring and waiting included.
    pub wall: Duration,
    /// Whether the warm-up saw steady times before its limit.
    pub steady: bool,
}

/// What can go wrong while a case is measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A check of the protocol failed: the number would not mean what it says.
    #[error("check {name} failed: {found}; the case is not timed and nothing was saved")]
    Check {
        /// The check, as it is named in the results.
        name: &'static str,
        /// What was found.
        found: String,
    },
    /// The experts did something else than the routing asks for.
    #[error("check routing failed: {found}; nothing was saved")]
    Routing {
        /// What was found.
        found: String,
    },
}

/// Makes a case ready to be timed: steps 1 to 6 of the protocol.
///
/// # Errors
/// If the device fails or a check does.
pub fn prepare(capture: &mut dyn Capture, protocol: &Protocol) -> Result<Prepared, MeasureError> {
    let checks = check(capture, protocol)?;
    let (wall, steady) = warm_up(capture, protocol)?;
    Ok(Prepared { checks, wall, steady })
}

/// Runs the step eagerly, records it, and checks both: steps 1 to 5 of the protocol. Several ranks do this side by side.
///
/// # Errors
/// If the device fails or a check does.
pub fn check(capture: &mut dyn Capture, protocol: &Protocol) -> Result<Checks, MeasureError> {
    capture.eager()?; // warm-up step: lazy initialisation and autotuning end here
    let state_reset_bytes = u64::try_from(capture.snapshot()?.0).unwrap_or(u64::MAX);
    let (eager, eager_repeat) = repeat_eagerly(capture)?;
    capture.record()?;
    let checks = check_replays(capture, &eager, eager_repeat, state_reset_bytes)?;
    judge(&checks, protocol)?;
    Ok(checks)
}

/// Runs twice from the same state; returns the first output and how far the second lies from it.
fn repeat_eagerly(capture: &mut dyn Capture) -> Result<(Vec<f32>, Difference), MeasureError> {
    capture.restore()?;
    capture.eager()?;
    let first = capture.output()?;
    capture.restore()?;
    capture.eager()?;
    let second = capture.output()?;
    Ok((first.clone(), Difference::between(&second, &first)))
}

fn check_replays(
    capture: &mut dyn Capture,
    eager: &[f32],
    eager_repeat: Difference,
    state_reset_bytes: u64,
) -> Result<Checks, MeasureError> {
    capture.replay()?;
    let first = capture.output()?;
    capture.replay()?;
    let second = capture.output()?;
    Ok(Checks {
        eager_repeat,
        graph_vs_eager: Difference::between(&first, eager),
        graph_deterministic: Difference::between(&second, &first).is_zero(),
        finite: first.iter().all(|value| value.is_finite()),
        state_reset_bytes,
    })
}

/// Refuses a case whose checks say that its time would not be the time of the forward that was asked for.
fn judge(checks: &Checks, protocol: &Protocol) -> Result<(), MeasureError> {
    let fail = |name, found: String| Err(MeasureError::Check { name, found });
    if !checks.finite {
        return fail("finite", "the output has infinities or NaNs".to_owned());
    }
    if protocol.exact_repeat && !checks.eager_repeat.is_zero() {
        let Difference { max_abs, relative_rms } = checks.eager_repeat;
        return fail(
            "eager_repeat",
            format!("two runs from one state differ by {max_abs:.3e} (relative RMS {relative_rms:.3e})"),
        );
    }
    let graph = checks.graph_vs_eager.relative_rms;
    if graph > protocol.graph_tolerance || graph.is_nan() {
        let limit = protocol.graph_tolerance;
        return fail("graph_vs_eager", format!("relative RMS {graph:.3e}, at most {limit:.1e} is allowed"));
    }
    if protocol.exact_repeat && !checks.graph_deterministic {
        return fail("graph_deterministic", "two replays gave different bits".to_owned());
    }
    Ok(())
}

/// Replays until two windows of replays agree, at least and at most as long as the protocol says: step 6. Returns the wall time of a
/// replay, and whether times were steady.
///
/// # Errors
/// If the device fails.
pub fn warm_up(capture: &mut dyn Capture, protocol: &Protocol) -> Result<(Duration, bool), MeasureError> {
    let window = protocol.min_warm_up / 3;
    let begin = Instant::now();
    let (mut last, mut wall) = window_of_replays(capture, window)?;
    loop {
        if begin.elapsed() >= protocol.max_warm_up {
            return Ok((wall, protocol.max_warm_up.is_zero()));
        }
        let (now, window_wall) = window_of_replays(capture, window)?;
        wall = window_wall;
        let steady = (now - last).abs() <= protocol.steady * last;
        if steady && begin.elapsed() >= protocol.min_warm_up {
            return Ok((wall, true));
        }
        last = now;
    }
}

/// Replays for about `length`; returns the median time in nanoseconds and the mean wall time of a replay.
fn window_of_replays(capture: &mut dyn Capture, length: Duration) -> Result<(f64, Duration), MeasureError> {
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.is_empty() || begin.elapsed() < length {
        times.push(capture.replay()?.time.0);
    }
    let wall = begin.elapsed() / u32::try_from(times.len()).unwrap_or(u32::MAX);
    Ok((median(&times).unwrap_or_default(), wall))
}

/// Replays `n` times, live.
///
/// # Errors
/// If the device fails.
pub fn replay(capture: &mut dyn Capture, n: u64) -> Result<Vec<Replay>, MeasureError> {
    Ok(capture.replays(n)?)
}

/// The largest relative change of the clock over the replays, where the device can read it.
#[must_use]
pub fn clock_span(replays: &[Replay]) -> Option<f64> {
    let clocks: Vec<f64> = replays.iter().filter_map(|replay| replay.clock_mhz).collect();
    let middle = median(&clocks)?;
    let (min, max) = clocks.iter().fold((f64::MAX, f64::MIN), |(min, max), &c| (min.min(c), max.max(c)));
    Some((max - min) / middle)
}

/// The times of replays.
#[must_use]
pub fn times(replays: &[Replay]) -> Vec<Nanos> {
    replays.iter().map(|replay| replay.time).collect()
}

#[cfg(test)]
mod tests;
