//! Rank 0's part: waits for all members of a collective, does it, and sends each its result.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufReader};
use std::net::TcpStream;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Header, Op, Outcome};
use crate::rank::notice::Notice;
use crate::rank::watchdog::Watchdog;
use crate::rank::wire;

/// Where collectives meet. Different groups may be at work at the same time.
pub struct Hub {
    state: Mutex<State>,
    watchdog: Option<Watchdog>,
}

#[derive(Default)]
struct State {
    /// Collectives for which members are missing, by group and number.
    pending: HashMap<(Vec<usize>, u64), Pending>,
    /// Ranks that are gone.
    lost: HashSet<usize>,
}

struct Pending {
    op: Op,
    values: usize,
    came: HashMap<usize, (Vec<f32>, Sink)>,
}

/// Where a member's result goes.
pub(super) enum Sink {
    /// To a rank elsewhere.
    Remote(TcpStream),
    /// To this one.
    Local(Sender<Outcome>),
}

impl Hub {
    /// Serves the other ranks' connections.
    ///
    /// # Errors
    /// The system's.
    pub fn start(streams: Vec<(usize, TcpStream)>, watchdog: Option<Watchdog>) -> io::Result<Arc<Self>> {
        let hub = Arc::new(Self { state: Mutex::default(), watchdog });
        for (rank, stream) in streams {
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(None)?;
            stream.set_nodelay(true)?; // a header goes before its values
            let hub = hub.clone();
            std::thread::spawn(move || {
                let Err(error) = hub.serve(rank, &stream);
                hub.lose(rank);
                if let Some(watchdog) = &hub.watchdog {
                    watchdog.trip(Notice::lost(rank, &wire::how(&error)));
                }
            });
        }
        Ok(hub)
    }

    /// What ends this process if a rank is lost.
    pub(super) fn watchdog(&self) -> Option<&Watchdog> {
        self.watchdog.as_ref()
    }

    fn serve(&self, rank: usize, stream: &TcpStream) -> Result<std::convert::Infallible, io::Error> {
        let mut reader = BufReader::new(stream);
        loop {
            let header: Header = wire::read(&mut reader, wire::HELLO_LIMIT)?;
            let values = wire::read_values(&mut reader, header.values)?;
            self.submit(rank, header, values, Sink::Remote(stream.try_clone()?));
        }
    }

    /// One member's part; the last member's does the collective.
    pub(super) fn submit(&self, rank: usize, header: Header, values: Vec<f32>, sink: Sink) {
        let Header { members, seq, op, values: count } = header;
        let mut state = self.lock();
        if let Some(lost) = members.iter().find(|member| state.lost.contains(member)) {
            return sink.send(Err(format!("rank {lost} was lost")));
        }
        let key = (members, seq);
        let pending = state.pending.entry(key.clone()).or_insert_with(|| Pending {
            op,
            values: count,
            came: HashMap::new(),
        });
        let fits = (pending.op, pending.values) == (op, count) && key.0.contains(&rank);
        let (first, length) = (pending.op, pending.values);
        pending.came.insert(rank, (values, sink));
        if !fits {
            let why = format!(
                "rank {rank} is at {op:?} of {count} values, others are at {first:?} of {length}; this is a bug"
            );
            return state.pending.remove(&key).into_iter().for_each(|pending| pending.fail(&why));
        }
        if pending.came.len() == key.0.len()
            && let Some(pending) = state.pending.remove(&key)
        {
            drop(state); // other groups go on meanwhile
            pending.finish(&key.0);
        }
    }

    /// A rank is gone: whoever waits for it hears so.
    fn lose(&self, rank: usize) {
        let mut state = self.lock();
        state.lost.insert(rank);
        let waiting: Vec<_> =
            state.pending.keys().filter(|(members, _)| members.contains(&rank)).cloned().collect();
        for key in waiting {
            if let Some(pending) = state.pending.remove(&key) {
                pending.fail(&format!("rank {rank} was lost"));
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pending {
    fn fail(self, why: &str) {
        for (_, sink) in self.came.into_values() {
            sink.send(Err(why.to_owned()));
        }
    }

    /// Does the collective and sends each member its result.
    fn finish(mut self, members: &[usize]) {
        let (inputs, sinks): (Vec<_>, Vec<_>) =
            members.iter().filter_map(|member| self.came.remove(member)).unzip();
        let outputs = collective(self.op, inputs);
        for (output, sink) in outputs.into_iter().zip(sinks) {
            sink.send(Ok(output));
        }
    }
}

/// Each member's result, in rank order.
fn collective(op: Op, inputs: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let members = inputs.len();
    let part = |values: &[f32], of: usize| {
        let length = values.len() / members;
        values[of * length..(of + 1) * length].to_vec()
    };
    match op {
        Op::AllReduce => vec![sum(inputs); members],
        Op::AllGather => vec![inputs.concat(); members],
        Op::ReduceScatter => {
            let sum = sum(inputs);
            (0..members).map(|of| part(&sum, of)).collect()
        }
        Op::AllToAll => {
            let to = |of| inputs.iter().flat_map(|input| part(input, of)).collect();
            (0..members).map(to).collect()
        }
    }
}

/// The sum in rank order.
fn sum(inputs: Vec<Vec<f32>>) -> Vec<f32> {
    let mut inputs = inputs.into_iter();
    let mut sum = inputs.next().unwrap_or_default();
    for input in inputs {
        sum.iter_mut().zip(input).for_each(|(sum, value)| *sum += value);
    }
    sum
}

impl Sink {
    /// Who is gone gets nothing, and is missed elsewhere.
    fn send(self, outcome: Outcome) {
        match self {
            Self::Local(sender) => drop(sender.send(outcome)),
            Self::Remote(mut stream) => {
                let header = outcome.as_ref().map(Vec::len);
                let sent = wire::write(&mut stream, &header);
                if let (Ok(()), Ok(values)) = (sent, &outcome) {
                    let _ = wire::write_values(&mut stream, values);
                }
            }
        }
    }
}
