//! Collectives over sockets, **for tests**: so that processors without a fabric of their own run every layout, and CI holds them against one rank.
//!
//! All values go through rank 0, which does the sums in rank order: every member gets the same bits, and nothing here is fast.

mod client;
mod hub;

pub use client::SocketCommunicator;
pub use hub::Hub;

use serde::{Deserialize, Serialize};

/// What a group does together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// See [`Communicator::all_reduce`](crate::backend::Communicator::all_reduce).
    AllReduce,
    /// See [`Communicator::all_gather`](crate::backend::Communicator::all_gather).
    AllGather,
    /// See [`Communicator::reduce_scatter`](crate::backend::Communicator::reduce_scatter).
    ReduceScatter,
    /// See [`Communicator::all_to_all`](crate::backend::Communicator::all_to_all).
    AllToAll,
}

/// One member's part in a collective; its values follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Header {
    /// The ranks of the group, ascending.
    members: Vec<usize>,
    /// The number of this group's collective, from 0.
    seq: u64,
    op: Op,
    /// How many values follow.
    values: usize,
}

/// What a member gets: so many values, or why there are none.
type Outcome = Result<Vec<f32>, String>;

#[cfg(test)]
mod tests;
