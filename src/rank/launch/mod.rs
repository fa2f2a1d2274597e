//! Who this process is: one rank, as a launcher's variables say, or the one that starts the ranks.

mod variables;

use serde::{Deserialize, Serialize};

use self::variables::Claim;
use super::RankError;
use crate::layout::Layout;

/// Tells a rank that [`supervise`](super::supervise()) started who it is: a [`Member`] as JSON.
pub const LAUNCHED: &str = "FORWARD_BENCH_LAUNCHED";

/// torchrun's port, where none is given.
const MASTER_PORT: u16 = 29_500;

/// The flags that say where ranks are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nodes {
    /// `--nnodes`: on how many hosts the bench is started by hand, with as many ranks each.
    pub nnodes: usize,
    /// `--node-rank`: which of them this is.
    pub node_rank: Option<usize>,
    /// `--master-addr`: the host of rank 0.
    pub master_addr: Option<String>,
    /// `--master-port`: a port there, from which the control port follows.
    pub master_port: Option<u16>,
    /// `--control-port`: where rank 0 listens; the master port + 1 by default.
    pub control_port: Option<u16>,
}

impl Default for Nodes {
    fn default() -> Self {
        Self { nnodes: 1, node_rank: None, master_addr: None, master_port: None, control_port: None }
    }
}

/// Who started the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Launcher {
    /// This program.
    Bench,
    /// torchrun, or whatever sets the same variables.
    Torchrun,
    /// srun.
    Slurm,
    /// Open MPI's mpirun.
    OpenMpi,
}

/// Where rank 0 is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// The host's name or address.
    pub host: String,
    /// The control port.
    pub port: u16,
}

/// One rank of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Who started it.
    pub launcher: Launcher,
    /// From 0.
    pub rank: usize,
    /// From 0 on each host: which device it takes.
    pub local_rank: usize,
    /// How many ranks there are.
    pub world: usize,
    /// Where rank 0 listens.
    pub control: Endpoint,
    /// Whether ranks may be on other hosts: rank 0 then listens to all of them.
    pub several_nodes: bool,
    /// Rank 0 of our own launch: the open socket that listens already.
    pub listener: Option<i32>,
    /// Our own launch: where it writes why it ends, for the process that started it.
    pub notices: Option<i32>,
}

/// The ranks that this process is to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Local {
    /// The first of them.
    pub first: usize,
    /// How many on this host.
    pub count: usize,
    /// How many in all.
    pub world: usize,
    /// Where rank 0 listens; port 0 is any that is free.
    pub control: Endpoint,
    /// Whether other hosts have ranks as well.
    pub several_nodes: bool,
}

/// What this process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Launch {
    /// The only one.
    Alone,
    /// One of several. A launcher may also have started a world of one.
    Rank(Member),
    /// The one that starts them.
    Supervise(Local),
}

impl Launch {
    /// Reads the launchers' variables.
    ///
    /// # Errors
    /// If they, the flags and the layout contradict each other; the line names what was found and what to change.
    pub fn detect(
        env: &dyn Fn(&str) -> Option<String>,
        layout: Layout,
        nodes: &Nodes,
    ) -> Result<Self, RankError> {
        if let Some(member) = launched(env) {
            check_world("the number of ranks that were started", member.world, layout)?;
            return Ok(Self::Rank(member));
        }
        match variables::claim(env)? {
            Some(claim) => member(env, layout, nodes, claim).map(Self::Rank),
            None if nodes.nnodes == 1 && layout.ranks() == 1 => Ok(Self::Alone),
            None => local(env, layout, nodes).map(Self::Supervise),
        }
    }
}

/// The rank that our own launch made of this process.
#[must_use]
pub fn launched(env: &dyn Fn(&str) -> Option<String>) -> Option<Member> {
    serde_json::from_str(&env(LAUNCHED)?).ok()
}

/// Which rank a launcher made of this process, where its variables agree; whether there is a layout for it is another question.
#[must_use]
pub fn claimed_rank(env: &dyn Fn(&str) -> Option<String>) -> Option<usize> {
    variables::claim(env).ok().flatten().map(|claim| claim.rank)
}

/// Whether some launcher started this process as a rank, however the variables fit together.
#[must_use]
pub fn is_launched(env: &dyn Fn(&str) -> Option<String>) -> bool {
    env(LAUNCHED).is_some() || variables::any(env)
}

