//! Whether one side's runs are faster or slower than the other's, the same, or cannot be told apart.

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
    /// What two sides of the same code may differ by, in percent: measured, or the backend's where a side has one run.
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
    /// The noise floor where a side has one run, in percent.
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
#[must_use]
pub fn judge(sides: Sides<'_>, rules: &Rules) -> Option<Verdict> {
    overall(&[sides], rules)
}

/// Judges several cases together, by the geometric mean of their changes. None: there is no case, or one has no replays.
#[must_use]
pub fn overall(cases: &[Sides<'_>], rules: &Rules) -> Option<Verdict> {
    let _ = (cases, rules);
    None
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

impl Verdict {
    /// One line.
    #[must_use]
    pub fn line(&self) -> String {
        String::new()
    }
}
