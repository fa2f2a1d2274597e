//! Which kernels a forward spends its time in, from replays that are traced after all timing is done.

pub mod collectives;
pub mod diff;
pub mod explain;
pub mod file;
pub mod names;
pub mod perfetto;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::backend::{Activity, Part, Traced};
use crate::units::Nanos;
use names::Names;

/// The kernels of a case on one rank, the mean over the traced replays: `<case>.rank<r>.kernels.json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// From the first kernel's start to the last one's end.
    pub span_us: f64,
    /// Time in which at least one kernel ran.
    pub busy_us: f64,
    /// Time in which something ran before the forward: state put back, caches flushed, clock probe, rendezvous.
    pub pre_forward_us: f64,
    /// Kernels of a forward.
    pub activities: f64,
    /// By name, the longest first.
    pub kernels: Vec<KernelTime>,
}

/// All launches of one kernel in a forward.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct KernelTime {
    /// Shortened sensibly: what tells kernels apart, and no more.
    pub name: String,
    /// Time in which it was the kernel that the step waited for: overlaps are counted once, so that all add up to `busy_us`.
    pub us: f64,
    /// `us` in percent of `busy_us`.
    pub pct: f64,
    /// Launches in a forward.
    pub calls: f64,
    /// One full name.
    pub example: String,
}

/// Time and launches of one kernel over all replays.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    nanos: u64,
    calls: usize,
}

impl Profile {
    /// The means over the replays; all zero if there are none. Means rather than medians: the kernels of one replay add up to its
    /// busy time, and only means keep that.
    #[must_use]
    pub fn of(replays: &[Traced], names: &Names) -> Self {
        let mut sums: BTreeMap<&str, Sum> = BTreeMap::new();
        let (mut span, mut busy, mut before, mut activities) = (0, 0, 0, 0);
        for replay in replays {
            before += exclusive(replay.of(Part::Before)).iter().map(|(_, nanos)| nanos).sum::<u64>();
            let forward = exclusive(replay.of(Part::Forward));
            for (activity, nanos) in &forward {
                let sum = sums.entry(&activity.name).or_default();
                *sum = Sum { nanos: sum.nanos + nanos, calls: sum.calls + 1 };
                busy += nanos;
            }
            activities += forward.len();
            span += extent(&forward);
        }
        let mean = |nanos: u64| Nanos(nanos as f64).micros() / replays.len().max(1) as f64;
        let kernel = |(name, sum): (&str, Sum)| KernelTime {
            name: names.short(name).to_owned(),
            us: mean(sum.nanos),
            pct: if busy == 0 { 0.0 } else { 100.0 * sum.nanos as f64 / busy as f64 },
            calls: sum.calls as f64 / replays.len().max(1) as f64,
            example: names.full(name).to_owned(),
        };
        let mut kernels: Vec<KernelTime> = sums.into_iter().map(kernel).collect();
        kernels.sort_by(|a, b| b.us.total_cmp(&a.us).then_with(|| a.name.cmp(&b.name)));
        Self {
            span_us: mean(span),
            busy_us: mean(busy),
            pre_forward_us: mean(before),
            activities: activities as f64 / replays.len().max(1) as f64,
            kernels,
        }
    }
}

/// Gives each instant in which something runs to one activity: the one that started first. A kernel that is launched before the
/// one ahead of it has ended (programmatic dependent launch) waits for it meanwhile, and what it waits for is what counts.
///
/// One sweep over the starts does it: whatever runs after the latest end so far belongs to the next activity, as all that
/// started before have ended by then.
fn exclusive<'a>(activities: impl Iterator<Item = &'a Activity>) -> Vec<(&'a Activity, u64)> {
    let mut sorted: Vec<&Activity> = activities.collect();
    sorted.sort_by_key(|activity| activity.start_ns);
    let mut covered = 0;
    let own = |activity: &'a Activity| {
        let nanos = activity.end_ns.saturating_sub(activity.start_ns.max(covered));
        covered = covered.max(activity.end_ns);
        (activity, nanos)
    };
    sorted.into_iter().map(own).collect()
}

/// From the first start to the last end in nanoseconds; zero if there is nothing.
fn extent(activities: &[(&Activity, u64)]) -> u64 {
    let start = activities.iter().map(|(activity, _)| activity.start_ns).min();
    let end = activities.iter().map(|(activity, _)| activity.end_ns).max();
    start.zip(end).map_or(0, |(start, end)| end.saturating_sub(start))
}

#[cfg(test)]
mod tests;
