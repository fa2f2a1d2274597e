//! Rank 0: lets the others in.
//!
//! What connects may be anything. Each connection is answered in a thread of its own within [`HELLO`], so that one that says
//! nothing holds up nobody; what does not know the token is turned away, and the run goes on without it.

use std::collections::HashSet;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use super::at_once;
use crate::rank::RankError;
use crate::rank::launch::Member;
use crate::rank::pulse::Pulses;
use crate::rank::token::{self, Token, TokenFile};
use crate::rank::watchdog::Watchdog;
use crate::rank::wire::{self, Answer, Channel, Hello, Stranger};

/// How long a connection may take to say who it is.
const HELLO: Duration = Duration::from_secs(5);
/// How often it is looked for connections.
const POLL: Duration = Duration::from_millis(5);
/// Connections that may be answered at a time.
const AT_A_TIME: usize = 1024;

/// Somebody at the door.
type Guest = (Hello, TcpStream);
/// A connection that was let in.
pub type Admitted = (usize, Channel, TcpStream);

/// Lets all ranks in, each with one connection a channel; signs of life begin as they come.
pub fn all(
    member: &Member,
    watchdog: &Watchdog,
    channels: &[Channel],
    pulses: &Pulses,
) -> Result<Vec<Admitted>, RankError> {
    if crate::rank::fault::at("connect", 0) {
        return Err(RankError::Refused("asked to fail at connect".to_owned()));
    }
    if member.world == 1 {
        return Ok(Vec::new());
    }
    let listener = listener(member)?;
    let port = listener.local_addr().map_or(member.control.port, |address| address.port());
    let (token, file) = own_token(member, port)?;
    let mut door = Door::new(member.world, channels, token, file.is_none());
    let deadline = Instant::now() + watchdog.timeouts().connect;
    let (sender, receiver) = channel();
    while door.admitted.len() < (member.world - 1) * channels.len() {
        door.answer_new(&listener, &sender);
        for came in receiver.try_iter() {
            door.came(came, pulses)?;
        }
        if Instant::now() > deadline {
            return Err(door.not_joined(watchdog.timeouts().connect));
        }
        std::thread::sleep(POLL);
    }
    drop(file); // nobody else is to come
    Ok(door.admitted)
}

/// The socket that was handed down, or a new one: of this host alone, unless ranks are elsewhere.
fn listener(member: &Member) -> Result<TcpListener, RankError> {
    let listener = match member.listener {
        // SAFETY: the number is that of the listening socket which our own launch left open for this process, and this is the
        // only place that takes it; a process joins once.
        Some(fd) => TcpListener::from(unsafe { OwnedFd::from_raw_fd(fd) }),
        None => bind(member.control.port, member.several_nodes)?,
    };
    // Not to be inherited by what this process starts.
    let _ = rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::CLOEXEC);
    let port = member.control.port;
    listener.set_nonblocking(true).map_err(|error| RankError::Port { port, why: error.to_string() })?;
    Ok(listener)
}

/// Listens on the loopback, or on all addresses where ranks of several nodes are to come.
pub fn bind(port: u16, several_nodes: bool) -> Result<TcpListener, RankError> {
    let host = if several_nodes { [0, 0, 0, 0] } else { [127, 0, 0, 1] };
    TcpListener::bind(SocketAddr::from((host, port)))
        .map_err(|error| RankError::Port { port, why: error.to_string() })
}

/// The user's token, or on one host a new one, in a file.
fn own_token(member: &Member, port: u16) -> Result<(Token, Option<TokenFile>), RankError> {
    if let Some(token) = Token::from_environment(&|name| std::env::var(name).ok())? {
        return Ok((token, None));
    }
    if member.several_nodes {
        return Err(token::needed());
    }
    let token = Token::random()?;
    let file = TokenFile::create(port, &token)?;
    Ok((token, Some(file)))
}

/// Who is in, and who was turned away.
struct Door<'a> {
    world: usize,
    channels: &'a [Channel],
    token: Token,
    /// Whether a wrong token is worth a line at once: without the variable it may be that of an earlier run, read too soon.
    announces: bool,
    admitted: Vec<Admitted>,
    taken: HashSet<(usize, Channel)>,
    garbage: usize,
    wrong_tokens: usize,
}

/// Connections that are being answered.
static ANSWERED: AtomicUsize = AtomicUsize::new(0);

