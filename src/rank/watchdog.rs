//! Ends a rank whose run cannot go on, whatever its other threads wait for.
//!
//! The first cause wins. One that is only another's silence waits a moment for that one's own words. Then the others and the user are
//! told, the hooks run (aborting what a device waits for), and the process exits without running destructors, which could
//! wait for that device. Nothing of this can hold up the exit for more than [`Timeouts::hooks`].

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::notice::Notice;

/// How long ranks wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Timeouts {
    /// For all to join, from the start of each process.
    pub connect: Duration,
    /// For one case to be made ready on all.
    pub prepare: Duration,
    /// For the others, once one has answered that it failed: they may wait in a collective for it.
    pub after_failure: Duration,
    /// For a sign of life; a rank that is silent for longer is lost.
    pub silence: Duration,
    /// For a lost rank's own words.
    pub settle: Duration,
    /// For telling the others, and the hooks.
    pub hooks: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(60),
            prepare: Duration::from_secs(300),
            after_failure: Duration::from_secs(6),
            silence: Duration::from_secs(5),
            settle: Duration::from_millis(500),
            hooks: Duration::from_secs(3),
        }
    }
}

/// What is run before the process exits.
pub type Hook = Box<dyn Fn() + Send + Sync>;
/// Tells the others and the user.
type Tell = Box<dyn Fn(&Notice) + Send + Sync>;
/// Ends the process.
type Exit = Box<dyn Fn(u8) + Send + Sync>;
/// Says why a deadline that passed ends the run.
type Cause = Box<dyn Fn() -> Notice + Send>;

/// A thread that ends this rank; clones are the same one.
#[derive(Clone)]
pub struct Watchdog(Arc<Shared>);

struct Shared {
    rank: usize,
    timeouts: Timeouts,
    state: Mutex<State>,
    changed: Condvar,
    hooks: Mutex<Vec<Hook>>,
    exit: Exit,
}

#[derive(Default)]
struct State {
    cause: Option<(Notice, Instant)>,
    deadlines: BTreeMap<u64, (Instant, Cause)>,
    next: u64,
    /// All ranks were told to end in peace: nobody is lost any more.
    finished: bool,
    tell: Vec<Tell>,
}

/// A deadline that is called off when this value goes.
pub struct Deadline {
    watchdog: Watchdog,
    number: u64,
}

impl Drop for Deadline {
    fn drop(&mut self) {
        self.watchdog.state().deadlines.remove(&self.number);
    }
}

impl Watchdog {
    /// Of a rank; ends the process.
    #[must_use]
    pub fn new(rank: usize, timeouts: Timeouts) -> Self {
        Self::with_exit(rank, timeouts, Box::new(exit))
    }

    /// One that calls `exit` instead of ending the process.
    pub(super) fn with_exit(rank: usize, timeouts: Timeouts, exit: Exit) -> Self {
        let (state, changed, hooks) = (Mutex::default(), Condvar::new(), Mutex::default());
        let this = Self(Arc::new(Shared { rank, timeouts, state, changed, hooks, exit }));
        let watched = Arc::downgrade(&this.0);
        std::thread::spawn(move || {
            while let Some(shared) = watched.upgrade() {
                if Self(shared).watch() {
                    return;
                }
            }
        });
        this
    }

    /// How long this rank waits.
    #[must_use]
    pub fn timeouts(&self) -> &Timeouts {
        &self.0.timeouts
    }

    /// What else is to be run before the process exits: `ncclCommAbort`, for one. It may hang.
    pub fn on_end(&self, hook: Hook) {
        lock(&self.0.hooks).push(hook);
    }

    /// Who is told; the last one added first.
    pub(super) fn on_cause(&self, tell: impl Fn(&Notice) + Send + Sync + 'static) {
        self.state().tell.insert(0, Box::new(tell));
    }

    /// Ends the run for this cause, unless it ends already; returns at once.
    pub fn trip(&self, notice: Notice) {
        let mut state = self.state();
        let settled = state.cause.as_ref().is_some_and(|(first, _)| !first.weak || notice.weak);
        if !(settled || notice.weak && state.finished) {
            let since = state.cause.as_ref().map_or_else(Instant::now, |(_, since)| *since);
            state.cause = Some((notice, since));
            self.0.changed.notify_all();
        }
    }

    /// Ends the run for a failure of this rank; one after the run's own end is only a consequence of that.
    pub fn fail(&self, status: u8, message: &str) -> ! {
        if !self.tripped() {
            self.trip(Notice::failed(self.0.rank, status, message));
        }
        loop {
            std::thread::park(); // the watchdog's thread ends the process
        }
    }

    /// Ends the run if the returned value still lives after this time.
    #[must_use = "the deadline is called off when this value goes"]
    pub fn deadline(&self, after: Duration, cause: impl Fn() -> Notice + Send + 'static) -> Deadline {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.deadlines.insert(number, (Instant::now() + after, Box::new(cause)));
        self.0.changed.notify_all();
        Deadline { watchdog: self.clone(), number }
    }

    /// From now on a closed connection is no loss.
    pub fn finish(&self) {
        self.state().finished = true;
    }

    /// Whether all ranks were told to end in peace.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.state().finished
    }

    /// Whether the run ends.
    #[must_use]
    pub fn tripped(&self) -> bool {
        self.state().cause.is_some()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }

    /// Waits a while, or until something changes; ends the process if it must. Returns whether it did.
    fn watch(&self) -> bool {
        let now = Instant::now();
        if let Some(cause) = self.passed(now) {
            self.trip(cause()); // called without the lock: it may look at what waits for it
        }
        let state = self.state();
        let at = match &state.cause {
            Some((notice, since)) if !notice.weak || now >= *since + self.0.timeouts.settle => {
                let notice = notice.clone();
                drop(state);
                self.end(&notice);
                return true;
            }
            Some((_, since)) => Some(*since + self.0.timeouts.settle),
            None => state.deadlines.values().map(|(at, _)| *at).min(),
        };
        let wait = at.map_or(IDLE, |at| at.saturating_duration_since(now).min(IDLE));
        drop(self.0.changed.wait_timeout(state, wait));
        false
    }

    /// A deadline that has passed.
    fn passed(&self, now: Instant) -> Option<Cause> {
        let mut state = self.state();
        let number = state.deadlines.iter().find(|(_, (at, _))| *at <= now).map(|(number, _)| *number)?;
        state.deadlines.remove(&number).map(|(_, cause)| cause)
    }

    fn end(&self, notice: &Notice) {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (shared, told) = (self.0.clone(), notice.clone());
        std::thread::spawn(move || {
            let tell = std::mem::take(&mut lock(&shared.state).tell);
            for tell in &tell {
                tell(&told);
            }
            for hook in lock(&shared.hooks).iter() {
                hook();
            }
            let _ = sender.send(()); // nobody waits any more
        });
        // However it went: the process exits now.
        let _ = receiver.recv_timeout(self.0.timeouts.hooks);
        (self.0.exit)(notice.status);
    }
}

/// A watchdog with nothing to wait for looks up this often, to see whether it is still needed.
const IDLE: Duration = Duration::from_secs(5);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner) // what panicked ends the process anyway
}

fn exit(status: u8) {
    // SAFETY: _exit has no preconditions. It runs no destructors, which is the point.
    unsafe { libc::_exit(i32::from(status)) }
}

#[cfg(test)]
mod tests;
