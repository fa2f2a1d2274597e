//! The timed graph: restore → flush → probe → meeting of ranks → start event → forward → end event → probe, and its replays.

use std::rc::Rc;

use super::collectives::Collectives;
use super::compile::File;
use super::gpu::Event;
use super::graph::Graph;
use super::kernels::{Arg, Function, Grid, Kernels};
use super::meeting::Meeting;
use super::memory::Buffer;
use crate::backend::{BackendError, L2, Replay};
use crate::stats::median;
use crate::units::Nanos;

/// Shorter intervals say nothing about the clock: the global timer ticks too coarsely.
const MIN_CLOCK_NANOS: f64 = 20_000.0;

/// What lies between the stamps beside the forward.
const STAMPS_NANOS: f64 = 100_000.0;

/// The longest wait for other ranks that a clock is still told of: stamps further apart are taken for old ones.
const WAIT_NANOS: f64 = 1e9;

/// A graph with two events around its forward.
pub(super) struct Timed {
    // Dropped first: the graph uses everything below.
    graph: Option<Graph>,
    start: Event,
    end: Event,
    probe: Probe,
    flush: Option<Flush>,
    meeting: Option<Meeting>,
    kernels: Rc<Kernels>,
}

impl Timed {
    /// With collectives, replays begin when all ranks are there.
    pub(super) fn new(
        kernels: &Rc<Kernels>,
        l2: L2,
        collectives: Option<&Rc<dyn Collectives>>,
    ) -> Result<Self, BackendError> {
        let gpu = &kernels.gpu;
        let flush = match l2 {
            L2::Warm => None,
            L2::Cold => Some(Flush::new(kernels)?),
        };
        Ok(Self {
            graph: None,
            start: Event::new(gpu)?,
            end: Event::new(gpu)?,
            probe: Probe::new(kernels)?,
            flush,
            meeting: collectives.map(|collectives| Meeting::new(gpu, collectives)).transpose()?,
            kernels: kernels.clone(),
        })
    }

    /// Records `before`, then `forward` between the events. Neither may allocate, copy from or to the host, or wait.
    pub(super) fn record(
        &mut self,
        before: impl FnOnce() -> Result<(), BackendError>,
        forward: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        self.graph = None;
        if let Some(meeting) = &self.meeting {
            meeting.launch(&self.kernels.gpu)?; // what a library does at its first call is not for a capture
        }
        self.kernels.gpu.synchronize()?;
        let Self { start, end, probe, flush, meeting, kernels, .. } = self;
        let graph = Graph::record(&kernels.gpu, || {
            kernels.no_overlap();
            before()?;
            kernels.no_overlap();
            if let Some(flush) = flush {
                flush.launch(kernels)?;
            }
            kernels.no_overlap();
            probe.launch(kernels, 0)?;
            if let Some(meeting) = meeting {
                meeting.launch(&kernels.gpu)?;
            }
            start.record(true)?;
            kernels.no_overlap();
            forward()?;
            end.record(true)?;
            kernels.no_overlap();
            probe.launch(kernels, 1)
        })?;
        self.graph = Some(graph);
        Ok(())
    }

    /// The kernels that the graph is made of, besides the forward's own.
    pub(super) fn kernels(&self) -> &Rc<Kernels> {
        &self.kernels
    }

    /// Whether replays wait for other ranks.
    pub(super) fn meets(&self) -> bool {
        self.meeting.is_some()
    }

    /// Launches the graph, waits for it, and returns what its events and its probe say.
    pub(super) fn replay(&mut self) -> Result<Replay, BackendError> {
        let graph = self.graph.as_ref();
        let graph =
            graph.ok_or_else(|| BackendError::Device("a step is replayed before it is recorded".into()))?;
        graph.launch()?;
        self.end.wait()?;
        let time = self.start.until(&self.end)?;
        let meets = self.meets();
        Ok(Replay { time, clock_mhz: self.probe.read(time, meets)? })
    }
}

/// Reads more than twice the L2, so that nothing of a step stays there. Reading leaves no dirty line behind.
struct Flush {
    function: Function,
    data: Buffer,
    sums: Buffer,
}

impl Flush {
    fn new(kernels: &Kernels) -> Result<Self, BackendError> {
        let gpu = &kernels.gpu;
        let data = Buffer::new(gpu, gpu.l2_bytes * 5 / 2 / 16 * 16, "the data that flushes the L2 cache")?;
        data.fill(0x5a)?;
        let sums = Buffer::new(gpu, 16 * gpu.multiprocessors as usize * 4, "sums")?;
        Ok(Self { function: kernels.get(File::State, &[], "read_sum")?, data, sums })
    }

    fn launch(&self, kernels: &Kernels) -> Result<(), BackendError> {
        read_sum(kernels, self.function, self.data.address(), self.data.bytes(), &self.sums)
    }
}

