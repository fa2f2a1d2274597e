//! The other ranks' end: does what rank 0 says.

use std::net::TcpStream;

use serde_json::Value;

use super::{Command, Down, Exchange, Reply, Up, Work};
use crate::rank::RankError;
use crate::rank::notice::Notice;
use crate::rank::pulse::Pulses;
use crate::rank::watchdog::Watchdog;
use crate::rank::{fault, wire};

/// A rank other than 0.
pub struct Follower {
    rank: usize,
    stream: TcpStream,
    watchdog: Watchdog,
    pulses: Pulses,
    /// The number of the last command.
    call: u64,
}

impl Follower {
    pub(in crate::rank) fn new(
        rank: usize,
        stream: TcpStream,
        watchdog: Watchdog,
        pulses: Pulses,
    ) -> std::io::Result<Self> {
        stream.set_read_timeout(None)?;
        Ok(Self { rank, stream, watchdog, pulses, call: 0 })
    }

    /// What ends this process if the run cannot go on.
    #[must_use]
    pub fn watchdog(&self) -> &Watchdog {
        &self.watchdog
    }

    /// Does what rank 0 says until it says that the run is over; between commands it waits on the socket.
    ///
    /// # Errors
    /// If rank 0 is lost. The watchdog then ends the process as well.
    pub fn serve(mut self, work: Work<'_>) -> Result<(), RankError> {
        loop {
            let command = self.command()?;
            let reply = work(&command, &mut self);
            self.answer(&reply)?;
            if command == Command::Shutdown {
                return Ok(());
            }
        }
    }

    /// What rank 0 wants next, for who keeps something open over several commands; each is to be answered by [`Follower::answer`].
    /// After [`Command::Shutdown`] nobody is lost any more.
    ///
    /// # Errors
    /// If rank 0 is lost. The watchdog then ends the process as well.
    pub fn command(&mut self) -> Result<Command, RankError> {
        loop {
            let command = match self.next()? {
                Down::Call(call, command) => {
                    self.call = call;
                    command
                }
                Down::Decided(key, _) => return Err(self.lost(&format!("it chose {key} unasked"))),
            };
            if fault::at(command.name(), self.rank) {
                self.answer(&fault::reply(command.name()))?;
                continue;
            }
            if command == Command::Shutdown {
                self.watchdog.finish();
                self.pulses.bye();
            }
            return Ok(command);
        }
    }

    /// Replies to the last command.
    ///
    /// # Errors
    /// If rank 0 is lost.
    pub fn answer(&mut self, reply: &Reply) -> Result<(), RankError> {
        self.send(&Up::Reply(self.call, reply.clone()))
    }

    fn next(&mut self) -> Result<Down, RankError> {
        wire::read(&mut self.stream, wire::MESSAGE_LIMIT).map_err(|error| self.lost(&wire::how(&error)))
    }

    fn send(&mut self, up: &Up) -> Result<(), RankError> {
        wire::write(&mut self.stream, up).map_err(|error| self.lost(&wire::how(&error)))
    }

    fn lost(&self, how: &str) -> RankError {
        self.watchdog.trip(Notice::lost(0, how));
        RankError::Lost { rank: 0, how: how.to_owned() }
    }
}

impl Exchange for Follower {
    fn decide(
        &mut self,
        key: &str,
        own: Value,
        _choose: &mut dyn FnMut(&[Value]) -> Value,
    ) -> Result<Value, RankError> {
        self.send(&Up::Offer(key.to_owned(), own))?;
        match self.next()? {
            Down::Decided(of, Some(value)) if of == key => Ok(value),
            Down::Decided(_, None) => Err(RankError::Failed {
                rank: self.rank,
                status: crate::rank::error::LOST,
                message: format!("{key}: another rank failed"),
            }),
            other => Err(self.lost(&format!("it said {other:?} where {key} was to be chosen"))),
        }
    }
}
