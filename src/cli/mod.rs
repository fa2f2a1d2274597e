//! The command line: our flags and Criterion's in one `--help`.

mod comparison;
mod passed_on;
mod ranks;

use std::path::PathBuf;

use clap::{CommandFactory, FromArgMatches, Parser};
use serde::{Deserialize, Serialize};

pub use comparison::{ComparisonArgs, Field};
pub use passed_on::CriterionArgs;
pub use ranks::RanksArgs;

use crate::backend::{All2All, KvInit, L2};
use crate::layout::{Layout, Place};

const HEADINGS: [&str; 6] = ["Cases", "Model", "Measurement", "Baselines and verdicts", "Criterion", "Ranks"];

/// Times the forward pass of a language model on exact batch shapes, and compares the times with saved baselines.
#[derive(Debug, Clone, Parser, Serialize, Deserialize)]
#[command(
    name = "forward-bench",
    bin_name = "cargo bench --",
    version,
    max_term_width = 110,
    args_override_self = true
)]
#[command(after_help = AFTER_HELP)]
pub struct Cli {
    /// Run only benchmarks whose id (GROUP/MODEL/CASE) matches this regular expression; ids write `x` for `*`
    #[arg(value_name = "FILTER")]
    pub filter: Option<String>,

    /// `--case`, in the grammar of [`crate::case`].
    #[arg(long, value_name = "CASE", help_heading = HEADINGS[0],
          help = "Time this case: NAME=REQS or REQS, REQS a comma list of [N*]Q[@K][c][:D]; repeatable")]
    pub case: Vec<String>,
    /// Time the cases of this shape file (YAML or JSON) or of a folder of them; repeatable
    #[arg(long, value_name = "PATH", help_heading = HEADINGS[0])]
    pub shapes: Vec<PathBuf>,
    /// Vary each prefix length by up to this fraction, in [0, 1), from the seed [default: the file's, else 0.5]
    #[arg(long, value_name = "FRACTION", help_heading = HEADINGS[0])]
    pub kv_len_jitter: Option<f64>,
    /// Seed of jitter, token ids, dummy weights and random KV
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = HEADINGS[0])]
    pub seed: u64,
    /// Draft tokens that a request may have [default: the file's, else 0]
    #[arg(long, value_name = "TOKENS", help_heading = HEADINGS[0])]
    pub num_speculative_tokens: Option<u32>,
    /// Print what would run, without building a model; `=json` prints it as JSON
    #[arg(long, value_name = "FORMAT", num_args = 0..=1, require_equals = true,
          default_missing_value = "table", help_heading = HEADINGS[0])]
    pub plan: Option<PlanFormat>,

    /// Preset, or a Hugging Face model folder [default: the file's, else smollm2-135m on the CPU and
    /// qwen3-8b, or the largest that fits, on a GPU]
    #[arg(long, value_name = "NAME|DIR", help_heading = HEADINGS[1])]
    pub model: Option<String>,
    /// JSON object that is merged over the model's config.json
    #[arg(long, value_name = "JSON", help_heading = HEADINGS[1])]
    pub hf_overrides: Option<String>,
    /// Where weights come from: made up from the seed, or the model folder's safetensors
    #[arg(long, value_enum, default_value_t = LoadFormat::Dummy, help_heading = HEADINGS[1])]
    pub load_format: LoadFormat,
    /// Type of weights and KV; the CPU rounds to it and computes in float32 [auto: float32 on the CPU, bfloat16 on a GPU]
    #[arg(long, value_enum, default_value_t = DtypeArg::Auto, help_heading = HEADINGS[1])]
    pub dtype: DtypeArg,
    /// Device kind
    #[arg(long, value_enum, default_value_t = BackendArg::Auto, help_heading = HEADINGS[1])]
    pub backend: BackendArg,
    /// GPU number, among those that CUDA_VISIBLE_DEVICES leaves
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = HEADINGS[1])]
    pub device: usize,
    /// What KV blocks hold before a step
    #[arg(long, value_enum, default_value_t = KvInit::Random, help_heading = HEADINGS[1])]
    pub kv_init: KvInit,
    /// How tokens choose experts: auto, real (by the gates), balanced, or zipf:S (the expert of rank r has probability ∝ 1/r^S);
    /// dense models have none and take only auto [default: the file's, else auto: balanced with dummy weights, else real]
    #[arg(long, value_name = "ROUTING", help_heading = HEADINGS[1])]
    pub routing: Option<String>,
    /// Tokens in a KV block
    #[arg(long, value_name = "TOKENS", default_value_t = 16, help_heading = HEADINGS[1])]
    pub block_size: u32,
    /// Memory of the KV pool in bytes; suffixes K, M, G (powers of 1024) are understood [default: 1G on the CPU; on a GPU
    /// what --gpu-memory-utilization leaves]
    #[arg(long, value_name = "BYTES", help_heading = HEADINGS[1])]
    pub kv_cache_memory_bytes: Option<String>,
    /// Share of the GPU's memory, in (0, 1], for weights, workspace and KV
    #[arg(long, value_name = "FRACTION", default_value_t = 0.9, help_heading = HEADINGS[1])]
    pub gpu_memory_utilization: f64,
    /// Longest request in tokens [default: the model's]
    #[arg(long, value_name = "TOKENS", help_heading = HEADINGS[1])]
    pub max_model_len: Option<u32>,
    /// Most query tokens in a step
    #[arg(long, value_name = "TOKENS", default_value_t = 16384, help_heading = HEADINGS[1])]
    pub max_num_batched_tokens: u32,
    /// Most requests in a step
    #[arg(long, value_name = "REQUESTS", default_value_t = 1024, help_heading = HEADINGS[1])]
    pub max_num_seqs: u32,
    /// Compare a checkpoint's forward with hidden states computed elsewhere (input_ids, hidden), then exit; on the CPU
    /// unless --backend says otherwise
    #[arg(long, value_name = "FILE", help_heading = HEADINGS[1],
          conflicts_with_all = ["filter", "case", "shapes", "plan", "routing", "output_json", "profile_dir",
                                "save_baseline", "baseline", "baseline_lenient", "load_baseline", "list", "test",
                                "profile_time"])]
    pub verify: Option<PathBuf>,
    /// Largest relative RMS of a row that --verify accepts
    #[arg(long, value_name = "RMS", default_value_t = 1e-5, help_heading = HEADINGS[1])]
    pub verify_tolerance: f64,
    /// Ranks that share heads, the MLP's inner size and the vocabulary (short: -tp)
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = HEADINGS[1])]
    pub tensor_parallel_size: u32,
    /// Ranks that each have the case's requests; of a model with experts they share the experts (short: -dp)
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = HEADINGS[1])]
    pub data_parallel_size: u32,
    /// Stages of layers; this version has one (short: -pp)
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = HEADINGS[1])]
    pub pipeline_parallel_size: u32,
    /// Spread whole experts over data × tensor ranks; else each rank has a part of every expert (short: -ep)
    #[arg(long, help_heading = HEADINGS[1])]
    pub enable_expert_parallel: bool,
    /// How tokens get to experts of other data-parallel ranks and back
    #[arg(long, value_enum, default_value_t = All2All::AllgatherReducescatter, help_heading = HEADINGS[1])]
    pub all2all_backend: All2All,

    /// Replays in a sample
    #[arg(long, value_name = "N", default_value_t = 20, help_heading = HEADINGS[2])]
    pub iters: u32,
    /// Samples of a case
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = HEADINGS[2])]
    pub samples: u32,
    /// What the GPU's L2 cache holds when a replay starts: what the one before left, or nothing of the step's
    #[arg(long, value_enum, default_value_t = L2::Warm, help_heading = HEADINGS[2])]
    pub l2: L2,
    /// Measure the algorithms of matrix products again instead of taking those that were chosen before
    #[arg(long, help_heading = HEADINGS[2])]
    pub retune: bool,
    /// Write all results to this file
    #[arg(long, value_name = "FILE", help_heading = HEADINGS[2])]
    pub output_json: Option<PathBuf>,
    /// After all timing, trace replays of each case and write its kernels and a trace into this folder:
    /// GROUP/MODEL/CASE.rank0.kernels.json and .trace.json.gz (for ui.perfetto.dev)
    #[arg(long, value_name = "DIR", help_heading = HEADINGS[2])]
    pub profile_dir: Option<PathBuf>,
    /// Print how the kernels of two files of --profile-dir differ, the most changed first, then exit
    #[arg(long, num_args = 2, value_names = ["A.kernels.json", "B.kernels.json"], action = clap::ArgAction::Set,
          help_heading = HEADINGS[2],
          conflicts_with_all = ["filter", "case", "shapes", "plan", "verify", "output_json", "profile_dir", "save_baseline",
                                "baseline", "baseline_lenient", "load_baseline", "list", "test", "profile_time"])]
    pub diff: Vec<PathBuf>,

    #[command(flatten)]
    pub ranks: RanksArgs,
    #[command(flatten)]
    pub comparison: ComparisonArgs,
    #[command(flatten)]
    pub criterion: CriterionArgs,

    /// What a process that measures for another one is to do with it.
    #[arg(skip)]
    pub part: Part,
    /// The flags that decide what is measured and how, as they were given.
    #[arg(skip)]
    pub given: Vec<String>,
}

