//! The flags that compare: verdicts, baselines, targets.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::HEADINGS;

/// What is compared with what, and what becomes of it.
#[derive(Debug, Clone, Default, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = HEADINGS[3])]
pub struct ComparisonArgs {
    /// Processes that measure the suite, one after the other; with --against, on each side [default: 1; 5 with --against]
    #[arg(long, value_name = "N")]
    pub runs: Option<u32>,
    /// Build commit REF in a worktree, measure it and this tree alternately, and give the verdict; an executable's path
    /// stands for a build of REF
    #[arg(long, value_name = "REF|FILE",
          conflicts_with_all = ["save_baseline", "baseline", "baseline_lenient", "load_baseline", "discard_baseline",
                                "list", "test", "profile_time", "output_json", "check_targets", "update_targets", "plan"])]
    pub against: Option<String>,
    /// Wait for a turn on this socket before each case; for the processes of --against
    #[arg(long, value_name = "SOCKET", hide = true)]
    pub take_turns: Option<PathBuf>,
    /// A change must be larger than this to count, in percent [default: the file's, else 1]
    #[arg(long, value_name = "PCT")]
    pub tolerance_pct: Option<f64>,
    /// Exit 1 if a case is slower by more than this many percent [default: its margin]; a number that follows is PCT, so a
    /// filter that is a number stands before it
    #[arg(long, value_name = "PCT", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub fail_on_regression: Option<f64>,
    /// Compare with a baseline although this differs: backend, device, dtype, model, layout or draws; repeatable
    #[arg(long, value_enum, value_name = "FIELD", value_delimiter = ',')]
    pub allow_mismatch: Vec<Field>,
    /// Write the verdicts to this file as Markdown, for a pull request's comment
    #[arg(long, value_name = "FILE")]
    pub summary_md: Option<PathBuf>,
    /// Write the medians to this file in the Bencher Metric Format
    #[arg(long, value_name = "FILE")]
    pub output_bmf: Option<PathBuf>,
    /// Compare the medians with target-baselines/DEVICE/MODEL.toml; exit 1 if one misses its target
    #[arg(long)]
    pub check_targets: bool,
    /// Write the medians to target-baselines/DEVICE/MODEL.toml; comments and order there stay
    #[arg(long)]
    pub update_targets: bool,
    /// List the saved baselines
    #[arg(long, conflicts_with_all = ["export_baseline", "import_baseline", "baseline", "save_baseline", "against"])]
    pub baselines: bool,
    /// Write a saved baseline to one file, to be committed or cached
    #[arg(long, value_name = "NAME", conflicts_with = "import_baseline")]
    pub export_baseline: Option<String>,
    /// The file of --export-baseline [default: target-baselines/DEVICE/NAME.json.gz]
    #[arg(long, value_name = "FILE", requires = "export_baseline")]
    pub export_file: Option<PathBuf>,
    /// Read a baseline that --export-baseline wrote
    #[arg(long, value_name = "FILE", conflicts_with_all = ["baseline", "baseline_lenient", "save_baseline", "against"])]
    pub import_baseline: Option<PathBuf>,
}

/// A part of a configuration that two compared runs must share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Field {
    /// Kind of device.
    Backend,
    /// Its name and number of threads or multiprocessors.
    Device,
    /// Type of weights and KV.
    Dtype,
    /// The model's configuration after overrides, and where its weights come from.
    Model,
    /// Ranks and block size.
    Layout,
    /// Requests after jitter, and what the KV cache held.
    Draws,
}