/// Puts a read of `bytes` bytes on the stream; `sums` has one word for each of its blocks.
pub(super) fn read_sum(
    kernels: &Kernels,
    function: Function,
    data: u64,
    bytes: usize,
    sums: &Buffer,
) -> Result<(), BackendError> {
    let args = [Arg::Address(data), Arg::U64(bytes as u64), Arg::Address(sums.address())];
    // SAFETY: (data, bytes, sums) as in state.cu; the caller's range exists, and `sums` has a word for each block.
    unsafe { kernels.launch(function, Grid::new(sums.bytes() / 4, 512), &args) }
}

/// Stamps of every multiprocessor's clock and the global timer on both sides of a forward.
struct Probe {
    function: Function,
    grid: Grid,
    /// `[2, multiprocessors, 2]` of (clock, nanoseconds).
    ring: Buffer,
    /// `[2]` counters of the kernel.
    state: Buffer,
    /// Replays so far.
    replays: usize,
}

/// Rows of the ring: a stamp of an older replay can be told from one of this one.
const ROWS: usize = 2;

impl Probe {
    fn new(kernels: &Kernels) -> Result<Self, BackendError> {
        let gpu = &kernels.gpu;
        let function = kernels.get(File::State, &[], "clock_probe")?;
        kernels.allow_shared(function, gpu.max_shared, "the clock probe")?;
        let count = gpu.multiprocessors as usize;
        let ring = Buffer::of(gpu, &vec![[0_u64; 2]; ROWS * count * 2], "clock stamps")?;
        let state = Buffer::of(gpu, &[0_u32; 2], "clock stamps")?;
        let grid = Grid::new(count, 32).shared(gpu.max_shared);
        Ok(Self { function, grid, ring, state, replays: 0 })
    }

    fn launch(&self, kernels: &Kernels, side: u32) -> Result<(), BackendError> {
        let (rows, count) = (Arg::U32(ROWS as u32), Arg::U32(kernels.gpu.multiprocessors));
        let (ring, state) = (Arg::Address(self.ring.address()), Arg::Address(self.state.address()));
        // SAFETY: (ring, state, rows, multiprocessors, side) as in state.cu, with buffers of those sizes.
        unsafe { kernels.launch(self.function, self.grid, &[ring, state, rows, count, Arg::U32(side)]) }
    }

    /// The median over multiprocessors of their clock during the replay that just ended, in MHz; of ranks, with the time that they waited.
    fn read(&mut self, time: Nanos, meets: bool) -> Result<Option<f64>, BackendError> {
        let row = self.replays % ROWS;
        self.replays += 1;
        let count = self.ring.bytes() / (ROWS * 32);
        let stamps: Vec<[u64; 2]> = self.ring.read(row * count * 32, count * 2)?;
        Ok(clock(&stamps, time, meets))
    }
}

/// Stamps whose distance does not fit the event interval are of another replay.
///
/// Ranks wait for each other between their stamps, so up to [`WAIT_NANOS`] more fits them. An old stamp may then pass for a new
/// one; the median is the clock of now all the same while most multiprocessors' are new.
fn clock(stamps: &[[u64; 2]], time: Nanos, meets: bool) -> Option<f64> {
    let wait = if meets { WAIT_NANOS } else { 0.0 };
    let fits = |nanos: f64| nanos >= time.0 * 0.9 && nanos <= time.0 * 1.1 + STAMPS_NANOS + wait;
    let clocks: Vec<f64> = stamps
        .as_chunks::<2>()
        .0
        .iter()
        .filter_map(|[before, after]| {
            let (cycles, nanos) = (after[0].checked_sub(before[0])?, after[1].checked_sub(before[1])?);
            (fits(nanos as f64) && nanos > 0).then(|| cycles as f64 / nanos as f64 * 1e3)
        })
        .collect();
    if time.0 < MIN_CLOCK_NANOS { None } else { median(&clocks) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_cycles_over_time_and_old_stamps_do_not_count() {
        let now = [[1_000, 5_000_000], [1_980_000, 6_000_000]]; // 1 979 000 cycles in 1 ms
        let old = [[0, 0], [500, 6_000_000]];
        let stamps: Vec<[u64; 2]> = now.into_iter().chain(old).chain(now).collect();
        assert_eq!(clock(&stamps, Nanos(1e6), false), Some(1979.0));
        assert_eq!(clock(&stamps, Nanos(1e4), false), None, "too short");
        assert_eq!(clock(&old, Nanos(1e6), false), None);
    }

    #[test]
    fn waiting_for_other_ranks_is_no_old_stamp() {
        let waited = [[0, 0], [36_000_000, 20_000_000]]; // 20 ms at 1800 MHz, for a forward of 1 ms
        let old = [[0, 0], [160_000_000, 200_000_000]]; // at 800 MHz
        let stamps: Vec<[u64; 2]> = waited.into_iter().chain(old).chain(waited).collect();
        assert_eq!(clock(&waited, Nanos(1e6), false), None);
        assert_eq!(clock(&stamps, Nanos(1e6), true), Some(1800.0));
        let older = [[0, 0], [1, 2_000_000_000]];
        assert_eq!(clock(&older, Nanos(1e6), true), None, "more than a second");
        assert_eq!(clock(&[], Nanos(1e6), true), None);
    }
}
