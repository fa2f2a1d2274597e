//! The flags that are passed on to Criterion.

use serde::{Deserialize, Serialize};

use super::HEADINGS;

/// The flags that Criterion knows, with its names, values and conflicts.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = HEADINGS[4])]
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
