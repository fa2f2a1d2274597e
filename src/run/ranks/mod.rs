//! Several ranks: who this process is, and rank 0's and the others' part in a case.
//!
//! Rank 0 alone runs Criterion and writes files. The others follow ([`follow`]): they make the same case ready, and replay it as often as rank
//! 0 says. What rank 0 measures is the step of all ranks ([`together`]).

mod begin;
pub mod crew;
mod follow;
mod start;
mod together;

pub use begin::Links;
pub use crew::Crew;
pub use start::{is_echo, is_launched, launch, refuse_launcher, role, run_suite};
pub use together::Together;

use std::time::Duration;

use crate::cli::Cli;
use crate::rank::{Nodes, RankError, Timeouts};

use super::Failure;

impl From<RankError> for Failure {
    fn from(error: RankError) -> Self {
        Self { status: error.status(), message: error.to_string() }
    }
}

/// The flags that say where ranks are.
fn nodes(cli: &Cli) -> Nodes {
    let flags = &cli.ranks;
    Nodes {
        nnodes: flags.nnodes,
        node_rank: flags.node_rank,
        master_addr: flags.master_addr.clone(),
        master_port: flags.master_port,
        control_port: flags.control_port,
    }
}

/// How long ranks wait for each other.
fn timeouts(cli: &Cli) -> Timeouts {
    Timeouts {
        connect: Duration::from_secs_f64(cli.ranks.connect_timeout),
        prepare: Duration::from_secs_f64(cli.ranks.prepare_timeout),
        ..Timeouts::default()
    }
}
