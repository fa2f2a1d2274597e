//! Rank 0's end: says what is done, and gathers the replies.

use std::net::TcpStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;

use super::{Command, Down, Exchange, Reply, Up, Work};
use crate::backend::Replay;
use crate::rank::notice::Notice;
use crate::rank::pulse::Pulses;
use crate::rank::watchdog::{Deadline, Watchdog};
use crate::rank::{RankError, error, fault, named, wire};

/// For a command to be taken by the system.
const SEND: Duration = Duration::from_secs(10);
/// How often it is looked whether the run ends.
const POLL: Duration = Duration::from_millis(100);
/// For all to say that the run is over.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// Rank 0.
pub struct Leader {
    followers: Vec<Link>,
    watchdog: Watchdog,
    pulses: Pulses,
    calls: u64,
    replays: u64,
    open: Arc<Mutex<Open>>,
}

/// The way to one rank, and what it said that nobody asked for yet.
struct Link {
    rank: usize,
    stream: TcpStream,
    inbox: Receiver<Up>,
    early: Option<Reply>,
}

/// The call that is open: who has not replied, and until when they must, once one has failed.
#[derive(Default)]
struct Open {
    waiting: Vec<usize>,
    /// Those that wait for a choice themselves.
    choosing: Vec<usize>,
    deadline: Option<Deadline>,
    /// What the first one said that failed: the others may be waiting for that one.
    failed: Option<Notice>,
}

impl Open {
    /// Whom the others wait for.
    fn late(&self) -> Vec<usize> {
        let late: Vec<usize> =
            self.waiting.iter().filter(|rank| !self.choosing.contains(rank)).copied().collect();
        if late.is_empty() { self.waiting.clone() } else { late }
    }
}

impl Leader {
    pub(in crate::rank) fn new(
        streams: Vec<(usize, TcpStream)>,
        watchdog: Watchdog,
        pulses: Pulses,
    ) -> std::io::Result<Self> {
        let open: Arc<Mutex<Open>> = Arc::default();
        let mut followers = Vec::new();
        for (rank, stream) in streams {
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(SEND))?;
            let (sender, inbox) = channel();
            let reader = Reader {
                rank,
                stream: stream.try_clone()?,
                sender,
                open: open.clone(),
                watchdog: watchdog.clone(),
            };
            std::thread::spawn(move || reader.read());
            followers.push(Link { rank, stream, inbox, early: None });
        }
        Ok(Self { followers, watchdog, pulses, calls: 0, replays: 0, open })
    }

    /// How many ranks there are, this one among them.
    #[must_use]
    pub fn world(&self) -> usize {
        self.followers.len() + 1
    }

    /// What ends this process if the run cannot go on.
    #[must_use]
    pub fn watchdog(&self) -> &Watchdog {
        &self.watchdog
    }

    /// Has all ranks do something, this one by `work`; returns all replies in rank order.
    ///
    /// If that takes longer than `limit`, or a rank's failure leaves others waiting for longer than
    /// [`Timeouts::after_failure`](crate::rank::Timeouts::after_failure), the watchdog ends the run.
    ///
    /// # Errors
    /// If the run ends.
    pub fn call(
        &mut self,
        command: &Command,
        limit: Duration,
        work: Work<'_>,
    ) -> Result<Vec<Reply>, RankError> {
        self.calls += 1;
        *lock(&self.open) = Open { waiting: (0..self.world()).collect(), ..Open::default() };
        let (open, name) = (self.open.clone(), command.name());
        let _deadline = self.watchdog.deadline(limit, move || {
            let open = lock(&open);
            let late = || {
                let seconds = (limit.as_secs_f64() * 1e3).round() / 1e3;
                let text = format!("{} did not end {name} within {seconds} s", named(&open.late()));
                Notice::failed(0, error::LOST, &text)
            };
            open.failed.clone().unwrap_or_else(late)
        });
        for at in 0..self.followers.len() {
            self.send(at, &Down::Call(self.calls, command.clone()))?;
        }
        let own = match fault::at(name, 0) {
            true => fault::reply(name),
            false => work(command, self),
        };
        answered(&self.open, &self.watchdog, 0, &own);
        let mut replies = vec![own];
        for at in 0..self.followers.len() {
            replies.push(self.reply(at)?);
        }
        lock(&self.open).deadline = None;
        Ok(replies)
    }

    /// Has all ranks replay the step so often; returns each rank's replays, in rank order. `work` gets the command and answers with
    /// [`Reply::replayed`]. The limit is ten times the `expected` time of all, and ten seconds.
    ///
    /// # Errors
    /// If a rank failed, or the run ends.
    pub fn replay(
        &mut self,
        n: u64,
        expected: Duration,
        work: Work<'_>,
    ) -> Result<Vec<Vec<Replay>>, RankError> {
        self.replays += 1;
        let seq = self.replays;
        let limit = expected.saturating_mul(10).saturating_add(Duration::from_secs(10));
        let replies = self.call(&Command::Replay { n, seq }, limit, work)?;
        replies.into_iter().enumerate().map(|(rank, reply)| reply.replays(rank, n, seq)).collect()
    }

    /// Tells all that the run is over. From now on nobody is lost.
    ///
    /// # Errors
    /// If the run ends otherwise.
    pub fn shutdown(mut self) -> Result<(), RankError> {
        self.watchdog.finish();
        let replies = self.call(&Command::Shutdown, SHUTDOWN, &mut |_, _| Reply::Done(Value::Null));
        self.pulses.bye();
        replies.map(|_| ())
    }

    fn send(&mut self, at: usize, down: &Down) -> Result<(), RankError> {
        let Link { rank, stream, .. } = &mut self.followers[at];
        let rank = *rank;
        wire::write(stream, down).map_err(|error| self.lost(rank, &wire::how(&error)))
    }

    /// The follower's reply to the open call. One that would rather agree on something hears that it will not be.
    fn reply(&mut self, at: usize) -> Result<Reply, RankError> {
        if let Some(reply) = self.followers[at].early.take() {
            return Ok(reply);
        }
        loop {
            match self.next(at)? {
                Up::Reply(call, reply) if call == self.calls => return Ok(reply),
                Up::Reply(call, _) => return Err(self.astray(at, &format!("it answered call {call}"))),
                Up::Offer(key, _) => self.send(at, &Down::Decided(key, None))?,
            }
        }
    }

    /// What a follower says next.
    fn next(&mut self, at: usize) -> Result<Up, RankError> {
        let Link { rank, inbox, .. } = &self.followers[at];
        let rank = *rank;
        loop {
            match inbox.recv_timeout(POLL) {
                Ok(up) => return Ok(up),
                Err(RecvTimeoutError::Timeout) if self.watchdog.tripped() => {
                    return Err(RankError::Lost { rank, how: "the run ends".to_owned() });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(self.lost(rank, "its connection closed")),
            }
        }
    }

    fn lost(&self, rank: usize, how: &str) -> RankError {
        self.watchdog.trip(Notice::lost(rank, how));
        RankError::Lost { rank, how: how.to_owned() }
    }

    fn astray(&self, at: usize, how: &str) -> RankError {
        let Link { rank, .. } = self.followers[at];
        let error = RankError::Protocol(format!("rank {rank} is not where rank 0 is: {how}"));
        self.watchdog.trip(Notice::failed(0, error.status(), &error.to_string()));
        error
    }
}

