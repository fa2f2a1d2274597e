//! Verdicts in words.

use std::fmt;

use super::{MEASURED_RUNS, Rules, State, Verdict};

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::Same => "same",
            Self::Ambiguous => "ambiguous",
        })
    }
}

impl Verdict {
    /// Everything about it in one line, such as `slower: +1.42 % [+1.10, +1.75] in time, +1.39 % in cycles; margin 1 %, noise
    /// 0.33 %, 5 and 5 runs`; an ambiguous one begins with the reason, `ambiguous (clock): …`. Runs are the old and the new
    /// side's.
    #[must_use]
    pub fn line(&self) -> String {
        let why = self.why.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
        let time = &self.time;
        let cycles =
            self.cycles.map(|cycles| format!(", {} % in cycles", signed(cycles.pct))).unwrap_or_default();
        format!(
            "{}{why}: {} % [{}, {}] in time{cycles}; margin {} %, noise {} %, {} and {} runs",
            self.state,
            signed(time.pct),
            signed(time.low),
            signed(time.high),
            short(self.margin_pct),
            short(self.noise_pct),
            self.runs.0,
            self.runs.1
        )
    }
}

/// With its sign and two decimals; what rounds to nothing is +0.00.
fn signed(pct: f64) -> String {
    format!("{:+.2}", (pct * 100.0).round() / 100.0 + 0.0)
}

/// With two decimals at most.
fn short(pct: f64) -> String {
    let text = format!("{pct:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Why neither a change nor the lack of one can be told, where it is not the clock.
pub(super) fn why(verdict: &Verdict, rules: &Rules) -> String {
    let (noise, runs) = (short(verdict.noise_pct), verdict.runs);
    if verdict.noise_pct <= rules.tolerance_pct {
        "the change is about as large as the margin".to_owned()
    } else if runs.0.min(runs.1) < MEASURED_RUNS && verdict.noise_pct <= rules.single_run_noise_pct {
        format!("fewer than {MEASURED_RUNS} runs a side, for which a noise of {noise} % is assumed")
    } else {
        let tolerance = short(rules.tolerance_pct);
        format!("noise {noise} % is more than the tolerance of {tolerance} %: more runs would tell")
    }
}
