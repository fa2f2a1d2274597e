//! Times the forward pass of a language model on exact batch shapes, as Criterion benchmarks.

pub mod backend;
pub mod baseline;
pub mod batch;
pub mod case;
pub mod cli;
pub mod measure;
pub mod model;
pub mod report;
pub mod run;
pub mod shapes;
pub mod stats;
pub mod units;
