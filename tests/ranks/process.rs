//! Runs of the example, and how they end.

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// The example, as cargo builds it.
pub static EXECUTABLE: LazyLock<PathBuf> = LazyLock::new(|| {
    crate::common::built(&["build", "--example", "ranks_overhead"], ("ranks_overhead", "example"))
});

/// The longest that any run here may take: the ten seconds that are promised, and as much again for a busy machine.
pub const PROMISED: Duration = Duration::from_secs(20);

/// A token for runs that are given one.
pub const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// One run: its processes are known by a variable that only they have.
pub struct Run {
    mark: String,
    pub runtime: tempfile::TempDir,
}

/// How a process ended.
#[derive(Debug)]
pub struct Ended {
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub took: Duration,
}

impl Run {
    pub fn new() -> Self {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let mark = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let runtime = tempfile::tempdir().unwrap();
        std::fs::set_permissions(runtime.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .unwrap();
        Self { mark, runtime }
    }

    /// The example with these arguments, outside of any launcher.
    pub fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(&*EXECUTABLE);
        command.args(arguments.split_whitespace()).env("RANKS_TEST", &self.mark);
        command.env("XDG_RUNTIME_DIR", self.runtime.path()).env_remove("FORWARD_BENCH_TOKEN");
        for (name, _) in std::env::vars() {
            if ["RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_"]
                .iter()
                .any(|is| name.starts_with(is))
            {
                command.env_remove(name);
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// The same as one rank of torchrun's; the control port is the one after the master port.
    pub fn rank(&self, rank: usize, world: usize, port: u16, arguments: &str) -> Command {
        let mut command = self.command(&format!("--ranks {world} {arguments}"));
        let variables = [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", world.to_string()),
            ("LOCAL_WORLD_SIZE", world.to_string()),
            ("MASTER_ADDR", "localhost".to_owned()),
            ("MASTER_PORT", (port - 1).to_string()),
        ];
        command.envs(variables);
        command
    }

    /// Processes of this run that still live, other than zombies.
    pub fn alive(&self) -> Vec<String> {
        let mark = format!("RANKS_TEST={}\0", self.mark);
        let processes = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        let ours = processes.filter(|entry| {
            let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
            let has =
                |text: &[u8], part: &str| text.windows(part.len()).any(|window| window == part.as_bytes());
            has(&read("environ"), &mark) && !has(&read("stat"), ") Z ")
        });
        ours.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// The processes that [`Run::rank`] or a supervisor started are gone, and so is the token.
    pub fn nothing_is_left(&self) {
        let until = Instant::now() + PROMISED;
        while !self.alive().is_empty() {
            assert!(Instant::now() < until, "orphans: {:?}", self.alive());
            std::thread::sleep(Duration::from_millis(20));
        }
        let files: Vec<_> = std::fs::read_dir(self.runtime.path()).unwrap().collect();
        assert!(files.is_empty(), "{files:?}");
    }
}

pub fn start(command: &mut Command) -> (Child, Instant) {
    (command.spawn().unwrap(), Instant::now())
}

pub fn end((child, begin): (Child, Instant)) -> Ended {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ended { status: status.code(), stdout: text(stdout), stderr: text(stderr), took: begin.elapsed() }
}

impl Ended {
    /// It ended with this status, within the promised time, and said one line, with all of `needles` in it.
    pub fn with(&self, status: i32, needles: &[&str]) -> &Self {
        assert_eq!(self.status, Some(status), "{self:?}");
        assert!(self.took < PROMISED, "{self:?}");
        let lines: Vec<&str> = self.stderr.lines().filter(|line| line.starts_with("error:")).collect();
        assert_eq!(lines.len(), 1, "{self:?}");
        for needle in needles {
            assert!(lines[0].contains(needle), "{needle}: {self:?}");
        }
        self
    }

    pub fn silently_killed(&self) {
        assert_eq!((self.status, self.stderr.as_str()), (None, ""), "{self:?}");
    }

    pub fn silently(&self, status: i32) {
        assert_eq!((self.status, self.stderr.as_str()), (Some(status), ""), "{self:?}");
    }
}

/// A port that nobody has, of those that the system gives to nobody unasked.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 12_000 + u16::try_from(std::process::id() % 10_000).unwrap();
    loop {
        let port = first + NEXT.fetch_add(2, Ordering::Relaxed);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A run of our own launch in which a rank does something wrong.
pub fn with_fault(fault: &str, arguments: &str) -> Ended {
    let run = Run::new();
    let ended = end(start(run.command(arguments).env("FORWARD_BENCH_FAULT", fault)));
    run.nothing_is_left();
    ended
}

pub fn connect(port: u16) -> TcpStream {
    let until = Instant::now() + PROMISED;
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
