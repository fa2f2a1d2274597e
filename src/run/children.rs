//! Processes that measure for this one: started, waited for, and ended with it.

use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{Failure, INTERRUPTED};

/// How often a child is looked after.
const POLL: Duration = Duration::from_millis(20);

/// Whether this process was asked to end: by ctrl-C, which its children get as well, or by SIGTERM or SIGHUP.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens from now on; the signals no longer end the process by themselves, so that it can clean up.
    pub fn listen() -> Result<Self, Failure> {
        let this = Self::default();
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            signal_hook::flag::register(signal, this.0.clone())
                .map_err(|error| Failure::usage(format!("listening for ctrl-C: {error}")))?;
        }
        Ok(this)
    }

    /// Whether the signal came.
    pub fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// An error if it did.
    pub fn check(&self) -> Result<(), Failure> {
        if self.came() {
            return Err(Failure {
                status: INTERRUPTED,
                message: "interrupted; nothing was saved".to_owned(),
            });
        }
        Ok(())
    }
}

/// A child that does not outlive this value.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    /// Starts it.
    pub fn start(command: &mut Command) -> Result<Self, Failure> {
        let program = command.get_program().to_owned();
        command
            .stdin(Stdio::null())
            .spawn()
            .map(Self)
            .map_err(|error| Failure::usage(format!("{} could not be started: {error}", program.display())))
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }

    /// Waits for its end, or until this process is interrupted.
    pub fn wait(&mut self, interrupt: &Interrupt) -> Result<ExitStatus, Failure> {
        loop {
            if let Some(status) = self.ended() {
                interrupt.check()?;
                return Ok(status);
            }
            interrupt.check()?;
            std::thread::sleep(POLL);
        }
    }
}

/// What a process printed, and how it ended.
pub struct Output {
    /// Its exit status.
    pub status: ExitStatus,
    /// What it printed on stdout.
    pub stdout: String,
    /// What it printed on stderr.
    pub stderr: String,
}

/// Runs a command for at most `limit`.
pub fn output(command: &mut Command, interrupt: &Interrupt, limit: Duration) -> Result<Output, Failure> {
    let failed = |error: std::io::Error| Failure::usage(format!("a file for what a process prints: {error}"));
    let files = [tempfile::tempfile().map_err(failed)?, tempfile::tempfile().map_err(failed)?];
    let [out, err] = &files;
    command.stdout(out.try_clone().map_err(failed)?).stderr(err.try_clone().map_err(failed)?);
    let (begin, mut process) = (std::time::Instant::now(), Process::start(command)?);
    let status = loop {
        interrupt.check()?;
        if let Some(status) = process.ended() {
            break status;
        }
        if begin.elapsed() > limit {
            let program = command.get_program().display();
            return Err(Failure::usage(format!("{program} has not ended after {} s", limit.as_secs())));
        }
        std::thread::sleep(POLL);
    };
    let [stdout, stderr] = files.map(|mut file| {
        use std::io::{Read, Seek};
        let mut bytes = Vec::new();
        // What cannot be read back is as good as nothing printed.
        let _ = file.rewind().and_then(|()| file.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    });
    interrupt.check()?;
    Ok(Output { status, stdout, stderr })
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            // It may have ended by itself just now, which is as well.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// The exit status of a process, 128 and more for one that a signal ended, as shells have it.
pub fn code(status: ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().or_else(|| Some(128 + status.signal()?));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}
