//! What torchrun, Slurm and Open MPI say about a process.

use super::{Launcher, usage};
use crate::rank::RankError;

/// What one launcher says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Who says it.
    pub launcher: Launcher,
    /// The variable that has the rank.
    pub rank_name: &'static str,
    /// The variable that has the number of ranks.
    pub size_name: &'static str,
    /// From 0.
    pub rank: usize,
    /// From 0 on each host.
    pub local_rank: usize,
    /// How many there are.
    pub world: usize,
    /// Whether they are on several hosts.
    pub several_nodes: bool,
    /// The host of rank 0, where it can be told.
    pub first_host: Option<String>,
}

/// The names of one launcher's variables.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    local: &'static str,
    size: &'static str,
}

const TORCHRUN: Names =
    Names { launcher: Launcher::Torchrun, rank: "RANK", local: "LOCAL_RANK", size: "WORLD_SIZE" };
const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    local: "OMPI_COMM_WORLD_LOCAL_RANK",
    size: "OMPI_COMM_WORLD_SIZE",
};
const SLURM: Names = Names {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    local: "SLURM_LOCALID",
    size: "SLURM_STEP_NUM_TASKS",
};

type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Whether there is a launcher at all.
pub fn any(env: Env<'_>) -> bool {
    [TORCHRUN.rank, OPEN_MPI.rank, SLURM.size].iter().any(|name| env(name).is_some())
}

/// The launcher that started this process, if one did.
///
/// Launchers nest: torchrun's agents, and Open MPI's daemons, may be tasks of a Slurm step that counts agents. So the inner one
/// is believed where it is known to be one (torchrun sets `TORCHELASTIC_RUN_ID`); `RANK` and `WORLD_SIZE` that a script made
/// of another launcher's must say what that one says.
pub fn claim(env: Env<'_>) -> Result<Option<Claim>, RankError> {
    let outer = match read(env, &OPEN_MPI)? {
        Some(claim) => Some(with_hosts_of_open_mpi(env, claim)),
        None => slurm(env)?,
    };
    // A batch script may set WORLD_SIZE for the tasks of its step.
    if env(TORCHRUN.rank).is_none() && env(TORCHRUN.local).is_none() && outer.is_some() {
        return agreed(env, outer);
    }
    let Some(inner) = read(env, &TORCHRUN)? else { return Ok(outer) };
    let several_nodes = number(env, "LOCAL_WORLD_SIZE")?
        .map(|local| local < inner.world)
        .or_else(|| outer.as_ref().map(|outer| outer.several_nodes))
        .unwrap_or_else(|| !is_this_host(env("MASTER_ADDR")));
    let inner = Claim { several_nodes, ..inner };
    match outer {
        Some(outer) if env("TORCHELASTIC_RUN_ID").is_none() && !inner.says_what(&outer) => {
            let (a, b) = (&inner, &outer);
            usage(format!(
                "{}={} and {}={}, but {}={} and {}={}; unset the ones that are not meant",
                a.rank_name, a.rank, a.size_name, a.world, b.rank_name, b.rank, b.size_name, b.world
            ))
        }
        _ => Ok(Some(inner)),
    }
}

/// The outer launcher's claim, which a lone WORLD_SIZE may not contradict.
fn agreed(env: Env<'_>, outer: Option<Claim>) -> Result<Option<Claim>, RankError> {
    if let (Some(outer), Some(size)) = (&outer, number(env, TORCHRUN.size)?)
        && size != outer.world
    {
        let (name, world) = (outer.size_name, outer.world);
        return usage(format!("WORLD_SIZE={size}, but {name}={world}; unset the one that is not meant"));
    }
    Ok(outer)
}

impl Claim {
    fn says_what(&self, other: &Self) -> bool {
        (self.rank, self.world) == (other.rank, other.world)
    }
}

fn is_this_host(host: Option<String>) -> bool {
    host.is_none_or(|host| ["127.0.0.1", "localhost", "::1"].contains(&host.as_str()))
}

/// A variable's number, if it is set.
fn number(env: Env<'_>, name: &str) -> Result<Option<usize>, RankError> {
    let Some(text) = env(name) else { return Ok(None) };
    match text.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => usage(format!("{name}={} is no number; unset or mend it", text.escape_default())),
    }
}

/// What one launcher's variables say; `None` if none of them is set.
fn read(env: Env<'_>, names: &Names) -> Result<Option<Claim>, RankError> {
    let all = [names.rank, names.local, names.size];
    let found = all.iter().map(|name| number(env, name)).collect::<Result<Vec<_>, _>>()?;
    let [Some(rank), Some(local_rank), Some(world)] = found[..] else {
        if found.iter().all(Option::is_none) {
            return Ok(None);
        }
        let named = |there: bool| {
            let names = all.iter().zip(&found).filter(|(_, found)| found.is_some() == there);
            names.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
        };
        return usage(format!("{} set, but not {}; set all of them or none", named(true), named(false)));
    };
    if rank >= world || local_rank >= world {
        let [rank_name, local_name, size_name] = all;
        return usage(format!(
            "{rank_name}={rank} and {local_name}={local_rank} of {size_name}={world}; they count from 0, so mend the variables"
        ));
    }
    Ok(Some(Claim {
        launcher: names.launcher,
        rank_name: names.rank,
        size_name: names.size,
        rank,
        local_rank,
        world,
        several_nodes: false,
        first_host: None,
    }))
}

fn with_hosts_of_open_mpi(env: Env<'_>, claim: Claim) -> Claim {
    let local = number(env, "OMPI_COMM_WORLD_LOCAL_SIZE").ok().flatten();
    Claim { several_nodes: local.is_some_and(|local| local < claim.world), ..claim }
}

/// Slurm's claim. Outside a step, and in a step of one task such as an interactive shell, Slurm started no ranks.
fn slurm(env: Env<'_>) -> Result<Option<Claim>, RankError> {
    if number(env, SLURM.size)?.is_none_or(|tasks| tasks == 1) {
        return Ok(None);
    }
    let Some(claim) = read(env, &SLURM)? else { return Ok(None) };
    let several_nodes = number(env, "SLURM_STEP_NUM_NODES")?.is_some_and(|nodes| nodes > 1);
    let first_host = env("SLURM_STEP_NODELIST").and_then(|list| first_host(&list));
    Ok(Some(Claim { several_nodes, first_host, ..claim }))
}

/// The first host of Slurm's list: `gpu[007-012,020],login1` begins with `gpu007`. `None` for forms beyond that.
pub fn first_host(list: &str) -> Option<String> {
    let is_name =
        |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().filter(|name| is_name(name)).map(str::to_owned);
    };
    let (numbers, after) = rest.split_once(']')?;
    let first = numbers.split([',', '-']).next()?;
    let plain = is_name(prefix)
        && !first.is_empty()
        && first.bytes().all(|byte| byte.is_ascii_digit())
        && (after.is_empty() || after.starts_with(','));
    plain.then(|| format!("{prefix}{first}"))
}
