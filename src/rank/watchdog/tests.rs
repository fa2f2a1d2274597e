//! Tests of `rank::watchdog`.

use super::*;
use std::sync::mpsc::{Receiver, channel};

/// A watchdog whose end is seen here: what it told, and its exit status.
fn watched(timeouts: Timeouts) -> (Watchdog, Receiver<String>, Receiver<u8>) {
    let ((told, told_here), (ended, ended_here)) = (channel(), channel());
    let watchdog = Watchdog::with_exit(
        1,
        timeouts,
        Box::new(move |status| {
            let _ = ended.send(status);
        }),
    );
    watchdog.on_cause(move |notice| told.send(notice.line()).unwrap());
    (watchdog, told_here, ended_here)
}

const SOON: Duration = Duration::from_secs(60);

#[test]
fn a_lost_ranks_own_words_replace_anothers_guess() {
    let (watchdog, told, ended) = watched(Timeouts { settle: SOON, ..Timeouts::default() });
    watchdog.trip(Notice::lost(2, "its connection closed"));
    watchdog.trip(Notice::lost(3, "its connection closed"));
    watchdog.trip(Notice::failed(2, 3, "out of\nmemory"));
    assert_eq!(ended.recv_timeout(SOON), Ok(3));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), ["rank 2: out of memory"]);
}

#[test]
fn a_silent_rank_is_lost_after_a_moment() {
    let (watchdog, told, ended) = watched(Timeouts::default());
    watchdog.trip(Notice::lost(2, "no sign of life"));
    assert_eq!(ended.recv_timeout(SOON), Ok(4));
    assert_eq!(told.recv(), Ok("rank 2 was lost: no sign of life".to_owned()));
}

#[test]
fn a_hook_that_hangs_does_not_hold_up_the_end() {
    let (watchdog, _told, ended) =
        watched(Timeouts { hooks: Duration::from_millis(50), ..Timeouts::default() });
    watchdog.on_end(Box::new(|| {
        loop {
            std::thread::park();
        }
    }));
    watchdog.trip(Notice::failed(1, 4, "a collective hangs"));
    assert_eq!(ended.recv_timeout(SOON), Ok(4));
}

#[test]
fn a_deadline_ends_the_run_unless_it_is_called_off() {
    let (watchdog, told, ended) = watched(Timeouts::default());
    let notice = |text: &'static str| move || Notice::failed(0, 4, text);
    drop(watchdog.deadline(SOON, notice("called off")));
    assert!(watchdog.state().deadlines.is_empty());
    let _late = watchdog.deadline(SOON, notice("late"));
    let _passed = watchdog.deadline(Duration::from_millis(20), notice("passed"));
    assert_eq!(ended.recv_timeout(SOON), Ok(4));
    assert_eq!(told.recv(), Ok("passed".to_owned()));
}

#[test]
fn after_the_end_in_peace_nobody_is_lost() {
    let (watchdog, _told, ended) = watched(Timeouts { settle: Duration::ZERO, ..Timeouts::default() });
    watchdog.finish();
    watchdog.trip(Notice::lost(2, "its connection closed"));
    assert!(!watchdog.tripped() && ended.try_recv().is_err());
}
