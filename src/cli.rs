//! The command line: our flags and Criterion's in one `--help`.

use std::path::PathBuf;

use clap::Parser;
use serde::{Deserialize, Serialize};

use crate::backend::KvInit;

const HEADINGS: [&str; 4] = ["Cases", "Model", "Measurement", "Criterion"];

/// Times the forward pass of a language model on exact batch shapes, and compares the times with saved baselines.
#[derive(Debug, Clone, Parser, Serialize, Deserialize)]
#[command(
    name = "cargo bench --",
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

    /// Time this case: NAME=REQS or REQS, REQS a comma list of [N*]Q[@K][c][:D]; repeatable
    #[arg(long, value_name = "CASE", help_heading = HEADINGS[0])]
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

    /// Preset, or a Hugging Face model folder [default: the file's, else smollm2-135m on the CPU]
    #[arg(long, value_name = "NAME|DIR", help_heading = HEADINGS[1])]
    pub model: Option<String>,
    /// JSON object that is merged over the model's config.json
    #[arg(long, value_name = "JSON", help_heading = HEADINGS[1])]
    pub hf_overrides: Option<String>,
    /// Where weights come from: made up from the seed, or the model folder's safetensors
    #[arg(long, value_enum, default_value_t = LoadFormat::Dummy, help_heading = HEADINGS[1])]
    pub load_format: LoadFormat,
    /// Type of weights and KV; the CPU rounds to it and computes in float32 [auto: float32 on the CPU]
    #[arg(long, value_enum, default_value_t = DtypeArg::Auto, help_heading = HEADINGS[1])]
    pub dtype: DtypeArg,
    /// Device kind
    #[arg(long, value_enum, default_value_t = BackendArg::Auto, help_heading = HEADINGS[1])]
    pub backend: BackendArg,
    /// What KV blocks hold before a step
    #[arg(long, value_enum, default_value_t = KvInit::Random, help_heading = HEADINGS[1])]
    pub kv_init: KvInit,
    /// How tokens choose experts; dense models have none, so only `auto` is taken
    #[arg(long, value_name = "ROUTING", help_heading = HEADINGS[1])]
    pub routing: Option<String>,
    /// Tokens in a KV block
    #[arg(long, value_name = "TOKENS", default_value_t = 16, help_heading = HEADINGS[1])]
    pub block_size: u32,
    /// Memory of the KV pool in bytes; suffixes K, M, G (powers of 1024) are understood
    #[arg(long, value_name = "BYTES", default_value = "1G", help_heading = HEADINGS[1])]
    pub kv_cache_memory_bytes: String,
    /// Longest request in tokens [default: the model's]
    #[arg(long, value_name = "TOKENS", help_heading = HEADINGS[1])]
    pub max_model_len: Option<u32>,
    /// Most query tokens in a step
    #[arg(long, value_name = "TOKENS", default_value_t = 16384, help_heading = HEADINGS[1])]
    pub max_num_batched_tokens: u32,
    /// Most requests in a step
    #[arg(long, value_name = "REQUESTS", default_value_t = 1024, help_heading = HEADINGS[1])]
    pub max_num_seqs: u32,
    /// Compare a checkpoint's forward with hidden states computed elsewhere (input_ids, hidden), then exit
    #[arg(long, value_name = "FILE", help_heading = HEADINGS[1])]
    pub verify: Option<PathBuf>,
    /// Largest relative RMS of a row that --verify accepts
    #[arg(long, value_name = "RMS", default_value_t = 1e-5, help_heading = HEADINGS[1])]
    pub verify_tolerance: f64,
    /// Number of tensor-parallel ranks; this version runs one (short: -tp)
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = HEADINGS[1])]
    pub tensor_parallel_size: u32,
    /// Number of data-parallel ranks; this version runs one (short: -dp)
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = HEADINGS[1])]
    pub data_parallel_size: u32,
    /// Number of pipeline stages; this version runs one (short: -pp)
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = HEADINGS[1])]
    pub pipeline_parallel_size: u32,
    /// Spread experts over the ranks; this version runs one rank (short: -ep)
    #[arg(long, help_heading = HEADINGS[1])]
    pub enable_expert_parallel: bool,

    /// Replays in a sample
    #[arg(long, value_name = "N", default_value_t = 20, help_heading = HEADINGS[2])]
    pub iters: u32,
    /// Samples of a case
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = HEADINGS[2])]
    pub samples: u32,
    /// Write all results to this file
    #[arg(long, value_name = "FILE", help_heading = HEADINGS[2])]
    pub output_json: Option<PathBuf>,
    /// Compare with a baseline although this differs: backend, device, dtype, model, layout or draws; repeatable
    #[arg(long, value_enum, value_name = "FIELD", value_delimiter = ',', help_heading = HEADINGS[2])]
    pub allow_mismatch: Vec<Field>,
    /// Exit 1 if a case's median is slower than its baseline by more than this many percent [default: 5]
    #[arg(long, value_name = "PCT", num_args = 0..=1, require_equals = true,
          default_missing_value = "5", help_heading = HEADINGS[2])]
    pub fail_on_regression: Option<f64>,

    #[command(flatten)]
    pub criterion: CriterionArgs,
}

