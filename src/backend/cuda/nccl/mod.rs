//! Collectives by NCCL, one process for each GPU.
//!
//! NCCL chooses algorithm, protocol and channels by the size of a call and the machine's topology, once a communicator is made; with these the order of
//! a sum is fixed, so that a replay gives the bits of the one before. Another size, machine or `NCCL_…` variable may give
//! others. Nothing here sets such a variable.

mod communicators;
mod find;

use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::nccl::sys::{self, ncclDataType_t, ncclRedOp_t};

pub use find::nccl_library_path;

use self::communicators::{Communicator, Communicators, check};
use super::collectives::{Collectives, Span};
use super::error::driver;
use super::gpu::Gpu;
use super::library;
use crate::backend::{BackendError, Dtype};
use crate::layout::{Group, Place};

/// Every call that is made here: a library without one of them is too old.
const CALLS: [&str; 16] = [
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommSplit",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclCommGetAsyncError",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclAllReduce",
    "ncclAllGather",
    "ncclReduceScatter",
    "ncclSend",
    "ncclRecv",
];

/// Whether NCCL is there and new enough. Starts nothing on a GPU and never panics.
///
/// # Errors
/// One line that names what is missing and how to give it.
pub fn nccl_available() -> Result<(), BackendError> {
    library::guarded(|| library::nccl(&CALLS))
}

/// A rank's communicators: of the world, and of each of its groups that is neither that nor itself alone.
///
/// Graphs that hold its collectives must be gone before it is dropped: NCCL waits for them. Dropping it ends the communicators
/// in order, unless they were aborted, and gives up after 5 s if other ranks do not do the same.
pub struct Nccl {
    /// Of every group; none for a group of this rank alone.
    groups: Vec<(Group, Option<Communicator>)>,
    place: Place,
    communicators: Arc<Communicators>,
    // The device of the communicators.
    _gpu: Arc<Gpu>,
}

impl Nccl {
    /// An id for the ranks of one world, which one of them makes and all others are told: 128 bytes.
    ///
    /// # Errors
    /// If NCCL is missing or has no network interface to meet at.
    pub fn unique_id() -> Result<Vec<u8>, BackendError> {
        nccl_available()?;
        library::guarded(communicators::unique_id)
    }

    /// Joins the other ranks, and waits until all of them have called this.
    ///
    /// # Errors
    /// If NCCL is missing, or it refuses.
    pub fn new(gpu: &Arc<Gpu>, place: Place, id: &[u8]) -> Result<Rc<Self>, BackendError> {
        nccl_available()?;
        gpu.bind()?;
        let communicators = Arc::new(Communicators::default());
        let groups = library::guarded(|| communicators.connect(place, id));
        match groups {
            Ok(groups) => Ok(Rc::new(Self { groups, place, communicators, _gpu: gpu.clone() })),
            Err(error) => {
                communicators.abort(); // the others may never come to end it in order
                Err(error)
            }
        }
    }

    /// What ends every communicator at once, for [`crate::rank`]'s watchdog: kernels that wait for another rank stop, and so do
    /// calls that wait for those. It may be called from any thread while this rank is in a collective; a second call does
    /// nothing. It returns after a second at the latest. Collectives that are asked for afterwards fail.
    #[must_use]
    pub fn abort_hook(&self) -> Box<dyn Fn() + Send + Sync> {
        let communicators = self.communicators.clone();
        Box::new(move || communicators.abort())
    }

    /// A group's communicator, and how many its members are; none if this rank is all of it.
    fn group(&self, gpu: &Gpu, group: Group) -> Result<Option<(Communicator, usize)>, BackendError> {
        self.communicators.alive()?;
        gpu.bind()?;
        let found = self.groups.iter().find(|(other, _)| *other == group);
        let communicator = found.and_then(|(_, communicator)| *communicator);
        Ok(communicator.map(|communicator| (communicator, self.place.members(group).len())))
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.communicators.end();
    }
}

impl Collectives for Nccl {
    fn all_reduce(&self, gpu: &Gpu, group: Group, data: Span) -> Result<(), BackendError> {
        let Some((communicator, _)) = self.group(gpu, group)? else { return Ok(()) };
        let (address, dtype) = (data.address as *mut c_void, dtype(data.dtype));
        // SAFETY: the caller's elements, in place; communicator and stream are alive.
        let status = unsafe {
            let (sum, raw, stream) = (ncclRedOp_t::ncclSum, communicator.0, stream(gpu));
            sys::ncclAllReduce(address, address, data.count, dtype, sum, raw, stream)
        };
        check(status, Some(communicator), || call("summing", group, data))
    }

