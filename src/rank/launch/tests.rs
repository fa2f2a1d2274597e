//! Tests of `rank::launch`.

use super::variables::first_host;
use super::*;

fn layout(ranks: usize) -> Layout {
    Layout { tensor: ranks, ..Layout::ONE }
}

fn detect(variables: &[(&str, &str)], ranks: usize, nodes: &Nodes) -> Result<Launch, RankError> {
    let env =
        |name: &str| variables.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned());
    Launch::detect(&env, layout(ranks), nodes)
}

fn rank(variables: &[(&str, &str)], ranks: usize) -> Member {
    match detect(variables, ranks, &Nodes::default()) {
        Ok(Launch::Rank(member)) => member,
        other => panic!("{variables:?}: {other:?}"),
    }
}

/// The line that refuses them; exit status 2.
fn refused(variables: &[(&str, &str)], ranks: usize, nodes: &Nodes) -> String {
    let error = detect(variables, ranks, nodes).expect_err("it is refused");
    let text = error.to_string();
    assert!(error.status() == 2 && !text.contains('\n'), "{text}");
    text
}

const TORCHRUN: [(&str, &str); 7] = [
    ("RANK", "3"),
    ("LOCAL_RANK", "1"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "gpu7"),
    ("MASTER_PORT", "29400"),
    ("TORCHELASTIC_RUN_ID", "none"),
];
const SLURM: [(&str, &str); 5] = [
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_PROCID", "2"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NODELIST", "gpu[07-08]"),
];
const OPEN_MPI: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
];

#[test]
fn without_a_launcher_the_ranks_are_started_here() {
    assert_eq!(detect(&[], 1, &Nodes::default()), Ok(Launch::Alone));
    let Ok(Launch::Supervise(local)) = detect(&[], 4, &Nodes::default()) else { panic!() };
    assert_eq!((local.first, local.count, local.world, local.control.port), (0, 4, 4, 0));
    assert_eq!((local.control.host.as_str(), local.several_nodes), ("127.0.0.1", false));
}

#[test]
fn torchrun_over_two_hosts() {
    let member = rank(&TORCHRUN, 4);
    assert_eq!((member.rank, member.local_rank, member.world), (3, 1, 4));
    assert_eq!(member.control, Endpoint { host: "gpu7".to_owned(), port: 29_401 });
    assert!(member.several_nodes);
}

#[test]
fn torchrun_on_one_host_uses_the_loopback() {
    let mut variables = TORCHRUN;
    variables[1] = ("LOCAL_RANK", "3");
    variables[3] = ("LOCAL_WORLD_SIZE", "4");
    let member = rank(&variables, 4);
    assert_eq!((member.control.host.as_str(), member.several_nodes), ("127.0.0.1", false));
}

#[test]
fn srun_names_the_first_host_and_one_task_is_no_launch() {
    let member = rank(&SLURM, 4);
    assert_eq!((member.rank, member.local_rank, member.launcher), (2, 0, Launcher::Slurm));
    assert_eq!(member.control, Endpoint { host: "gpu07".to_owned(), port: 29_501 });
    let shell = [("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")];
    assert!(matches!(detect(&shell, 2, &Nodes::default()), Ok(Launch::Supervise(_))));
    // In a batch script, outside of a step: not a rank.
    let batch = [("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")];
    assert!(matches!(detect(&batch, 4, &Nodes::default()), Ok(Launch::Supervise(_))));
}

#[test]
fn mpirun_on_one_host_and_over_two() {
    let member = rank(&OPEN_MPI, 2);
    assert_eq!((member.rank, member.several_nodes, member.launcher), (1, false, Launcher::OpenMpi));
    let mut two = OPEN_MPI;
    two[1] = ("OMPI_COMM_WORLD_LOCAL_RANK", "0");
    two[3] = ("OMPI_COMM_WORLD_LOCAL_SIZE", "1");
    assert!(refused(&two, 2, &Nodes::default()).contains("--master-addr"));
    let nodes = Nodes { master_addr: Some("a".to_owned()), control_port: Some(7), ..Nodes::default() };
    let Ok(Launch::Rank(member)) = detect(&two, 2, &nodes) else { panic!() };
    assert_eq!(member.control, Endpoint { host: "a".to_owned(), port: 7 });
}

