//! Which kernels make one side slower.

use std::fmt;

use super::Profile;
use super::diff::{Change, changes};

/// An explanation names at most this many.
const MOST_KERNELS: usize = 3;
/// It is enough once this share of the difference is explained.
const ENOUGH: f64 = 0.8;
/// An increase of less than this share of the difference explains nothing.
const NOISE: f64 = 0.05;

/// Where the step waits for no kernel.
const GAPS: &str = "gaps between kernels";

/// What a slower side spends its additional time in.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The largest increases, as few as explain 80 % of the difference and at most three; none if no increase counts.
    pub kernels: Vec<Increase>,
    /// How much of the difference they explain together, in percent. More than 100 where other kernels became faster.
    pub pct: f64,
}

/// A kernel that takes longer than before.
#[derive(Debug, Clone, PartialEq)]
pub struct Increase {
    /// Its short name.
    pub name: String,
    /// The kernel that did its work before, if it is another one.
    pub instead_of: Option<String>,
    /// How much longer it takes in a forward, in microseconds.
    pub us: f64,
}

/// Explains why the new side is slower by `difference_us` microseconds, as it was timed: the fewest kernels (at most three) whose
/// increases in the traced replays make up 80 % of that. None if it is not slower.
///
/// A kernel that one side alone has is taken for the replacement of one that the other side alone has, if it is launched as often:
/// what counts is how much longer it takes than that one.
#[must_use]
pub fn explain(old: &Profile, new: &Profile, difference_us: f64) -> Option<Explanation> {
    if difference_us <= 0.0 || !difference_us.is_finite() {
        return None;
    }
    let mut increases = increases(old, new);
    let gaps = (new.span_us - new.busy_us) - (old.span_us - old.busy_us);
    increases.push(Increase { name: GAPS.to_owned(), instead_of: None, us: gaps });
    increases.sort_by(|a, b| b.us.total_cmp(&a.us));
    let mut explained = 0.0;
    let mut kernels = Vec::new();
    for increase in increases.into_iter().take(MOST_KERNELS) {
        if increase.us < NOISE * difference_us || explained >= ENOUGH * difference_us {
            break;
        }
        explained += increase.us;
        kernels.push(increase);
    }
    Some(Explanation { kernels, pct: explained / difference_us * 100.0 })
}

fn increases(old: &Profile, new: &Profile) -> Vec<Increase> {
    let (both, alone): (Vec<Change<'_>>, Vec<Change<'_>>) =
        changes(old, new).into_iter().partition(|change| change.old.is_some() && change.new.is_some());
    let (mut gone, came): (Vec<Change<'_>>, Vec<Change<'_>>) =
        alone.into_iter().partition(|change| change.old.is_some());
    let mut increases: Vec<Increase> = both
        .iter()
        .map(|change| Increase { name: change.name().to_owned(), instead_of: None, us: change.us() })
        .collect();
    for change in came {
        let calls = |change: &Change<'_>| change.new.or(change.old).map_or(0.0, |kernel| kernel.calls);
        // Of several that are launched as often, the one whose time is nearest.
        let apart = |other: &Change<'_>| (other.us() + change.us()).abs();
        let replaced = (0..gone.len())
            .filter(|&at| calls(&gone[at]) == calls(&change))
            .min_by(|&a, &b| apart(&gone[a]).total_cmp(&apart(&gone[b])))
            .map(|at| gone.swap_remove(at));
        increases.push(Increase {
            name: change.name().to_owned(),
            instead_of: replaced.map(|replaced| replaced.name().to_owned()),
            us: change.us() + replaced.map_or(0.0, |replaced| replaced.us()),
        });
    }
    increases
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kernels.is_empty() {
            return write!(f, "no kernel takes longer in the traced replays");
        }
        for (at, Increase { name, instead_of, us }) in self.kernels.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{name} {us:+.1} µs")?;
            if let Some(other) = instead_of {
                write!(f, " (instead of {other})")?;
            }
        }
        write!(f, ": {:.0} % of the difference", self.pct)
    }
}

#[cfg(test)]
mod tests;