/// The flags that Criterion knows, with its names, values and conflicts.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = HEADINGS[3])]
pub struct CriterionArgs {
    /// Save the results as this baseline; @HEAD is the commit
    #[arg(short = 's', long, value_name = "NAME")]
    pub save_baseline: Option<String>,
    /// Compare with this baseline; it must exist for every case; @REV is a commit
    #[arg(short = 'b', long, value_name = "NAME", conflicts_with_all = ["save_baseline", "baseline_lenient"])]
    pub baseline: Option<String>,
    /// Compare with this baseline where it exists
    #[arg(long, value_name = "NAME", conflicts_with = "save_baseline")]
    pub baseline_lenient: Option<String>,
    /// Compare a saved baseline with --baseline, without measuring
    #[arg(long, value_name = "NAME", requires = "baseline", conflicts_with = "profile_time")]
    pub load_baseline: Option<String>,
    /// Save no results
    #[arg(long, conflicts_with_all = ["save_baseline", "baseline", "baseline_lenient"])]
    pub discard_baseline: bool,
    /// List the benchmarks
    #[arg(long, conflicts_with_all = ["test", "profile_time"])]
    pub list: bool,
    /// Format of --list
    #[arg(long, value_parser = ["pretty", "terse"], default_value = "pretty")]
    pub format: String,
    /// Take FILTER as a whole id rather than a regular expression
    #[arg(long)]
    pub exact: bool,
    /// Run or list ignored benchmarks; there are none
    #[arg(long)]
    pub ignored: bool,
    /// Run each case for this many seconds without analysis, for a profiler
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["test", "list"])]
    pub profile_time: Option<f64>,
    /// Criterion samples of a case [default: 10, or --samples if that is more]
    #[arg(long, value_name = "N")]
    pub sample_size: Option<usize>,
    /// Criterion's own warm-up of a case in seconds, after ours [default: 0.5]
    #[arg(long, value_name = "SECONDS")]
    pub warm_up_time: Option<f64>,
    /// Time of a case's measurement in seconds [default: what iters × samples replays need]
    #[arg(long, value_name = "SECONDS")]
    pub measurement_time: Option<f64>,
    /// Bootstrap resamples [default: 100000]
    #[arg(long, value_name = "N")]
    pub nresamples: Option<usize>,
    /// Relative change that counts as noise [default: 0.01]
    #[arg(long, value_name = "FRACTION")]
    pub noise_threshold: Option<f64>,
    /// Level of confidence intervals [default: 0.95]
    #[arg(long, value_name = "LEVEL")]
    pub confidence_level: Option<f64>,
    /// Significance level of the comparison [default: 0.05]
    #[arg(long, value_name = "LEVEL")]
    pub significance_level: Option<f64>,
    /// Stop as soon as the significance level is reached
    #[arg(long, conflicts_with = "sample_size")]
    pub quick: bool,
    /// Run each case once, without measuring
    #[arg(long, conflicts_with_all = ["list", "profile_time"])]
    pub test: bool,
    /// Measure; cargo bench adds this
    #[arg(long)]
    pub bench: bool,
    /// Colours of the output
    #[arg(short = 'c', long, alias = "colour", value_parser = ["auto", "always", "never"], default_value = "auto")]
    pub color: String,
    /// Print more statistics
    #[arg(short = 'v', long)]
    pub verbose: bool,
    /// Print results only
    #[arg(long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Draw no plots and write no HTML
    #[arg(short = 'n', long)]
    pub noplot: bool,
    /// What draws the plots
    #[arg(long, value_parser = ["gnuplot", "plotters"])]
    pub plotting_backend: Option<String>,
    /// Format of the output
    #[arg(long, value_parser = ["criterion", "bencher"], default_value = "criterion")]
    pub output_format: String,
    /// Taken for libtest's sake
    #[arg(long, hide = true)]
    pub nocapture: bool,
    /// Taken for libtest's sake
    #[arg(long, hide = true)]
    pub show_output: bool,
    /// Taken for libtest's sake
    #[arg(long, hide = true)]
    pub include_ignored: bool,
}

