//! Which rank a process is, and starting those that no launcher started.

use std::path::Path;
use std::process::{Command, Stdio};

use super::super::children::{Interrupt, Process, code};
use super::super::{Failure, backend, bench, handover};
use super::{Crew, begin, follow, nodes, timeouts};
use crate::baseline::Store;
use crate::cli::{Cli, Mode};
use crate::rank::{self, Joined, Launch, Member, RankError};
use crate::run::backend::Backend;
use crate::run::suite::Entry;

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Whether a launcher, or this program, started this process as a rank.
pub fn is_launched() -> bool {
    rank::is_launched(&environment)
}

/// Whether rank 0 of the same launch finds what this process finds in the command line and in what launchers say, and says it.
pub fn is_echo() -> bool {
    rank::claimed_rank(&environment).is_some_and(|rank| rank > 0)
}

/// What a process is among the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// The only one, or the one that starts the others: it speaks to the user.
    First,
    /// A rank that a launcher started.
    Rank(Member),
}

impl Role {
    /// Whether it speaks to the user: of several ranks, rank 0.
    pub fn speaks(&self) -> bool {
        match self {
            Self::First => true,
            Self::Rank(member) => member.rank == 0,
        }
    }
}

/// Reads the launchers' variables.
pub fn role(cli: &Cli) -> Result<Role, Failure> {
    Ok(match Launch::detect(&environment, cli.layout(), &nodes(cli))? {
        Launch::Rank(member) => Role::Rank(member),
        Launch::Alone | Launch::Supervise(_) => Role::First,
    })
}

/// Runs the second stage on all ranks that this process is to start, one or several, and returns the exit status; `quiet` throws away what
/// Criterion prints. Under a launcher, or alone, it replaces this process instead, unless `stays`.
pub fn launch(cli: &Cli, home: &Path, quiet: bool, stays: Option<&Interrupt>) -> Result<u8, Failure> {
    let stdout = |command: &mut Command| {
        if quiet {
            command.stdout(Stdio::null());
        }
    };
    match Launch::detect(&environment, cli.layout(), &nodes(cli))? {
        Launch::Supervise(local) => {
            enough_devices(cli, local.count)?;
            Ok(rank::supervise(&local, |member| {
                let failed = |failure: Failure| RankError::Usage(failure.message);
                let mut command = handover::command(cli, home).map_err(failed)?;
                stdout(&mut command);
                if member.rank > 0 {
                    command.stdout(Stdio::null());
                }
                Ok(command)
            })?)
        }
        Launch::Rank(_) | Launch::Alone => match stays {
            None => Err(handover::replace_process(cli, home)),
            Some(interrupt) => {
                let mut command = handover::command(cli, home)?;
                stdout(&mut command);
                Ok(code(Process::start(&mut command)?.wait(interrupt)?))
            }
        },
    }
}

/// One line where there are fewer GPUs than ranks, rather than one of each rank.
fn enough_devices(cli: &Cli, count: usize) -> Result<(), Failure> {
    if *backend::of(cli)? == Backend::Cpu {
        return Ok(());
    }
    backend::cuda_info(count - 1)
        .map(drop)
        .map_err(|error| Failure::usage(format!("{count} ranks on this host need a GPU each: {error}")))
}

/// The second stage: measures, tests or profiles as one rank of perhaps several.
pub fn run_suite(cli: &Cli, store: &Store, selected: &[&Entry]) -> Result<u8, Failure> {
    let Role::Rank(member) = role(cli)? else {
        let _lock = lock(cli, store)?;
        return bench::run(cli, store, selected, Crew::Alone);
    };
    let mut cli = cli.clone();
    cli.part.rank = member.rank;
    if member.world > 1 {
        cli.device = backend::device_of(member.local_rank);
    }
    cli.part.host_ranks = if member.several_nodes { 1 } else { member.world };
    let host_makes = *backend::of(&cli)? == Backend::Cpu;
    let ready = rank::join(&member, timeouts(&cli), cli.place(), host_makes)?;
    let communicator = ready.communicator.map(|one| one as std::sync::Arc<dyn crate::backend::Communicator>);
    match ready.joined {
        Joined::Leader(leader) => {
            let _lock = lock(&cli, store)?;
            let crew = begin::lead(&cli, leader, communicator)?;
            bench::run(&cli, store, selected, crew)
        }
        Joined::Follower(follower) => follow::run(&cli, selected, follower, communicator),
    }
}

/// Who saves keeps others from saving.
fn lock(cli: &Cli, store: &Store) -> Result<Option<std::fs::File>, Failure> {
    Ok((cli.mode() == Mode::Measure).then(|| store.lock()).transpose()?)
}

/// Refuses a flag that has this process start several others, where a launcher starts the ranks.
pub fn refuse_launcher(flag: &str) -> Result<(), Failure> {
    if is_launched() {
        return Err(Failure::usage(format!(
            "{flag} starts processes of its own, one after the other; start it without a launcher"
        )));
    }
    Ok(())
}
