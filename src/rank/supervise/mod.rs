//! The process that the user started, where no launcher did: starts the ranks of this host, and ends when they have.
//!
//! Ranks die with it, however it ends. When one fails, the others have [`GRACE`] to end by themselves; then they are killed. One line
//! says why: what a rank said of itself, else how it was seen to end, else what others saw.

mod verdict;

use std::io::Read;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use super::join::bind;
use super::launch::{LAUNCHED, Launcher, Local, Member};
use super::notice::{self, Notice};
use super::token::{self, Token};
use super::{Endpoint, RankError};
use verdict::Verdict;

/// How long the ranks may take to end by themselves.
const GRACE: Duration = Duration::from_secs(3);
/// How often they are looked after.
const POLL: Duration = Duration::from_millis(20);

/// Starts this host's ranks and waits for them; returns the exit status, having printed why if it is no rank's own.
///
/// `command` makes the command of a rank; its environment and standard input are set here. It is to be called on a thread that lives as
/// long as the process: ranks are killed when the thread that started them ends.
///
/// # Errors
/// If the ranks cannot be started, or this process is interrupted; no rank is left then.
pub fn supervise(
    local: &Local,
    mut command: impl FnMut(&Member) -> Result<Command, RankError>,
) -> Result<u8, RankError> {
    let interrupted = listen_to_signals()?;
    let token = match Token::from_environment(&|name| std::env::var(name).ok())? {
        Some(token) => token,
        None if local.several_nodes => return Err(token::needed()),
        None => Token::random()?,
    };
    let system = |error: std::io::Error| RankError::Usage(format!("the ranks could not be started: {error}"));
    let listener = if local.first == 0 { Some(bind(local.control.port, local.several_nodes)?) } else { None };
    let control = match &listener {
        Some(listener) => {
            let port = listener.local_addr().map_err(system)?.port();
            Endpoint { port, ..local.control.clone() }
        }
        None => local.control.clone(),
    };
    let mut ranks = Ranks { ranks: Vec::new(), interrupted };
    for local_rank in 0..local.count {
        let rank = local.first + local_rank;
        let listener = listener.as_ref().filter(|_| rank == 0);
        let member = Member {
            launcher: Launcher::Bench,
            rank,
            local_rank,
            world: local.world,
            control: control.clone(),
            several_nodes: local.several_nodes,
            listener: listener.map(AsRawFd::as_raw_fd),
            notices: None,
        };
        let mut command = command(&member)?;
        ranks.start(&mut command, &member, &token)?;
    }
    drop(listener); // rank 0's alone from now on
    ranks.wait()
}

/// Signals that ask for an end no longer end this process by themselves, so that it can end its ranks.
fn listen_to_signals() -> Result<Arc<AtomicBool>, RankError> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        signal_hook::flag::register(signal, flag.clone())
            .map_err(|error| RankError::Usage(format!("listening for ctrl-C: {error}")))?;
    }
    Ok(flag)
}

/// The ranks of this host; none outlives this value.
struct Ranks {
    ranks: Vec<Rank>,
    interrupted: Arc<AtomicBool>,
}

struct Rank {
    rank: usize,
    child: Child,
    /// What it tells, line by line.
    notices: std::io::PipeReader,
    unread: Vec<u8>,
    ended: Option<ExitStatus>,
    /// Whether it was killed here.
    killed: bool,
}

impl Ranks {
    fn start(&mut self, command: &mut Command, member: &Member, token: &Token) -> Result<(), RankError> {
        let system = |error: std::io::Error| {
            RankError::Usage(format!("rank {} could not be started: {error}", member.rank))
        };
        let (notices, writer) = std::io::pipe().map_err(system)?;
        rustix::io::ioctl_fionbio(&notices, true).map_err(|error| system(error.into()))?;
        let member = &Member { notices: Some(writer.as_raw_fd()), ..member.clone() };
        let text = serde_json::to_string(member).map_err(|error| RankError::Protocol(error.to_string()))?;
        command.env(LAUNCHED, text).env(token::VARIABLE, token.secret()).stdin(Stdio::null());
        let inherited: Vec<RawFd> = member.listener.into_iter().chain(member.notices).collect();
        let parent = rustix::process::getpid();
        // SAFETY: between fork and exec only system calls are made; the descriptors are open, here and in `supervise`.
        unsafe { command.pre_exec(move || settle(&inherited, parent)) };
        let child = command.spawn().map_err(|error| {
            let program = command.get_program().display();
            RankError::Usage(format!("rank {}: {program} could not be started: {error}", member.rank))
        })?;
        let rank = member.rank;
        self.ranks.push(Rank { rank, child, notices, unread: Vec::new(), ended: None, killed: false });
        Ok(())
    }

