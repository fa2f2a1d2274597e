//! What rank 0 has the others do. **Nobody derives a count of its own**: rank 0 says how often a step is replayed.
//!
//! A command goes to all at once; rank 0 then does its own part, and the call ends with all replies. In between, while rank 0
//! analyses what it measured, the others wait on a socket and leave their devices alone. Both sides give the same function for
//! the work: what it does to agree on something midway ([`Exchange`]) meets its counterpart on the other ranks.

mod follower;
mod leader;

pub use follower::Follower;
pub use leader::Leader;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::RankError;
use crate::backend::Replay;
use crate::units::Nanos;

/// What every rank is to do. What the values mean is up to whoever handles them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Command {
    /// Make a case ready.
    Prepare(Value),
    /// Run the checks of the case, or whatever else is asked for between replays.
    Check(Value),
    /// Replay the step that is ready.
    Replay {
        /// So often.
        n: u64,
        /// The number of this command among its like, from 1; it comes back with the times.
        seq: u64,
    },
    /// Replay it under the tracer.
    Profile(Value),
    /// The case is done.
    Finish,
    /// The run is.
    Shutdown,
}

impl Command {
    /// Its name in faults and messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Prepare(_) => "prepare",
            Self::Check(_) => "check",
            Self::Replay { .. } => "replay",
            Self::Profile(_) => "profile",
            Self::Finish => "finish",
            Self::Shutdown => "shutdown",
        }
    }
}

/// What a rank answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reply {
    /// It is done.
    Done(Value),
    /// It is not, and the rank is ready for another command.
    Failed {
        /// The exit status that this means.
        status: u8,
        /// One line.
        message: String,
    },
    /// Replays.
    Replayed {
        /// That of the command.
        seq: u64,
        /// Nanoseconds of each.
        times_ns: Vec<f64>,
        /// The device's clock over each in MHz, where it can be read.
        clocks_mhz: Vec<Option<f64>>,
    },
}

impl Reply {
    /// Of replays, to the command of this number.
    #[must_use]
    pub fn replayed(seq: u64, replays: &[Replay]) -> Self {
        Self::Replayed {
            seq,
            times_ns: replays.iter().map(|replay| replay.time.0).collect(),
            clocks_mhz: replays.iter().map(|replay| replay.clock_mhz).collect(),
        }
    }

    /// A failure.
    #[must_use]
    pub fn failed(status: u8, message: impl std::fmt::Display) -> Self {
        Self::Failed { status, message: message.to_string() }
    }

    /// What it says, as the given rank's.
    ///
    /// # Errors
    /// If it is a failure, or replays.
    pub fn value(self, rank: usize) -> Result<Value, RankError> {
        match self {
            Self::Done(value) => Ok(value),
            Self::Failed { status, message } => Err(RankError::Failed { rank, status, message }),
            Self::Replayed { .. } => Err(RankError::Protocol(format!("rank {rank} sent replays unasked"))),
        }
    }

    /// Its replays, as the given rank's.
    ///
    /// # Errors
    /// If it is a failure, or is not of this command.
    fn replays(self, rank: usize, n: u64, asked: u64) -> Result<Vec<Replay>, RankError> {
        let Self::Replayed { seq, times_ns, clocks_mhz } = self else {
            self.value(rank)?;
            return Err(RankError::Protocol(format!("rank {rank} sent no replays")));
        };
        if (seq, times_ns.len() as u64, clocks_mhz.len()) != (asked, n, times_ns.len()) {
            return Err(RankError::Protocol(format!(
                "rank {rank} sent {} times of command {seq}, where {n} of {asked} were asked for",
                times_ns.len()
            )));
        }
        let replay = |(time, clock_mhz)| Replay { time: Nanos(time), clock_mhz };
        Ok(times_ns.into_iter().zip(clocks_mhz).map(replay).collect())
    }
}

impl From<RankError> for Reply {
    fn from(error: RankError) -> Self {
        Self::failed(error.status(), error)
    }
}

/// All replies as values, in rank order.
///
/// # Errors
/// The first failure.
pub fn values(replies: Vec<Reply>) -> Result<Vec<Value>, RankError> {
    replies.into_iter().enumerate().map(|(rank, reply)| reply.value(rank)).collect()
}

/// Agreement in the middle of a command. All ranks make the same calls in the same order, outside of collectives.
pub trait Exchange {
    /// Tells rank 0 this rank's value; rank 0 chooses, and all get its choice. `key` says what it is about, such as the product
    /// whose algorithm is chosen; `choose` gets all values in rank order and is called at rank 0 alone.
    ///
    /// # Errors
    /// If another rank has failed instead, or is elsewhere.
    fn decide(
        &mut self,
        key: &str,
        own: Value,
        choose: &mut dyn FnMut(&[Value]) -> Value,
    ) -> Result<Value, RankError>;
}

/// The only rank's: it chooses for itself.
#[derive(Debug, Clone, Copy)]
pub struct Alone;

impl Exchange for Alone {
    fn decide(
        &mut self,
        _key: &str,
        own: Value,
        choose: &mut dyn FnMut(&[Value]) -> Value,
    ) -> Result<Value, RankError> {
        Ok(choose(&[own]))
    }
}

/// A rank's part in a command.
pub type Work<'a> = &'a mut dyn FnMut(&Command, &mut dyn Exchange) -> Reply;

/// From rank 0.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Down {
    /// The command of this number.
    Call(u64, Command),
    /// The choice; none if a rank failed instead of offering a value.
    Decided(String, Option<Value>),
}

/// To rank 0.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Up {
    /// To the command of this number.
    Reply(u64, Reply),
    /// This rank's value.
    Offer(String, Value),
}

#[cfg(test)]
mod tests;
