//! What can go wrong between ranks, and the exit status that it means.

/// Exit status: bad usage.
pub const USAGE: u8 = 2;
/// Exit status: a rank was lost.
pub const LOST: u8 = 4;
/// Exit status: ended by ctrl-C, as shells have it.
pub const INTERRUPTED: u8 = 130;

/// What can go wrong between ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RankError {
    /// Flags or a launcher's variables that contradict each other.
    #[error("{0}")]
    Usage(String),
    /// The port is not to be had.
    #[error("the control port {port} cannot be listened on: {why}; choose another with --control-port")]
    Port {
        /// The port.
        port: u16,
        /// What the system said.
        why: String,
    },
    /// Rank 0 did not let this one in, or this one has nothing to say to what answered.
    #[error("{0}")]
    Refused(String),
    /// Not everybody came.
    #[error("{0}")]
    NotJoined(String),
    /// A rank is gone.
    #[error("rank {rank} was lost: {how}")]
    Lost {
        /// Which.
        rank: usize,
        /// How that was seen.
        how: String,
    },
    /// A step took longer than it may.
    #[error("{0}")]
    TimedOut(String),
    /// A rank failed and said why.
    #[error("{}{message}", prefix(*.rank))]
    Failed {
        /// Which.
        rank: usize,
        /// The exit status that this means.
        status: u8,
        /// One line.
        message: String,
    },
    /// Ranks that are not at the same place: a bug.
    #[error("this is a bug, please report it: {0}")]
    Protocol(String),
    /// Ctrl-C, SIGTERM or SIGHUP.
    #[error("interrupted; nothing was saved")]
    Interrupted,
}

impl RankError {
    /// The exit status of a process that ends with this.
    #[must_use]
    pub fn status(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Port { .. } | Self::Refused(_) => USAGE,
            Self::NotJoined(_) | Self::Lost { .. } | Self::TimedOut(_) | Self::Protocol(_) => LOST,
            Self::Failed { status, .. } => *status,
            Self::Interrupted => INTERRUPTED,
        }
    }
}

/// `rank 3: ` before what a rank says; nothing before what rank 0 says, which speaks for all.
pub(super) fn prefix(rank: usize) -> String {
    if rank == 0 { String::new() } else { format!("rank {rank}: ") }
}
