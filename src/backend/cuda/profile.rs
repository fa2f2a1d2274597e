//! Replays for a profiler: under our own tracer where CUPTI lets us, and in a range that a profiler from outside can be
//! pointed at (`nsys profile --capture-range=cudaProfilerApi`).

use cudarc::driver::{profiler_start, profiler_stop};

use super::error::driver;
use super::kernels::Kernels;
use super::nvtx::Range;
use super::{library, nvtx};
use crate::backend::{BackendError, Capture, Tracing};

/// Replays under the tracer before those that count.
const WARM_UP: u32 = 3;

/// For this long the stream is kept busy before each replay, in nanoseconds. Under CUPTI the driver submits a graph's kernels one
/// by one, at about 0.7 µs each: behind a busy stream they are all there when the first one starts, and the gaps in the trace are the
/// GPU's own.
const BUSY_NANOS: u64 = 3_000_000;

/// Traces `replays` replays of `capture`, whose kernels are those of `kernels`, and which begin with a meeting of ranks or not.
pub(super) fn profile(
    capture: &mut dyn Capture,
    (kernels, meets): (&Kernels, bool),
    name: &str,
    replays: u32,
) -> Result<Tracing, BackendError> {
    let spin = kernels.spin()?;
    let session = library::guarded(session::Session::start);
    // Under the tracer, so that every kernel of the graph is traced.
    let replayed = capture.record().and_then(|()| {
        for _ in 0..WARM_UP {
            capture.replay()?;
        }
        let range = Outside::begin(name)?;
        for _ in 0..replays {
            kernels.keep_busy(spin, BUSY_NANOS)?;
            capture.replay()?;
        }
        kernels.gpu.synchronize()?;
        drop(range);
        Ok(())
    });
    let traced = session.and_then(|session| session.end(replays, meets));
    replayed?;
    capture.record()?; // the next replay is of a graph that was made without the tracer
    Ok(traced.map_or_else(|error| Tracing::Untraced(why(&error)), Tracing::Traced))
}

fn why(error: &BackendError) -> String {
    let ranges =
        if nvtx::is_there() { "" } else { "; NVTX ranges need libnvtx3interop (`pip install nvidia-nvtx`)" };
    format!("{error}: the replays ran for a profiler from outside alone{ranges}")
}

/// What a profiler from outside may capture: the range of the profiler API, and a named one within it.
struct Outside(Option<Range>);

impl Outside {
    fn begin(name: &str) -> Result<Self, BackendError> {
        profiler_start().map_err(driver("starting the profiler's range"))?;
        Ok(Self(Some(Range::begin(name))))
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        drop(self.0.take());
        // Nobody may be listening; then there is nothing to stop.
        let _ = profiler_stop();
    }
}

#[cfg(feature = "cuda")]
mod session {
    //! CUPTI, for as long as the replays take.

    use std::sync::{Mutex, MutexGuard, PoisonError};

    use crate::backend::cuda::trace::{self, KernelRecord, Tracer};
    use crate::backend::{Activity, BackendError, Part, Traced};

    /// CUPTI is attached to the process at the first profile, after all timing, and stays.
    static TRACER: Mutex<Option<Tracer>> = Mutex::new(None);

    /// A trace that is going on.
    pub(super) struct Session {
        tracer: MutexGuard<'static, Option<Tracer>>,
        stopped: bool,
    }

    impl Session {
        pub(super) fn start() -> Result<Self, BackendError> {
            let mut tracer = TRACER.lock().unwrap_or_else(PoisonError::into_inner);
            if tracer.is_none() {
                *tracer = Some(Tracer::attach()?);
            }
            tracer.as_mut().map_or(Ok(()), Tracer::start)?;
            Ok(Self { tracer, stopped: false })
        }

        /// The last `replays` of the trace. The GPU must have been waited for.
        pub(super) fn end(mut self, replays: u32, meets: bool) -> Result<Vec<Traced>, BackendError> {
            let kernels = self.stop()?;
            let traced: Vec<Traced> = trace::replays(&kernels, meets).iter().map(traced).collect();
            let wanted = replays as usize;
            let Some(first) = traced.len().checked_sub(wanted) else {
                return Err(BackendError::Device(format!(
                    "CUPTI saw {} of {wanted} replays: another profiler may have taken the rest",
                    traced.len()
                )));
            };
            Ok(traced[first..].to_vec())
        }

        fn stop(&mut self) -> Result<Vec<KernelRecord>, BackendError> {
            self.stopped = true;
            self.tracer.as_mut().map_or(Ok(Vec::new()), Tracer::stop)
        }
    }

    impl Drop for Session {
        fn drop(&mut self) {
            if !self.stopped {
                // On the way out after another error, which is the one to be told of.
                let _ = self.stop();
            }
        }
    }

    fn traced(replay: &trace::Split<'_>) -> Traced {
        let of = |part: Part| {
            move |kernel: &KernelRecord| Activity {
                name: kernel.name.clone(),
                start_ns: kernel.start,
                end_ns: kernel.end.max(kernel.start),
                part,
            }
        };
        // What keeps the stream busy is ours, and no part of a replay.
        let before = replay.before.iter().filter(|kernel| kernel.name != "spin_nanos").map(of(Part::Before));
        Traced { activities: before.chain(replay.forward.iter().map(of(Part::Forward))).collect() }
    }
}

#[cfg(not(feature = "cuda"))]
mod session {
    //! Linked at build time, every executable would need libcupti; so there is no tracer.

    use crate::backend::{BackendError, Traced};

    pub(super) struct Session(std::convert::Infallible);

    impl Session {
        pub(super) fn start() -> Result<Self, BackendError> {
            Err(BackendError::Unsupported(
                "this executable links CUDA at build time (feature `cuda-dynamic-linking`) and has no CUPTI"
                    .into(),
            ))
        }

        pub(super) fn end(self, _replays: u32, _meets: bool) -> Result<Vec<Traced>, BackendError> {
            match self.0 {}
        }
    }
}
