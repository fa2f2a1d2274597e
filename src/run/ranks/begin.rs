//! The first command: ranks agree that they run the same, and get their way to each other's devices.

use std::sync::Arc;

use serde_json::{Value, json};

use super::super::backend::{self, Backend};
use super::super::{Failure, USAGE};
use super::crew::Crew;
use crate::backend::Communicator;
use crate::cli::Cli;
use crate::rank::{Command, Exchange, Leader, Reply, control};

/// What a device needs to communicate with those of other ranks.
#[derive(Clone, Default)]
pub struct Links {
    /// For a device whose collectives the host makes.
    pub host: Option<Arc<dyn Communicator>>,
    /// For GPUs.
    #[cfg(feature = "cuda-api")]
    pub gpu: Option<std::rc::Rc<dyn crate::backend::cuda::Collectives>>,
}

impl Links {
    fn of_host(host: Option<Arc<dyn Communicator>>) -> Self {
        Self {
            host,
            #[cfg(feature = "cuda-api")]
            gpu: None,
        }
    }
}

/// What makes the ranks agree; the value says which command this is.
pub const BEGIN: &str = "begin";

/// Rank 0's part.
pub fn lead(cli: &Cli, mut leader: Leader, host: Option<Arc<dyn Communicator>>) -> Result<Crew, Failure> {
    let (mut links, limit) = (Links::default(), leader.watchdog().timeouts().prepare);
    let watchdog = leader.watchdog().clone();
    let replies = leader.call(&Command::Prepare(json!(BEGIN)), limit, &mut |_, exchange| {
        answer(begin(cli, exchange, host.clone(), &watchdog), &mut links)
    })?;
    control::values(replies)?;
    Ok(Crew::Leads { leader: Box::new(leader), links })
}

/// Every rank's part; the reply says what is wrong with it.
pub fn answer(begun: Result<Links, Failure>, links: &mut Links) -> Reply {
    match begun {
        Ok(begun) => {
            *links = begun;
            Reply::Done(Value::Null)
        }
        Err(failure) => Reply::failed(failure.status, failure.message),
    }
}

/// Agrees with the other ranks on what is run, and connects the devices.
pub fn begin(
    cli: &Cli,
    exchange: &mut dyn Exchange,
    host: Option<Arc<dyn Communicator>>,
    watchdog: &crate::rank::Watchdog,
) -> Result<Links, Failure> {
    let own = what_is_run(cli)?;
    let common = exchange.decide("the run", own.clone(), &mut |all| all[0].clone())?;
    if let Some(line) = difference(&own, &common) {
        return Err(Failure { status: USAGE, message: line });
    }
    match backend::of(cli)? {
        Backend::Cpu => Ok(Links::of_host(host)),
        Backend::Cuda(_) => connect_gpus(cli, exchange, watchdog),
    }
}

/// What must be the same on all ranks.
fn what_is_run(cli: &Cli) -> Result<Value, Failure> {
    let backend = backend::of(cli)?;
    Ok(json!({
        "flags": cli.given,
        "cases": [json!(cli.filter), json!(cli.case), json!(cli.shapes), json!(cli.model)],
        "backend": backend.info().backend,
        "device": backend.device(),
    }))
}

/// The first thing in which a rank differs from rank 0, as a line.
fn difference(own: &Value, common: &Value) -> Option<String> {
    let (Value::Object(own), Value::Object(common)) = (own, common) else { return None };
    let (key, found) = own.iter().find(|(key, value)| common.get(*key) != Some(value))?;
    let wanted = common.get(key).map_or_else(String::new, Value::to_string);
    Some(format!("its {key} are {found}, those of rank 0 are {wanted}; start all ranks alike"))
}

#[cfg(feature = "cuda-api")]
fn connect_gpus(
    cli: &Cli,
    exchange: &mut dyn Exchange,
    watchdog: &crate::rank::Watchdog,
) -> Result<Links, Failure> {
    use crate::backend::cuda::{Gpu, Nccl};
    let failed = |error: crate::backend::BackendError| Failure::usage(error.to_string());
    let place = cli.place();
    let own = if place.rank == 0 { json!(Nccl::unique_id().map_err(failed)?) } else { Value::Null };
    let id = exchange.decide("NCCL's id", own, &mut |all| all[0].clone())?;
    let id: Vec<u8> = serde_json::from_value(id)
        .map_err(|error| Failure::usage(format!("NCCL's id cannot be read: {error}")))?;
    let gpu = Gpu::open(cli.device).map_err(failed)?;
    let nccl = Nccl::new(&gpu, place, &id).map_err(failed)?;
    watchdog.on_end(nccl.abort_hook());
    Ok(Links { host: None, gpu: Some(nccl) })
}

#[cfg(not(feature = "cuda-api"))]
fn connect_gpus(
    _cli: &Cli,
    _exchange: &mut dyn Exchange,
    _watchdog: &crate::rank::Watchdog,
) -> Result<Links, Failure> {
    Err(Failure::usage("this executable was built without the feature `cuda`; build it with"))
}
