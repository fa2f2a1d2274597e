//! What rank 0 has all ranks do for a case; alone it does the same by itself.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::{CASE, Failure};
use super::Links;
use crate::backend::{Capture, Tracing};
use crate::measure::loads::{self, ExpertLoads, Wanted};
use crate::measure::{self, Checks, Protocol};
use crate::rank::{Command, Exchange, Leader, RankError, Reply, control};

/// The ranks of this run, as rank 0 sees them.
pub enum Crew {
    /// There are no others.
    Alone,
    /// There are.
    Leads {
        /// The way to them.
        leader: Box<Leader>,
        /// What this rank's device needs to communicate with theirs.
        links: Links,
    },
}

/// What [`Command::Prepare`] asks for: that the model of a case be loaded, or its step be made ready.
pub const LOAD: &str = "load";
/// See [`LOAD`].
pub const CAPTURE: &str = "capture";
/// What [`Command::Check`] asks for: the protocol's checks, or what the experts did.
pub const PROTOCOL: &str = "protocol";
/// See [`PROTOCOL`].
pub const LOADS: &str = "loads";

/// A work for all ranks: what is asked for, and of which case.
pub fn of_case(what: &str, case: usize) -> Value {
    json!({ "what": what, "case": case })
}

impl Crew {
    /// What this rank's device needs to communicate with others'.
    pub fn links(&self) -> Links {
        match self {
            Self::Alone => Links::default(),
            Self::Leads { links, .. } => links.clone(),
        }
    }

    /// The way to the other ranks, if there are any.
    pub fn leader(&mut self) -> Option<&mut Leader> {
        match self {
            Self::Alone => None,
            Self::Leads { leader, .. } => Some(leader),
        }
    }

    /// Has all ranks load the model of a case, this one by `own`.
    pub fn load<T>(&mut self, case: usize, own: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        let Self::Leads { leader, .. } = self else { return own() };
        let (mut own, mut made) = (Some(own), None);
        let limit = leader.watchdog().timeouts().prepare;
        let command = Command::Prepare(of_case(LOAD, case));
        let replies = leader.call(&command, limit, &mut |_, _| match own.take().map(|own| own()) {
            Some(Ok(loaded)) => {
                made = Some(loaded);
                Reply::Done(Value::Null)
            }
            Some(Err(failure)) => Reply::failed(failure.status, failure.message),
            None => bug(),
        })?;
        all_did(replies)?;
        made.ok_or_else(|| Failure::case("no model was loaded"))
    }

    /// Has the other ranks make the step of a case ready; this one's is.
    pub fn capture(&mut self, case: usize) -> Result<(), Failure> {
        let Self::Leads { leader, .. } = self else { return Ok(()) };
        let limit = leader.watchdog().timeouts().prepare;
        let command = Command::Prepare(of_case(CAPTURE, case));
        let replies = leader.call(&command, limit, &mut |_, _| Reply::Done(Value::Null))?;
        all_did(replies).map(drop)
    }

    /// The protocol's checks on all ranks, side by side; in rank order.
    pub fn check(&mut self, capture: &mut dyn Capture, protocol: &Protocol) -> Result<Vec<Checks>, Failure> {
        let Self::Leads { leader, .. } = self else {
            let checks = measure::check(capture, protocol);
            return Ok(vec![checks.map_err(|error| Failure::case(error.to_string()))?]);
        };
        let limit = leader.watchdog().timeouts().prepare;
        let command = Command::Check(json!(PROTOCOL));
        let replies =
            leader.call(&command, limit, &mut |_, exchange| checked(capture, protocol, exchange, true))?;
        all_did(replies)?.into_iter().map(parsed).collect()
    }

    /// What each rank's experts did in the last replay; in rank order. Empty without experts.
    pub fn loads(
        &mut self,
        capture: &mut dyn Capture,
        wanted: Option<&Wanted>,
    ) -> Result<Vec<Vec<ExpertLoads>>, Failure> {
        let Some(wanted) = wanted else { return Ok(Vec::new()) };
        let Self::Leads { leader, .. } = self else {
            return Ok(vec![
                loads::check(capture, wanted).map_err(|error| Failure::case(error.to_string()))?,
            ]);
        };
        let limit = leader.watchdog().timeouts().prepare;
        let command = Command::Check(json!(LOADS));
        let replies = leader.call(&command, limit, &mut |_, _| counted(capture, wanted))?;
        all_did(replies)?.into_iter().map(parsed).collect()
    }

