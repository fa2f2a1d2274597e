//! Tests of `rank::collective`.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use super::{Hub, SocketCommunicator};
use crate::backend::{BackendError, Communicator};
use crate::layout::{Group, Layout, Place};

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// A communicator for each rank of a layout.
fn communicators(layout: Layout) -> Vec<SocketCommunicator> {
    let (near, far): (Vec<_>, Vec<_>) =
        (1..layout.ranks()).map(|rank| (rank, pair())).map(|(rank, (near, far))| (near, (rank, far))).unzip();
    let hub = Hub::start(far, None).unwrap();
    let mut near = near.into_iter();
    let place = |rank| Place { layout, rank };
    let all = (0..layout.ranks()).map(|rank| match rank {
        0 => SocketCommunicator::local(hub.clone(), place(0)),
        rank => SocketCommunicator::remote(near.next().unwrap(), place(rank), None),
    });
    all.collect()
}

/// What each rank gets, in rank order, all ranks being at work at the same time.
fn on_each<T: Send>(layout: Layout, work: impl Fn(Place, &SocketCommunicator) -> T + Sync) -> Vec<T> {
    let all = communicators(layout);
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = all
            .iter()
            .enumerate()
            .map(|(rank, communicator)| scope.spawn(move || work(Place { layout, rank }, communicator)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Values of a rank that no other has; their sums round, so that the order of adding shows.
fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| 1.0 / (1.0 + (rank * 31 + at * 7) as f32)).collect()
}

const MIXED: Layout = Layout { data: 2, pipeline: 1, tensor: 2, expert_parallel: true };
const GROUPS: [Group; 4] = [Group::World, Group::Tensor, Group::Data, Group::Expert];

#[test]
fn each_collective_is_the_plain_one_in_every_group() {
    for (layout, count) in [(MIXED, 3), (MIXED, 0), (Layout { tensor: 3, data: 1, ..MIXED }, 40_000)] {
        on_each(layout, |place, communicator| {
            for group in GROUPS {
                let members = place.members(group);
                let (size, mine) =
                    (members.len(), members.iter().position(|&rank| rank == place.rank).unwrap());
                let inputs: Vec<_> = members.iter().map(|&rank| values(rank, count * size)).collect();
                let add = |at: usize| inputs.iter().map(|input| input[at]).fold(0.0, |a, b| a + b);
                let sum: Vec<f32> = (0..count * size).map(add).collect();
                let own = values(place.rank, count * size);

                let mut data = own.clone();
                communicator.all_reduce(group, &mut data).unwrap();
                assert_eq!(data, sum);

                let mut part = vec![0.0; count];
                communicator.reduce_scatter(group, &own, &mut part).unwrap();
                assert_eq!(part, sum[mine * count..(mine + 1) * count]);

                let mut all = vec![0.0; count * size];
                communicator.all_gather(group, &own[..count], &mut all).unwrap();
                let firsts = inputs.iter().flat_map(|input| &input[..count]);
                assert!(all.iter().eq(firsts));

                communicator.all_to_all(group, &own, &mut all).unwrap();
                let parts = inputs.iter().flat_map(|input| &input[mine * count..(mine + 1) * count]);
                assert!(all.iter().eq(parts));
            }
        });
    }
}

#[test]
fn groups_do_not_wait_for_each_other() {
    let gate = std::sync::Barrier::new(3);
    on_each(MIXED, |place, communicator| {
        if place.data() == 1 {
            gate.wait(); // this tensor-parallel group begins when the other one is done
        }
        let mut data = [place.rank as f32];
        for _ in 0..100 {
            communicator.all_reduce(Group::Tensor, &mut data).unwrap();
            data[0] /= 2.0;
        }
        assert_eq!(data[0], [0.5, 2.5][place.data()]);
        if place.rank == 0 {
            gate.wait();
        }
    });
}

#[test]
fn a_hundred_megabytes_arrive() {
    let count = 25_000_000;
    let layout = Layout { tensor: 2, ..Layout::ONE };
    on_each(layout, |place, communicator| {
        let mut data = vec![(place.rank + 1) as f32; count];
        communicator.all_reduce(Group::Tensor, &mut data).unwrap();
        assert!(data.iter().all(|value| *value == 3.0));
    });
}

#[test]
fn ranks_at_different_collectives_hear_so() {
    let layout = Layout { tensor: 2, ..Layout::ONE };
    let errors = on_each(layout, |place, communicator| {
        communicator.all_reduce(Group::World, &mut vec![0.0; 3 + place.rank]).unwrap_err().to_string()
    });
    assert!(
        errors.iter().all(|error| error.contains("3 values") && error.contains("4 values")
            || error.contains("at AllReduce of")),
        "{errors:?}"
    );
}

#[test]
fn a_part_that_does_not_fit_the_whole_is_refused_before_it_is_sent() {
    let communicator = &communicators(Layout { tensor: 2, ..Layout::ONE })[0];
    assert!(communicator.all_gather(Group::World, &[1.0], &mut [0.0; 3]).is_err());
    assert!(communicator.reduce_scatter(Group::World, &[1.0; 3], &mut [0.0; 1]).is_err());
    assert!(communicator.all_to_all(Group::World, &[1.0; 3], &mut [0.0; 3]).is_err());
}

#[test]
fn a_lost_rank_fails_whoever_waits_for_it_and_nobody_else() {
    let mut all = communicators(Layout { tensor: 3, ..Layout::ONE });
    drop(all.pop());
    let all = Arc::new(all);
    let reduce = |rank: usize| -> Result<(), BackendError> { all[rank].all_reduce(Group::World, &mut [1.0]) };
    for rank in 0..2 {
        assert!(reduce(rank).unwrap_err().to_string().contains("rank 2 was lost"));
    }
}
