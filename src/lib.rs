//! Times the forward pass of a language model on exact batch shapes, as Criterion benchmarks.
//!
//! Each shape file is a Criterion group, each case in it a benchmark: an exact batch of requests, whose forward is captured once
//! and replayed. The measurement is the interval between two events around the forward; Criterion does statistics, baselines
//! and reports. `benches/forward.rs` is a `main` over [`run::main`].
//!
//! A case goes through the modules from top to bottom. Each uses only what its row names, which stands above it; a test
//! (`tests/modules.rs`) holds this table against the code.
//!
//! | module | what it is | uses |
//! | --- | --- | --- |
//! | [`units`] | nanoseconds, bytes, FLOPs, tokens | |
//! | [`stats`] | what replays amount to | units |
//! | [`layout`] | how a step is spread over ranks | |
//! | [`case`] | a case, its grammar, its jitter | units |
//! | [`shapes`] | shape files | case |
//! | [`batch`] | the exact batch: paged KV, order, check | case, units |
//! | [`backend`] | what a device must offer: `Ops`, `Device`, `Capture` | batch, layout, units |
//! | [`backend::cpu`] | the processor | backend, batch, layout, units |
//! | [`backend::cuda`] | an NVIDIA GPU; the only place that names cudarc | backend, batch, layout, stats, units |
//! | [`rank`] | launching ranks, their control plane, the max over them | backend, layout, stats, units |
//! | [`model`] | configuration to layers and weights, and the forward over `Ops` | backend, batch, case, layout, units |
//! | [`measure`] | the timing protocol | backend, layout, rank, stats, units |
//! | [`measure::criterion`] | the only place that names criterion | backend, measure, units |
//! | [`profile`] | kernels of traced replays | backend, stats, units |
//! | [`baseline`] | saved baselines, their sidecars, their safety | backend, measure, profile, stats |
//! | [`report`] | the plan, the results file, the pages | baseline, batch, case, measure, model, profile, stats, units |
//! | [`cli`] | the command line | backend, layout |
//! | [`run`] | from the command line to the exit status | everything above |
//!
//! A new backend implements the traits of [`backend`] beside [`backend::cpu`]; nothing else moves.

pub mod backend;
pub mod baseline;
pub mod batch;
pub mod case;
pub mod cli;
pub mod layout;
pub mod measure;
pub mod model;
pub mod profile;
pub mod rank;
pub mod report;
pub mod run;
pub mod shapes;
pub mod stats;
pub mod units;