    /// Traces replays on all ranks; in rank order.
    pub fn profile(
        &mut self,
        capture: &mut dyn Capture,
        name: &str,
        replays: u32,
    ) -> Result<Vec<Tracing>, Failure> {
        let Self::Leads { leader, .. } = self else {
            let tracing = capture.profile(name, replays);
            return Ok(vec![tracing.map_err(|error| Failure::case(error.to_string()))?]);
        };
        let limit = leader.watchdog().timeouts().prepare;
        let command = Command::Profile(json!({ "name": name, "replays": replays }));
        let replies = leader.call(&command, limit, &mut |_, _| traced(capture, name, replays))?;
        all_did(replies)?.into_iter().map(parsed).collect()
    }

    /// Has the other ranks put the case away.
    pub fn finish(&mut self) -> Result<(), Failure> {
        let Self::Leads { leader, .. } = self else { return Ok(()) };
        let limit = leader.watchdog().timeouts().prepare;
        let replies = leader.call(&Command::Finish, limit, &mut |_, _| Reply::Done(Value::Null))?;
        all_did(replies).map(drop)
    }

    /// Tells the other ranks that the run is over.
    pub fn shutdown(self) -> Result<(), Failure> {
        match self {
            Self::Alone => Ok(()),
            Self::Leads { leader, .. } => Ok(leader.shutdown()?),
        }
    }
}

/// All values; a rank that could not do its part has the case fail, unless it says that the run must end.
fn all_did(replies: Vec<Reply>) -> Result<Vec<Value>, Failure> {
    control::values(replies).map_err(|error| match error {
        RankError::Failed { status: CASE, .. } => Failure::case(error.to_string()),
        error => error.into(),
    })
}

fn parsed<T: serde::de::DeserializeOwned>(value: Value) -> Result<T, Failure> {
    serde_json::from_value(value).map_err(|error| Failure::case(format!("a rank's answer: {error}")))
}

/// An answer to a command that does not fit.
pub fn bug() -> Reply {
    Reply::failed(CASE, "this is a bug, please report it: a command out of order")
}

fn reply<T: serde::Serialize, E: std::fmt::Display>(outcome: Result<T, E>) -> Reply {
    match outcome {
        Ok(value) => match serde_json::to_value(value) {
            Ok(value) => Reply::Done(value),
            Err(error) => Reply::failed(CASE, error),
        },
        Err(error) => Reply::failed(CASE, error),
    }
}

/// A rank's answer to [`PROTOCOL`]: first rank 0 chooses among ways to compute the same, and the others take its choices; then the
/// protocol's steps 1 to 5.
pub fn checked(
    capture: &mut dyn Capture,
    protocol: &Protocol,
    exchange: &mut dyn Exchange,
    leads: bool,
) -> Reply {
    let tuned = tune(capture, exchange, leads);
    match tuned {
        Ok(()) => reply(measure::check(capture, protocol)),
        Err(message) => Reply::failed(CASE, message),
    }
}

fn tune(capture: &mut dyn Capture, exchange: &mut dyn Exchange, leads: bool) -> Result<(), String> {
    let none = BTreeMap::new();
    let own = if leads { capture.tune(&none).map_err(|error| error.to_string())? } else { none };
    let choice = exchange.decide("algorithms", json!(own), &mut |all| all[0].clone());
    let choice = choice.map_err(|error| error.to_string())?;
    if !leads {
        let agreed: BTreeMap<String, String> =
            serde_json::from_value(choice).map_err(|error| error.to_string())?;
        capture.tune(&agreed).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// A rank's answer to [`LOADS`].
pub fn counted(capture: &mut dyn Capture, wanted: &Wanted) -> Reply {
    reply(loads::check(capture, wanted))
}

/// A rank's answer to [`Command::Profile`].
pub fn traced(capture: &mut dyn Capture, name: &str, replays: u32) -> Reply {
    reply(capture.profile(name, replays))
}
