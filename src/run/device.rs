//! Opening a device for a model, and everything of a case that depends on both.

use serde_json::json;

use super::progress::Progress;
use super::suite::Entry;
use super::{Failure, refuse};
use crate::backend::cpu::{self, CpuDevice};
use crate::backend::{BackendError, Capture, Device, DeviceInfo, Dtype, Forward, Ops, Weights};
use crate::baseline::Configuration;
use crate::batch::{Batch, BatchPlan, Limits};
use crate::case::Case;
use crate::cli::{Cli, DtypeArg, LoadFormat};
use crate::measure::Protocol;
use crate::model::{Model, ModelConfig};

/// The model where neither the command line nor a file names one.
pub fn default_model(_cli: &Cli) -> &'static str {
    "smollm2-135m"
}

/// The folder of shape files where the command line names none.
pub fn default_folder(_cli: &Cli) -> &'static str {
    "shapes/cpu"
}

/// A case on its model, as far as it is known without a device.
pub struct Plan {
    /// The case after jitter.
    pub case: Case,
    /// The model's layers and weights.
    pub model: Model,
    /// What each request schedules, and its blocks.
    pub batch: BatchPlan,
    /// Positions that a request may reach.
    pub max_model_len: u32,
}

impl Plan {
    /// Decides everything that `entry` leaves open.
    pub fn of(cli: &Cli, entry: &Entry) -> Result<Self, Failure> {
        let config = config(cli, &entry.model)?;
        if let Some(routing) = entry.routing.as_deref().filter(|routing| *routing != "auto") {
            return Err(Failure::usage(format!(
                "--routing {routing}: {} has no experts to route to; leave the routing out",
                entry.model
            )));
        }
        let max_model_len = cli.max_model_len.unwrap_or(config.max_position_embeddings);
        warn_of_length(cli, &config);
        let in_case = |error: &dyn std::fmt::Display| Failure::usage(format!("{}: {error}", entry.id));
        let case = entry
            .asked
            .with_jitter(entry.jitter, cli.seed, max_model_len)
            .map_err(|error| in_case(&error))?;
        let model = Model::new(config, cli.block_size, max_model_len).map_err(|error| in_case(&error))?;
        let batch = BatchPlan::new(&case, &model.spec.kv_groups, 0);
        Ok(Self { case, model, batch, max_model_len })
    }

    /// Bytes and FLOPs by operation, as the backend that would run it stores weights and KV.
    pub fn costs(&self, _cli: &Cli) -> Vec<OpCost> {
        cost::of_case(&self.model.config, &self.case, ELEMENT_BYTES)
    }
}

/// The CPU backend stores everything in float32.
const ELEMENT_BYTES: u64 = 4;

/// Says once a process that requests may be longer than the model was made for.
fn warn_of_length(cli: &Cli, config: &ModelConfig) {
    static SAID: std::sync::Once = std::sync::Once::new();
    let Some(length) = cli.max_model_len.filter(|length| *length > config.max_position_embeddings) else { return };
    SAID.call_once(|| {
        eprintln!(
            "warning: --max-model-len {length}: the model's own limit is {}",
            config.max_position_embeddings
        );
    });
}

/// A model's configuration after overrides.
pub fn config(cli: &Cli, model: &str) -> Result<ModelConfig, Failure> {
    ModelConfig::resolve(model, cli.hf_overrides.as_deref()).map_err(|error| Failure::usage(error.to_string()))
}
