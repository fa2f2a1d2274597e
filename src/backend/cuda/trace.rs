//! Which kernels ran and when, from CUPTI's Activity API: a second opinion on the interval between the events.
//!
//! Tracing stretches small steps, so a traced replay is only compared with itself. Kernels are traced one by one
//! (`CONCURRENT_KERNEL` alone; `GRAPH_TRACE` would fold a graph into one record).

use std::ffi::CStr;
use std::sync::{Mutex, PoisonError};

use cudarc::cupti::result::{CuptiError, activity};
use cudarc::cupti::sys;
use cudarc::driver::sys::CUcontext;

use super::library;
use crate::backend::BackendError;
use crate::units::Nanos;

const KIND: sys::CUpti_ActivityKind = sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;

/// `u64` words of a buffer that CUPTI fills: 8 MiB, as in NVIDIA's samples. Words give the alignment of 8 that it asks for.
const BUFFER_WORDS: usize = 1 << 20;

/// What CUPTI has delivered. Its callbacks carry no data of ours, so this is the process's.
static KERNELS: Mutex<Vec<KernelRecord>> = Mutex::new(Vec::new());

/// One kernel that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelRecord {
    /// Its symbol; ours are not mangled.
    pub name: String,
    /// When it started, in nanoseconds of CUPTI's clock; 64 bits, as a float of that size would round by hundreds.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// CUPTI, attached to this process until it ends.
#[derive(Debug)]
pub struct Tracer(());

impl Tracer {
    /// Attaches CUPTI; nothing is traced yet. To be called before the GPU is used, so that all that is made later can be traced.
    ///
    /// # Errors
    /// If libcupti is missing, or another profiler is attached.
    pub fn attach() -> Result<Self, BackendError> {
        library::cupti()?;
        library::guarded(|| {
            activity::register_callbacks(Some(give_buffer), Some(take_buffer))
                .map_err(failed("attaching"))?;
            activity::enable(KIND).map_err(failed("attaching"))?;
            activity::disable(KIND).map_err(failed("attaching"))?;
            Ok(Self(()))
        })
    }

    /// Starts to trace. A graph is best recorded after this.
    ///
    /// # Errors
    /// If CUPTI refuses.
    pub fn start(&mut self) -> Result<(), BackendError> {
        activity::enable(KIND).map_err(failed("starting to trace"))
    }

    /// Stops tracing and returns the kernels since [`Tracer::start`], by their starts. The GPU must have been waited for.
    ///
    /// # Errors
    /// If a record was lost or has no time.
    pub fn stop(&mut self) -> Result<Vec<KernelRecord>, BackendError> {
        activity::disable(KIND).map_err(failed("stopping to trace"))?;
        activity::flush_all(sys::CUpti_ActivityFlag::CUPTI_ACTIVITY_FLAG_FLUSH_FORCED as u32)
            .map_err(failed("reading the trace"))?;
        let mut lost = 0;
        // SAFETY: no context and stream 0 ask for the whole process; one integer is written.
        unsafe { activity::get_num_dropped_records(std::ptr::null_mut(), 0, &raw mut lost) }
            .map_err(failed("reading the trace"))?;
        let mut kernels = std::mem::take(&mut *KERNELS.lock().unwrap_or_else(PoisonError::into_inner));
        let untimed = kernels.iter().filter(|kernel| kernel.start == 0 || kernel.end == 0).count();
        if lost + untimed > 0 {
            return Err(BackendError::Device(format!(
                "CUPTI lost {lost} kernels and gave {untimed} no time; trace fewer replays"
            )));
        }
        kernels.sort_by_key(|kernel| kernel.start);
        Ok(kernels)
    }
}

/// The kernels of one replay of a timed graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split<'a> {
    /// KV put back, caches flushed, the first clock probe, and the ranks' meeting.
    pub before: &'a [KernelRecord],
    /// The timed forward: what lies between that and the second clock probe.
    pub forward: &'a [KernelRecord],
}

/// How NCCL's kernels begin.
const NCCL: &str = "nccl";

/// The replays in a trace of nothing else. One that lacks its second clock probe is left out.
///
/// Where ranks meet (`meets`), NCCL's first kernel directly after the first probe is that meeting. There is none among one rank
/// alone, for which NCCL launches nothing, neither there nor for a sum in place that a forward may begin with.
#[must_use]
pub fn replays(kernels: &[KernelRecord], meets: bool) -> Vec<Split<'_>> {
    let probes: Vec<usize> = kernels
        .iter()
        .enumerate()
        .filter(|(_, kernel)| kernel.name == "clock_probe")
        .map(|(i, _)| i)
        .collect();
    let mut begin = 0;
    let split = |pair: &[usize; 2]| {
        let [first, second] = *pair;
        let meeting = meets && kernels[first + 1].name.starts_with(NCCL);
        let start = first + 1 + usize::from(meeting);
        let split = Split { before: &kernels[begin..start], forward: &kernels[start..second] };
        begin = second + 1;
        split
    };
    probes.as_chunks::<2>().0.iter().map(split).collect()
}

/// The kernels of each timed forward of one rank; what comes before (KV put back, caches flushed) is left out.
#[must_use]
pub fn forwards(kernels: &[KernelRecord]) -> Vec<&[KernelRecord]> {
    replays(kernels, false).iter().map(|replay| replay.forward).collect()
}

/// From the first start to the last end; kernels may overlap. Zero if there are none.
#[must_use]
pub fn span(kernels: &[KernelRecord]) -> Nanos {
    let start = kernels.iter().map(|kernel| kernel.start).min();
    let end = kernels.iter().map(|kernel| kernel.end).max();
    let nanos = start.zip(end).map_or(0, |(start, end)| end.saturating_sub(start));
    Nanos(nanos as f64)
}

