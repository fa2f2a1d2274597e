//! Times the forward pass of a language model on exact batch shapes, as Criterion benchmarks.

pub mod backend;
pub mod batch;
pub mod case;
pub mod model;
pub mod shapes;
pub mod units;
