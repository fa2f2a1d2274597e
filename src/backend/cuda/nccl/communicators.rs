//! NCCL's communicators, from their making to their end, and its errors.
//!
//! They are blocking: calls return when they are done or recorded, so a capture needs no polling between them. An abort does not need it
//! otherwise: it sets a flag that the kernels of either kind look at. What blocks for want of a rank while communicators are made is ended by
//! the watchdog's time-out, with the process.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{self, ncclResult_t};

use crate::backend::BackendError;
use crate::layout::{Group, Place};

/// A communicator. It is NCCL's own; whoever takes it out of [`Communicators::live`] ends it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Communicator(pub sys::ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time. An abort alone may come while another thread waits in a call,
// which is what it is for.
unsafe impl Send for Communicator {}

impl Communicator {
    fn abort(self) {
        // SAFETY: made by NCCL, and ended by nobody else. What it answers has nobody to tell.
        let _ = unsafe { sys::ncclCommAbort(self.0) };
    }

    fn end(self) {
        // SAFETY: made by NCCL, and ended by nobody else. What they answer has nobody to tell.
        let _ = unsafe { (sys::ncclCommFinalize(self.0), sys::ncclCommDestroy(self.0)) };
    }
}

/// For how long an abort is waited for. Kernels are told at once; the rest frees memory, and waits for graphs that hold a communicator,
/// which a process that ends need not.
const ABORT: Duration = Duration::from_secs(1);

/// For how long an orderly end is waited for: ranks on one machine wait for each other in it, and one may be gone.
const END: Duration = Duration::from_secs(5);

/// All communicators of a rank.
#[derive(Debug, Default)]
pub(super) struct Communicators {
    /// Those that nobody has ended.
    live: Mutex<Vec<Communicator>>,
    ended: AtomicBool,
}

impl Communicators {
    fn add(&self, communicator: Communicator) -> Communicator {
        self.lock().push(communicator);
        communicator
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Communicator>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails once they are ended.
    pub(super) fn alive(&self) -> Result<(), BackendError> {
        if self.ended.load(Ordering::Acquire) {
            return Err(BackendError::Device("a collective is asked for after NCCL was aborted".into()));
        }
        Ok(())
    }

    /// Joins the world, and then its own groups. One entry a group: none for one member among several ranks.
    pub(super) fn connect(
        &self,
        place: Place,
        id: &[u8],
    ) -> Result<Vec<(Group, Option<Communicator>)>, BackendError> {
        let world = self.add(join(place, id)?);
        let mut made = vec![(place.members(Group::World), Some(world))];
        let mut groups = vec![(Group::World, Some(world))];
        for group in [Group::Tensor, Group::Data, Group::Expert] {
            let members = place.members(group);
            let known = made.iter().find(|(others, _)| *others == members).map(|(_, known)| *known);
            let communicator = match known {
                Some(known) => known,
                None if members.len() == 1 => None,
                None => Some(self.add(split(world, place, group, &members)?)),
            };
            made.push((members, communicator));
            groups.push((group, communicator));
        }
        Ok(groups)
    }

    /// Takes those that nobody has ended.
    fn take(&self) -> Vec<Communicator> {
        self.ended.store(true, Ordering::Release);
        std::mem::take(&mut *self.lock())
    }

    /// Aborts each once, whatever other threads wait for; each in a thread of its own, as one may wait for graphs that hold it.
    pub(super) fn abort(&self) {
        let aborts =
            self.take().into_iter().map(|communicator| apart(move || communicator.abort())).collect();
        wait(aborts, ABORT);
    }

    /// Ends them in order, as the other ranks do; gives up after a while if those do not come.
    pub(super) fn end(&self) {
        let communicators = self.take();
        if communicators.is_empty() {
            return;
        }
        let ended = apart(move || communicators.into_iter().rev().for_each(Communicator::end));
        wait(vec![ended], END);
    }
}

/// Runs `body` in a thread; without one to be had, not at all.
fn apart(body: impl FnOnce() + Send + 'static) -> std::sync::mpsc::Receiver<()> {
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || {
        body();
        let _ = sender.send(()); // nobody waits any more
    });
    drop(thread);
    receiver
}

