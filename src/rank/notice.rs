//! Why a run ends, told to whom it may concern: the process that started the ranks, rank 0, or the user.

use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::error::prefix;
use super::launch::{Member, launched};
use super::watchdog::Watchdog;

/// Why a run ends. Of several, the strongest and then the first is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// Who says it, or who is gone.
    pub rank: usize,
    /// The exit status that it means.
    pub status: u8,
    /// What it says; one line.
    pub message: String,
    /// Whether it is of another's silence: that one may still say why.
    pub weak: bool,
}

impl Notice {
    /// A rank's own failure.
    #[must_use]
    pub fn failed(rank: usize, status: u8, message: &str) -> Self {
        Self { rank, status, message: one_line(message), weak: false }
    }

    /// A rank that is gone, as another sees it.
    #[must_use]
    pub fn lost(rank: usize, how: &str) -> Self {
        let message = format!("rank {rank} was lost: {}", one_line(how));
        Self { rank, status: super::error::LOST, message, weak: true }
    }

    /// The line for the user: what a rank says of itself has its number before it.
    #[must_use]
    pub fn line(&self) -> String {
        let prefix = if self.weak { String::new() } else { prefix(self.rank) };
        format!("{prefix}{}", self.message)
    }
}

/// A message of several lines as one; what steers a terminal is written out.
fn one_line(text: &str) -> String {
    let write_out = |c: char| match c {
        '\n' => " ".to_owned(),
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.trim_end().chars().map(write_out).collect()
}

/// Prints the line with which a run ends.
pub fn print(line: &str) {
    // Where stderr is gone, too, only the exit status is left to say it with.
    let _ = writeln!(std::io::stderr(), "error: {line}");
}

/// The watchdog of this process, once it has joined.
static WATCHDOG: OnceLock<Watchdog> = OnceLock::new();

/// Makes a watchdog the one of this process; a second one stays a stranger.
pub(super) fn install(watchdog: &Watchdog) {
    let _ = WATCHDOG.set(watchdog.clone());
}

/// Ends this process, and with it the run that it is a rank of: the place for every failure that ends a process, a panic among them. The
/// message is one line, printed once however many ranks there are.
///
/// A process that is no rank prints `error: ` and the message, and exits with the status.
pub fn fail(status: u8, message: &str) -> ! {
    end_if_lost();
    if let Some(watchdog) = WATCHDOG.get() {
        watchdog.fail(status, message);
    }
    let member = launched(&|name| std::env::var(name).ok());
    let notice = Notice::failed(member.as_ref().map_or(0, |member| member.rank), status, message);
    if !member.is_some_and(|member| send(&member, &notice)) {
        print(&notice.line());
    }
    std::process::exit(i32::from(status))
}

/// Waits for the end of this process if its run ends already: the first cause is told, and nothing that follows from it.
pub fn end_if_lost() {
    if WATCHDOG.get().is_some_and(Watchdog::tripped) {
        loop {
            std::thread::park(); // the watchdog's thread ends the process
        }
    }
}

/// Tells the process that started this rank; whether there is one.
pub(super) fn send(member: &Member, notice: &Notice) -> bool {
    static PIPE: OnceLock<Option<std::fs::File>> = OnceLock::new();
    let open = || {
        // SAFETY: the number is that of the pipe which our own launch left open for this process, and this is the only place
        // that takes it, once.
        member.notices.map(|fd| std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
    };
    let Some(mut pipe) = PIPE.get_or_init(open).as_ref() else { return false };
    let mut line = serde_json::to_string(notice).unwrap_or_default();
    line.push('\n');
    pipe.write_all(line.as_bytes()).is_ok()
}
