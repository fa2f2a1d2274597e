//! CUDA's status codes as this crate's errors.

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::{DriverError, sys};
use cudarc::nvrtc::result::NvrtcError;

use crate::backend::BackendError;

/// For `map_err`: names what was being done.
pub(super) fn driver(doing: &str) -> impl Fn(DriverError) -> BackendError {
    move |error| {
        let name = error
            .error_name()
            .map_or_else(|_| format!("{:?}", error.0), |s| s.to_string_lossy().into_owned());
        let text =
            error.error_string().map_or_else(|_| String::new(), |s| format!(" ({})", s.to_string_lossy()));
        let message = format!("{doing} failed: {name}{text}");
        if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            BackendError::NoRoom(format!(
                "{message}; lower --gpu-memory-utilization or choose a smaller --model"
            ))
        } else {
            BackendError::Device(message)
        }
    }
}

/// As [`driver`], for cuBLASLt.
pub(super) fn blas(doing: &str) -> impl Fn(CublasError) -> BackendError {
    move |error| BackendError::Device(format!("{doing} failed: {:?}", error.0))
}

/// As [`driver`], for NVRTC.
pub(super) fn nvrtc(doing: &str) -> impl Fn(NvrtcError) -> BackendError {
    move |error| BackendError::Device(format!("{doing} failed: {:?}", error.0))
}
