//! One case at a time over several processes: each waits for its turn before a case.
//!
//! A process connects to a socket, writes a line when it is ready for its next case, and reads a line before it goes on. What it
//! measures in between is nobody's business here; that it is ready again, or has ended, says that it is done.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use crate::run::Failure;
use crate::run::children::{Interrupt, Process};

/// How often the processes are looked after.
const POLL: Duration = Duration::from_millis(5);

/// The side of a process that measures.
pub struct Turns(BufReader<UnixStream>);

impl Turns {
    /// Connects to the process that gives turns.
    pub fn connect(socket: &Path) -> Result<Self, Failure> {
        let stream = UnixStream::connect(socket)
            .map_err(|error| Failure::usage(format!("--take-turns {}: {error}", socket.display())))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Waits for its turn.
    pub fn wait(&mut self) -> Result<(), Failure> {
        let gone = || Failure::usage("--take-turns: the process that gives turns is gone".to_owned());
        self.0.get_mut().write_all(b"ready\n").map_err(|_| gone())?;
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(read) if read > 0 => Ok(()),
            _ => Err(gone()),
        }
    }
}

/// A process that takes turns, and the way to give them.
pub struct Taker {
    /// The process.
    pub process: Process,
    listener: Option<UnixListener>,
    stream: Option<UnixStream>,
}

/// What a process is at.
enum At {
    /// It waits for its turn.
    Ready,
    /// It is starting, or measures.
    Busy,
    /// It has ended.
    Ended,
}

impl Taker {
    /// Of a process that was told of this socket; without one it measures as soon as it is started.
    pub fn new(process: Process, listener: Option<UnixListener>) -> Self {
        Self { process, listener, stream: None }
    }

    fn at(&mut self) -> At {
        if self.process.ended().is_some() {
            return At::Ended;
        }
        if self.stream.is_none() {
            let accepted = self.listener.as_ref().and_then(|listener| listener.accept().ok());
            self.stream =
                accepted.map(|(stream, _)| stream).filter(|stream| stream.set_nonblocking(true).is_ok());
        }
        let Some(stream) = &mut self.stream else { return At::Busy };
        match std::io::Read::read(stream, &mut [0; 16]) {
            Ok(0) => At::Busy, // it closed the socket, and is about to end
            Ok(_) => At::Ready,
            Err(error) if error.kind() == ErrorKind::WouldBlock => At::Busy,
            Err(_) => At::Busy,
        }
    }

    /// Waits until it is ready or has ended; returns whether it is ready.
    fn until_ready(&mut self, interrupt: &Interrupt) -> Result<bool, Failure> {
        loop {
            interrupt.check()?;
            match self.at() {
                At::Ready => return Ok(true),
                At::Ended => return Ok(false),
                At::Busy => std::thread::sleep(POLL),
            }
        }
    }

    fn go(&mut self) {
        // A process that is gone is seen as ended in its next turn.
        let _ = self.stream.as_mut().map(|stream| stream.write_all(b"go\n"));
    }
}

/// Lets processes measure one case at a time until all have ended: the first, the second, then the second, the first, and so on.
pub fn alternate(takers: &mut [Taker], interrupt: &Interrupt) -> Result<(), Failure> {
    let mut ready = Vec::new();
    for taker in takers.iter_mut() {
        ready.push(taker.until_ready(interrupt)?);
    }
    let mut case = 0_usize;
    while ready.contains(&true) {
        for turn in 0..takers.len() {
            let which = if case.is_multiple_of(2) { turn } else { takers.len() - 1 - turn };
            if ready[which] {
                takers[which].go();
                ready[which] = takers[which].until_ready(interrupt)?;
            }
        }
        case += 1;
    }
    Ok(())
}

/// A socket in a folder of this process's own.
pub fn listen(socket: &Path) -> Result<UnixListener, Failure> {
    let failed = |error: std::io::Error| Failure::usage(format!("{}: {error}", socket.display()));
    let listener = UnixListener::bind(socket).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}