const AFTER_HELP: &str = "\
Examples:
  cargo bench -- decode                            every case of the group decode
  cargo bench -- decode --save-baseline @HEAD      keep the times under the commit's name
  cargo bench -- decode --baseline 1a2b3c4d5e6f    compare with another commit's
  cargo bench -- --model qwen3-0.6b --case decode=8*1@512

  cargo bench -- decode -tp 2                      one step of two ranks; a replay takes as long as the slower one

Exit status: 0 fine, 1 a regression that was asked to be fatal, 2 bad usage or a bad file, 3 a case could
not run or failed a check, 4 a rank was lost.";

/// A process's part in a measurement that several share.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Part {
    /// Write the runs to this file and save nothing: a later process saves.
    pub gather_into: Option<PathBuf>,
    /// Files of runs that earlier processes gathered.
    pub earlier: Vec<PathBuf>,
    /// Which rank this process is.
    pub rank: usize,
    /// How many ranks share this host's processor; 0 and 1: one.
    pub host_ranks: usize,
}

/// How `--plan` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub enum PlanFormat {
    /// One row a case.
    Table,
    /// One JSON document on stdout.
    Json,
}

/// `--load-format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadFormat {
    /// Values from the seed.
    Dummy,
    /// A checkpoint.
    Safetensors,
}

