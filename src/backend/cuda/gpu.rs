//! One GPU: its context, the stream that everything runs on, and its facts.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUevent_flags};
use cudarc::driver::{CudaContext, CudaStream, result, sys};

use super::error::driver;
use super::library;
use crate::backend::BackendError;
use crate::units::Nanos;

/// A GPU that is open.
#[derive(Debug)]
pub struct Gpu {
    /// Everything that runs on the GPU is ordered by this stream; it is not the default stream, which cannot be captured.
    pub stream: Arc<CudaStream>,
    /// The context, the device's primary one.
    pub context: Arc<CudaContext>,
    /// The device's name.
    pub name: String,
    /// `GPU-…`, as nvidia-smi prints it.
    pub uuid: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Bytes of the L2 cache.
    pub l2_bytes: usize,
    /// Bytes of dynamic shared memory that a block may ask for.
    pub max_shared: usize,
    /// CUDA version of the driver, 1000 × major + 10 × minor.
    pub driver: i32,
}

impl Gpu {
    /// Opens device `ordinal`, counted among those that CUDA_VISIBLE_DEVICES leaves.
    ///
    /// # Errors
    /// What [`super::available`] says, or that there is no such device.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, BackendError> {
        super::available()?;
        library::guarded(|| Self::open_checked(ordinal))
    }

    fn open_checked(ordinal: usize) -> Result<Arc<Self>, BackendError> {
        let device = library::device(ordinal)?;
        let context = primary_context(ordinal)?;
        // SAFETY: buffers are used on one stream only, so nothing needs the events that are no longer recorded.
        unsafe { context.disable_event_tracking() };
        let attribute =
            |which| context.attribute(which).map_err(driver("asking the device")).map(|value| value.max(0));
        let stream = context.new_stream().map_err(driver("creating a stream"))?;
        let uuid = result::device::get_uuid(device).map_err(driver("asking the device"))?;
        Ok(Arc::new(Self {
            name: context.name().map_err(driver("asking the device"))?,
            uuid: uuid_text(&uuid.bytes.map(|byte| byte as u8)),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            capability: context.compute_capability().map_err(driver("asking the device"))?,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            max_shared: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            driver: library::driver_version()?,
            stream,
            context,
        }))
    }

    /// The architecture that kernels are compiled for.
    #[must_use]
    pub fn arch(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}{}", if (major, minor) == (9, 0) { "a" } else { "" })
    }

    /// Makes the context current in this thread; driver calls need that.
    pub(super) fn bind(&self) -> Result<(), BackendError> {
        self.context.bind_to_thread().map_err(driver("making the context current"))
    }

    /// Waits for all work of the stream.
    ///
    /// # Errors
    /// If work on the GPU failed.
    pub fn synchronize(&self) -> Result<(), BackendError> {
        self.stream.synchronize().map_err(driver("waiting for the GPU"))
    }

    /// Bytes free and in all.
    pub(super) fn memory(&self) -> Result<(usize, usize), BackendError> {
        self.bind()?;
        result::mem_get_info().map_err(driver("asking for free memory"))
    }
}

/// The device's primary context, which then lives as long as the process: cuBLASLt keeps state of a context that does not survive
/// its end.
fn primary_context(ordinal: usize) -> Result<Arc<CudaContext>, BackendError> {
    static OPEN: Mutex<Vec<Arc<CudaContext>>> = Mutex::new(Vec::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = open.iter().find(|context| context.ordinal() == ordinal) {
        context.bind_to_thread().map_err(driver("making the context current"))?;
        return Ok(context.clone());
    }
    let context = CudaContext::new(ordinal).map_err(driver("creating a context"))?;
    open.push(context.clone());
    Ok(context)
}

fn uuid_text(bytes: &[u8; 16]) -> String {
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |range: std::ops::Range<usize>| hex[range].concat();
    format!("GPU-{}-{}-{}-{}-{}", part(0..4), part(4..6), part(6..8), part(8..10), part(10..16))
}

/// A timing event.
pub(super) struct Event {
    pub raw: sys::CUevent,
    gpu: Arc<Gpu>,
}

impl Event {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Self, BackendError> {
        gpu.bind()?;
        let raw =
            result::event::create(CUevent_flags::CU_EVENT_DEFAULT).map_err(driver("creating an event"))?;
        Ok(Self { raw, gpu: gpu.clone() })
    }

    /// Records it on the stream; in a capture as an external event, whose time is taken at every replay.
    pub(super) fn record(&self, capturing: bool) -> Result<(), BackendError> {
        let flags =
            if capturing { sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL as u32 } else { 0 };
        // SAFETY: event and stream belong to the same live context.
        let status = unsafe { sys::cuEventRecordWithFlags(self.raw, self.gpu.stream.cu_stream(), flags) };
        status.result().map_err(driver("recording an event"))
    }

    /// Waits until the event's work is done.
    pub(super) fn wait(&self) -> Result<(), BackendError> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.map_err(driver("waiting for the GPU"))
    }

    /// The time from this event to `end`, both recorded and done. The one place where event milliseconds are converted.
    pub(super) fn until(&self, end: &Self) -> Result<Nanos, BackendError> {
        // SAFETY: both events are alive and were made with timing.
        let millis =
            unsafe { result::event::elapsed(self.raw, end.raw) }.map_err(driver("reading an event"))?;
        Ok(Nanos(f64::from(millis) * 1e6))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        // SAFETY: made by this struct and not destroyed before. A failure here has nobody to tell.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_uuid_reads_as_nvidia_smi_prints_it() {
        let bytes: [u8; 16] = std::array::from_fn(|i| i as u8 + 0xa0);
        assert_eq!(super::uuid_text(&bytes), "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf");
    }
}
