//! Ranks as threads of one process, with collectives over memory.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use forward_bench::backend::{BackendError, Communicator};
use forward_bench::layout::{Group, Layout, Place};

/// A test that waits longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the members of one group lay down for each other.
#[derive(Default)]
struct Table {
    /// By member; all are there before any is taken.
    given: Vec<Option<Arc<Vec<f32>>>>,
    taken: usize,
    lost: bool,
}

/// The table of one group, and a bell.
#[derive(Default)]
struct Meeting(Mutex<Table>, Condvar);

/// One rank's way to the others.
pub struct Threads {
    /// The rank.
    pub place: Place,
    /// One meeting for each group and its lowest rank.
    meetings: Arc<Vec<(Group, usize, Meeting)>>,
}

fn lost() -> BackendError {
    BackendError::Device("a rank is lost".into())
}

impl Threads {
    /// The communicators of all ranks.
    pub fn of(layout: Layout) -> Vec<Arc<Self>> {
        let mut meetings: Vec<(Group, usize, Meeting)> = Vec::new();
        for place in layout.places() {
            for group in [Group::World, Group::Tensor, Group::Data, Group::Expert] {
                let first = place.members(group)[0];
                if !meetings.iter().any(|(other, rank, _)| (*other, *rank) == (group, first)) {
                    meetings.push((group, first, Meeting::default()));
                }
            }
        }
        let meetings = Arc::new(meetings);
        layout.places().map(|place| Arc::new(Self { place, meetings: meetings.clone() })).collect()
    }

    /// What every member brought, in rank order.
    fn exchange(&self, group: Group, mine: &[f32]) -> Result<Vec<Arc<Vec<f32>>>, BackendError> {
        let members = self.place.members(group);
        let own = members.iter().position(|rank| *rank == self.place.rank).unwrap();
        let meeting = self.meetings.iter().find(|(other, rank, _)| (*other, *rank) == (group, members[0]));
        let Meeting(table, bell) = &meeting.unwrap().2;
        let mut table = table.lock().unwrap();
        table.given.resize(members.len(), None);
        table = wait(bell, table, |table| table.given[own].is_none())?;
        table.given[own] = Some(Arc::new(mine.to_vec()));
        bell.notify_all();
        table = wait(bell, table, |table| table.given.iter().all(Option::is_some))?;
        let all: Vec<Arc<Vec<f32>>> = table.given.iter().flatten().cloned().collect();
        table.taken += 1;
        if table.taken == members.len() {
            table.given.fill(None);
            table.taken = 0;
        } else {
            // Nobody leaves before all have taken: else one could lay down the next before the last has seen this.
            table = wait(bell, table, |table| table.taken == 0)?;
        }
        drop(table);
        bell.notify_all();
        assert!(all.iter().all(|other| other.len() == mine.len()), "{group:?}: lengths differ");
        Ok(all)
    }

    /// Tells the others that this rank does not take part any more.
    fn leave(&self) {
        for (_, _, Meeting(table, bell)) in self.meetings.iter() {
            table.lock().unwrap_or_else(std::sync::PoisonError::into_inner).lost = true;
            bell.notify_all();
        }
    }
}

fn wait<'a>(
    bell: &Condvar,
    mut table: MutexGuard<'a, Table>,
    until: impl Fn(&Table) -> bool,
) -> Result<MutexGuard<'a, Table>, BackendError> {
    let start = Instant::now();
    while !until(&table) {
        if table.lost || start.elapsed() > PATIENCE {
            return Err(lost());
        }
        table = bell.wait_timeout(table, Duration::from_secs(1)).unwrap().0;
    }
    Ok(table)
}

/// The sum in rank order.
fn sum(all: &[Arc<Vec<f32>>], range: std::ops::Range<usize>, out: &mut [f32]) {
    out.fill(0.0);
    for other in all {
        out.iter_mut().zip(&other[range.clone()]).for_each(|(sum, value)| *sum += value);
    }
}

impl Communicator for Threads {
    fn all_reduce(&self, group: Group, data: &mut [f32]) -> Result<(), BackendError> {
        let all = self.exchange(group, data)?;
        sum(&all, 0..data.len(), data);
        Ok(())
    }

    fn all_gather(&self, group: Group, mine: &[f32], all: &mut [f32]) -> Result<(), BackendError> {
        let parts = self.exchange(group, mine)?;
        assert_eq!(all.len(), parts.len() * mine.len());
        all.chunks_exact_mut(mine.len()).zip(parts).for_each(|(to, from)| to.copy_from_slice(&from));
        Ok(())
    }

    fn reduce_scatter(&self, group: Group, all: &[f32], mine: &mut [f32]) -> Result<(), BackendError> {
        let own = self.place.members(group).iter().position(|rank| *rank == self.place.rank).unwrap();
        let parts = self.exchange(group, all)?;
        assert_eq!(all.len(), parts.len() * mine.len());
        sum(&parts, own * mine.len()..(own + 1) * mine.len(), mine);
        Ok(())
    }

    fn all_to_all(&self, group: Group, send: &[f32], receive: &mut [f32]) -> Result<(), BackendError> {
        let own = self.place.members(group).iter().position(|rank| *rank == self.place.rank).unwrap();
        let parts = self.exchange(group, send)?;
        let len = receive.len() / parts.len();
        assert_eq!(send.len(), receive.len());
        receive.chunks_exact_mut(len).zip(parts).for_each(|(to, from)| {
            to.copy_from_slice(&from[own * len..][..len]);
        });
        Ok(())
    }
}

/// Runs `rank` on a thread for each rank; a rank that panics fails the test, and the others do not wait for it.
pub fn on_ranks<T: Send>(layout: Layout, rank: impl Fn(Place, Arc<Threads>) -> T + Sync) -> Vec<T> {
    struct Leave(Arc<Threads>);
    impl Drop for Leave {
        fn drop(&mut self) {
            if std::thread::panicking() {
                self.0.leave();
            }
        }
    }
    let rank = &rank;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = Threads::of(layout)
            .into_iter()
            .map(|threads| {
                scope.spawn(move || {
                    let _leave = Leave(threads.clone());
                    rank(threads.place, threads)
                })
            })
            .collect();
        let ended: Vec<_> = ranks.into_iter().map(|rank| rank.join()).collect();
        ended
            .into_iter()
            .map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
