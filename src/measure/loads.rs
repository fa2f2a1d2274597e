//! How many rows each expert computed, and whether that is what was asked for.

use serde::{Deserialize, Serialize};

use super::MeasureError;
use crate::backend::Capture;
use crate::layout::Layout;

/// The rows of one MoE layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoads {
    /// Of the expert with the fewest.
    pub min: u32,
    /// Of the one with the most.
    pub max: u32,
    /// Mean over all experts.
    pub mean: f64,
    /// `[experts]`
    pub counts: Vec<u32>,
}

impl ExpertLoads {
    fn of(counts: Vec<u32>) -> Self {
        let min = counts.iter().min().copied().unwrap_or(0);
        let max = counts.iter().max().copied().unwrap_or(0);
        let sum: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        Self { min, max, mean: sum as f64 / counts.len().max(1) as f64, counts }
    }
}

/// What a routing asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// These rows, `[MoE layers][experts]`: the routing was made.
    Exactly(Vec<Vec<u32>>),
    /// So many rows in each of so many layers, whichever experts compute them: the gates decided.
    InAll {
        /// MoE layers.
        layers: usize,
        /// Tokens times the experts of each.
        rows: u64,
    },
    /// No more than so many rows in each of so many layers: the gates decided, and other ranks have the other experts.
    AtMost {
        /// MoE layers.
        layers: usize,
        /// Tokens times the experts of each, those of all ranks.
        rows: u64,
    },
}

/// What the experts did in the last run, checked; not to be called while something is timed.
///
/// # Errors
/// If the device fails or does not count, or if the experts did something else than was asked for.
pub fn check(capture: &mut dyn Capture, wanted: &Wanted) -> Result<Vec<ExpertLoads>, MeasureError> {
    let fail = |found: String| Err(MeasureError::Routing { found });
    let Some(found) = capture.expert_loads()? else {
        return fail(
            "the device counts no rows of experts, so that the routing cannot be checked".to_owned(),
        );
    };
    compare(&found, wanted)?;
    Ok(found.into_iter().map(ExpertLoads::of).collect())
}

/// The loads of all ranks together, checked: of the places of `layout` in rank order, what [`check`] returned on each. Where whole
/// experts are spread over ranks their loads follow each other; where each rank has a part of every expert all must be equal.
///
/// # Errors
/// If that is not what was asked of all experts.
pub fn whole(
    layout: Layout,
    ranks: &[Vec<ExpertLoads>],
    wanted: &Wanted,
) -> Result<Vec<ExpertLoads>, MeasureError> {
    let counts = |rank: usize| ranks[rank].iter().map(|layer| layer.counts.clone()).collect::<Vec<_>>();
    let fail = |found: String| Err(MeasureError::Routing { found });
    if ranks.len() != layout.ranks() || ranks.is_empty() {
        return fail(format!("{} ranks counted rows of experts, not {}", ranks.len(), layout.ranks()));
    }
    let mut all = counts(0);
    for rank in 1..ranks.len() {
        let found = counts(rank);
        if found.len() != all.len() {
            return fail(format!("{} layers of rank {rank} have experts, not {}", found.len(), all.len()));
        }
        if layout.expert_parallel {
            all.iter_mut().zip(found).for_each(|(all, found)| all.extend(found));
        } else if let Some(difference) = difference(&found, &all) {
            return fail(format!("rank {rank} and rank 0 share every expert, but {difference}"));
        }
    }
    compare(&all, wanted)?;
    Ok(all.into_iter().map(ExpertLoads::of).collect())
}

fn compare(found: &[Vec<u32>], wanted: &Wanted) -> Result<(), MeasureError> {
    let fail = |found: String| Err(MeasureError::Routing { found });
    let (layers, rows, exactly) = match wanted {
        Wanted::Exactly(wanted) => {
            return match difference(found, wanted) {
                Some(difference) => fail(format!("the routing had no effect: {difference}")),
                None => Ok(()),
            };
        }
        Wanted::InAll { layers, rows } => (*layers, *rows, true),
        Wanted::AtMost { layers, rows } => (*layers, *rows, false),
    };
    if found.len() != layers {
        return fail(format!("{} layers have experts, not {layers}", found.len()));
    }
    let sums = found.iter().map(|counts| counts.iter().map(|&count| u64::from(count)).sum::<u64>());
    let wrong = |sum: u64| if exactly { sum != rows } else { sum > rows };
    match sums.enumerate().find(|(_, sum)| wrong(*sum)) {
        Some((layer, sum)) => {
            fail(format!("the experts of MoE layer {layer} computed {sum} rows, not {rows}"))
        }
        None => Ok(()),
    }
}

/// The first expert whose rows differ, in words.
fn difference(found: &[Vec<u32>], wanted: &[Vec<u32>]) -> Option<String> {
    if found.len() != wanted.len() {
        return Some(format!("{} layers have experts, not {}", found.len(), wanted.len()));
    }
    for (layer, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        if found.len() != wanted.len() {
            return Some(format!("MoE layer {layer} has {} experts, not {}", found.len(), wanted.len()));
        }
        let differs = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
        if let Some(expert) = differs {
            let others = found.iter().zip(wanted).filter(|(found, wanted)| found != wanted).count() - 1;
            return Some(format!(
                "expert {expert} of MoE layer {layer} computed {} rows, not {} (and {others} more of {} experts differ)",
                found[expert],
                wanted[expert],
                found.len()
            ));
        }
    }
    None
}
