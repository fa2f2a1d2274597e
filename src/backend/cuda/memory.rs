//! Memory on the GPU. Buffers are plain allocations, made and freed outside of any capture.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::error::driver;
use super::gpu::Gpu;
use crate::backend::BackendError;
use crate::units::Bytes;

/// A device allocation.
pub struct Buffer {
    address: sys::CUdeviceptr,
    bytes: usize,
    gpu: Arc<Gpu>,
}

/// Types whose bytes may be copied to and from the GPU.
///
/// # Safety
/// No padding, no pointers, and every bit pattern is a value.
// SAFETY: this only declares what implementations assert.
pub(super) unsafe trait Plain: Copy + Default {}
macro_rules! plain {
    ($($t:ty),*) => {$(
        // SAFETY: plain numbers, and arrays of them.
        unsafe impl Plain for $t {}
    )*};
}
plain!(u8, u16, u32, i32, u64, i64, f32, [f32; 2], [i32; 4], [i32; 8], [u64; 2]);

impl Buffer {
    /// `bytes` bytes (at least 16 are taken) for `what`, a noun for the error message.
    pub(super) fn new(gpu: &Arc<Gpu>, bytes: usize, what: &str) -> Result<Self, BackendError> {
        gpu.bind()?;
        let bytes = bytes.max(16);
        // SAFETY: the context is current; a failed allocation is an error, not a null pointer.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(|error| {
            let free = gpu.memory().map_or(0, |(free, _)| free);
            if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                BackendError::NoRoom(format!(
                    "{what}: {} are needed, {} are free on the GPU; lower --gpu-memory-utilization or choose a smaller --model",
                    Bytes(bytes as u128),
                    Bytes(free as u128)
                ))
            } else {
                driver(&format!("allocating {what}"))(error)
            }
        })?;
        Ok(Self { address, bytes, gpu: gpu.clone() })
    }

    /// A buffer that holds `values`.
    pub(super) fn of<T: Plain>(gpu: &Arc<Gpu>, values: &[T], what: &str) -> Result<Self, BackendError> {
        let buffer = Self::new(gpu, size_of_val(values), what)?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Its device address, 256-byte aligned.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<(), BackendError> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.bytes);
        let fail =
            || BackendError::Device(format!("a copy of {bytes} bytes at {offset} in {} bytes", self.bytes));
        end.map(|_| ()).ok_or_else(fail)
    }

    /// Copies `values` to byte `offset`, after the stream's earlier work, and waits.
    pub(super) fn write<T: Plain>(&self, offset: usize, values: &[T]) -> Result<(), BackendError> {
        self.check(offset, size_of_val(values))?;
        if values.is_empty() {
            return Ok(());
        }
        self.gpu.bind()?;
        let stream = self.gpu.stream.cu_stream();
        // SAFETY: within the buffer, as checked; `values` lives until the stream was waited for.
        unsafe { result::memcpy_htod_async(self.address + offset as u64, values, stream) }
            .map_err(driver("copying to the GPU"))?;
        self.gpu.synchronize()
    }

    /// Copies `count` values from byte `offset`, after the stream's earlier work.
    pub(super) fn read<T: Plain>(&self, offset: usize, count: usize) -> Result<Vec<T>, BackendError> {
        self.check(offset, count * size_of::<T>())?;
        let mut values = vec![T::default(); count];
        if count == 0 {
            return Ok(values);
        }
        self.gpu.bind()?;
        let stream = self.gpu.stream.cu_stream();
        // SAFETY: within the buffer, as checked; `values` is as long, and the stream is waited for before it is used.
        unsafe { result::memcpy_dtoh_async(&mut values, self.address + offset as u64, stream) }
            .map_err(driver("copying from the GPU"))?;
        self.gpu.synchronize()?;
        Ok(values)
    }

    /// Sets every byte, in the stream's order.
    pub(super) fn fill(&self, byte: u8) -> Result<(), BackendError> {
        self.gpu.bind()?;
        // SAFETY: the whole buffer.
        unsafe { result::memset_d8_async(self.address, byte, self.bytes, self.gpu.stream.cu_stream()) }
            .map_err(driver("filling memory"))
    }

    /// Copies the first `bytes` over and over until `total` bytes from `offset` are written.
    pub(super) fn repeat(&self, offset: usize, bytes: usize, total: usize) -> Result<(), BackendError> {
        self.check(offset, total)?;
        self.gpu.bind()?;
        let (base, mut done) = (self.address + offset as u64, bytes.min(total));
        while done < total {
            let next = done.min(total - done);
            // SAFETY: both ranges lie within the checked one and do not overlap.
            unsafe { result::memcpy_dtod_async(base + done as u64, base, next, self.gpu.stream.cu_stream()) }
                .map_err(driver("copying on the GPU"))?;
            done += next;
        }
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        // SAFETY: allocated by this struct, freed once; cuMemFree waits for work that uses it.
        let _ = unsafe { result::free_sync(self.address) };
    }
}
