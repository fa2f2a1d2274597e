//! What the control plane of many ranks costs: a run without a model, in which a replay takes no time.
//!
//!     cargo run --example ranks_overhead            # 4, 16 and 64 processes, one after the other
//!     cargo run --example ranks_overhead -- --ranks 2 --cases 3 --collectives
//!
//! With `--ranks` it is also what a launcher can start (`torchrun --no-python`, `srun`, `mpirun`), and what the tests of faults run.

use std::process::{Command as Process, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forward_bench::backend::{Communicator, Replay};
use forward_bench::layout::{Group, Layout, Place};
use forward_bench::rank::collective::SocketCommunicator;
use forward_bench::rank::control::values;
use forward_bench::rank::{
    self, Command, Exchange, Joined, Launch, Leader, Member, Nodes, RankError, Ready, Reply, Slowest,
    Timeouts,
};
use forward_bench::stats::median;
use forward_bench::units::Nanos;
use serde_json::{Value, json};

/// Simulates a run of ranks.
#[derive(Debug, clap::Parser)]
struct Arguments {
    /// How many ranks; 4, 16 and 64 without it.
    #[arg(long)]
    ranks: Option<usize>,
    /// How many cases are made ready.
    #[arg(long, default_value_t = 1)]
    cases: u64,
    /// How often the ranks of a case are told to replay.
    #[arg(long, default_value_t = 200)]
    calls: u64,
    /// Replays each time.
    #[arg(long, default_value_t = 20)]
    replays: u64,
    /// Whether values travel as well.
    #[arg(long)]
    collectives: bool,
    /// Seconds that rank 0 waits in each case, as while it analyses.
    #[arg(long, default_value_t = 0.0)]
    analysis: f64,
    /// Seconds for all to join.
    #[arg(long, default_value_t = 60.0)]
    connect_timeout: f64,
    /// Seconds for a case to be made ready.
    #[arg(long, default_value_t = 300.0)]
    prepare_timeout: f64,
    /// Where rank 0 listens.
    #[arg(long)]
    control_port: Option<u16>,
    /// Hosts, if started by hand on each.
    #[arg(long, default_value_t = 1)]
    nnodes: usize,
    /// Which of them.
    #[arg(long)]
    node_rank: Option<usize>,
    /// The host of rank 0.
    #[arg(long)]
    master_addr: Option<String>,
    /// A port there.
    #[arg(long)]
    master_port: Option<u16>,
}

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| rank::fail(4, panic.payload_as_str().unwrap_or("no message"))));
    let arguments: Arguments = clap::Parser::parse();
    let sizes = arguments.ranks.map_or(vec![4, 16, 64], |ranks| vec![ranks]);
    for ranks in sizes {
        match simulate(ranks, &arguments) {
            Ok(0) => {}
            Ok(status) => return ExitCode::from(status),
            Err(error) => rank::fail(error.status(), &error.to_string()),
        }
    }
    ExitCode::SUCCESS
}

fn simulate(ranks: usize, arguments: &Arguments) -> Result<u8, RankError> {
    let layout = Layout { tensor: ranks, ..Layout::ONE };
    let nodes = Nodes {
        nnodes: arguments.nnodes,
        node_rank: arguments.node_rank,
        master_addr: arguments.master_addr.clone(),
        master_port: arguments.master_port,
        control_port: arguments.control_port,
    };
    match Launch::detect(&|name| std::env::var(name).ok(), layout, &nodes)? {
        Launch::Alone => println!("one rank needs no control plane"),
        Launch::Rank(member) => run(&member, layout, arguments)?,
        Launch::Supervise(local) => {
            return rank::supervise(&local, |_| {
                let program = std::env::current_exe().map_err(|error| RankError::Usage(error.to_string()))?;
                let mut command = Process::new(program);
                command.args(std::env::args().skip(1));
                if arguments.ranks.is_none() {
                    command.args(["--ranks", &ranks.to_string()]);
                }
                Ok(command)
            });
        }
    }
    Ok(0)
}