/// `--dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub enum DtypeArg {
    /// The backend's own choice.
    Auto,
    /// IEEE 754 binary32.
    Float32,
    /// bfloat16.
    Bfloat16,
    /// IEEE 754 binary16.
    Float16,
}

/// `--backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub enum BackendArg {
    /// The best that this machine has.
    Auto,
    /// An NVIDIA GPU.
    Cuda,
    /// This machine's processor.
    Cpu,
}

/// What this process is to do with the benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Measure and save.
    Measure,
    /// Compare two saved baselines.
    Load,
    /// Run each once.
    Test,
    /// Run for a profiler.
    Profile,
    /// Print the ids.
    List,
}

impl Cli {
    /// Parses a command line after writing `-tp` and its kin as long flags; exits with help or a usage error as clap does.
    /// A launcher that started this process has not added `--bench`: it is meant.
    #[must_use]
    pub fn from_command_line(arguments: impl Iterator<Item = String>, is_launched: bool) -> Self {
        // `-1` is a value out of range, not an unknown flag: the error should say so.
        let command = Self::command().mut_args(|argument| {
            let takes_value = argument.get_action().takes_values();
            argument.allow_negative_numbers(takes_value)
        });
        let matches = command.get_matches_from(expand(arguments));
        let mut cli = Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
        cli.given = given(&matches);
        if is_launched && !cli.criterion.test && !cli.criterion.list {
            cli.criterion.bench = true;
        }
        cli
    }

    /// How the step is spread over ranks.
    #[must_use]
    pub fn layout(&self) -> Layout {
        let sizes = [self.data_parallel_size, self.pipeline_parallel_size, self.tensor_parallel_size];
        let [data, pipeline, tensor] = sizes.map(|size| size as usize);
        // One rank has all experts either way.
        Layout { data, pipeline, tensor, expert_parallel: self.enable_expert_parallel && data * tensor > 1 }
    }

