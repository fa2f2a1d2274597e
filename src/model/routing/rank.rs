//! A step's routing as one rank sees it: the logits of its own tokens, and what its own experts then have to do for the tokens of
//! all data-parallel ranks. Every rank has equally many tokens, and they draw one stream.

use std::ops::Range;

use super::{Choices, Layout, Rule, Slice};
use crate::layout::Place;
use crate::model::cost::{Hit, Reached};

/// The routing of a step on one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankRouting {
    /// Who decides.
    pub rule: Rule,
    /// The model's experts and the ranks that they are spread over.
    pub layout: Layout,
    /// The rank.
    pub place: Place,
    /// Tokens of its own.
    pub tokens: usize,
    /// Of what is drawn.
    pub seed: u64,
}

impl RankRouting {
    /// Tokens that this rank's experts may get.
    #[must_use]
    pub fn all_tokens(&self) -> usize {
        self.tokens.saturating_mul(self.place.layout.data)
    }

    /// The rank's experts.
    #[must_use]
    pub fn local(&self) -> Range<usize> {
        let each = self.layout.experts / self.layout.ranks.max(1);
        let first = if self.layout.ranks > 1 { self.place.expert() * each } else { 0 };
        first..first + each
    }

    /// What this rank's tokens choose; none where the gates decide.
    ///
    /// # Errors
    /// One line if the rule is impossible.
    pub fn own(&self) -> Result<Option<Choices>, String> {
        let first = self.place.data().saturating_mul(self.tokens);
        Choices::of(self.rule, self.layout, Slice { first, tokens: self.tokens }, self.seed)
    }

    /// What the tokens of all data-parallel ranks choose; none where the gates decide.
    ///
    /// # Errors
    /// As for [`RankRouting::own`].
    pub fn all(&self) -> Result<Option<Choices>, String> {
        Choices::of(self.rule, self.layout, Slice { first: 0, tokens: self.all_tokens() }, self.seed)
    }

    /// `[MoE layers][local experts]` rows that this rank's experts must compute; none where the gates decide.
    ///
    /// # Errors
    /// As for [`RankRouting::own`].
    pub fn loads(&self) -> Result<Option<Vec<Vec<u32>>>, String> {
        let of_rank = |loads: Vec<u32>| loads[self.local()].to_vec();
        Ok(self.all()?.map(|choices| choices.loads().into_iter().map(of_rank).collect()))
    }

    /// What this rank's experts have to do; nothing is drawn for more tokens than `most`, which no step may have.
    #[must_use]
    pub fn reached(&self, most: u32) -> Reached {
        match self.rule {
            Rule::Balanced if self.layout.groups.is_none() => {
                Reached::Exactly(vec![self.balanced(); self.layout.layers])
            }
            Rule::Real => Reached::Expected,
            _ if self.all_tokens() > (most as usize).saturating_mul(self.place.layout.data) => {
                Reached::Expected
            }
            _ => match self.loads() {
                Ok(Some(loads)) => Reached::of(&loads),
                _ => Reached::Expected,
            },
        }
    }

    /// Slots go to the ranks in turns, and to the experts of a rank in turns.
    fn balanced(&self) -> Hit {
        let slots = self.all_tokens().saturating_mul(self.layout.top_k);
        let ranks = self.layout.ranks.max(1);
        let rank = if ranks > 1 { self.place.expert() } else { 0 };
        let rows = slots / ranks + usize::from(rank < slots % ranks);
        Hit { experts: rows.min(self.local().len()), rows: rows as u64 }
    }
}
