//! Experts and attention sinks, for which there are no kernels yet.

use crate::backend::{Attention, BackendError};

/// The error of a model with experts.
pub(super) fn unsupported() -> BackendError {
    BackendError::Unsupported(
        "the CUDA backend has no experts yet; use --backend cpu or a dense --model".into(),
    )
}

/// Fails if the layer has sinks.
pub(super) fn refuse_sinks(attention: &Attention) -> Result<(), BackendError> {
    match attention.sinks {
        None => Ok(()),
        Some(_) => Err(BackendError::Unsupported(
            "the CUDA backend has no attention sinks yet; use --backend cpu or another --model".into(),
        )),
    }
}
