//! Linked at build time, every executable would need libnccl; so there are no ranks on GPUs.

use std::convert::Infallible;
use std::ffi::OsString;
use std::rc::Rc;
use std::sync::Arc;

use super::collectives::{Collectives, Span};
use super::gpu::Gpu;
use crate::backend::BackendError;
use crate::layout::{Group, Place};

fn absent<T>() -> Result<T, BackendError> {
    let message = "this executable links CUDA at build time (feature `cuda-dynamic-linking`) and has no NCCL: only one rank runs on GPUs";
    Err(BackendError::Unsupported(message.into()))
}

/// That this executable has no NCCL.
///
/// # Errors
/// Always.
pub fn nccl_available() -> Result<(), BackendError> {
    absent()
}

/// Nothing: this executable does not look for NCCL.
///
/// # Errors
/// Never.
pub fn nccl_library_path() -> Result<Option<OsString>, BackendError> {
    Ok(None)
}

/// There is none.
pub struct Nccl(Infallible);

impl Nccl {
    /// Fails.
    ///
    /// # Errors
    /// Always.
    pub fn unique_id() -> Result<Vec<u8>, BackendError> {
        absent()
    }

    /// Fails.
    ///
    /// # Errors
    /// Always.
    pub fn new(_gpu: &Arc<Gpu>, _place: Place, _id: &[u8]) -> Result<Rc<Self>, BackendError> {
        absent()
    }

    /// Of nothing.
    #[must_use]
    pub fn abort_hook(&self) -> Box<dyn Fn() + Send + Sync> {
        match self.0 {}
    }
}

impl Collectives for Nccl {
    fn all_reduce(&self, _: &Gpu, _: Group, _: Span) -> Result<(), BackendError> {
        match self.0 {}
    }

    fn all_gather(&self, _: &Gpu, _: Group, _: Span, _: u64) -> Result<(), BackendError> {
        match self.0 {}
    }

    fn reduce_scatter(&self, _: &Gpu, _: Group, _: u64, _: Span) -> Result<(), BackendError> {
        match self.0 {}
    }

    fn all_to_all(&self, _: &Gpu, _: Group, _: Span, _: u64) -> Result<(), BackendError> {
        match self.0 {}
    }
}
