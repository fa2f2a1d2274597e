//! `--routing`: which experts each token uses, made rather than left to the gates of made-up weights.
//!
//! A rule gives every slot (a token's `j`th choice) its expert, for each MoE layer. [`Choices::routing`] turns that into logits
//! which replace the gates' logits; the choice itself, top-k, still runs on the device. Tokens are numbered over all
//! data-parallel ranks, and what a token draws depends on its number alone, so that each rank takes its slice of one stream.

mod balanced;
mod rank;
mod zipf;

use std::fmt;
use std::str::FromStr;

use super::config::ModelConfig;
use crate::backend::Routing;
use crate::layout;

pub use balanced::Groups;
pub use rank::RankRouting;

/// What `--routing` asks for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Asked {
    /// [`Rule::Balanced`] with made-up weights, else [`Rule::Real`].
    Auto,
    /// That rule.
    By(Rule),
}

/// How tokens choose experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// As the gates say.
    Real,
    /// As evenly as can be: over expert-parallel ranks, and over the experts of each.
    Balanced,
    /// The expert of rank r is drawn with probability ∝ 1 / r^S.
    Zipf(f64),
}

impl Asked {
    /// The rule, knowing whether weights are made up.
    #[must_use]
    pub fn rule(self, dummy_weights: bool) -> Rule {
        match self {
            Self::By(rule) => rule,
            Self::Auto if dummy_weights => Rule::Balanced,
            Self::Auto => Rule::Real,
        }
    }
}

impl FromStr for Asked {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let needed = "auto, real, balanced or zipf:S is needed, S a number from 0 to 100, such as zipf:1.2";
        let exponent = |text: &str| text.parse::<f64>().ok().filter(|s| (0.0..=100.0).contains(s));
        match (text, text.strip_prefix("zipf:").map(exponent)) {
            ("auto", _) => Ok(Self::Auto),
            ("real", _) => Ok(Self::By(Rule::Real)),
            ("balanced", _) => Ok(Self::By(Rule::Balanced)),
            (_, Some(Some(s))) => Ok(Self::By(Rule::Zipf(s))),
            _ => Err(needed.to_owned()),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Real => f.write_str("real"),
            Self::Balanced => f.write_str("balanced"),
            Self::Zipf(s) => write!(f, "zipf:{s}"),
        }
    }
}

/// What a rule must know of a model and of its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// MoE layers.
    pub layers: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token uses.
    pub top_k: usize,
    /// Ranks over which whole experts are spread; each has the same number of experts, one after the other.
    pub ranks: usize,
    /// Groups that the choice is limited to.
    pub groups: Option<Groups>,
}

impl Layout {
    /// A model's on the ranks of a layout; none if it has no experts.
    #[must_use]
    pub fn of(config: &ModelConfig, ranks: layout::Layout) -> Option<Self> {
        let experts = config.experts.as_ref()?;
        let (layers, count) = (experts.num_layers(), experts.count);
        let ranks = if ranks.expert_parallel { ranks.data * ranks.tensor } else { 1 };
        Some(Self { layers, experts: count, top_k: experts.top_k, ranks, groups: None })
    }
}

/// The tokens of one data-parallel rank among those of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// Number of its first token.
    pub first: usize,
    /// How many.
    pub tokens: usize,
}

/// The experts of all slots of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choices {
    layout: Layout,
    /// `[MoE layers][tokens * top_k]`; those of a token in the order in which they win.
    pub experts: Vec<Vec<u32>>,
}

impl Choices {
    /// What the rule chooses; none where the gates do. Fails if the layout does not allow an even choice.
    ///
    /// # Errors
    /// One line that says which sizes do not divide.
    pub fn of(rule: Rule, layout: Layout, slice: Slice, seed: u64) -> Result<Option<Self>, String> {
        let experts = match rule {
            Rule::Real => return Ok(None),
            Rule::Balanced => {
                let layer = balanced::experts(&layout, slice)?;
                vec![layer; layout.layers]
            }
            Rule::Zipf(s) => {
                (0..layout.layers).map(|l| zipf::experts(&layout, s, slice, (seed, l))).collect()
            }
        };
        Ok(Some(Self { layout, experts }))
    }

    /// `[MoE layers][experts]` slots of each expert.
    #[must_use]
    pub fn loads(&self) -> Vec<Vec<u32>> {
        let of_layer = |experts: &Vec<u32>| {
            let mut loads = vec![0; self.layout.experts];
            experts.iter().for_each(|&expert| loads[expert as usize] += 1);
            loads
        };
        self.experts.iter().map(of_layer).collect()
    }

    /// The logits by which these experts win, in this order: k, k − 1, … 1, and −8 for those that are not chosen. All are exact in
    /// bfloat16 for k up to 256.
    #[must_use]
    pub fn routing(&self) -> Routing {
        let Layout { experts: count, top_k, .. } = self.layout;
        let of_layer = |experts: &Vec<u32>| {
            let tokens = experts.len() / top_k;
            let mut logits = vec![-8.0; tokens * count];
            for (row, chosen) in logits.chunks_exact_mut(count).zip(experts.chunks_exact(top_k)) {
                for (j, &expert) in chosen.iter().enumerate() {
                    row[expert as usize] = (top_k - j) as f32;
                }
            }
            logits
        };
        Routing { logits: self.experts.iter().map(of_layer).collect() }
    }
}

#[cfg(test)]
mod tests;
