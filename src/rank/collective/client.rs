//! A member's part: sends its values to rank 0 and waits for the result.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::hub::{Hub, Sink};
use super::{Header, Op, Outcome};
use crate::backend::{BackendError, Communicator};
use crate::layout::{Group, Place};
use crate::rank::notice::Notice;
use crate::rank::watchdog::Watchdog;
use crate::rank::wire;

/// For the watchdog to end the process, before a collective says itself that a rank was lost.
const WATCHDOG: Duration = Duration::from_secs(10);

/// Collectives through rank 0.
pub struct SocketCommunicator {
    place: Place,
    way: Mutex<Way>,
    watchdog: Option<Watchdog>,
}

/// The way to rank 0, and how many collectives each group has made.
struct Way {
    link: Link,
    made: HashMap<Vec<usize>, u64>,
}

enum Link {
    Local(Arc<Hub>),
    Remote(TcpStream),
}

impl SocketCommunicator {
    /// Of rank 0 itself.
    #[must_use]
    pub fn local(hub: Arc<Hub>, place: Place) -> Self {
        let watchdog = hub.watchdog().cloned();
        Self::new(Link::Local(hub), place, watchdog)
    }

    /// Of another rank, over its connection to rank 0.
    #[must_use]
    pub fn remote(stream: TcpStream, place: Place, watchdog: Option<Watchdog>) -> Self {
        let _ = stream.set_nodelay(true); // a header goes before its values; else it is only slower
        Self::new(Link::Remote(stream), place, watchdog)
    }

    fn new(link: Link, place: Place, watchdog: Option<Watchdog>) -> Self {
        Self { place, way: Mutex::new(Way { link, made: HashMap::new() }), watchdog }
    }

    /// Does one collective; what comes back has as many values as `out`.
    fn run(&self, group: Group, op: Op, values: &[f32], out: &mut [f32]) -> Result<(), BackendError> {
        let members = self.place.members(group);
        let mut way = self.way.lock().unwrap_or_else(PoisonError::into_inner);
        let made = way.made.entry(members.clone()).or_default();
        let seq = std::mem::replace(made, *made + 1);
        let header = Header { members, seq, op, values: values.len() };
        let outcome = match &mut way.link {
            Link::Local(hub) => local(hub, self.place.rank, header, values),
            Link::Remote(stream) => remote(stream, &header, values).unwrap_or_else(|error| {
                if let Some(watchdog) = &self.watchdog {
                    watchdog.trip(Notice::lost(0, &wire::how(&error)));
                }
                Err(format!("rank 0 was lost: {}", wire::how(&error)))
            }),
        };
        let result = outcome.map_err(|why| self.failed(op, &why))?;
        if result.len() != out.len() {
            let (found, wanted) = (result.len(), out.len());
            return Err(self.failed(op, &format!("{found} values came, {wanted} were wanted")));
        }
        out.copy_from_slice(&result);
        Ok(())
    }

    /// A lost rank is the watchdog's to tell, who knows more about it: it has the time to end the process first.
    fn failed(&self, op: Op, why: &str) -> BackendError {
        let end = Instant::now() + WATCHDOG;
        while self.watchdog.as_ref().is_some_and(Watchdog::tripped) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        BackendError::Device(format!("{op:?} over sockets: {why}"))
    }

    fn check(&self, group: Group, op: Op, parts: usize, whole: usize) -> Result<(), BackendError> {
        let members = self.place.members(group).len();
        if parts.checked_mul(members) == Some(whole) {
            return Ok(());
        }
        Err(BackendError::Device(format!(
            "{op:?} over sockets: {members} members, parts of {parts} values and a whole of {whole}; this is a bug"
        )))
    }
}

fn local(hub: &Hub, rank: usize, header: Header, values: &[f32]) -> Outcome {
    let (sender, receiver) = channel();
    hub.submit(rank, header, values.to_vec(), Sink::Local(sender));
    receiver.recv().unwrap_or_else(|_| Err("rank 0 dropped it".to_owned()))
}

fn remote(stream: &mut TcpStream, header: &Header, values: &[f32]) -> io::Result<Outcome> {
    wire::write(stream, header)?;
    wire::write_values(stream, values)?;
    let mut reader = BufReader::new(stream); // nothing else comes before the next request
    let outcome: Result<usize, String> = wire::read(&mut reader, wire::HELLO_LIMIT)?;
    match outcome {
        Ok(count) => wire::read_values(&mut reader, count).map(Ok),
        Err(why) => Ok(Err(why)),
    }
}

impl Communicator for SocketCommunicator {
    fn all_reduce(&self, group: Group, data: &mut [f32]) -> Result<(), BackendError> {
        let values = data.to_vec();
        self.run(group, Op::AllReduce, &values, data)
    }

    fn all_gather(&self, group: Group, mine: &[f32], all: &mut [f32]) -> Result<(), BackendError> {
        self.check(group, Op::AllGather, mine.len(), all.len())?;
        self.run(group, Op::AllGather, mine, all)
    }

    fn reduce_scatter(&self, group: Group, all: &[f32], mine: &mut [f32]) -> Result<(), BackendError> {
        self.check(group, Op::ReduceScatter, mine.len(), all.len())?;
        self.run(group, Op::ReduceScatter, all, mine)
    }

    fn all_to_all(&self, group: Group, send: &[f32], receive: &mut [f32]) -> Result<(), BackendError> {
        let members = self.place.members(group).len();
        self.check(group, Op::AllToAll, send.len() / members, send.len())?;
        self.run(group, Op::AllToAll, send, receive)
    }
}
