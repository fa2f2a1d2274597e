//! Values on which Criterion would panic or stay silent, refused before anything runs.

use crate::cli::{Cli, CriterionArgs};

/// Checks every flag's value; the error is one line that names the flag.
///
/// # Errors
/// The first value that cannot work.
pub fn check_values(cli: &Cli) -> Result<(), String> {
    check_criterion(&cli.criterion)?;
    let positive = [
        ("--iters", u64::from(cli.iters)),
        ("--samples", u64::from(cli.samples)),
        ("--block-size", u64::from(cli.block_size)),
        ("--max-num-batched-tokens", u64::from(cli.max_num_batched_tokens)),
        ("--max-num-seqs", u64::from(cli.max_num_seqs)),
        ("--max-model-len", u64::from(cli.max_model_len.unwrap_or(1))),
    ];
    for (flag, value) in positive {
        if value == 0 {
            return Err(format!("{flag} 0: at least 1 is needed"));
        }
    }
    let replays = u64::from(cli.iters) * u64::from(cli.samples);
    if replays > 10_000_000 {
        return Err(format!("--iters × --samples: {replays} replays; at most 10000000 are kept"));
    }
    if cli.block_size > 4096 {
        return Err(format!("--block-size {}: at most 4096", cli.block_size));
    }
    if let Some(jitter) = cli.kv_len_jitter {
        if !(0.0..1.0).contains(&jitter) {
            return Err(format!("--kv-len-jitter {jitter}: a fraction in [0, 1) is needed, such as 0.5"));
        }
    }
    if !(cli.verify_tolerance > 0.0 && cli.verify_tolerance.is_finite()) {
        return Err(format!("--verify-tolerance {}: a number above 0 is needed", cli.verify_tolerance));
    }
    if let Some(percent) = cli.fail_on_regression {
        if !(percent >= 0.0 && percent.is_finite()) {
            return Err(format!("--fail-on-regression {percent}: a percentage of 0 or more is needed"));
        }
    }
    check_layout(cli)
}

/// More than one rank is not built yet: say so rather than time something else.
fn check_layout(cli: &Cli) -> Result<(), String> {
    let sizes = [
        ("--tensor-parallel-size", cli.tensor_parallel_size),
        ("--data-parallel-size", cli.data_parallel_size),
        ("--pipeline-parallel-size", cli.pipeline_parallel_size),
    ];
    for (flag, size) in sizes {
        if size != 1 {
            return Err(format!("{flag} {size}: this version runs one rank; leave the flag out"));
        }
    }
    if cli.enable_expert_parallel {
        return Err("--enable-expert-parallel: this version runs one rank; leave the flag out".to_owned());
    }
    Ok(())
}

fn check_criterion(flags: &CriterionArgs) -> Result<(), String> {
    if let Some(size) = flags.sample_size {
        if !(10..=1_000_000).contains(&size) {
            return Err(format!("--sample-size {size}: Criterion takes 10 to 1000000 samples"));
        }
    }
    let seconds = [
        ("--warm-up-time", flags.warm_up_time, 1e-9),
        ("--measurement-time", flags.measurement_time, 1e-9),
        ("--profile-time", flags.profile_time, 1.0),
    ];
    for (flag, value, least) in seconds {
        if let Some(value) = value {
            if !(least..=1e6).contains(&value) {
                return Err(format!("{flag} {value}: seconds from {least} to 1000000 are needed"));
            }
        }
    }
    if let Some(resamples) = flags.nresamples {
        if !(1..=10_000_000).contains(&resamples) {
            return Err(format!("--nresamples {resamples}: 1 to 10000000 are needed"));
        }
    }
    if let Some(noise) = flags.noise_threshold {
        if !(noise > 0.0 && noise.is_finite()) {
            return Err(format!("--noise-threshold {noise}: a number above 0 is needed"));
        }
    }
    let levels =
        [("--confidence-level", flags.confidence_level), ("--significance-level", flags.significance_level)];
    for (flag, value) in levels {
        if let Some(value) = value {
            if !(value > 0.0 && value < 1.0) {
                return Err(format!("{flag} {value}: a number between 0 and 1 is needed"));
            }
        }
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
            "--tensor-parallel-size 2",
            "--enable-expert-parallel",
            "--verify-tolerance 0",
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
