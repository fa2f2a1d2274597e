//! Signs of life each second, and why a run ends, over a connection of its own, so that no payload is ever in the way.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::SendFlags;
use serde::{Deserialize, Serialize};

use super::notice::Notice;
use super::watchdog::Watchdog;
use super::wire;

/// How often a sign of life is sent.
const BEAT: Duration = Duration::from_secs(1);
/// How often it is looked whether one is missing.
const TICK: Duration = Duration::from_millis(250);
/// Longest message.
const LIMIT: usize = 1 << 16;

/// What is sent.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Pulse {
    /// A sign of life.
    Beat,
    /// Why the run ends.
    End(Notice),
    /// The connection closes in peace.
    Bye,
}

/// What to do with the other side's reason.
type Heard = Arc<dyn Fn(Notice) + Send + Sync>;

/// The connections of one rank, to all others at rank 0 and to rank 0 elsewhere; clones are the same ones.
#[derive(Clone)]
pub struct Pulses {
    peers: Arc<Mutex<Vec<TcpStream>>>,
    watchdog: Watchdog,
    heard: Heard,
}

impl Pulses {
    /// Begins to send signs of life to whoever is added.
    pub fn start(watchdog: &Watchdog, heard: impl Fn(Notice) + Send + Sync + 'static) -> Self {
        let peers: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let all = Arc::downgrade(&peers);
        std::thread::spawn(move || {
            while let Some(peers) = all.upgrade() {
                send(&lock(&peers), &Pulse::Beat);
                drop(peers);
                std::thread::sleep(BEAT);
            }
        });
        Self { peers, watchdog: watchdog.clone(), heard: Arc::new(heard) }
    }

    /// Adds a connection, and listens to it.
    ///
    /// # Errors
    /// The system's.
    pub fn add(&self, rank: usize, stream: TcpStream) -> std::io::Result<()> {
        stream.set_read_timeout(Some(TICK))?;
        let listening = stream.try_clone()?;
        send(std::slice::from_ref(&stream), &Pulse::Beat);
        lock(&self.peers).push(stream);
        let (watchdog, heard) = (self.watchdog.clone(), self.heard.clone());
        std::thread::spawn(move || {
            if let Err(how) = listen(listening, watchdog.timeouts().silence, &heard) {
                watchdog.trip(Notice::lost(rank, &how));
            }
        });
        Ok(())
    }

    /// Tells all why the run ends; whether it was said to any.
    pub fn end(&self, notice: &Notice) -> bool {
        send(&lock(&self.peers), &Pulse::End(notice.clone()))
    }

    /// Tells all that the connection closes in peace.
    pub fn bye(&self) {
        send(&lock(&self.peers), &Pulse::Bye);
    }
}

fn lock(peers: &Mutex<Vec<TcpStream>>) -> MutexGuard<'_, Vec<TcpStream>> {
    peers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends without waiting for anybody: who does not read for so long that its buffer is full is lost anyway.
fn send(peers: &[TcpStream], pulse: &Pulse) -> bool {
    let Ok(frame) = wire::frame(pulse) else { return false };
    let mut sent = false;
    for peer in peers {
        sent |= rustix::net::send(peer, &frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) == Ok(frame.len());
    }
    sent
}

/// Listens until the other side says goodbye; an error says how it was lost.
///
/// Silence is counted in ticks that this thread lived through: after this process was itself stopped for a while, nobody is lost.
fn listen(mut stream: TcpStream, silence: Duration, heard: &Heard) -> Result<(), String> {
    let (mut bytes, mut chunk, mut silent) = (Vec::new(), [0; 1024], Duration::ZERO);
    loop {
        let begin = Instant::now();
        match stream.read(&mut chunk) {
            Ok(0) => return Err("its connection closed".to_owned()),
            Ok(read) => {
                silent = Duration::ZERO;
                bytes.extend_from_slice(&chunk[..read]);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                silent += begin.elapsed().min(2 * TICK);
                if silent >= silence {
                    return Err(format!("no sign of life for {} s", silence.as_secs_f64()));
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(wire::how(&error)),
        }
        while let Some(pulse) = wire::take(&mut bytes, LIMIT).map_err(|error| error.to_string())? {
            match pulse {
                Pulse::Beat => {}
                Pulse::End(notice) => heard(notice),
                Pulse::Bye => return Ok(()),
            }
        }
    }
}
