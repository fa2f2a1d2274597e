//! Ranks that go wrong once all have joined.

use crate::process::{Run, end, free_port, start, with_fault};

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
