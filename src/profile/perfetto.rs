//! A trace that <https://ui.perfetto.dev> and `chrome://tracing` open, in the "Trace Event Format" of Chromium (Duca and
//! Sinclair): complete events (`"ph": "X"`) with times in microseconds.
//!
//! A rank is a process. What comes before the forward is thread 0, the forward thread 1. Events of one thread may only follow or
//! enclose each other, so kernels that overlap are laid out on further threads.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use super::file::KernelsFile;
use super::names::Names;
use crate::backend::{Activity, Part, Traced};
use crate::units::Nanos;

/// The trace of all replays, one after the other as they ran; `file` says of what.
#[must_use]
pub fn document(file: &KernelsFile, replays: &[Traced], names: &Names) -> Value {
    let zero = replays.iter().flat_map(|replay| &replay.activities).map(|activity| activity.start_ns).min();
    let mut threads = Threads::default();
    let mut placed: Vec<(u32, usize, &Activity)> = Vec::new();
    for (number, replay) in replays.iter().enumerate() {
        let mut activities: Vec<&Activity> = replay.activities.iter().collect();
        activities.sort_by_key(|activity| activity.start_ns);
        placed.extend(activities.into_iter().map(|activity| (threads.place(activity), number, activity)));
    }
    let event = |(thread, replay, activity): &(u32, usize, &Activity)| {
        let micros = |nanos: u64| Nanos(nanos as f64).micros();
        json!({
            "ph": "X", "pid": file.rank, "tid": thread,
            "ts": micros(activity.start_ns - zero.unwrap_or_default()),
            "dur": micros(activity.end_ns.saturating_sub(activity.start_ns)),
            "name": names.short(&activity.name),
            "args": { "full": names.full(&activity.name), "replay": replay },
        })
    };
    let mut events = threads.named(file);
    events.extend(placed.iter().map(event));
    json!({
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "id": file.id, "rank": file.rank, "commit": file.commit, "date": file.date, "device": file.device,
            "model": file.model, "replays": file.replays,
        },
    })
}

/// The document as the bytes of a `.json.gz`.
///
/// # Errors
/// If it cannot be written as JSON.
pub fn gzipped(document: &Value) -> std::io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(document.to_string().as_bytes())?;
    encoder.finish()
}

/// Threads of the trace: each with its part, and when its last event ends.
struct Threads(Vec<(Part, u64)>);

impl Default for Threads {
    fn default() -> Self {
        Self(vec![(Part::Before, 0), (Part::Forward, 0)])
    }
}

impl Threads {
    /// The first thread of the activity's part whose last event has ended.
    fn place(&mut self, activity: &Activity) -> u32 {
        let free = |(part, end): &(Part, u64)| *part == activity.part && *end <= activity.start_ns;
        let thread = self.0.iter().position(free).unwrap_or_else(|| {
            self.0.push((activity.part, 0));
            self.0.len() - 1
        });
        self.0[thread].1 = activity.end_ns;
        u32::try_from(thread).unwrap_or(u32::MAX)
    }

    /// The events that name the process and its threads.
    fn named(&self, file: &KernelsFile) -> Vec<Value> {
        let name = |what: &str, thread: usize, args: Value| json!({ "ph": "M", "pid": file.rank, "tid": thread, "name": what, "args": args });
        let mut events =
            vec![name("process_name", 0, json!({ "name": format!("{} rank {}", file.id, file.rank) }))];
        for (thread, (part, _)) in self.0.iter().enumerate() {
            let text = match (part, thread) {
                (Part::Before, 0) => "before the forward",
                (Part::Forward, 1) => "forward",
                (Part::Before, _) => "before the forward, overlapping",
                (Part::Forward, _) => "forward, overlapping",
            };
            events.push(name("thread_name", thread, json!({ "name": text })));
            events.push(name("thread_sort_index", thread, json!({ "sort_index": thread })));
        }
        events
    }
}

#[cfg(test)]
mod tests;
