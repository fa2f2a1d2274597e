//! Tests of `rank::control`.

use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Command, Down, Exchange, Follower, Leader, Reply, Up, values};
use crate::backend::Replay;
use crate::rank::pulse::Pulses;
use crate::rank::watchdog::{Timeouts, Watchdog};
use crate::rank::{RankError, wire};
use crate::units::Nanos;

const LONG: Duration = Duration::from_secs(60);

/// A watchdog that tells here instead of ending this process.
fn watchdog(rank: usize, timeouts: Timeouts) -> (Watchdog, Receiver<String>) {
    let (sender, receiver) = channel();
    let watchdog = Watchdog::with_exit(rank, timeouts, Box::new(|_| {}));
    watchdog.on_cause(move |notice| drop(sender.send(notice.line())));
    (watchdog, receiver)
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// Rank 0 of so many, what its watchdog tells, and the others' ends.
fn leader(world: usize, timeouts: Timeouts) -> (Leader, Receiver<String>, Vec<TcpStream>) {
    let (watchdog, told) = watchdog(0, timeouts);
    let pulses = Pulses::start(&watchdog, |_| {});
    let (near, far) = (1..world).map(|rank| (rank, pair())).map(|(rank, (a, b))| ((rank, a), b)).unzip();
    (Leader::new(near, watchdog, pulses).unwrap(), told, far)
}

/// Another rank, which does this until the run is over.
fn follow(
    rank: usize,
    stream: TcpStream,
    mut work: impl FnMut(&Command, &mut dyn Exchange) -> Reply + Send + 'static,
) -> std::thread::JoinHandle<Result<(), RankError>> {
    let (watchdog, _) = watchdog(rank, Timeouts::default());
    let pulses = Pulses::start(&watchdog, |_| {});
    let follower = Follower::new(rank, stream, watchdog, pulses).unwrap();
    std::thread::spawn(move || follower.serve(&mut work))
}

fn largest(values: &[Value]) -> Value {
    values.iter().filter_map(Value::as_u64).max().into()
}

fn choose(own: usize) -> impl FnMut(&Command, &mut dyn Exchange) -> Reply {
    move |command, exchange| match command {
        Command::Prepare(case) if *case == json!({"fails": own}) => Reply::failed(3, "no room"),
        Command::Prepare(_) => {
            exchange.decide("tile", json!(own), &mut largest).map_or_else(Reply::from, Reply::Done)
        }
        Command::Replay { n, seq } => {
            let replay = Replay { time: Nanos(0.1 + own as f64), clock_mhz: (own == 1).then_some(1.5) };
            Reply::replayed(*seq, &vec![replay; *n as usize])
        }
        _ => Reply::Done(json!(own)),
    }
}

#[test]
fn all_ranks_get_rank_0s_choice_and_nobody_counts_for_itself() {
    let (mut leader, _told, far) = leader(3, Timeouts::default());
    let threads: Vec<_> =
        far.into_iter().enumerate().map(|(at, stream)| follow(at + 1, stream, choose(at + 1))).collect();
    for _ in 0..2 {
        let prepared = leader.call(&Command::Prepare(json!(7)), LONG, &mut choose(0)).unwrap();
        assert_eq!(values(prepared).unwrap(), [2, 2, 2]);
        for n in [1, 5, 0] {
            let ranks = leader.replay(n, Duration::ZERO, &mut choose(0)).unwrap();
            assert!(ranks.iter().all(|replays| replays.len() as u64 == n));
            assert_eq!(ranks[1].first().map(|replay| replay.clock_mhz), (n > 0).then_some(Some(1.5)));
            assert_eq!(ranks[2].first().map(|replay| replay.time), (n > 0).then_some(Nanos(2.1)));
        }
    }
    leader.shutdown().unwrap();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap().is_ok()));
}

#[test]
fn a_case_that_one_rank_cannot_do_is_given_up_by_all_and_the_next_one_goes_on() {
    for fails in 0..3 {
        let (mut leader, told, far) = leader(3, Timeouts::default());
        for (at, stream) in far.into_iter().enumerate() {
            follow(at + 1, stream, choose(at + 1));
        }
        let case = Command::Prepare(json!({"fails": fails}));
        let replies = leader.call(&case, LONG, &mut choose(0)).unwrap();
        assert!(replies.iter().all(|reply| matches!(reply, Reply::Failed { .. })), "{replies:?}");
        assert_eq!(replies[fails], Reply::failed(3, "no room"));
        let error = values(replies).unwrap_err();
        let line = if fails == 0 { "no room".to_owned() } else { format!("rank {fails}: no room") };
        assert_eq!((error.to_string(), error.status()), (line, 3));
        let next = leader.call(&Command::Prepare(json!(8)), LONG, &mut choose(0)).unwrap();
        assert_eq!(values(next).unwrap(), [2, 2, 2]);
        assert!(told.try_recv().is_err());
    }
}

#[test]
fn ranks_at_different_places_are_found_out() {
    type Says = fn(u64, u64) -> Up;
    let cases: [(Says, &str); 4] = [
        (|call, seq| Up::Reply(call + 1, Reply::replayed(seq, &[])), "it answered call 2"),
        (|call, seq| Up::Reply(call, Reply::replayed(seq + 1, &[])), "0 times of command 2, where 2 of 1"),
        (|call, seq| Up::Reply(call, Reply::replayed(seq, &[])), "0 times of command 1, where 2 of 1"),
        (|call, _| Up::Reply(call, Reply::Done(Value::Null)), "rank 1 sent no replays"),
    ];
    for (says, needle) in cases {
        let (mut leader, _told, mut far) = leader(2, Timeouts::default());
        let mut stream = far.remove(0);
        std::thread::spawn(move || {
            let Down::Call(call, Command::Replay { seq, .. }) = wire::read(&mut stream, 1000).unwrap() else {
                panic!("rank 0 has it replay");
            };
            wire::write(&mut stream, &says(call, seq)).unwrap();
            let _: Result<Down, _> = wire::read(&mut stream, 1000); // until the other end closes
        });
        let error = leader.replay(2, Duration::ZERO, &mut choose(0)).unwrap_err();
        assert!(error.to_string().contains(needle) && error.status() == 4, "{error}");
    }
}

#[test]
fn a_lost_rank_and_one_that_takes_too_long_end_the_run() {
    let soon = Timeouts { settle: Duration::ZERO, ..Timeouts::default() };
    let (mut one, told, far) = leader(3, soon);
    drop(far);
    assert!(one.call(&Command::Finish, LONG, &mut choose(0)).is_err());
    let line = told.recv_timeout(LONG).unwrap();
    assert!(line.contains("was lost: its connection closed"), "{line}");

    let (mut one, told, _far) = leader(3, soon);
    assert!(one.call(&Command::Finish, Duration::from_millis(20), &mut choose(0)).is_err());
    assert_eq!(told.recv_timeout(LONG).unwrap(), "ranks 1 and 2 did not end finish within 0.02 s");
}