    /// This process's place in it.
    #[must_use]
    pub fn place(&self) -> Place {
        Place { layout: self.layout(), rank: self.part.rank }
    }

    /// What is to be done; the same rules as Criterion's.
    #[must_use]
    pub fn mode(&self) -> Mode {
        let flags = &self.criterion;
        match () {
            () if flags.list => Mode::List,
            () if flags.test || !flags.bench => Mode::Test,
            () if flags.profile_time.is_some() => Mode::Profile,
            () if flags.load_baseline.is_some() => Mode::Load,
            () => Mode::Measure,
        }
    }

    /// The baseline that results are compared with, and whether each case must have it.
    #[must_use]
    pub fn compared_baseline(&self) -> (&str, bool) {
        let flags = &self.criterion;
        match (&flags.baseline, &flags.baseline_lenient) {
            (Some(name), _) => (name, true),
            (_, Some(name)) => (name, false),
            _ => (flags.save_baseline.as_deref().unwrap_or("base"), false),
        }
    }

    /// The baseline that results are saved under, if they are.
    #[must_use]
    pub fn saved_baseline(&self) -> Option<&str> {
        let flags = &self.criterion;
        let compares = flags.baseline.is_some() || flags.baseline_lenient.is_some();
        let saves = self.mode() == Mode::Measure && !compares && !flags.discard_baseline;
        saves.then(|| flags.save_baseline.as_deref().unwrap_or("base"))
    }
}

/// The flags on the command line that decide what a case's measurement is: those of the model and of the measurement, and
/// Criterion's own of sampling; neither which cases there are nor what becomes of the results.
fn given(matches: &clap::ArgMatches) -> Vec<String> {
    const SAMPLING: [&str; 4] = ["sample_size", "warm_up_time", "measurement_time", "nresamples"];
    const NOT: [&str; 4] = ["model", "output_json", "verify", "verify_tolerance"];
    let decides = |argument: &clap::Arg| {
        let id = argument.get_id().as_str();
        let heading = argument.get_help_heading().unwrap_or_default();
        id == "seed"
            || SAMPLING.contains(&id)
            || (HEADINGS[1..3].contains(&heading) && !NOT.contains(&id) && !id.starts_with("profile"))
    };
    let command = Cli::command();
    let on_the_line = |argument: &&clap::Arg| {
        let source = matches.value_source(argument.get_id().as_str());
        decides(argument) && source == Some(clap::parser::ValueSource::CommandLine)
    };
    let text = |argument: &clap::Arg| {
        let flag = format!("--{}", argument.get_long().unwrap_or_default());
        let values = matches.get_raw(argument.get_id().as_str()).into_iter().flatten();
        let values = values.filter(|_| argument.get_action().takes_values());
        let values: Vec<String> = values.map(|value| format!("{flag}={}", value.to_string_lossy())).collect();
        if values.is_empty() { vec![flag] } else { values }
    };
    command.get_arguments().filter(on_the_line).flat_map(text).collect()
}

/// Writes `-tp N`, `-tp=N`, `-dp`, `-pp` and `-ep` as their long forms, and gives `--fail-on-regression` its value
/// only where a number follows; what comes after `--` is left alone.
fn expand(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut expanded = Vec::new();
    let mut arguments = arguments.peekable();
    while let Some(argument) = arguments.next() {
        if argument == "--" {
            expanded.push(argument);
            expanded.extend(arguments);
            break;
        }
        if argument == "--fail-on-regression" {
            let number = arguments.next_if(|next| next.parse::<f64>().is_ok());
            expanded.push(number.map_or_else(|| argument.clone(), |number| format!("{argument}={number}")));
            continue;
        }
        let (flag, value) = match argument.split_once('=') {
            Some((flag, value)) => (flag, Some(value)),
            None => (argument.as_str(), None),
        };
        let long = match flag {
            "-tp" => "--tensor-parallel-size",
            "-dp" => "--data-parallel-size",
            "-pp" => "--pipeline-parallel-size",
            "-ep" => "--enable-expert-parallel",
            _ => {
                expanded.push(argument);
                continue;
            }
        };
        expanded.push(value.map_or_else(|| long.to_owned(), |value| format!("{long}={value}")));
    }
    expanded
}

#[cfg(test)]
mod tests;
