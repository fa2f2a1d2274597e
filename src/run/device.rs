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