impl Exchange for Leader {
    fn decide(
        &mut self,
        key: &str,
        own: Value,
        choose: &mut dyn FnMut(&[Value]) -> Value,
    ) -> Result<Value, RankError> {
        let (mut offers, mut offered, mut failed) = (vec![own], Vec::new(), None);
        lock(&self.open).choosing.push(0);
        for at in 0..self.followers.len() {
            match self.next(at)? {
                Up::Offer(of, value) if of == key => {
                    offers.push(value);
                    offered.push(at);
                }
                Up::Offer(of, _) => {
                    return Err(self.astray(at, &format!("it chooses {of}, rank 0 chooses {key}")));
                }
                Up::Reply(call, reply @ Reply::Failed { .. }) if call == self.calls => {
                    let rank = self.followers[at].rank;
                    failed = failed.or_else(|| reply.clone().value(rank).err());
                    self.followers[at].early = Some(reply);
                }
                Up::Reply(..) => {
                    return Err(self.astray(at, &format!("it is done, and has not chosen {key}")));
                }
            }
        }
        lock(&self.open).choosing.clear();
        let choice = failed.is_none().then(|| choose(&offers));
        for at in offered {
            self.send(at, &Down::Decided(key.to_owned(), choice.clone()))?;
        }
        match (choice, failed) {
            (_, Some(error)) => Err(error),
            (Some(choice), None) => Ok(choice),
            (None, None) => unreachable!("without a failure there is a choice"),
        }
    }
}

/// Reads what one rank says, so that its failure is seen while rank 0 itself is busy.
struct Reader {
    rank: usize,
    stream: TcpStream,
    sender: Sender<Up>,
    open: Arc<Mutex<Open>>,
    watchdog: Watchdog,
}

impl Reader {
    fn read(mut self) {
        loop {
            let up: Up = match wire::read(&mut self.stream, wire::MESSAGE_LIMIT) {
                Ok(up) => up,
                Err(error) => {
                    return self.watchdog.trip(Notice::lost(self.rank, &wire::how(&error)));
                }
            };
            match &up {
                Up::Reply(_, reply) => answered(&self.open, &self.watchdog, self.rank, reply),
                Up::Offer(..) => lock(&self.open).choosing.push(self.rank),
            }
            if self.sender.send(up).is_err() {
                return;
            }
        }
    }
}

/// Notes that a rank replied. If it failed, the others have a while: what they wait for may be that rank.
fn answered(open: &Mutex<Open>, watchdog: &Watchdog, rank: usize, reply: &Reply) {
    let mut open = lock(open);
    open.waiting.retain(|waiting| *waiting != rank);
    if let Reply::Failed { status, message } = reply
        && open.deadline.is_none()
        && !open.waiting.is_empty()
    {
        let notice = Notice::failed(rank, *status, message);
        open.failed = Some(notice.clone());
        open.deadline = Some(watchdog.deadline(watchdog.timeouts().after_failure, move || notice.clone()));
    }
}

fn lock(open: &Mutex<Open>) -> MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}