/// One rank's life.
fn run(member: &Member, layout: Layout, arguments: &Arguments) -> Result<(), RankError> {
    let timeouts = Timeouts {
        connect: Duration::from_secs_f64(arguments.connect_timeout),
        prepare: Duration::from_secs_f64(arguments.prepare_timeout),
        ..Timeouts::default()
    };
    let place = Place { layout, rank: member.rank };
    let Ready { joined, communicator } = rank::join(member, timeouts, place, arguments.collectives)?;
    let mut work = |command: &Command, exchange: &mut dyn Exchange| {
        do_part(command, exchange, place, communicator.as_ref()).unwrap_or_else(|failed| failed)
    };
    match joined {
        Joined::Follower(follower) => follower.serve(&mut work),
        Joined::Leader(leader) => lead(leader, arguments, &timeouts, &mut work),
    }
}

/// A rank's part in a command: it takes no time.
fn do_part(
    command: &Command,
    exchange: &mut dyn Exchange,
    place: Place,
    communicator: Option<&Arc<SocketCommunicator>>,
) -> Result<Reply, Reply> {
    match command {
        Command::Replay { n, seq } => {
            let replay = Replay { time: Nanos(1e3 + place.rank as f64), clock_mhz: None };
            Ok(Reply::replayed(*seq, &vec![replay; usize::try_from(*n).unwrap_or_default()]))
        }
        Command::Prepare(_) => {
            // The slowest rank decides: here the last one.
            let slowest = |ranks: &[Value]| ranks.iter().filter_map(Value::as_u64).max().into();
            let choice = exchange.decide("algorithm", json!(place.rank), &mut { slowest })?;
            let mut sum = [place.rank as f32];
            if let Some(communicator) = communicator {
                if rank::fault::at("collective", place.rank) {
                    return Err(rank::fault::reply("collective"));
                }
                communicator.all_reduce(Group::World, &mut sum).map_err(|error| Reply::failed(3, error))?;
            }
            Ok(Reply::Done(json!([choice, sum[0]])))
        }
        _ => Ok(Reply::Done(Value::Null)),
    }
}

/// Rank 0's part: says what is done, and prints what that cost.
fn lead(
    mut leader: Leader,
    arguments: &Arguments,
    timeouts: &Timeouts,
    work: rank::control::Work<'_>,
) -> Result<(), RankError> {
    let world = leader.world();
    for case in 0..arguments.cases {
        let prepared = values(leader.call(&Command::Prepare(json!(case)), timeouts.prepare, work)?)?;
        let sum = if arguments.collectives { (world * (world - 1) / 2) as f32 } else { 0.0 };
        for (rank, found) in prepared.iter().enumerate() {
            let own = if arguments.collectives { sum } else { rank as f32 };
            if *found != json!([world - 1, own]) {
                return Err(RankError::Protocol(format!(
                    "rank {rank} has {found}, not [{}, {own}]",
                    world - 1
                )));
            }
        }
        let mut walls = Vec::new();
        for _ in 0..arguments.calls {
            let begin = Instant::now();
            let ranks = leader.replay(arguments.replays, Duration::from_millis(1), work)?;
            walls.push(begin.elapsed().as_secs_f64() * 1e6);
            let slowest = Slowest::of(&ranks)?;
            assert!(slowest.replays.iter().all(|replay| replay.time.0 == 1e3 + (world - 1) as f64));
        }
        std::thread::sleep(Duration::from_secs_f64(arguments.analysis));
        values(leader.call(&Command::Finish, timeouts.prepare, work)?)?;
        let wall = median(&walls).unwrap_or_default();
        println!(
            "{world} ranks: {:.2} µs a replay, in calls of {} ({wall:.0} µs a call, median of {})",
            wall / arguments.replays as f64,
            arguments.replays,
            walls.len(),
        );
    }
    leader.shutdown()
}