impl Door<'_> {
    fn new(world: usize, channels: &'_ [Channel], token: Token, announces: bool) -> Door<'_> {
        let (admitted, taken) = (Vec::new(), HashSet::new());
        Door { world, channels, token, announces, admitted, taken, garbage: 0, wrong_tokens: 0 }
    }

    /// Answers whoever has connected, each in a thread of its own.
    fn answer_new(&self, listener: &TcpListener, sender: &Sender<Result<Guest, Stranger>>) {
        while let Ok((stream, _)) = listener.accept() {
            if ANSWERED.fetch_add(1, Ordering::Relaxed) >= AT_A_TIME {
                ANSWERED.fetch_sub(1, Ordering::Relaxed);
                continue; // a rank will try again
            }
            let (token, world, sender) = (self.token.clone(), self.world, sender.clone());
            std::thread::spawn(move || {
                let _ = sender.send(greet(stream, &token, world)); // nobody may be waiting any more
                ANSWERED.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }

    fn came(&mut self, came: Result<Guest, Stranger>, pulses: &Pulses) -> Result<(), RankError> {
        let (hello, mut stream) = match came {
            Ok(guest) => guest,
            Err(Stranger::Misfit(text)) => return Err(RankError::Refused(text)),
            Err(Stranger::Garbage) => {
                self.garbage += 1;
                self.warn(self.garbage, "something that is no rank connected to the control port");
                return Ok(());
            }
            Err(Stranger::Token) => {
                self.wrong_tokens += 1;
                let times = if self.announces { self.wrong_tokens } else { 0 };
                self.warn(times, "a rank with another FORWARD_BENCH_TOKEN connected to the control port");
                return Ok(());
            }
        };
        let Hello { rank, channel, .. } = hello;
        if !self.channels.contains(&channel) || !self.taken.insert((rank, channel)) {
            let text = format!(
                "two processes join as rank {rank}; give each its own RANK or --node-rank, and start each once"
            );
            let _ = wire::write_first(&mut stream, &Answer::Refused(text.clone())); // it may be gone
            return Err(RankError::Refused(text));
        }
        let lost = |error: std::io::Error| RankError::Lost { rank, how: wire::how(&error) };
        wire::write_first(&mut stream, &Answer::Welcome).map_err(lost)?;
        if channel == Channel::Pulse {
            pulses.add(rank, stream.try_clone().map_err(lost)?).map_err(lost)?;
        }
        self.admitted.push((rank, channel, stream));
        Ok(())
    }

    /// Of the first of a kind; the others are counted.
    fn warn(&self, times: usize, what: &str) {
        if times == 1 {
            eprintln!("warning: {what}; it was turned away");
        }
    }

    fn not_joined(&self, limit: Duration) -> RankError {
        let missing =
            |rank: &usize| self.channels.iter().any(|&channel| !self.taken.contains(&(*rank, channel)));
        let ranks: Vec<usize> = (1..self.world).filter(missing).collect();
        let mut text = format!(
            "{} did not join within {} s; see whether {} started, and whether {} can reach the control port",
            super::super::named(&ranks),
            limit.as_secs_f64(),
            if ranks.len() == 1 { "it" } else { "they" },
            if ranks.len() == 1 { "it" } else { "they" },
        );
        if self.wrong_tokens > 0 {
            text += &format!(" ({} connections had another token)", self.wrong_tokens);
        }
        if self.garbage > 0 {
            text += &format!(" ({} connections were of something else)", self.garbage);
        }
        RankError::NotJoined(text)
    }
}

/// Reads who it is, and turns it away if it cannot stay.
fn greet(stream: TcpStream, token: &Token, world: usize) -> Result<Guest, Stranger> {
    let garbage = |_| Stranger::Garbage;
    stream.set_nonblocking(false).map_err(garbage)?;
    stream.set_write_timeout(Some(HELLO)).map_err(garbage)?;
    let mut stream = at_once(stream).map_err(garbage)?;
    let hello: Hello =
        wire::read_first(&mut Until { stream: &stream, end: Instant::now() + HELLO }).map_err(garbage)?;
    if let Err(stranger) = hello.check(token, world) {
        let answer = match &stranger {
            Stranger::Misfit(text) => Answer::Refused(text.clone()),
            _ => Answer::Token,
        };
        let _ = wire::write_first(&mut stream, &answer); // it may be gone
        return Err(stranger);
    }
    stream.set_read_timeout(None).map_err(garbage)?;
    Ok((hello, stream))
}

/// Reads until a point in time, however slowly bytes come.
pub struct Until<'a> {
    /// Where from.
    pub stream: &'a TcpStream,
    /// Until when.
    pub end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer)
    }
}