const AFTER_HELP: &str = "\
Examples:
  cargo bench -- decode                            every case of the group decode
  cargo bench -- decode --save-baseline @HEAD      keep the times under the commit's name
  cargo bench -- decode --baseline 1a2b3c4d5e6f    compare with another commit's
  cargo bench -- --model qwen3-0.6b --case decode=8*1@512

Exit status: 0 fine, 1 a regression that was asked to be fatal, 2 bad usage or a bad file, 3 a case could
not run or failed a check.";

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
    /// This machine's processor.
    Cpu,
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
    #[must_use]
    pub fn from_command_line(arguments: impl Iterator<Item = String>) -> Self {
        let mut cli = Self::parse_from(expand(arguments));
        if under_a_launcher() && !cli.criterion.test && !cli.criterion.list {
            cli.criterion.bench = true;
        }
        cli
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

impl CriterionArgs {
    /// These flags and the filter as Criterion's own command line takes them.
    #[must_use]
    pub fn to_arguments(&self, filter: Option<&str>) -> Vec<String> {
        let mut arguments = Vec::new();
        let switches = [
            ("--discard-baseline", self.discard_baseline),
            ("--list", self.list),
            ("--exact", self.exact),
            ("--ignored", self.ignored),
            ("--quick", self.quick),
            ("--test", self.test),
            ("--bench", self.bench),
            ("--verbose", self.verbose),
            ("--quiet", self.quiet),
            ("--noplot", self.noplot),
        ];
        arguments.extend(switches.iter().filter(|(_, on)| *on).map(|(flag, _)| (*flag).to_owned()));
        let number = |value: Option<f64>| value.map(|value| value.to_string());
        let count = |value: Option<usize>| value.map(|value| value.to_string());
        let values = [
            ("save-baseline", self.save_baseline.clone()),
            ("baseline", self.baseline.clone()),
            ("baseline-lenient", self.baseline_lenient.clone()),
            ("load-baseline", self.load_baseline.clone()),
            ("format", Some(self.format.clone())),
            ("profile-time", number(self.profile_time)),
            ("sample-size", count(self.sample_size)),
            ("warm-up-time", number(self.warm_up_time)),
            ("measurement-time", number(self.measurement_time)),
            ("nresamples", count(self.nresamples)),
            ("noise-threshold", number(self.noise_threshold)),
            ("confidence-level", number(self.confidence_level)),
            ("significance-level", number(self.significance_level)),
            ("color", Some(self.color.clone())),
            ("plotting-backend", self.plotting_backend.clone()),
            ("output-format", Some(self.output_format.clone())),
        ];
        let given = values.into_iter().filter_map(|(flag, value)| Some(format!("--{flag}={}", value?)));
        arguments.extend(given);
        if let Some(filter) = filter {
            arguments.extend(["--".to_owned(), filter.to_owned()]);
        }
        arguments
    }
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
            expanded.push(format!("{argument}={}", number.as_deref().unwrap_or("5")));
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

/// Whether torchrun, a Slurm step or Open MPI started this process: none of them adds `--bench`.
fn under_a_launcher() -> bool {
    ["RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_RANK"]
        .iter()
        .any(|variable| std::env::var_os(variable).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn expanded(line: &str) -> String {
        expand(line.split(' ').map(str::to_owned)).join(" ")
    }

    fn parse(line: &str) -> Cli {
        Cli::parse_from(expand(
            format!("bench {line}").split(' ').filter(|w| !w.is_empty()).map(str::to_owned),
        ))
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn short_layout_flags_become_long() {
        assert_eq!(expanded("b -tp 2 -dp=4"), "b --tensor-parallel-size 2 --data-parallel-size=4");
        assert_eq!(expanded("b -pp 1 -ep"), "b --pipeline-parallel-size 1 --enable-expert-parallel");
        assert_eq!(expanded("b -- -tp"), "b -- -tp");
        assert_eq!(parse("-tp 2").tensor_parallel_size, 2);
    }

    #[test]
    fn an_optional_percentage_does_not_swallow_the_filter() {
        let cli = parse("--fail-on-regression decode");
        assert_eq!((cli.fail_on_regression, cli.filter.as_deref()), (Some(5.0), Some("decode")));
        let cli = parse("--fail-on-regression 2.5 decode");
        assert_eq!((cli.fail_on_regression, cli.filter.as_deref()), (Some(2.5), Some("decode")));
    }

    #[test]
    fn optional_values_come_after_an_equals_sign_only() {
        let cli = parse("--plan decode");
        assert_eq!((cli.plan, cli.filter.as_deref()), (Some(PlanFormat::Table), Some("decode")));
        assert_eq!(parse("--plan=json").plan, Some(PlanFormat::Json));
    }

    #[test]
    fn modes_are_criterions() {
        assert_eq!(parse("").mode(), Mode::Test);
        assert_eq!(parse("--bench").mode(), Mode::Measure);
        assert_eq!(parse("--bench --test").mode(), Mode::Test);
        assert_eq!(parse("--bench --list").mode(), Mode::List);
        assert_eq!(parse("--bench --profile-time 1").mode(), Mode::Profile);
        assert_eq!(parse("--bench --load-baseline a --baseline b").mode(), Mode::Load);
    }

    #[test]
    fn baselines_that_are_saved_and_compared() {
        assert_eq!(parse("--bench").saved_baseline(), Some("base"));
        assert_eq!(parse("--bench --save-baseline a").saved_baseline(), Some("a"));
        assert_eq!(parse("--bench --baseline a").saved_baseline(), None);
        assert_eq!(parse("--bench --baseline a").compared_baseline(), ("a", true));
        assert_eq!(parse("--bench --baseline-lenient a").compared_baseline(), ("a", false));
        assert_eq!(parse("--bench --discard-baseline").saved_baseline(), None);
    }

    #[test]
    fn criterion_gets_only_what_it_knows() {
        let cli = parse("--bench --iters 3 --save-baseline a --sample-size 12 x --model y");
        let arguments = cli.criterion.to_arguments(cli.filter.as_deref());
        assert_eq!(
            arguments.join(" "),
            "--bench --save-baseline=a --format=pretty --sample-size=12 --color=auto \
             --output-format=criterion -- x"
        );
    }
}
