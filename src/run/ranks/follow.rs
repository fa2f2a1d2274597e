//! The other ranks: do what rank 0 says, case by case, and say nothing to the user.

use std::sync::Arc;

use serde_json::Value;

use super::super::device::{Loaded, Plan};
use super::super::suite::Entry;
use super::super::{Failure, backend};
use super::crew::{CAPTURE, LOAD, LOADS, PROTOCOL, bug, checked, counted, traced};
use super::together::replayed;
use super::{Links, begin};
use crate::backend::{Capture, Communicator};
use crate::cli::Cli;
use crate::measure::Protocol;
use crate::measure::loads::Wanted;
use crate::rank::{Command, Follower, RankError, Reply};

/// Follows rank 0 to the end of the run.
pub fn run(
    cli: &Cli,
    selected: &[&Entry],
    mut follower: Follower,
    host: Option<Arc<dyn Communicator>>,
) -> Result<u8, Failure> {
    let mut rank = Rank { cli, selected, host, links: Links::default(), loaded: None };
    let mut next = None;
    loop {
        let command = match next.take() {
            Some(command) => command,
            None => follower.command()?,
        };
        let reply = match &command {
            Command::Prepare(what) if *what == begin::BEGIN => {
                let watchdog = follower.watchdog().clone();
                let begun = begin::begin(cli, &mut follower, rank.host.clone(), &watchdog);
                begin::answer(begun, &mut rank.links)
            }
            Command::Prepare(what) => match (what["what"].as_str(), rank.entry(what)) {
                (Some(LOAD), Some(entry)) => answer(rank.load(entry)),
                (Some(CAPTURE), Some(entry)) => match rank.capture(entry, &mut follower)? {
                    Err(failure) => Reply::failed(failure.status, failure.message),
                    Ok(unanswered) => {
                        next = unanswered;
                        continue;
                    }
                },
                _ => bug(),
            },
            Command::Finish | Command::Shutdown => Reply::Done(Value::Null),
            _ => bug(),
        };
        follower.answer(&reply)?;
        if command == Command::Shutdown {
            return Ok(0);
        }
    }
}

fn answer(outcome: Result<(), Failure>) -> Reply {
    match outcome {
        Ok(()) => Reply::Done(Value::Null),
        Err(failure) => Reply::failed(failure.status, failure.message),
    }
}

/// A rank and what it has loaded.
struct Rank<'a> {
    cli: &'a Cli,
    selected: &'a [&'a Entry],
    host: Option<Arc<dyn Communicator>>,
    links: Links,
    loaded: Option<Loaded>,
}

impl<'a> Rank<'a> {
    fn entry(&self, what: &Value) -> Option<&'a Entry> {
        let case = usize::try_from(what["case"].as_u64()?).ok()?;
        self.selected.get(case).copied()
    }

    fn load(&mut self, entry: &Entry) -> Result<(), Failure> {
        let plan = Plan::of(self.cli, entry)?;
        let loaded = self.loaded.take();
        self.loaded = Some(Loaded::reuse(loaded, self.cli, &self.links, &entry.model, &plan.model)?);
        Ok(())
    }

    /// Makes a case's step ready and does what rank 0 wants of it until it is finished; returns a command that is not of this case, which is
    /// yet to be answered. So is what kept the step from being made ready.
    fn capture(
        &mut self,
        entry: &Entry,
        follower: &mut Follower,
    ) -> Result<Result<Option<Command>, Failure>, Failure> {
        let mut served = Ok(None);
        let opened = self.open(entry, |capture, protocol, wanted| {
            served = serve(capture, protocol, wanted, follower);
        });
        let next = served?;
        Ok(opened.map(|()| next))
    }

    fn open(
        &mut self,
        entry: &Entry,
        use_it: impl FnOnce(&mut dyn Capture, &Protocol, Option<&Wanted>),
    ) -> Result<(), Failure> {
        let cli = self.cli;
        let plan = Plan::of(cli, entry)?;
        let loaded = self.loaded.as_mut().ok_or_else(|| Failure::case("no model is loaded"))?;
        let batch = loaded.batch(cli, entry, &plan)?;
        let made = plan.route.map(|route| route.make()).transpose()?;
        let (logits, wanted) = made.map(|made| (made.logits, made.wanted)).unzip();
        let protocol = backend::of(cli)?.protocol(false);
        loaded.with_capture(&batch, logits.flatten(), |capture| {
            use_it(capture, &protocol, wanted.as_ref());
            Ok(())
        })
    }
}

/// Answers that the step is ready, then every command up to the case's end; returns one that is not of this case.
fn serve(
    capture: &mut dyn Capture,
    protocol: &Protocol,
    wanted: Option<&Wanted>,
    follower: &mut Follower,
) -> Result<Option<Command>, RankError> {
    follower.answer(&Reply::Done(Value::Null))?;
    loop {
        let command = follower.command()?;
        let reply = match &command {
            Command::Check(what) if *what == PROTOCOL => checked(capture, protocol, follower, false),
            Command::Check(what) if *what == LOADS => {
                wanted.map_or_else(bug, |wanted| counted(capture, wanted))
            }
            Command::Replay { .. } => replayed(capture, &command),
            Command::Profile(what) => {
                let name = what["name"].as_str().unwrap_or_default();
                let replays = what["replays"].as_u64().and_then(|n| u32::try_from(n).ok()).unwrap_or(1);
                traced(capture, name, replays)
            }
            Command::Finish => Reply::Done(Value::Null),
            Command::Prepare(_) | Command::Shutdown => return Ok(Some(command)),
            Command::Check(_) => bug(),
        };
        follower.answer(&reply)?;
        if command == Command::Finish {
            return Ok(None);
        }
    }
}
