//! What one run's replays amount to: the logarithm of their median, and how much it may wander within the run.

use super::Run;
use crate::stats::median;

/// Blocks of consecutive replays, whose medians tell how much a run's median wanders. So few, because the blocks must be
/// longer than the replays' memory: with a correlation of 0.9 from one to the next of 100 replays, four blocks and a
/// 99.5 % interval err in 0.8 % of comparisons of the same code, five in 1.4 % (batch means: Law and Kelton, *Simulation
/// Modeling and Analysis*).
pub(super) const BLOCKS: usize = 4;

/// A run's figure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Figure {
    /// Natural logarithm of the median.
    pub log: f64,
    /// Variance of `log` that the run's own blocks show; none with fewer replays than [`BLOCKS`].
    pub variance: Option<f64>,
}

impl Figure {
    /// Of a run's replays in order; `None` if there are none.
    pub(super) fn of(replays: &[f64]) -> Option<Self> {
        let log = median(replays)?.ln();
        Some(Self { log, variance: block_variance(replays) })
    }
}

fn block_variance(replays: &[f64]) -> Option<f64> {
    let length = replays.len() / BLOCKS;
    // The remainder is at the front, where a run may still be settling.
    let rest = replays.len() % BLOCKS;
    let logs: Vec<f64> = replays[rest..].chunks(length.max(1)).filter_map(median).map(f64::ln).collect();
    if length == 0 { None } else { Some(super::interval::variance(&logs) / BLOCKS as f64) }
}

fn is_usable(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

impl Run {
    /// The times that can be used: positive and finite.
    pub(super) fn times(&self) -> Option<Vec<f64>> {
        let times: Vec<f64> = self.times_us.iter().copied().filter(|&time| is_usable(time)).collect();
        (!times.is_empty()).then_some(times)
    }

    /// Clock cycles of the replays that can be used; `None` unless each replay has a clock.
    pub(super) fn cycles(&self) -> Option<Vec<f64>> {
        if self.clock_mhz.len() != self.times_us.len() {
            return None;
        }
        let pairs = self.times_us.iter().zip(&self.clock_mhz).filter(|(time, _)| is_usable(**time));
        let cycles: Vec<f64> = pairs.map(|(time, clock)| time * clock).collect();
        (!cycles.is_empty() && cycles.iter().all(|&cycles| is_usable(cycles))).then_some(cycles)
    }
}
