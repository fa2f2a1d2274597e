//! What ranks tell each other within a step, on a device whose collectives the host makes.

use super::BackendError;
use crate::layout::Group;

/// Collectives between the ranks of a group. All members make the same calls in the same order, with slices as long as the
/// others'; sums are made in rank order, so that every member gets the same bits.
///
/// Every call fails if a rank is lost.
pub trait Communicator: Send + Sync {
    /// `data` becomes the sum over the group.
    fn all_reduce(&self, group: Group, data: &mut [f32]) -> Result<(), BackendError>;

    /// `all` becomes the members' `mine`, one after the other; `[members * mine.len()]`.
    fn all_gather(&self, group: Group, mine: &[f32], all: &mut [f32]) -> Result<(), BackendError>;

    /// `mine` becomes this member's part of the sum of the members' `all`; `[members * mine.len()]`.
    fn reduce_scatter(&self, group: Group, all: &[f32], mine: &mut [f32]) -> Result<(), BackendError>;

    /// The i-th part of `send` goes to the i-th member; part j of `receive` is from the j-th. Both have one part a member, of
    /// one length.
    fn all_to_all(&self, group: Group, send: &[f32], receive: &mut [f32]) -> Result<(), BackendError>;
}
