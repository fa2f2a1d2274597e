//! What users and programs read: the results file and the plan.

pub mod plan;
pub mod results;
pub mod verdicts;