#[test]
fn launchers_nest() {
    // torchrun's agents as the two tasks of a step: the step counts agents.
    let agents = [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1"), ("SLURM_LOCALID", "0")];
    let member = rank(&[&TORCHRUN[..], &agents].concat(), 4);
    assert_eq!((member.launcher, member.rank), (Launcher::Torchrun, 3));
    // mpirun's daemons in the same way.
    let member = rank(&[&OPEN_MPI[..], &agents].concat(), 2);
    assert_eq!((member.launcher, member.rank), (Launcher::OpenMpi, 1));
    // A script that makes torchrun's variables of Slurm's.
    let script = [("RANK", "2"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "gpu07")];
    let member = rank(&[&SLURM[..], &script].concat(), 4);
    assert_eq!((member.rank, member.several_nodes, member.control.host.as_str()), (2, true, "gpu07"));
    // One that only sets the size.
    assert_eq!(rank(&[&SLURM[..], &[("WORLD_SIZE", "4")]].concat(), 4).rank, 2);
}

#[test]
fn contradictions_are_refused_with_the_variables() {
    let none = Nodes::default();
    for (variables, ranks, needles) in [
        (&TORCHRUN[..], 2, &["WORLD_SIZE is 4", "2 ranks"][..]),
        (&[("RANK", "4"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")], 4, &["RANK=4", "WORLD_SIZE=4"]),
        (&[("RANK", "0")], 2, &["RANK set", "LOCAL_RANK, WORLD_SIZE"]),
        (&[("WORLD_SIZE", "2")], 2, &["WORLD_SIZE set", "RANK"]),
        (&[("RANK", "x"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")], 4, &["RANK=x"]),
        (&[("RANK", "-1"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")], 4, &["RANK=-1"]),
        (&[("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "1")], 4, &["SLURM_LOCALID"]),
    ] {
        let text = refused(variables, ranks, &none);
        assert!(needles.iter().all(|needle| text.contains(needle)), "{text}");
    }
    let other = [("RANK", "1"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")];
    let text = refused(&[&SLURM[..], &other].concat(), 4, &none);
    assert!(text.contains("RANK=1") && text.contains("SLURM_PROCID=2"), "{text}");
    let text = refused(&[&SLURM[..], &[("WORLD_SIZE", "8")]].concat(), 4, &none);
    assert!(text.contains("WORLD_SIZE=8") && text.contains("SLURM_STEP_NUM_TASKS=4"), "{text}");
    let port = [&TORCHRUN[..5], &[("MASTER_PORT", "65535")]].concat();
    assert!(refused(&port, 4, &none).contains("--control-port"));
    let node = Nodes { node_rank: Some(1), ..none };
    assert!(refused(&TORCHRUN, 4, &node).contains("--node-rank"));
}

#[test]
fn each_host_starts_its_part() {
    let nodes = |nnodes, node_rank| Nodes {
        nnodes,
        node_rank,
        master_addr: Some("10.0.0.1".to_owned()),
        ..Nodes::default()
    };
    let Ok(Launch::Supervise(local)) = detect(&[], 8, &nodes(2, Some(1))) else { panic!() };
    assert_eq!((local.first, local.count, local.world, local.several_nodes), (4, 4, 8, true));
    assert_eq!(local.control.port, 29_501);
    assert!(refused(&[], 8, &nodes(3, Some(0))).contains("8 ranks"));
    assert!(refused(&[], 8, &nodes(2, None)).contains("--node-rank is missing"));
    assert!(refused(&[], 8, &nodes(2, Some(2))).contains("--node-rank is 2"));
    assert!(refused(&[], 8, &Nodes { master_addr: None, ..nodes(2, Some(0)) }).contains("--master-addr"));
}

#[test]
fn our_own_variable_goes_first() {
    let member = Member { launcher: Launcher::Bench, listener: Some(5), ..rank(&OPEN_MPI, 2) };
    let text = serde_json::to_string(&member).unwrap();
    let variables = [&TORCHRUN[..], &[(LAUNCHED, text.as_str())]].concat();
    assert_eq!(detect(&variables, 2, &Nodes::default()), Ok(Launch::Rank(member)));
    assert!(refused(&variables, 4, &Nodes::default()).contains("4 ranks"));
}

#[test]
fn hosts_of_slurm() {
    for (list, first) in [
        ("gpu1", Some("gpu1")),
        ("gpu1,gpu2", Some("gpu1")),
        ("gpu[007-012,020]", Some("gpu007")),
        ("a-b.c[3,5],d", Some("a-b.c3")),
        ("login,gpu[1-2]", Some("login")),
        ("rack[1-2]node[1-4]", None),
        ("gpu[1-2]-ib", None),
        ("", None),
        ("gpu[", None),
    ] {
        assert_eq!(first_host(list).as_deref(), first, "{list}");
    }
}