    fn all_gather(&self, gpu: &Gpu, group: Group, mine: Span, all: u64) -> Result<(), BackendError> {
        let Some((communicator, _)) = self.group(gpu, group)? else { return copy(gpu, mine, all) };
        let (from, to) = (mine.address as *const c_void, all as *mut c_void);
        // SAFETY: the caller's elements, at `all` as many for each member; communicator and stream are alive.
        let status = unsafe {
            sys::ncclAllGather(from, to, mine.count, dtype(mine.dtype), communicator.0, stream(gpu))
        };
        check(status, Some(communicator), || call("gathering", group, mine))
    }

    fn reduce_scatter(&self, gpu: &Gpu, group: Group, all: u64, mine: Span) -> Result<(), BackendError> {
        let Some((communicator, _)) = self.group(gpu, group)? else {
            return copy(gpu, Span { address: all, ..mine }, mine.address);
        };
        let (from, to) = (all as *const c_void, mine.address as *mut c_void);
        // SAFETY: the caller's elements, at `all` as many for each member; communicator and stream are alive.
        let status = unsafe {
            let (sum, raw, stream) = (ncclRedOp_t::ncclSum, communicator.0, stream(gpu));
            sys::ncclReduceScatter(from, to, mine.count, dtype(mine.dtype), sum, raw, stream)
        };
        check(status, Some(communicator), || call("summing and spreading", group, mine))
    }

    fn all_to_all(&self, gpu: &Gpu, group: Group, send: Span, receive: u64) -> Result<(), BackendError> {
        let Some((communicator, members)) = self.group(gpu, group)? else { return copy(gpu, send, receive) };
        if !send.count.is_multiple_of(members) {
            let call = call("exchanging", group, send);
            return Err(BackendError::Device(format!("{call} is no equal part for each of {members}")));
        }
        let part = send.count / members;
        let bytes = (part * bytes(send.dtype)) as u64;
        self.together(&mut || {
            for peer in 0..members {
                let (at, dtype) = (peer as u64 * bytes, dtype(send.dtype));
                let (from, to) = ((send.address + at) as *const c_void, (receive + at) as *mut c_void);
                let (raw, peer, stream) = (communicator.0, peer as i32, stream(gpu));
                // SAFETY: a member's part of the caller's elements; communicator and stream are alive.
                let statuses = unsafe {
                    [
                        sys::ncclSend(from, part, dtype, peer, raw, stream),
                        sys::ncclRecv(to, part, dtype, peer, raw, stream),
                    ]
                };
                for status in statuses {
                    check(status, Some(communicator), || call("exchanging", group, send))?;
                }
            }
            Ok(())
        })
    }

    fn together(&self, calls: &mut dyn FnMut() -> Result<(), BackendError>) -> Result<(), BackendError> {
        self.communicators.alive()?;
        // SAFETY: a group of this thread, ended below.
        let started = unsafe { sys::ncclGroupStart() };
        check(started, None, || "beginning a group of calls".into())?;
        let called = calls();
        // SAFETY: begun above; it is ended even if a call failed.
        let mut ended = unsafe { sys::ncclGroupEnd() };
        called?;
        for communicator in self.groups.iter().filter_map(|(_, communicator)| *communicator) {
            if ended == sys::ncclResult_t::ncclInProgress {
                check(ended, Some(communicator), || "running a group of calls".into())?;
            }
        }
        if ended == sys::ncclResult_t::ncclInProgress {
            ended = sys::ncclResult_t::ncclSuccess;
        }
        check(ended, None, || "running a group of calls".into())
    }
}

/// What was asked, in words.
fn call(doing: &str, group: Group, span: Span) -> String {
    format!("{doing} {} elements of {:?} over {group:?}", span.count, span.dtype)
}

fn stream(gpu: &Gpu) -> sys::cudaStream_t {
    gpu.stream.cu_stream().cast()
}

fn dtype(dtype: Dtype) -> ncclDataType_t {
    match dtype {
        Dtype::Float32 => ncclDataType_t::ncclFloat32,
        Dtype::Bfloat16 => ncclDataType_t::ncclBfloat16,
        Dtype::Float16 => ncclDataType_t::ncclFloat16,
    }
}

fn bytes(dtype: Dtype) -> usize {
    match dtype {
        Dtype::Float32 => 4,
        Dtype::Bfloat16 | Dtype::Float16 => 2,
    }
}

/// What a group of one does with what only moves.
fn copy(gpu: &Gpu, from: Span, to: u64) -> Result<(), BackendError> {
    if from.address == to {
        return Ok(());
    }
    let bytes = from.count * bytes(from.dtype);
    // SAFETY: the caller's elements, and room for as many.
    unsafe { result::memcpy_dtod_async(to, from.address, bytes, gpu.stream.cu_stream()) }
        .map_err(driver("copying on the GPU"))
}
