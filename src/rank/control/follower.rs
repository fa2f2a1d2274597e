//! The other ranks' end: does what rank 0 says.

use std::net::TcpStream;

use serde_json::Value;

use super::{Command, Down, Exchange, Up, Work};
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
}

impl Follower {
    pub(in crate::rank) fn new(
        rank: usize,
        stream: TcpStream,
        watchdog: Watchdog,
        pulses: Pulses,
    ) -> std::io::Result<Self> {
        stream.set_read_timeout(None)?;
        Ok(Self { rank, stream, watchdog, pulses })
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
            let (call, command) = match self.next()? {
                Down::Call(call, command) => (call, command),
                Down::Decided(key, _) => return Err(self.lost(&format!("it chose {key} unasked"))),
            };
            let over = command == Command::Shutdown;
            let reply = match fault::at(command.name(), self.rank) {
                true => fault::reply(command.name()),
                false => work(&command, &mut self),
            };
            if over {
                self.watchdog.finish();
                self.pulses.bye();
            }
            self.send(&Up::Reply(call, reply))?;
            if over {
                return Ok(());
            }
        }
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
