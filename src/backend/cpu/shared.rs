//! A slice that several threads write at once, each its own part.

use std::marker::PhantomData;

/// A mutable slice whose disjoint parts may be written from several threads.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    start: *mut f32,
    len: usize,
    _borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for an exclusive borrow of plain numbers; `part`'s contract keeps threads apart.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    /// Shares out `slice` for as long as it is borrowed.
    pub(super) fn new(slice: &'a mut [f32]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), _borrow: PhantomData }
    }

    /// The elements `first .. first + len`; panics outside the slice.
    ///
    /// # Safety
    /// While the part lives, no other part that overlaps it may be used, on any thread.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn part(&self, first: usize, len: usize) -> &'a mut [f32] {
        assert!(first <= self.len && len <= self.len - first, "a part lies outside its slice");
        // SAFETY: the range is inside the slice by the assertion, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), len) }
    }
}
