//! Ranks that cannot join, and what is no rank.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use forward_bench::rank::token::Token;
use forward_bench::rank::wire::{self, Answer, Channel, Hello};

use crate::process::{PROMISED, Run, TOKEN, connect, end, free_port, start, with_fault};

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
fn the_token_of_a_run_that_was_killed_is_in_nobodys_way() {
    let (run, port) = (Run::new(), free_port());
    let killed = start(&mut run.rank(0, 2, port, ""));
    drop(connect(port));
    let is_there = || std::fs::read_dir(run.runtime.path()).unwrap().count() == 1;
    let until = Instant::now() + PROMISED;
    while !is_there() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(20));
    }
    let (mut child, _) = killed;
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(is_there());
    // The other rank is there first, and reads the old one.
    let one = start(&mut run.rank(1, 2, port, "--calls 5"));
    std::thread::sleep(Duration::from_millis(200));
    let zero = end(start(&mut run.rank(0, 2, port, "--calls 5")));
    assert_eq!((zero.status, zero.stderr.as_str()), (Some(0), ""), "{zero:?}");
    end(one).silently(0);
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
