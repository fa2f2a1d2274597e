//! Runs of real processes that go wrong: all end, in time, with one line that says why.
//!
//! The processes are those of `examples/ranks_overhead.rs`, a run without a model.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use forward_bench::rank::token::Token;
use forward_bench::rank::wire::{self, Answer, Channel, Hello};

/// The example, as cargo builds it.
static EXECUTABLE: LazyLock<PathBuf> = LazyLock::new(|| {
    let output = Command::new(env!("CARGO"))
        .args(["build", "--example", "ranks_overhead", "--message-format=json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == "ranks_overhead")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .expect("cargo names the executable")
});

/// The longest that any run here may take: the ten seconds that are promised, and as much again for a busy machine.
const PROMISED: Duration = Duration::from_secs(20);

/// A token for runs that are given one.
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// One run: its processes are known by a variable that only they have.
struct Run {
    mark: String,
    runtime: tempfile::TempDir,
}

/// How a process ended.
#[derive(Debug)]
struct Ended {
    status: Option<i32>,
    stdout: String,
    stderr: String,
    took: Duration,
}

impl Run {
    fn new() -> Self {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let mark = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let runtime = tempfile::tempdir().unwrap();
        std::fs::set_permissions(runtime.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .unwrap();
        Self { mark, runtime }
    }

    /// The example with these arguments, outside of any launcher.
    fn command(&self, arguments: &str) -> Command {
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
    fn rank(&self, rank: usize, world: usize, port: u16, arguments: &str) -> Command {
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
    fn alive(&self) -> Vec<String> {
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
    fn nothing_is_left(&self) {
        let until = Instant::now() + PROMISED;
        while !self.alive().is_empty() {
            assert!(Instant::now() < until, "orphans: {:?}", self.alive());
            std::thread::sleep(Duration::from_millis(20));
        }
        let files: Vec<_> = std::fs::read_dir(self.runtime.path()).unwrap().collect();
        assert!(files.is_empty(), "{files:?}");
    }
}

fn start(command: &mut Command) -> (Child, Instant) {
    (command.spawn().unwrap(), Instant::now())
}

fn end((child, begin): (Child, Instant)) -> Ended {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ended { status: status.code(), stdout: text(stdout), stderr: text(stderr), took: begin.elapsed() }
}

impl Ended {
    /// It ended with this status, within the promised time, and said one line, with all of `needles` in it.
    fn with(&self, status: i32, needles: &[&str]) -> &Self {
        assert_eq!(self.status, Some(status), "{self:?}");
        assert!(self.took < PROMISED, "{self:?}");
        let lines: Vec<&str> = self.stderr.lines().filter(|line| line.starts_with("error:")).collect();
        assert_eq!(lines.len(), 1, "{self:?}");
        for needle in needles {
            assert!(lines[0].contains(needle), "{needle}: {self:?}");
        }
        self
    }

    fn silently_killed(&self) {
        assert_eq!((self.status, self.stderr.as_str()), (None, ""), "{self:?}");
    }

    fn silently(&self, status: i32) {
        assert_eq!((self.status, self.stderr.as_str()), (Some(status), ""), "{self:?}");
    }
}

/// A port that nobody has, and whose predecessor is a port as well.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A run of our own launch in which a rank does something wrong.
fn with_fault(fault: &str, arguments: &str) -> Ended {
    let run = Run::new();
    let ended = end(start(run.command(arguments).env("FORWARD_BENCH_FAULT", fault)));
    run.nothing_is_left();
    ended
}

#[test]
fn ranks_of_our_own_launch_and_of_torchrun_do_the_same() {
    let run = Run::new();
    let ended = end(start(&mut run.command("--ranks 3 --cases 2 --calls 5 --collectives")));
    assert_eq!((ended.status, ended.stdout.lines().count()), (Some(0), 2), "{ended:?}");
    let port = free_port();
    let all = [2, 1, 0].map(|rank| start(&mut run.rank(rank, 3, port, "--cases 2 --calls 5 --collectives")));
    let [two, one, zero] = all.map(end);
    assert_eq!((zero.status, zero.stdout.lines().count()), (Some(0), 2), "{zero:?}");
    one.silently(0);
    two.silently(0);
    run.nothing_is_left();
}

#[test]
fn a_rank_that_panics_ends_all_with_its_message() {
    with_fault("panic@prepare:1", "--ranks 3").with(4, &["rank 1: asked to panic at prepare"]);
    with_fault("panic@replay:0", "--ranks 3").with(4, &["error: asked to panic at replay"]);
}

#[test]
fn a_rank_that_is_killed_is_named() {
    with_fault("kill@replay:1", "--ranks 3").with(4, &["rank 1 was killed by SIGKILL"]);
    with_fault("kill@replay:0", "--ranks 3").with(4, &["rank 0 was killed by SIGKILL"]);
    with_fault("kill@prepare:1", "--ranks 3 --collectives").with(4, &["rank 1 was killed by SIGKILL"]);
}

#[test]
fn a_rank_that_ends_without_a_word_is_named() {
    with_fault("exit@replay:2", "--ranks 3").with(4, &["rank 2 ended with exit status 7"]);
}

#[test]
fn a_rank_that_fails_says_why_and_the_status_is_its_own() {
    with_fault("fail@prepare:2", "--ranks 3").with(3, &["rank 2: asked to fail at prepare"]);
}

#[test]
fn a_rank_that_hangs_is_named_when_its_time_is_up() {
    for (fault, who) in [
        ("hang@prepare:1", "error: rank 1 did not"),
        ("hang@prepare:0", "error: rank 0 did not"),
        ("hang@prepare:1,hang@prepare:2", "error: ranks 1 and 2 did not"),
    ] {
        let ended = with_fault(fault, "--ranks 3 --prepare-timeout 1");
        ended.with(4, &[who, "end prepare within 1 s"]);
    }
}

#[test]
fn a_failure_is_told_although_others_wait_for_the_failed_rank() {
    // Rank 1 fails before a collective in which the others wait for it.
    let ended = with_fault("fail@collective:1", "--ranks 3 --collectives");
    ended.with(3, &["rank 1: asked to fail at collective"]);
    with_fault("fail@collective:0", "--ranks 2 --collectives")
        .with(3, &["error: asked to fail at collective"]);
}

#[test]
fn a_stopped_rank_is_killed_and_named() {
    let ended = with_fault("stop@replay:1", "--ranks 3");
    ended.with(4, &["rank 1 was stopped by SIGSTOP"]);
    with_fault("stop@replay:0", "--ranks 2").with(4, &["rank 0 was stopped by SIGSTOP"]);
}

#[test]
fn a_rank_that_never_connects_is_named() {
    with_fault("hang@connect:2", "--ranks 4 --connect-timeout 1")
        .with(4, &["rank 2 did not join within 1 s"]);
    // The others of a foreign launcher end as well.
    let (run, port) = (Run::new(), free_port());
    let all = [0, 1].map(|rank| start(&mut run.rank(rank, 3, port, "--connect-timeout 2")));
    let [zero, one] = all.map(end);
    zero.with(4, &["rank 2 did not join within 2 s"]);
    one.silently(4);
    run.nothing_is_left();
    // And without rank 0.
    let one = end(start(&mut run.rank(1, 2, port, "--connect-timeout 1")));
    one.with(4, &["rank 0 could not be reached", "--control-port"]);
}

#[test]
fn under_a_foreign_launcher_rank_0_speaks_for_all() {
    for (fault, statuses, needle) in [
        ("panic@prepare:1", [4, 4], "rank 1: asked to panic"),
        ("exit@replay:1", [4, 7], "rank 1 was lost: its connection closed"),
    ] {
        let (run, port) = (Run::new(), free_port());
        let all = [0, 1, 2].map(|rank| start(run.rank(rank, 3, port, "").env("FORWARD_BENCH_FAULT", fault)));
        let [zero, one, two] = all.map(end);
        zero.with(statuses[0], &[needle]);
        one.silently(statuses[1]);
        two.silently(4);
        run.nothing_is_left();
    }
}

#[test]
fn under_a_foreign_launcher_the_others_of_a_stopped_rank_end() {
    let (run, port) = (Run::new(), free_port());
    let fault = "stop@replay:1";
    let [zero, mut one, two] =
        [0, 1, 2].map(|rank| start(run.rank(rank, 3, port, "").env("FORWARD_BENCH_FAULT", fault)));
    end(zero).with(4, &["rank 1 was lost: no sign of life for 5 s"]);
    end(two).silently(4);
    one.0.kill().unwrap(); // which is up to the launcher
    end(one).silently_killed();
    run.nothing_is_left();
}

#[test]
fn without_rank_0_one_of_the_others_speaks() {
    let (run, port) = (Run::new(), free_port());
    let fault = "kill@replay:0";
    let all = [0, 1, 2].map(|rank| start(run.rank(rank, 3, port, "").env("FORWARD_BENCH_FAULT", fault)));
    let [zero, one, two] = all.map(end);
    zero.silently_killed();
    one.with(4, &["rank 0 was lost"]);
    two.silently(4);
    run.nothing_is_left();
}

#[test]
fn a_port_in_use_is_named_with_the_flag() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let run = Run::new();
    let ended = end(start(&mut run.command(&format!("--ranks 2 --control-port {port}"))));
    ended.with(2, &[&port.to_string(), "--control-port"]);
    let zero = end(start(&mut run.rank(0, 2, port, "")));
    zero.with(2, &[&port.to_string(), "--control-port"]);
    run.nothing_is_left();
}

#[test]
fn what_is_no_rank_0_is_told_by_its_answer() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in other.incoming() {
            let _ = stream.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let run = Run::new();
    let one = end(start(run.rank(1, 2, port, "").env("FORWARD_BENCH_TOKEN", TOKEN)));
    one.with(2, &["is no rank 0 of forward-bench", "--control-port"]);
}

#[test]
fn a_wrong_number_of_processes_is_refused() {
    let run = Run::new();
    let ended = end(start(run.rank(0, 4, free_port(), "").env("WORLD_SIZE", "2")));
    ended.with(2, &["WORLD_SIZE is 2", "4 ranks"]);
    let ended = end(start(run.rank(0, 4, free_port(), "").env_remove("WORLD_SIZE")));
    ended.with(2, &["WORLD_SIZE"]);
}

/// Says hello as a rank might; returns rank 0's answer.
fn hello(port: u16, change: impl Fn(&mut Hello)) -> Answer {
    let token = Token::from_environment(&|_| Some(TOKEN.to_owned())).unwrap().unwrap();
    let mut hello = Hello::new(&token, 1, 2, Channel::Control);
    change(&mut hello);
    let mut stream = connect(port);
    wire::write_first(&mut stream, &hello).unwrap();
    wire::read_first(&mut stream).unwrap()
}

fn connect(port: u16) -> TcpStream {
    let until = Instant::now() + PROMISED;
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_rank_that_does_not_fit_ends_the_run_on_both_sides() {
    type Change = fn(&mut Hello);
    let cases: [(Change, &str); 4] = [
        (|hello| hello.version = "0.0.7".to_owned(), "forward-bench 0.0.7"),
        (|hello| hello.protocol = 77, "protocol 77"),
        (|hello| hello.world = 3, "expects 3 ranks"),
        (|hello| hello.rank = 2, "rank 2 of 2"),
    ];
    for (change, needle) in cases {
        let (run, port) = (Run::new(), free_port());
        let zero = start(run.rank(0, 2, port, "").env("FORWARD_BENCH_TOKEN", TOKEN));
        match hello(port, change) {
            Answer::Refused(text) => assert!(text.contains(needle), "{text}"),
            other => panic!("{other:?}"),
        }
        end(zero).with(2, &[needle]);
        run.nothing_is_left();
    }
}

#[test]
fn two_processes_of_one_rank_end_the_run() {
    let (run, port) = (Run::new(), free_port());
    let all = [0, 1, 1].map(|rank| start(&mut run.rank(rank, 3, port, "")));
    let [zero, one, other] = all.map(end);
    zero.with(2, &["two processes join as rank 1"]);
    for one in [one, other] {
        assert!(one.status == Some(2) && one.took < PROMISED, "{one:?}");
    }
    run.nothing_is_left();
}

#[test]
fn strangers_are_turned_away_and_the_run_goes_on() {
    let (run, port) = (Run::new(), free_port());
    let zero = start(run.rank(0, 2, port, "--calls 5").env("FORWARD_BENCH_TOKEN", TOKEN));
    let silent = connect(port); // says nothing at all, and holds up nobody
    for garbage in
        [&b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..], b"fwdbench\xff\xff\xff\xff", b"fwdbench\x02\0\0\0{]"]
    {
        let mut stream = connect(port);
        stream.write_all(garbage).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer); // it may be reset
        assert!(answer.is_empty());
    }
    assert!(matches!(hello(port, |hello| hello.token = "f".repeat(32)), Answer::Token));
    let one = end(start(run.rank(1, 2, port, "--calls 5").env("FORWARD_BENCH_TOKEN", TOKEN)));
    one.silently(0);
    let zero = end(zero);
    assert_eq!((zero.status, zero.stdout.lines().count()), (Some(0), 1), "{zero:?}");
    assert_eq!(zero.stderr.lines().count(), 2, "{zero:?}");
    assert!(!zero.stderr.contains(TOKEN));
    drop(silent);
    run.nothing_is_left();
}

#[test]
fn a_wrong_token_is_told_on_both_sides() {
    let (run, port) = (Run::new(), free_port());
    let zero = start(run.rank(0, 2, port, "--connect-timeout 3").env("FORWARD_BENCH_TOKEN", TOKEN));
    let one = end(start(run.rank(1, 2, port, "").env("FORWARD_BENCH_TOKEN", "f".repeat(32))));
    one.with(2, &["another FORWARD_BENCH_TOKEN"]);
    let zero = end(zero);
    zero.with(4, &["rank 1 did not join", "another token"]);
    assert!(!one.stderr.contains("ffff") && !zero.stderr.contains(TOKEN));
}

#[test]
fn several_nodes_need_a_token_and_are_two_launches() {
    let (run, port) = (Run::new(), free_port());
    let node = |node: usize| {
        let arguments = "--ranks 4 --calls 5 --nnodes 2 --master-addr 127.0.0.1";
        run.command(&format!("{arguments} --node-rank {node} --control-port {port}"))
    };
    end(start(&mut node(0))).with(2, &["export FORWARD_BENCH_TOKEN="]);
    let [one, zero] = [1, 0].map(|at| start(node(at).env("FORWARD_BENCH_TOKEN", TOKEN))).map(end);
    assert_eq!((zero.status, zero.stdout.lines().count()), (Some(0), 1), "{zero:?}");
    one.silently(0);
    let with_fault =
        |at| start(node(at).env("FORWARD_BENCH_TOKEN", TOKEN).env("FORWARD_BENCH_FAULT", "panic@replay:2"));
    let [one, zero] = [1, 0].map(with_fault).map(end);
    for ended in [zero, one] {
        ended.with(4, &["rank 2: asked to panic at replay"]); // each host has a terminal of its own
    }
    run.nothing_is_left();
}

#[test]
fn only_the_loopback_is_listened_on_unless_there_are_several_nodes() {
    for (nnodes, address) in [("1", "0100007F"), ("2", "00000000")] {
        let (run, port) = (Run::new(), free_port());
        let zero = start(
            run.rank(0, 2, port, &format!("--connect-timeout 1 --nnodes {nnodes}"))
                .env("FORWARD_BENCH_TOKEN", TOKEN),
        );
        drop(connect(port));
        let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let listens = format!("{address}:{port:04X} 00000000:0000 0A");
        assert!(sockets.contains(&listens), "{listens}\n{sockets}");
        end(zero).with(4, &["rank 1 did not join"]);
    }
}

#[test]
fn who_started_the_ranks_takes_them_along() {
    for signal in ["-TERM", "-INT", "-KILL"] {
        let run = Run::new();
        let bench = start(&mut run.command("--ranks 3 --analysis 600"));
        let until = Instant::now() + PROMISED;
        while run.alive().len() < 4 {
            assert!(Instant::now() < until, "{:?}", run.alive());
            std::thread::sleep(Duration::from_millis(20));
        }
        let id = bench.0.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        let ended = end(bench);
        match signal {
            "-KILL" => ended.silently_killed(),
            _ => drop(ended.with(130, &["interrupted"])),
        }
        run.nothing_is_left();
    }
}

#[test]
fn ranks_wait_on_their_sockets_while_rank_0_analyses() {
    // Longer than any sign of life may be missing, and shorter than a collective would wait.
    let run = Run::new();
    let ended = end(start(&mut run.command("--ranks 3 --calls 5 --analysis 7")));
    assert_eq!((ended.status, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
}