fn failed(doing: &str) -> impl Fn(CuptiError) -> BackendError {
    move |error| BackendError::Device(format!("CUPTI: {doing} failed: {:?}", error.0))
}

/// CUPTI wants a buffer.
///
/// # Safety
/// Called by CUPTI only, with three places to write to.
unsafe extern "C" fn give_buffer(buffer: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
    let words: Box<[u64]> = vec![0_u64; BUFFER_WORDS].into_boxed_slice();
    // SAFETY: CUPTI hands over three places to write to. It owns the buffer until `take_buffer`, which frees it. Zero: as many
    // records as fit.
    unsafe {
        *buffer = Box::into_raw(words).cast();
        *size = BUFFER_WORDS * size_of::<u64>();
        *max_records = 0;
    }
}

/// CUPTI gives a buffer back, its first `valid` bytes filled.
///
/// # Safety
/// Called by CUPTI only, with a buffer of [`give_buffer`].
unsafe extern "C" fn take_buffer(
    _context: CUcontext,
    _stream: u32,
    buffer: *mut u8,
    _size: usize,
    valid: usize,
) {
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut record: *mut sys::CUpti_Activity = std::ptr::null_mut();
    // SAFETY: the buffer is whole, and `record` null at first, then the record before, as the call wants it.
    while unsafe { activity::get_next_record(buffer, valid, &raw mut record) }.is_ok() {
        // SAFETY: every record begins with its kind. It is read as a number, as a newer CUPTI may have kinds that the enum lacks.
        let kind = unsafe { record.cast::<u32>().read() };
        if kind == KIND as u32 {
            let kernel = record.cast::<sys::CUpti_ActivityKernel10>();
            // SAFETY: a kernel's record. Later CUPTIs append fields; these three are where they were. The name lives as long as CUPTI.
            let (start, end, name) = unsafe { ((*kernel).start, (*kernel).end, (*kernel).name) };
            let name = if name.is_null() {
                String::new()
            } else {
                // SAFETY: CUPTI's zero-terminated string.
                unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
            };
            kernels.push(KernelRecord { name, start, end });
        }
    }
    let words = std::ptr::slice_from_raw_parts_mut(buffer.cast::<u64>(), BUFFER_WORDS);
    // SAFETY: made by `give_buffer` with this length, and given back once.
    drop(unsafe { Box::from_raw(words) });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(name: &str, start: u64, end: u64) -> KernelRecord {
        KernelRecord { name: name.to_owned(), start, end }
    }

    #[test]
    fn a_forward_is_what_lies_between_two_probes() {
        let replay = |at: u64| {
            [
                kernel("copy_segments", at, at + 5),
                kernel("clock_probe", at + 6, at + 8),
                kernel("long", at + 10, at + 90), // the next begins and ends within it
                kernel("short", at + 20, at + 30),
                kernel("clock_probe", at + 100, at + 102),
            ]
        };
        let mut kernels: Vec<KernelRecord> = replay(1000).into_iter().chain(replay(2000)).collect();
        let spans = |kernels: &[KernelRecord]| -> Vec<f64> {
            forwards(kernels).into_iter().map(|kernels| span(kernels).0).collect()
        };
        assert_eq!(spans(&kernels), [80.0, 80.0]);
        let before = |replay: &Split<'_>| replay.before.iter().map(|k| k.name.clone()).collect::<Vec<_>>();
        let set_apart: Vec<_> = replays(&kernels, false).iter().map(before).collect();
        assert_eq!(set_apart, [["copy_segments", "clock_probe"], ["copy_segments", "clock_probe"]]);
        kernels.pop();
        assert_eq!(spans(&kernels), [80.0], "the last replay was cut off");
        assert!(forwards(&[]).is_empty() && forwards(&[kernel("a", 0, 1)]).is_empty());
        assert_eq!(span(&[]), Nanos(0.0));
    }

    #[test]
    fn the_meeting_of_ranks_comes_before_the_forward() {
        let sum = "ncclDevKernel_AllReduce_Sum_f32_RING_LL";
        let replay = |names: &[&str]| -> Vec<KernelRecord> {
            names.iter().zip(1..).map(|(name, at)| kernel(name, 10 * at, 10 * at + 5)).collect()
        };
        let forward = |kernels: &[KernelRecord], meets: bool| -> Vec<String> {
            replays(kernels, meets)[0].forward.iter().map(|kernel| kernel.name.clone()).collect()
        };
        let met = replay(&["clock_probe", sum, "embed_gather", sum, "clock_probe"]);
        assert_eq!(forward(&met, true), ["embed_gather", sum]);
        assert_eq!(replays(&met, true)[0].before.len(), 2);
        assert_eq!(forward(&met, false), [sum, "embed_gather", sum], "a forward of one's own may begin so");
        let alone = replay(&["clock_probe", "embed_gather", "clock_probe"]);
        assert_eq!(forward(&alone, true), ["embed_gather"]);
        assert!(forward(&replay(&["clock_probe", "clock_probe"]), true).is_empty());
    }

    #[test]
    fn the_fields_that_are_read_are_where_cupti_has_had_them_since_cuda_9() {
        use std::mem::offset_of;
        type Record = sys::CUpti_ActivityKernel10;
        assert_eq!(
            (offset_of!(Record, start), offset_of!(Record, end), offset_of!(Record, name)),
            (16, 24, 104)
        );
    }
}
