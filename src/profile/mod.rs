//! Which kernels a forward spends its time in, from replays that are traced after all timing is done.

pub mod diff;

use serde::{Deserialize, Serialize};

/// The kernels of a case on one rank, averaged over the traced replays: `<case>.rank<r>.kernels.json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// From the first kernel's start to the last one's end.
    pub span_us: f64,
    /// Time in which at least one kernel ran.
    pub busy_us: f64,
    /// Before the forward: state put back, caches flushed, clock probe, rendezvous.
    pub pre_forward_us: f64,
    /// Kernels and copies of a forward.
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
