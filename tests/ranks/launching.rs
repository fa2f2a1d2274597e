//! Who starts ranks, and what becomes of them then.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::{PROMISED, Run, TOKEN, connect, end, free_port, start};

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

/// Starts three ranks by a launcher, if it is installed: well, with a rank that panics, and one too few.
fn under(launcher: &str, arguments: &[&str]) {
    if Command::new(launcher).arg("--version").output().is_err() {
        let required = std::env::var("FORWARD_BENCH_REQUIRE_LAUNCHERS").unwrap_or_default();
        assert!(!required.split(' ').any(|one| one == launcher), "{launcher} is not installed");
        return eprintln!("{launcher} is not installed: not tested");
    }
    let run = Run::new();
    let command = |ranks: usize| {
        let example = run.command(&format!("--ranks {ranks} --calls 5 --collectives"));
        let mut command = Command::new(launcher);
        command.args(arguments).arg(example.get_program()).args(example.get_args());
        for (name, value) in example.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let ended = end(start(&mut command(3)));
    assert_eq!((ended.status, ended.stdout.matches("3 ranks").count()), (Some(0), 1), "{ended:?}");
    run.nothing_is_left();
    let ended = end(start(command(3).env("FORWARD_BENCH_FAULT", "panic@replay:2")));
    assert!(ended.status != Some(0) && ended.took < PROMISED, "{ended:?}");
    assert_eq!(ended.stderr.matches("rank 2: asked to panic at replay").count(), 1, "{ended:?}");
    run.nothing_is_left();
    let ended = end(start(&mut command(4)));
    assert!(ended.stderr.contains("_SIZE is 3, and the layout has 4 ranks"), "{ended:?}");
    run.nothing_is_left();
}

#[test]
fn under_open_mpi() {
    under("mpirun", &["--allow-run-as-root", "--oversubscribe", "-n", "3"]);
}

#[test]
fn under_torchrun() {
    let port = free_port().to_string();
    under("torchrun", &["--no-python", "--nproc-per-node", "3", "--master-port", &port]);
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
