//! What a traced replay is made of: a device's kernels, or the processor's operations, with their times.

use serde::{Deserialize, Serialize};

/// On which side of the timed interval's start an activity lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    /// Restore, cache flush, clock probe, rendezvous: what comes before the forward and is not timed.
    Before,
    /// The forward.
    Forward,
}

/// One kernel or operation that ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Its full name; C++ names may be mangled.
    pub name: String,
    /// When it started, in nanoseconds of the tracer's clock.
    pub start_ns: u64,
    /// When it ended, not before it started.
    pub end_ns: u64,
    /// What it belongs to.
    pub part: Part,
}

/// All activities of one replay on one rank, by their starts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traced {
    /// They may overlap.
    pub activities: Vec<Activity>,
}

impl Traced {
    /// Those of one part, by their starts.
    pub fn of(&self, part: Part) -> impl Iterator<Item = &Activity> {
        self.activities.iter().filter(move |activity| activity.part == part)
    }
}

/// What came of asking a device for traced replays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tracing {
    /// One entry a replay.
    Traced(Vec<Traced>),
    /// The replays were not traced by us, for this reason: another profiler has the tracer, or there is none.
    Untraced(String),
}