/// Waits for all, this long in all.
fn wait(bodies: Vec<std::sync::mpsc::Receiver<()>>, patience: Duration) {
    let until = Instant::now() + patience;
    for body in bodies {
        let _ = body.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// A new id, for all ranks of a world.
pub(super) fn unique_id() -> Result<Vec<u8>, BackendError> {
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    // SAFETY: one id is written.
    let status = unsafe { sys::ncclGetUniqueId(&raw mut id) };
    check(status, None, || "making an id for a communicator".into())?;
    Ok(id.internal.map(|byte| byte as u8).to_vec())
}

fn join(place: Place, id: &[u8]) -> Result<Communicator, BackendError> {
    let (ranks, rank) = (place.layout.ranks(), place.rank);
    let bytes: [u8; 128] = id
        .try_into()
        .map_err(|_| BackendError::Device(format!("an NCCL id has 128 bytes, {} were given", id.len())))?;
    let id = sys::ncclUniqueId { internal: bytes.map(|byte| byte as c_char) };
    let (mut raw, mut config) = (std::ptr::null_mut(), config());
    // SAFETY: a whole configuration; one communicator is written.
    let status = unsafe {
        sys::ncclCommInitRankConfig(&raw mut raw, ranks as c_int, id, rank as c_int, &raw mut config)
    };
    check(status, Some(Communicator(raw)), || format!("joining {ranks} ranks as rank {rank}"))?;
    Ok(Communicator(raw))
}

/// The communicator of a group; all ranks of the world take part.
fn split(
    world: Communicator,
    place: Place,
    group: Group,
    members: &[usize],
) -> Result<Communicator, BackendError> {
    let (mut raw, mut config) = (std::ptr::null_mut(), config());
    let (color, key) = (members[0] as c_int, place.rank as c_int);
    // SAFETY: the world is alive, the configuration whole; one communicator is written.
    let status = unsafe { sys::ncclCommSplit(world.0, color, key, &raw mut raw, &raw mut config) };
    // Until a split is done, both say so.
    check(status, Some(world), || format!("joining the {} ranks of {group:?}", members.len()))?;
    check(status, Some(Communicator(raw)), || format!("joining the {} ranks of {group:?}", members.len()))?;
    Ok(Communicator(raw))
}

/// `NCCL_CONFIG_INITIALIZER` of NCCL 2.28, blocking, with nothing shared between communicators, so that each is aborted by itself. Other versions
/// read as much of it as they know.
fn config() -> sys::ncclConfig_t {
    const UNSET: c_int = c_int::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 22_800,
        blocking: 1,
        cgaClusterSize: UNSET,
        minCTAs: UNSET,
        maxCTAs: UNSET,
        netName: std::ptr::null(),
        splitShare: 0,
        trafficClass: UNSET,
        commName: std::ptr::null(),
        collnetEnable: UNSET,
        CTAPolicy: UNSET,
        shrinkShare: UNSET,
        nvlsCTAs: UNSET,
        nChannelsPerNetPeer: UNSET,
        nvlinkCentricSched: UNSET,
    }
}

/// What a call answered. The environment (`NCCL_COMM_BLOCKING`) can make communicators that do not block: those are waited for.
pub(super) fn check(
    mut status: ncclResult_t,
    communicator: Option<Communicator>,
    doing: impl FnOnce() -> String,
) -> Result<(), BackendError> {
    let raw = communicator.map_or(std::ptr::null_mut(), |communicator| communicator.0);
    while status == ncclResult_t::ncclInProgress && !raw.is_null() {
        std::thread::sleep(Duration::from_micros(50));
        // SAFETY: the communicator is alive; one status is written.
        let asked = unsafe { sys::ncclCommGetAsyncError(raw, &raw mut status) };
        if asked != ncclResult_t::ncclSuccess {
            status = asked;
        }
    }
    if status == ncclResult_t::ncclSuccess {
        return Ok(());
    }
    // SAFETY: both answer zero-terminated strings that live on, or nothing; the communicator may be null.
    let (name, last) = unsafe { (text(sys::ncclGetErrorString(status)), text(sys::ncclGetLastError(raw))) };
    let last = if last.is_empty() { last } else { format!(" ({last})") };
    let doing = doing();
    Err(BackendError::Device(format!(
        "NCCL: {doing} failed: {name}{last}; NCCL_DEBUG=INFO makes it say more"
    )))
}

/// A string of NCCL's in one line.
///
/// # Safety
/// Null, or a zero-terminated string that is alive.
unsafe fn text(raw: *const c_char) -> String {
    if raw.is_null() {
        return String::new();
    }
    // SAFETY: the caller's.
    let text = unsafe { CStr::from_ptr(raw) }.to_string_lossy();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
