//! Runs of real processes, well and ill: all end, in time, with one line that says why.
//!
//! The processes are those of `examples/ranks_overhead.rs`, a run without a model.

mod faults;
mod joining;
mod launching;
mod process;
