//! How ranks come together: rank 0 listens, the others connect, show the token, and are let in.

mod connect;
mod gather;

use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};

use super::RankError;
use super::collective::{Hub, SocketCommunicator};
use super::control::{Follower, Leader};
use super::error::USAGE;
use super::launch::Member;
use super::notice::{self, Notice};
use super::pulse::Pulses;
use super::watchdog::{Timeouts, Watchdog};
use super::wire::Channel;
use crate::layout::Place;
pub(super) use gather::bind;

/// One rank of a run whose ranks all came.
pub enum Joined {
    /// Rank 0.
    Leader(Leader),
    /// Another.
    Follower(Follower),
}

/// What is made of one process.
pub struct Ready {
    /// Its part of the control plane.
    pub joined: Joined,
    /// Collectives over sockets, where they were asked for.
    pub communicator: Option<Arc<SocketCommunicator>>,
}

/// Joins the run; returns once rank 0 let this one in, and at rank 0 once all are there. Collectives over sockets are for devices whose
/// collectives the host makes; `place` is this rank's.
///
/// From now on [`fail`](super::fail) ends the whole run, and so does the loss of any rank.
///
/// # Errors
/// If the port is not to be had, a rank does not come in time, or one comes that cannot take part.
pub fn join(
    member: &Member,
    timeouts: Timeouts,
    place: Place,
    collectives: bool,
) -> Result<Ready, RankError> {
    let watchdog = Watchdog::new(member.rank, timeouts);
    notice::install(&watchdog);
    let mut channels = vec![Channel::Pulse, Channel::Control];
    channels.extend(collectives.then_some(Channel::Data));
    let ready = if member.rank == 0 {
        lead(member, &watchdog, place, &channels)
    } else {
        follow(member, &watchdog, place, &channels)
    };
    ready.inspect_err(|error| watchdog.trip(Notice::failed(member.rank, error.status(), &error.to_string())))
}

fn lead(
    member: &Member,
    watchdog: &Watchdog,
    place: Place,
    channels: &[Channel],
) -> Result<Ready, RankError> {
    let heard = watchdog.clone();
    let pulses = Pulses::start(watchdog, move |notice| heard.trip(notice));
    let (others, own) = (pulses.clone(), member.clone());
    watchdog.on_cause(move |notice| {
        others.end(notice);
        if !notice::send(&own, notice) {
            notice::print(&notice.line());
        }
    });
    let (mut control, mut data) = (Vec::new(), Vec::new());
    for (rank, channel, stream) in gather::all(member, watchdog, channels, &pulses)? {
        match channel {
            Channel::Control => control.push((rank, stream)),
            Channel::Data => data.push((rank, stream)),
            Channel::Pulse => {} // added as it came
        }
    }
    control.sort_by_key(|(rank, _)| *rank);
    let failed = |error| broken(0, &error);
    let communicator = match channels.contains(&Channel::Data) {
        true => {
            let hub = Hub::start(data, Some(watchdog.clone())).map_err(failed)?;
            Some(Arc::new(SocketCommunicator::local(hub, place)))
        }
        false => None,
    };
    let leader = Leader::new(control, watchdog.clone(), pulses).map_err(failed)?;
    Ok(Ready { joined: Joined::Leader(leader), communicator })
}

fn follow(
    member: &Member,
    watchdog: &Watchdog,
    place: Place,
    channels: &[Channel],
) -> Result<Ready, RankError> {
    let from_rank_0: Arc<Mutex<Option<Notice>>> = Arc::default();
    let (heard, keep) = (watchdog.clone(), from_rank_0.clone());
    let pulses = Pulses::start(watchdog, move |notice| {
        *keep.lock().unwrap_or_else(PoisonError::into_inner) = Some(notice.clone());
        heard.trip(notice);
    });
    let (to_rank_0, own) = (pulses.clone(), member.clone());
    watchdog.on_cause(move |notice| {
        let heard = from_rank_0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        tell_as_a_follower(&own, notice, heard, &to_rank_0);
    });
    let failed = |error| broken(member.rank, &error);
    let mut streams = connect::all(member, watchdog, channels, &pulses)?.into_iter();
    let mut next = || streams.next().ok_or_else(|| RankError::Protocol("too few connections".to_owned()));
    let control = next()?;
    let communicator = match channels.contains(&Channel::Data) {
        true => Some(Arc::new(SocketCommunicator::remote(next()?, place, Some(watchdog.clone())))),
        false => None,
    };
    let follower = Follower::new(member.rank, control, watchdog.clone(), pulses).map_err(failed)?;
    Ok(Ready { joined: Joined::Follower(follower), communicator })
}

/// Rank 0 speaks to the user; a follower does only if that one cannot, and of several on a host one.
fn tell_as_a_follower(own: &Member, notice: &Notice, heard: Option<Notice>, rank_0: &Pulses) {
    let reached = heard.is_some() || !notice.weak && rank_0.end(notice);
    if notice::send(own, &heard.unwrap_or_else(|| notice.clone())) || reached {
        return;
    }
    let speaks = own.rank == 1 || own.local_rank == 0;
    if !notice.weak || speaks {
        notice::print(&notice.line());
    }
}

fn broken(rank: usize, error: &std::io::Error) -> RankError {
    RankError::Failed { rank, status: USAGE, message: format!("a connection of ranks: {error}") }
}

/// Small messages go at once.
fn at_once(stream: TcpStream) -> std::io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    Ok(stream)
}