fn usage<T>(text: String) -> Result<T, RankError> {
    Err(RankError::Usage(text))
}

fn check_world(name: &str, found: usize, layout: Layout) -> Result<(), RankError> {
    let Layout { data, pipeline, tensor, .. } = layout;
    let asked = layout.ranks();
    if found == asked {
        return Ok(());
    }
    let noun = if asked == 1 { "rank" } else { "ranks" };
    usage(format!(
        "{name} is {found}, and the layout has {asked} {noun} (tensor {tensor} × pipeline {pipeline} × data {data}); start {asked} \
         processes or change -tp and -dp"
    ))
}

fn member(
    env: &dyn Fn(&str) -> Option<String>,
    layout: Layout,
    nodes: &Nodes,
    claim: Claim,
) -> Result<Member, RankError> {
    check_world(claim.size_name, claim.world, layout)?;
    if nodes.node_rank.is_some() {
        return usage(format!(
            "--node-rank is for a run without a launcher; {} already says which rank this is",
            claim.rank_name
        ));
    }
    let several_nodes = claim.several_nodes || nodes.nnodes > 1;
    let host = match master(env, nodes).or(claim.first_host) {
        _ if !several_nodes => "127.0.0.1".to_owned(),
        Some(host) => host,
        None => {
            return usage(format!(
                "the ranks are on several hosts ({}={}), and none of the variables names that of rank 0; give --master-addr",
                claim.size_name, claim.world
            ));
        }
    };
    Ok(Member {
        launcher: claim.launcher,
        rank: claim.rank,
        local_rank: claim.local_rank,
        world: claim.world,
        control: Endpoint { host, port: control_port(env, nodes)? },
        several_nodes,
        listener: None,
        notices: None,
    })
}

fn master(env: &dyn Fn(&str) -> Option<String>, nodes: &Nodes) -> Option<String> {
    nodes.master_addr.clone().or_else(|| env("MASTER_ADDR")).filter(|host| !host.is_empty())
}

/// `--control-port`, else the master port + 1: the master port itself is held by torchrun's agent.
fn control_port(env: &dyn Fn(&str) -> Option<String>, nodes: &Nodes) -> Result<u16, RankError> {
    if let Some(port) = nodes.control_port {
        return Ok(port);
    }
    let master = match (nodes.master_port, env("MASTER_PORT")) {
        (Some(port), _) => port,
        (None, Some(text)) => match text.parse() {
            Ok(port) => port,
            Err(_) => return usage(format!("MASTER_PORT={text} is no port; a number below 65535 is needed")),
        },
        (None, None) => MASTER_PORT,
    };
    match master.checked_add(1) {
        Some(port) => Ok(port),
        None => usage(format!("there is no port after MASTER_PORT={master}; give --control-port")),
    }
}

/// The ranks that this process starts: all, or one host's part of them.
fn local(env: &dyn Fn(&str) -> Option<String>, layout: Layout, nodes: &Nodes) -> Result<Local, RankError> {
    let (world, nnodes) = (layout.ranks(), nodes.nnodes);
    if nnodes <= 1 {
        if let Some(rank) = nodes.node_rank.filter(|rank| *rank > 0) {
            return usage(format!("--node-rank {rank} of --nnodes 1; give --nnodes"));
        }
        let port = nodes.control_port.unwrap_or(0);
        let control = Endpoint { host: "127.0.0.1".to_owned(), port };
        return Ok(Local { first: 0, count: world, world, control, several_nodes: false });
    }
    if !world.is_multiple_of(nnodes) {
        return usage(format!(
            "{world} ranks cannot be spread evenly over --nnodes {nnodes}; change -tp or -dp"
        ));
    }
    let Some(node) = nodes.node_rank.filter(|node| *node < nnodes) else {
        let found = nodes.node_rank.map_or("is missing".to_owned(), |node| format!("is {node}"));
        return usage(format!(
            "--nnodes {nnodes}: --node-rank {found}; give each host its own, 0 to {}",
            nnodes - 1
        ));
    };
    let Some(host) = master(env, nodes) else {
        return usage(format!("--nnodes {nnodes}: give --master-addr, the host of --node-rank 0"));
    };
    let count = world / nnodes;
    let control = Endpoint { host, port: control_port(env, nodes)? };
    Ok(Local { first: node * count, count, world, control, several_nodes: true })
}

#[cfg(test)]
mod tests;