    /// Until all have ended.
    fn wait(mut self) -> Result<u8, RankError> {
        let mut verdict = Verdict::default();
        let mut ending: Option<Instant> = None;
        loop {
            self.look(&mut verdict);
            if self.interrupted.load(Ordering::Relaxed) {
                self.end_all();
                return Err(RankError::Interrupted);
            }
            if self.ranks.iter().all(|rank| rank.ended.is_some()) {
                break;
            }
            if verdict.is_over() {
                let since = *ending.get_or_insert_with(Instant::now);
                if since.elapsed() > GRACE {
                    self.kill_rest(&mut verdict);
                }
            }
            std::thread::sleep(POLL);
        }
        self.look(&mut verdict);
        if let Some(line) = verdict.line() {
            notice::print(&line);
        }
        Ok(verdict.status())
    }

    /// What has happened since.
    fn look(&mut self, verdict: &mut Verdict) {
        // Ends first: what a rank said before it ended can then be read.
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            rank.ended = rank.child.try_wait().ok().flatten();
            if let Some(status) = rank.ended.filter(|_| !rank.killed) {
                verdict.ended(rank.rank, status);
            }
        }
        for rank in &mut self.ranks {
            rank.told().for_each(|notice| verdict.heard(notice));
        }
    }

    /// Kills who has not ended; one that was stopped is named, as that is why.
    fn kill_rest(&mut self, verdict: &mut Verdict) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            if let Some(signal) = stopped(&rank.child) {
                verdict.stopped(rank.rank, signal);
            }
            rank.killed = true;
            let _ = rank.child.kill(); // it may have ended by itself just now
        }
    }

    /// Asks all to end, and kills who does not.
    fn end_all(&mut self) {
        for rank in self.ranks.iter().filter(|rank| rank.ended.is_none()) {
            if let Ok(id) = i32::try_from(rank.child.id())
                && let Some(pid) = Pid::from_raw(id)
            {
                let _ = rustix::process::kill_process(pid, Signal::TERM);
            }
        }
        let end = Instant::now() + GRACE;
        while Instant::now() < end && self.ranks.iter().any(|rank| rank.ended.is_none()) {
            self.look(&mut Verdict::default());
            std::thread::sleep(POLL);
        }
    }
}

impl Rank {
    /// What it has told since.
    fn told(&mut self) -> impl Iterator<Item = Notice> {
        let mut chunk = [0; 4096];
        while let Ok(read @ 1..) = self.notices.read(&mut chunk) {
            self.unread.extend_from_slice(&chunk[..read]);
        }
        let whole = self.unread.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let lines: Vec<u8> = self.unread.drain(..whole).collect();
        let notices = lines.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
        notices.collect::<Vec<_>>().into_iter()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            // It may have ended by itself just now, which is as well.
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

/// In a rank, before it runs: it dies with its parent, and keeps what it is to inherit.
fn settle(inherited: &[RawFd], parent: Pid) -> std::io::Result<()> {
    for fd in inherited {
        // SAFETY: F_SETFD on a descriptor that the parent held open while it forked.
        if unsafe { libc::fcntl(*fd, libc::F_SETFD, 0) } == -1 {
            return Err(std::io::Error::last_os_error());
        }
    }
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // A parent that ended before the line above would not be noticed any more.
    if rustix::process::getppid() != Some(parent) {
        return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// The signal by which a child is stopped, if it is.
fn stopped(child: &Child) -> Option<i32> {
    let pid = Pid::from_raw(i32::try_from(child.id()).ok()?)?;
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    rustix::process::waitid(WaitId::Pid(pid), options).ok().flatten()?.stopping_signal()
}
