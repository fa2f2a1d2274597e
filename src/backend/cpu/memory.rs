//! Large zeroed buffers that take memory only where they are touched, and how much memory there is.

use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

use crate::backend::BackendError;
use crate::units::Bytes;

/// Zeroed float32 values in an anonymous mapping: pages come into being when first written.
pub(super) struct Buffer {
    map: MmapMut,
    len: usize,
}

impl Buffer {
    /// `len` zeros; `what` names them in the error when there is no room.
    pub(super) fn zeroed(len: usize, what: &str) -> Result<Self, BackendError> {
        let bytes = len.max(1).checked_mul(size_of::<f32>());
        let map = bytes.and_then(|bytes| MmapMut::map_anon(bytes).ok());
        let map = map.ok_or_else(|| {
            BackendError::NoRoom(format!("{what}: {} could not be reserved", Bytes(len as u128 * 4)))
        })?;
        // Weights and KV are read end to end: large pages save address look-ups. Where there are none it changes nothing.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { map, len })
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: a mapping starts at a page's boundary, holds `len` floats, and any bits are a float.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as for `deref`; the exclusive borrow covers the mapping.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().cast(), self.len) }
    }
}

/// Memory that the system can still give, where it says so (Linux).
pub(super) fn available() -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u128 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib * 1024))
}

/// Fails if `needed` is more than the system can give; `advice` says what to change, knowing what is free.
pub(super) fn require(
    needed: Bytes,
    what: &str,
    advice: impl Fn(Bytes) -> String,
) -> Result<(), BackendError> {
    match available() {
        Some(free) if needed > free => {
            let advice = advice(free);
            Err(BackendError::NoRoom(format!(
                "{what} need {needed} of memory, {free} is available; {advice}"
            )))
        }
        _ => Ok(()),
    }
}
