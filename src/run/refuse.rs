//! Values on which Criterion would panic or stay silent, refused before anything runs.

use std::fmt::Display;

use crate::cli::{Cli, CriterionArgs};

/// Checks every flag's value; the error is one line that names the flag.
///
/// # Errors
/// The first value that cannot work.
pub fn check_values(cli: &Cli) -> Result<(), String> {
    check_criterion(&cli.criterion)?;
    let positive = [
        ("--iters", cli.iters),
        ("--samples", cli.samples),
        ("--max-num-batched-tokens", cli.max_num_batched_tokens),
        ("--max-num-seqs", cli.max_num_seqs),
        ("--max-model-len", cli.max_model_len.unwrap_or(1)),
    ];
    for (flag, value) in positive {
        require(flag, Some(value), |value| value > 0, "at least 1 is needed")?;
    }
    let replays = u64::from(cli.iters) * u64::from(cli.samples);
    require("--iters × --samples", Some(replays), |n| n <= 10_000_000, "at most 10000000 replays are kept")?;
    require(
        "--block-size",
        Some(cli.block_size),
        |size| (1..=4096).contains(&size),
        "1 to 4096 tokens are needed",
    )?;
    let is_jitter = |jitter| (0.0..1.0).contains(&jitter);
    require("--kv-len-jitter", cli.kv_len_jitter, is_jitter, "a fraction in [0, 1) is needed, such as 0.5")?;
    require("--verify-tolerance", Some(cli.verify_tolerance), is_positive, "a number above 0 is needed")?;
    let is_share = |share| share > 0.0 && share <= 1.0;
    require(
        "--gpu-memory-utilization",
        Some(cli.gpu_memory_utilization),
        is_share,
        "a fraction in (0, 1] is needed, such as 0.9",
    )?;
    let is_percentage = |percent: f64| (0.0..=1e9).contains(&percent);
    let flags = &cli.comparison;
    let percentages =
        [("--fail-on-regression", flags.fail_on_regression), ("--tolerance-pct", flags.tolerance_pct)];
    for (flag, value) in percentages {
        require(flag, value, is_percentage, "a percentage of 0 or more is needed")?;
    }
    require("--runs", flags.runs, |runs| (1..=1000).contains(&runs), "1 to 1000 processes are needed")?;
    check_layout(cli)
}

/// One line if there is a value that does not do.
fn require<T: Copy + Display>(
    flag: &str,
    value: Option<T>,
    does: impl Fn(T) -> bool,
    needed: &str,
) -> Result<(), String> {
    match value {
        Some(value) if !does(value) => Err(format!("{flag} {value}: {needed}")),
        _ => Ok(()),
    }
}

fn is_positive(value: f64) -> bool {
    value > 0.0 && value.is_finite()
}

/// Sizes that no layout has; whether a model divides over one is seen with the model.
fn check_layout(cli: &Cli) -> Result<(), String> {
    let sizes = [
        ("--tensor-parallel-size", cli.tensor_parallel_size),
        ("--data-parallel-size", cli.data_parallel_size),
    ];
    for (flag, size) in sizes {
        require(flag, Some(size), |size| (1..=1024).contains(&size), "1 to 1024 ranks are served")?;
    }
    let flag = "--pipeline-parallel-size";
    require(
        flag,
        Some(cli.pipeline_parallel_size),
        |n| n == 1,
        "this version has one stage; leave the flag out",
    )?;
    require("ranks", Some(cli.layout().ranks()), |n| n <= 4096, "at most 4096 are served; lower -tp or -dp")?;
    let several = cli.layout().ranks() > 1;
    if several && cli.verify.is_some() {
        return Err(
            "--verify holds one rank's forward against what is expected; leave -tp, -dp and -ep out".into()
        );
    }
    let is_first = |device| !several || device == 0;
    let each = "several ranks take one GPU each; choose them by CUDA_VISIBLE_DEVICES";
    require("--device", Some(cli.device), is_first, each)?;
    let flags = &cli.ranks;
    require("--nnodes", Some(flags.nnodes), |n| (1..=4096).contains(&n), "1 to 4096 hosts are served")?;
    let is_time = |seconds| (0.1..=1e6).contains(&seconds);
    let times = [("--connect-timeout", flags.connect_timeout), ("--prepare-timeout", flags.prepare_timeout)];
    for (flag, value) in times {
        require(flag, Some(value), is_time, "seconds from 0.1 to 1000000 are needed")?;
    }
    Ok(())
}

