//! Ranks: one process each, who started them, and what they tell each other between replays.
//!
//! A process first asks who it is ([`Launch::detect`]). The one that the user started starts the others ([`supervise()`]) unless a launcher did;
//! a rank joins the run ([`join()`]) and is then its [`Leader`], rank 0, or a [`Follower`], which does what rank 0 says. Every failure
//! ends in [`fail`], and the run as a whole with it.
//!
//! Rank 0 and each other rank have two or three TCP connections: commands and replies; signs of life, and why the run ends; and, on devices whose
//! collectives the host makes, values. Each begins with a hello that has a token, the version, the rank and the number of ranks.

pub mod collective;
pub mod control;
mod error;
pub mod fault;
mod join;
mod launch;
mod notice;
mod pulse;
mod slowest;
mod supervise;
pub mod token;
mod watchdog;
pub mod wire;

pub use control::{Command, Exchange, Follower, Leader, Reply};
pub use error::RankError;
pub use join::{Joined, Ready, join};
pub use launch::{
    Endpoint, LAUNCHED, Launch, Launcher, Local, Member, Nodes, claimed_rank, is_launched, launched,
};
pub use notice::{end_if_lost, fail};
pub use slowest::{RankTimes, Slowest};
pub use supervise::supervise;
pub use watchdog::{Hook, Timeouts, Watchdog};

/// `rank 3`, or `ranks 1, 2 and 5`; of many, the first few.
fn named(ranks: &[usize]) -> String {
    const SHOWN: usize = 8;
    let texts: Vec<String> = ranks.iter().take(SHOWN).map(usize::to_string).collect();
    match texts.as_slice() {
        [one] => format!("rank {one}"),
        _ if ranks.len() > SHOWN => format!("ranks {} and {} more", texts.join(", "), ranks.len() - SHOWN),
        [all @ .., last] => format!("ranks {} and {last}", all.join(", ")),
        [] => "no rank".to_owned(),
    }
}
