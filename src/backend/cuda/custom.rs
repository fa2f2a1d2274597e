//! Timing a CUDA forward of your own, your kernels and your buffers, by the same protocol and with Criterion.
//!
//! Implement [`CustomForward`], wrap it in a [`CustomCapture`], and hand that to [`crate::measure::prepare`] and
//! [`crate::measure::replay`]; `examples/custom_forward.rs` does it in full.

use std::rc::Rc;
use std::sync::Arc;

pub use cudarc;
use cudarc::driver::CudaStream;

use super::collectives::Collectives;
use super::gpu::Gpu;
use super::kernels::Kernels;
use super::profile::profile;
use super::timed::Timed;
use crate::backend::{BackendError, Capture, Dtype, L2, Replay, Tracing};
use crate::units::Bytes;

/// A forward that puts its work on a stream.
pub trait CustomForward {
    /// Puts one forward on `stream`. It is called eagerly, then once inside a stream capture: it may not allocate, free, copy from
    /// or to the host, wait, or use the default stream. Its buffers must stay where they are.
    ///
    /// # Errors
    /// Whatever keeps it from running.
    fn launch(&mut self, stream: &Arc<CudaStream>) -> Result<(), BackendError>;

    /// Puts back the state that the forward reads and changes, such as a cache that it appends to; inside the graph, before the
    /// timed part. The same limits hold.
    ///
    /// # Errors
    /// Whatever keeps it from running.
    fn restore(&mut self, _stream: &Arc<CudaStream>) -> Result<(), BackendError> {
        Ok(())
    }

    /// The last run's output, once the stream has been waited for; none: the checks of the output are skipped.
    ///
    /// # Errors
    /// If it cannot be copied from the GPU.
    fn output(&mut self) -> Result<Option<Vec<f32>>, BackendError> {
        Ok(None)
    }
}

/// A [`Capture`] of a [`CustomForward`].
pub struct CustomCapture<F: CustomForward> {
    // Dropped first: its graph uses the forward's buffers.
    timed: Timed,
    forward: F,
    gpu: Arc<Gpu>,
}

impl<F: CustomForward> CustomCapture<F> {
    /// Of `forward`, whose buffers are on `gpu`.
    ///
    /// # Errors
    /// If NVRTC or the GPU fails.
    pub fn new(gpu: &Arc<Gpu>, l2: L2, forward: F) -> Result<Self, BackendError> {
        Self::of(gpu, l2, forward, None)
    }

    /// The same of one rank of several: replays begin together, and `forward` may communicate by the same collectives.
    ///
    /// # Errors
    /// As for [`CustomCapture::new`].
    pub fn of_rank(
        gpu: &Arc<Gpu>,
        l2: L2,
        forward: F,
        collectives: &Rc<dyn Collectives>,
    ) -> Result<Self, BackendError> {
        Self::of(gpu, l2, forward, Some(collectives))
    }

    fn of(
        gpu: &Arc<Gpu>,
        l2: L2,
        forward: F,
        collectives: Option<&Rc<dyn Collectives>>,
    ) -> Result<Self, BackendError> {
        let kernels = Rc::new(Kernels::new(gpu, Dtype::Bfloat16)?);
        Ok(Self { timed: Timed::new(&kernels, l2, collectives)?, forward, gpu: gpu.clone() })
    }
}

impl<F: CustomForward> Capture for CustomCapture<F> {
    fn timer(&self) -> &'static str {
        "CUDA events in the graph"
    }

    fn snapshot(&mut self) -> Result<Bytes, BackendError> {
        Ok(Bytes(0)) // the forward looks after its own state
    }

    fn restore(&mut self) -> Result<(), BackendError> {
        self.forward.restore(&self.gpu.stream)
    }

    fn eager(&mut self) -> Result<(), BackendError> {
        self.gpu.bind()?;
        self.forward.launch(&self.gpu.stream)?;
        self.gpu.synchronize()
    }

    fn record(&mut self) -> Result<(), BackendError> {
        let Self { timed, forward, gpu } = self;
        let forward = std::cell::RefCell::new(forward);
        timed
            .record(|| forward.borrow_mut().restore(&gpu.stream), || forward.borrow_mut().launch(&gpu.stream))
    }

    fn replay(&mut self) -> Result<Replay, BackendError> {
        self.timed.replay()
    }

    fn profile(&mut self, name: &str, replays: u32) -> Result<Tracing, BackendError> {
        let kernels = self.timed.kernels().clone();
        let meets = self.timed.meets();
        profile(self, (&kernels, meets), name, replays)
    }

    fn output(&mut self) -> Result<Vec<f32>, BackendError> {
        self.gpu.synchronize()?;
        Ok(self.forward.output()?.unwrap_or_default())
    }
}
