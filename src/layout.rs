//! How a step is spread over ranks: sizes, places, and who works together.
//!
//! Ranks are ordered data × pipeline × tensor, tensor fastest, as vLLM orders them.

use serde::{Deserialize, Serialize};

/// The sizes of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Ranks that each have requests of their own.
    pub data: usize,
    /// Stages of layers.
    pub pipeline: usize,
    /// Ranks that share heads and the inner sizes of products.
    pub tensor: usize,
    /// Whether experts are spread over data × tensor ranks; else each rank has a part of every expert.
    pub expert_parallel: bool,
}

/// One rank of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The layout.
    pub layout: Layout,
    /// From 0 to the layout's number of ranks.
    pub rank: usize,
}

/// Ranks that communicate with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// All.
    World,
    /// Those that share a rank's heads.
    Tensor,
    /// Those at the same place of every data-parallel rank.
    Data,
    /// Those over which experts are spread: data × tensor.
    Expert,
}

impl Layout {
    /// One rank.
    pub const ONE: Self = Self { data: 1, pipeline: 1, tensor: 1, expert_parallel: false };

    /// How many ranks there are.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.data * self.pipeline * self.tensor
    }

    /// The places of all ranks.
    pub fn places(self) -> impl Iterator<Item = Place> {
        (0..self.ranks()).map(move |rank| Place { layout: self, rank })
    }
}

impl Place {
    /// The only rank of [`Layout::ONE`].
    pub const ONE: Self = Self { layout: Layout::ONE, rank: 0 };

    /// Which tensor-parallel rank it is.
    #[must_use]
    pub fn tensor(&self) -> usize {
        self.rank % self.layout.tensor
    }

    /// Which pipeline stage.
    #[must_use]
    pub fn pipeline(&self) -> usize {
        self.rank / self.layout.tensor % self.layout.pipeline
    }

    /// Which data-parallel rank.
    #[must_use]
    pub fn data(&self) -> usize {
        self.rank / (self.layout.tensor * self.layout.pipeline)
    }

    /// Which of the ranks over which experts, or their inner sizes, are spread: data × tensor.
    #[must_use]
    pub fn expert(&self) -> usize {
        self.data() * self.layout.tensor + self.tensor()
    }

    /// The group's ranks in ascending order; this one is among them.
    #[must_use]
    pub fn members(&self, group: Group) -> Vec<usize> {
        let with = |place: &Place| match group {
            Group::World => true,
            Group::Tensor => place.data() == self.data() && place.pipeline() == self.pipeline(),
            Group::Data => place.tensor() == self.tensor() && place.pipeline() == self.pipeline(),
            Group::Expert => place.pipeline() == self.pipeline(),
        };
        self.layout.places().filter(with).map(|place| place.rank).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_parallel_ranks_are_neighbours() {
        let layout = Layout { data: 2, pipeline: 3, tensor: 2, expert_parallel: true };
        let place = Place { layout, rank: 9 };
        assert_eq!((place.data(), place.pipeline(), place.tensor(), place.expert()), (1, 1, 1, 3));
        assert_eq!(place.members(Group::Tensor), [8, 9]);
        assert_eq!(place.members(Group::Data), [3, 9]);
        assert_eq!(place.members(Group::Expert), [2, 3, 8, 9]);
        assert_eq!(place.members(Group::World).len(), layout.ranks());
    }

    #[test]
    fn every_rank_is_in_its_groups() {
        let layout = Layout { data: 3, pipeline: 1, tensor: 4, expert_parallel: false };
        for place in layout.places() {
            for group in [Group::World, Group::Tensor, Group::Data, Group::Expert] {
                assert!(place.members(group).contains(&place.rank), "{place:?} {group:?}");
            }
        }
        assert_eq!(Place::ONE.members(Group::Expert), [0]);
    }
}
