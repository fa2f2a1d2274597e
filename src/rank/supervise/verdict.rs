//! Why the ranks ended, in one line, and with which exit status.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use crate::rank::error::LOST;
use crate::rank::notice::Notice;

/// The statuses with which a rank ends for a reason that it has given: all that this program has.
const OWN: [u8; 6] = [0, 1, 2, 3, LOST, 130];

/// What is known so far; the first of each kind.
#[derive(Debug, Default)]
pub struct Verdict {
    /// What ranks said of themselves.
    said: Vec<Notice>,
    /// A rank that a signal ended.
    killed: Option<String>,
    /// A rank that was stopped.
    stopped: Option<String>,
    /// Rank 0's own exit status.
    rank_0: Option<u8>,
    /// Another rank that ended without a word.
    exited: Option<String>,
    /// What others say of one that is gone.
    guessed: Option<Notice>,
    /// One that ended because others did.
    followed: Option<String>,
}

impl Verdict {
    /// A rank told something.
    pub fn heard(&mut self, notice: Notice) {
        if notice.weak {
            self.guessed.get_or_insert(notice);
        } else {
            self.said.push(notice);
        }
    }

    /// A rank ended by itself.
    pub fn ended(&mut self, rank: usize, status: ExitStatus) {
        let Some(code) = status.code() else {
            let signal = name(status.signal().unwrap_or_default());
            self.killed.get_or_insert(format!("rank {rank} was killed by {signal}"));
            return;
        };
        let own = u8::try_from(code).ok().filter(|code| OWN.contains(code));
        if let (0, Some(code)) = (rank, own) {
            self.rank_0 = Some(code);
        } else if code != 0 {
            let place = if code == i32::from(LOST) { &mut self.followed } else { &mut self.exited };
            place.get_or_insert(format!("rank {rank} ended with exit status {code}"));
        }
    }

    /// A rank was found stopped.
    pub fn stopped(&mut self, rank: usize, signal: i32) {
        self.stopped.get_or_insert(format!("rank {rank} was stopped by {}", name(signal)));
    }

    /// Whether the run is at its end, for better or worse: nobody has long to go any more.
    pub fn is_over(&self) -> bool {
        self.rank_0.is_some() || self.line().is_some()
    }

    /// The line that says why, unless all went well or rank 0 has said it itself.
    pub fn line(&self) -> Option<String> {
        if let Some(said) = self.said() {
            return Some(said.line());
        }
        let surely = self.killed.as_ref().or(self.stopped.as_ref());
        let rank_0_said_it = self.rank_0.is_some_and(|status| status != 0 && status != LOST);
        if surely.is_some() || rank_0_said_it {
            return surely.cloned();
        }
        let guessed = self.guessed.as_ref().map(|guessed| &guessed.message);
        self.exited.as_ref().or(guessed).or(self.followed.as_ref()).cloned()
    }

    /// What was said first; by rank 0, if that one says the same.
    fn said(&self) -> Option<&Notice> {
        let first = self.said.first()?;
        let by_rank_0 = self.said.iter().find(|said| said.rank == 0 && said.message == first.message);
        by_rank_0.or(Some(first))
    }

    /// The exit status of all.
    pub fn status(&self) -> u8 {
        match (self.said(), self.line()) {
            (Some(said), _) => said.status,
            (None, Some(_)) => LOST,
            (None, None) => self.rank_0.unwrap_or(0), // which may be on another host
        }
    }
}

/// A signal's name.
fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILLED: i32 = libc::SIGKILL;

    fn exit(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    #[test]
    fn all_well() {
        let mut verdict = Verdict::default();
        verdict.ended(1, exit(0));
        assert!(!verdict.is_over());
        verdict.ended(0, exit(0));
        assert!(verdict.is_over());
        assert_eq!((verdict.line(), verdict.status()), (None, 0));
    }

    #[test]
    fn rank_0_speaks_for_itself() {
        let mut verdict = Verdict::default();
        verdict.ended(0, exit(3));
        verdict.ended(1, exit(0));
        assert_eq!((verdict.line(), verdict.status()), (None, 3));
    }

    #[test]
    fn what_a_rank_said_goes_before_what_others_saw() {
        let mut verdict = Verdict::default();
        verdict.heard(Notice::lost(1, "its connection closed"));
        verdict.ended(1, exit(3));
        verdict.ended(0, exit(4));
        verdict.heard(Notice::failed(1, 3, "out of memory"));
        assert_eq!((verdict.line().as_deref(), verdict.status()), (Some("rank 1: out of memory"), 3));
        verdict.heard(Notice::failed(0, 3, "out of memory"));
        assert_eq!(verdict.line().as_deref(), Some("out of memory"));
    }

    #[test]
    fn a_signal_goes_before_what_others_saw_and_before_who_followed() {
        let mut verdict = Verdict::default();
        verdict.heard(Notice::lost(1, "its connection closed"));
        verdict.ended(2, exit(4));
        verdict.ended(1, ExitStatus::from_raw(KILLED));
        verdict.ended(0, exit(4));
        assert_eq!((verdict.line().as_deref(), verdict.status()), (Some("rank 1 was killed by SIGKILL"), 4));
    }

    #[test]
    fn a_stopped_rank_is_named() {
        let mut verdict = Verdict::default();
        verdict.heard(Notice::lost(1, "no sign of life for 5 s"));
        verdict.ended(0, exit(4));
        assert_eq!(verdict.line().as_deref(), Some("rank 1 was lost: no sign of life for 5 s"));
        verdict.stopped(1, libc::SIGSTOP);
        assert_eq!((verdict.line().as_deref(), verdict.status()), (Some("rank 1 was stopped by SIGSTOP"), 4));
    }

    #[test]
    fn a_rank_that_ends_without_a_word_is_named() {
        let mut verdict = Verdict::default();
        verdict.ended(2, exit(7));
        assert!(verdict.is_over());
        assert_eq!(verdict.line().as_deref(), Some("rank 2 ended with exit status 7"));
    }
}
