//! What users and programs read: the pages, the results file and the plan.

pub mod html;
pub mod plan;
pub mod results;
pub mod verdicts;
