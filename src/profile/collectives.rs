//! What ranks spend in collectives, and how long each waits in the first one: from the traced replays of all ranks.

use crate::backend::{Activity, Part, Traced};
use crate::stats::median;

/// What a collective's name begins with or has in it, on GPUs and on processors.
const NAMES: [&str; 5] = ["nccl", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"];

fn is_collective(activity: &&Activity) -> bool {
    NAMES.iter().any(|name| activity.name.contains(name))
}

fn micros(activity: &Activity) -> f64 {
    activity.end_ns.saturating_sub(activity.start_ns) as f64 / 1e3
}

/// One rank's collectives within the forward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    /// Time in collectives, in percent of the forward's span; waiting for other ranks included.
    pub pct: f64,
    /// Of the first one, in microseconds: how much longer it took than on the rank where it was the shortest, which came last.
    pub wait_us: f64,
}

/// Of each rank, the medians over its replays; `[ranks][replays]`. None if no rank has a collective.
#[must_use]
pub fn shares(ranks: &[Vec<Traced>]) -> Option<Vec<Share>> {
    let first = |replay: &Traced| replay.of(Part::Forward).find(is_collective).map(micros);
    let firsts: Vec<Vec<Option<f64>>> =
        ranks.iter().map(|replays| replays.iter().map(first).collect()).collect();
    let shortest = |replay: usize| {
        let all = firsts.iter().filter_map(|rank| rank.get(replay).copied().flatten());
        all.fold(f64::INFINITY, f64::min)
    };
    let of_rank = |(rank, replays): (usize, &Vec<Traced>)| {
        let pct: Vec<f64> = replays.iter().filter_map(percent).collect();
        let waits = firsts[rank].iter().enumerate().filter_map(|(at, first)| Some((*first)? - shortest(at)));
        Some(Share { pct: median(&pct)?, wait_us: median(&waits.collect::<Vec<_>>())? })
    };
    ranks.iter().enumerate().map(of_rank).collect()
}

/// Collectives in percent of a forward.
fn percent(replay: &Traced) -> Option<f64> {
    let start = replay.of(Part::Forward).map(|activity| activity.start_ns).min()?;
    let end = replay.of(Part::Forward).map(|activity| activity.end_ns).max()?;
    let inside: f64 = replay.of(Part::Forward).filter(is_collective).map(micros).sum();
    Some(inside / (end.saturating_sub(start).max(1) as f64 / 1e3) * 100.0)
}

/// The shares of several ranks as a line.
#[must_use]
pub fn line(ranks: &[Vec<Traced>]) -> Option<String> {
    let shares = shares(ranks).filter(|shares| shares.len() > 1)?;
    let list = |value: &dyn Fn(&Share) -> String| shares.iter().map(value).collect::<Vec<_>>().join(", ");
    Some(format!(
        "by rank, collectives take {} % of a forward, waiting included; in the first one ranks wait {} µs",
        list(&|share| format!("{:.1}", share.pct)),
        list(&|share| format!("{:.1}", share.wait_us))
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replay(first: u64) -> Traced {
        let activity =
            |name: &str, start_ns, end_ns, part| Activity { name: name.to_owned(), start_ns, end_ns, part };
        Traced {
            activities: vec![
                activity("ncclDevKernel_AllReduce rendezvous", 0, 900, Part::Before),
                activity("gemm", 1_000, 5_000, Part::Forward),
                activity("ncclDevKernel_AllReduce", 5_000, 5_000 + first, Part::Forward),
                activity("norm", 5_000 + first, 11_000, Part::Forward),
            ],
        }
    }

    #[test]
    fn the_rank_that_comes_last_waits_for_nobody() {
        let ranks = [vec![replay(3_000), replay(4_000), replay(3_000)], vec![replay(1_000); 3]];
        let shares = shares(&ranks).unwrap();
        assert_eq!(shares[0], Share { pct: 30.0, wait_us: 2.0 });
        assert_eq!(shares[1], Share { pct: 10.0, wait_us: 0.0 });
        assert_eq!(
            line(&ranks).unwrap(),
            "by rank, collectives take 30.0, 10.0 % of a forward, waiting included; in the first one ranks wait 2.0, 0.0 µs"
        );
        assert_eq!(line(&ranks[..1]), None);
    }

    #[test]
    fn a_step_without_collectives_has_no_share() {
        let quiet =
            Traced { activities: replay(1).activities.into_iter().filter(|a| a.name == "gemm").collect() };
        assert_eq!(shares(&[vec![quiet.clone()], vec![quiet]]), None);
    }
}
