//! Runs of real processes, well and ill: all end, in time, with one line that says why.
//!
//! Most processes are those of `examples/ranks_overhead.rs`, a run without a model; `whole` runs the bench.

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod joining;
mod launching;
mod process;
mod whole;