fn check_criterion(flags: &CriterionArgs) -> Result<(), String> {
    let is_size = |size| (10..=1_000_000).contains(&size);
    require("--sample-size", flags.sample_size, is_size, "Criterion takes 10 to 1000000 samples")?;
    let is_time = |seconds| (1e-9..=1e6).contains(&seconds);
    let times = [("--warm-up-time", flags.warm_up_time), ("--measurement-time", flags.measurement_time)];
    for (flag, value) in times {
        require(flag, value, is_time, "seconds above 0, at most 1000000, are needed")?;
    }
    let is_profile = |seconds| (1.0..=1e6).contains(&seconds);
    require("--profile-time", flags.profile_time, is_profile, "seconds from 1 to 1000000 are needed")?;
    let is_count = |count| (2..=10_000_000).contains(&count);
    require("--nresamples", flags.nresamples, is_count, "2 to 10000000 are needed")?;
    require("--noise-threshold", flags.noise_threshold, is_positive, "a number above 0 is needed")?;
    let levels =
        [("--confidence-level", flags.confidence_level), ("--significance-level", flags.significance_level)];
    for (flag, value) in levels {
        require(flag, value, |level| level > 0.0 && level < 1.0, "a number between 0 and 1 is needed")?;
    }
    if flags.plotting_backend.as_deref() == Some("gnuplot") && !gnuplot_is_there() {
        return Err("--plotting-backend gnuplot: there is no gnuplot; install it or use plotters".to_owned());
    }
    Ok(())
}

fn gnuplot_is_there() -> bool {
    std::process::Command::new("gnuplot")
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
}

/// A size in bytes, with an optional suffix K, M or G for powers of 1024.
///
/// # Errors
/// One line, if it is no such size.
pub fn bytes(flag: &str, text: &str) -> Result<u64, String> {
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 1 << 10),
        Some((at, 'M' | 'm')) => (&text[..at], 1 << 20),
        Some((at, 'G' | 'g')) => (&text[..at], 1 << 30),
        _ => (text, 1_u64),
    };
    let size = digits.parse::<u64>().ok().and_then(|size| size.checked_mul(factor)).filter(|size| *size > 0);
    size.ok_or_else(|| format!("{flag} {text:?}: a size in bytes is needed, such as 4096, 512M or 2G"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn refusal(line: &str) -> String {
        let cli = Cli::try_parse_from(format!("bench {line}").split(' ')).unwrap();
        check_values(&cli).expect_err(line)
    }

    #[test]
    fn every_value_that_criterion_asserts_on_is_refused_by_flag() {
        for line in [
            "--sample-size 9",
            "--warm-up-time 0",
            "--warm-up-time NaN",
            "--measurement-time 0",
            "--measurement-time 1e300",
            "--profile-time 0.5",
            "--nresamples 0",
            "--noise-threshold 0",
            "--confidence-level 1",
            "--significance-level 0",
            "--iters 0",
            "--samples 0",
            "--kv-len-jitter 1",
            "--kv-len-jitter NaN",
            "--tensor-parallel-size 0",
            "--tensor-parallel-size 2000",
            "--pipeline-parallel-size 2",
            "--device 1 --tensor-parallel-size 2",
            "--nnodes 0",
            "--connect-timeout 0",
            "--verify-tolerance 0",
            "--gpu-memory-utilization 1.5",
            "--fail-on-regression=-1",
        ] {
            let flag = line.split([' ', '=']).next().unwrap();
            assert!(refusal(line).starts_with(flag), "{line}: {}", refusal(line));
        }
    }

    #[test]
    fn sizes_have_binary_suffixes() {
        assert_eq!(bytes("--f", "4096"), Ok(4096));
        assert_eq!(bytes("--f", "2G"), Ok(2 << 30));
        for bad in ["", "G", "-1", "1.5G", "99999999999G", "0", "é"] {
            assert!(bytes("--f", bad).unwrap_err().contains("--f"), "{bad}");
        }
    }
}
