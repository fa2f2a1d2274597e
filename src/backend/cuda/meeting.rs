//! Where ranks wait for each other before a timed forward: a sum of one word over all of them.

use std::rc::Rc;
use std::sync::Arc;

use super::collectives::{Collectives, Span};
use super::gpu::Gpu;
use super::memory::Buffer;
use crate::backend::{BackendError, Dtype};
use crate::layout::Group;

/// The word, and the way to the others.
pub(super) struct Meeting {
    word: Buffer,
    collectives: Rc<dyn Collectives>,
}

impl Meeting {
    pub(super) fn new(gpu: &Arc<Gpu>, collectives: &Rc<dyn Collectives>) -> Result<Self, BackendError> {
        let word = Buffer::of(gpu, &[0.0_f32], "the word that ranks meet by")?;
        Ok(Self { word, collectives: collectives.clone() })
    }

    /// What follows on the stream waits until all ranks have come here.
    pub(super) fn launch(&self, gpu: &Gpu) -> Result<(), BackendError> {
        let word = Span { address: self.word.address(), count: 1, dtype: Dtype::Float32 };
        self.collectives.all_reduce(gpu, Group::World, word)
    }
}
