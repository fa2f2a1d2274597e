//! Whether one side's runs are faster or slower than the other's, the same, or cannot be told apart.
//!
//! `docs/verdict.md` has the rule in words and how often it errs; `tests/calibration.rs` holds it to that.

mod interval;
mod replays;
mod words;

use interval::{Estimate, between, percent};
use serde::{Deserialize, Serialize};

/// One process-level run of a case: every replay in order, each the maximum over ranks.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Run {
    /// Times in microseconds.
    pub times_us: Vec<f64>,
    /// The device's clock over each replay in MHz; empty where it cannot be read.
    pub clock_mhz: Vec<f64>,
    /// Replays of a sample: consecutive ones, whose median is one figure.
    pub iters: usize,
}

/// From so many runs a side on, the noise is measured alone. Fewer may agree by chance: of two equally frequent levels, three
/// runs of one side take the one and three of the other side the other in 3 % of comparisons of the same code, and even with
/// the ranks of the runs alone no test of fewer than five a side could tell at 1 %: 2 / C(10, 5) = 0.8 %.
pub const MEASURED_RUNS: usize = 5;

/// What a comparison found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The new side takes less time, by more than the margin.
    Faster,
    /// The new side takes more time, by more than the margin.
    Slower,
    /// The interval lies within the margin.
    Same,
    /// None of these can be said.
    Ambiguous,
}

/// A change of medians in percent of the old side, with its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// The estimate.
    pub pct: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

/// A comparison of two sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// What was found.
    pub state: State,
    /// The change of the time.
    pub time: Effect,
    /// The change in clock cycles, where both sides' clocks could be read.
    pub cycles: Option<Effect>,
    /// A change must be larger than this to count, in percent.
    pub margin_pct: f64,
    /// What two sides of the same code may differ by, in percent: measured, and at least the backend's where a side has
    /// fewer than [`MEASURED_RUNS`] runs.
    pub noise_pct: f64,
    /// Runs of the old and the new side.
    pub runs: (usize, usize),
    /// Why it is ambiguous, in a few words, such as `clock`.
    pub why: Option<String>,
}

/// What a comparison takes for granted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// A change must be larger than this to count, in percent, whatever the noise.
    pub tolerance_pct: f64,
    /// The least noise where a side has one run, or too few to measure it, in percent.
    pub single_run_noise_pct: f64,
}

/// One case's runs on both sides.
#[derive(Debug, Clone, Copy)]
pub struct Sides<'a> {
    /// The side that is compared with.
    pub old: &'a [Run],
    /// The side that is judged.
    pub new: &'a [Run],
}

/// Judges one case. None: a side has no replays.
///
/// A replay that is not a positive, finite time is left out. Cycles are told where each replay of both sides has a
/// clock.
#[must_use]
pub fn judge(sides: Sides<'_>, rules: &Rules) -> Option<Verdict> {
    overall(&[sides], rules)
}

/// Judges several cases together, by the geometric mean of their changes. None: there is no case, or one has no replays.
///
/// The n-th runs of all cases are taken for one process, whose offset they share; where cases have unlike numbers of runs,
/// the first ones that all have are used.
#[must_use]
pub fn overall(cases: &[Sides<'_>], rules: &Rules) -> Option<Verdict> {
    let time = between(cases, rules.single_run_noise_pct, Run::times)?;
    let cycles =
        between(cases, rules.single_run_noise_pct, Run::cycles).filter(|cycles| cycles.runs == time.runs);
    let noise_pct = time.noise_pct;
    let margin_pct = noise_pct.max(rules.tolerance_pct);
    let assumes = time.runs.0.min(time.runs.1) < MEASURED_RUNS;
    // A measured noise above the tolerance makes the margin wide, but it shows no sameness.
    let same_pct =
        if assumes { rules.tolerance_pct.max(rules.single_run_noise_pct) } else { rules.tolerance_pct };
    let mut verdict = Verdict {
        state: state(&time.effect(), margin_pct, same_pct),
        time: time.effect(),
        cycles: cycles.as_ref().map(Estimate::effect),
        margin_pct,
        noise_pct,
        runs: time.runs,
        why: None,
    };
    if verdict.changed() && verdict.cycles.is_some_and(|cycles| !confirms(&cycles, &verdict.time)) {
        verdict.state = State::Ambiguous;
        verdict.why = Some("clock".to_owned());
    } else if verdict.state == State::Ambiguous {
        verdict.why = Some(words::why(&verdict, rules));
    }
    Some(verdict)
}

fn state(effect: &Effect, margin_pct: f64, same_pct: f64) -> State {
    if effect.excludes_zero() && log(effect.pct).abs() > log(margin_pct) {
        if effect.pct > 0.0 { State::Slower } else { State::Faster }
    } else if log(effect.low) >= -log(same_pct) && log(effect.high) <= log(same_pct) {
        State::Same
    } else {
        State::Ambiguous
    }
}

/// A change in percent as a logarithm, where swapping the sides only turns the sign: in percent no speed-up exceeds a margin of
/// more than 100, and an interval as wide as the noise is narrower below than above.
fn log(pct: f64) -> f64 {
    (pct / 100.0).ln_1p()
}

/// Whether the cycles show the change of the time: surely, in the same direction, and at least half of it.
fn confirms(cycles: &Effect, time: &Effect) -> bool {
    cycles.excludes_zero() && cycles.pct * time.pct > 0.0 && cycles.pct.abs() >= time.pct.abs() / 2.0
}

impl Verdict {
    /// Whether it is [`State::Faster`] or [`State::Slower`].
    #[must_use]
    pub fn changed(&self) -> bool {
        matches!(self.state, State::Faster | State::Slower)
    }
}

impl Effect {
    /// Whether the interval lies on one side of 0.
    #[must_use]
    pub fn excludes_zero(&self) -> bool {
        self.low > 0.0 || self.high < 0.0
    }
}

impl Estimate {
    /// In percent. The ends have the same distance from the estimate as factors.
    fn effect(&self) -> Effect {
        Effect {
            pct: percent(self.log_change),
            low: percent(self.log_change - self.half_width),
            high: percent(self.log_change + self.half_width),
        }
    }
}

#[cfg(test)]
mod tests;
