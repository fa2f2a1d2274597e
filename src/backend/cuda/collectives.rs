//! What ranks tell each other within a step on GPUs: who does it is handed to the device.

use super::device::Parts;
use super::gpu::Gpu;
use crate::backend::{BackendError, Dtype, alone};
use crate::layout::Group;

/// Elements on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Address of the first.
    pub address: u64,
    /// How many.
    pub count: usize,
    /// Of which type; what is only moved may be any other of the same size.
    pub dtype: Dtype,
}

/// Collectives on a GPU's stream. All members of a group make the same calls in the same order; sums are made so that every replay
/// gives the same bits, and each call may lie inside a stream capture.
pub trait Collectives {
    /// `data` becomes the sum over the group.
    ///
    /// # Errors
    /// If a rank is lost or the library refuses; the same for all of these.
    fn all_reduce(&self, gpu: &Gpu, group: Group, data: Span) -> Result<(), BackendError>;

    /// The members' `mine`, one after the other, at `all`.
    ///
    /// # Errors
    /// As for [`Collectives::all_reduce`].
    fn all_gather(&self, gpu: &Gpu, group: Group, mine: Span, all: u64) -> Result<(), BackendError>;

    /// At `mine`, of `mine.count` elements, this member's part of the sum of the members' `all`.
    ///
    /// # Errors
    /// As for [`Collectives::all_reduce`].
    fn reduce_scatter(&self, gpu: &Gpu, group: Group, all: u64, mine: Span) -> Result<(), BackendError>;

    /// The i-th part of `send`, which is all of it divided by the members, goes to the i-th member; part j at `receive` is from the
    /// j-th.
    ///
    /// # Errors
    /// As for [`Collectives::all_reduce`].
    fn all_to_all(&self, gpu: &Gpu, group: Group, send: Span, receive: u64) -> Result<(), BackendError>;

    /// Runs calls that do not depend on each other, as one if that can be.
    ///
    /// # Errors
    /// What a call returns.
    fn together(&self, calls: &mut dyn FnMut() -> Result<(), BackendError>) -> Result<(), BackendError> {
        calls()
    }
}

impl Parts {
    /// Calls the collectives, between kernels of ours: neither side overlaps them.
    pub(super) fn communicate(
        &self,
        what: &str,
        call: impl Fn(&dyn Collectives, &Gpu) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let collectives = self.collectives.as_deref().ok_or_else(|| alone(what))?;
        let gpu = &self.kernels.gpu;
        collectives.together(&mut || call(collectives, gpu))?;
        self.kernels.no_overlap();
        Ok(())
    }
}
