//! The change between two sides with its interval, on logarithms of medians.
//!
//! The unit of replication is the process-level run: replays of one process share its memory layout, its clocks and its
//! neighbours, so however many there are, they say nothing of what the next process will do.

use statrs::distribution::{ContinuousCDF, StudentsT};

use super::replays::{BLOCKS, Figure};
use super::{MEASURED_RUNS, Run, Sides};

/// A change between two sides.
#[derive(Debug, Clone, Copy)]
pub(super) struct Estimate {
    /// Logarithm of new over old.
    pub log_change: f64,
    /// Half of the interval, as a logarithm.
    pub half_width: f64,
    /// What two sides of the same code may differ by, in percent.
    pub noise_pct: f64,
    /// Runs that were used of the old and the new side.
    pub runs: (usize, usize),
}

/// A logarithm's change in percent.
pub(super) fn percent(log: f64) -> f64 {
    log.exp_m1() * 100.0
}

/// The sample variance; NaN of fewer than two values.
pub(super) fn variance(values: &[f64]) -> f64 {
    let mean = mean(values);
    values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (values.len() as f64 - 1.0)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// One process-level run over all cases: the mean of their figures.
struct Process {
    log: f64,
    /// The cases' variances as they enter that of `log`; none if a case has none.
    parts: Option<Vec<f64>>,
}

/// Compares two sides by what `replays` takes of a run. `None` if a side has no run of which it takes any in every case.
pub(super) fn between(
    cases: &[Sides<'_>],
    floor_pct: f64,
    replays: impl Fn(&Run) -> Option<Vec<f64>>,
) -> Option<Estimate> {
    let old = processes(&cases.iter().map(|sides| sides.old).collect::<Vec<_>>(), &replays)?;
    let new = processes(&cases.iter().map(|sides| sides.new).collect::<Vec<_>>(), &replays)?;
    let logs = |side: &[Process]| side.iter().map(|process| process.log).collect::<Vec<f64>>();
    let (old_logs, new_logs) = (logs(&old), logs(&new));
    // Two degrees of freedom are needed for an interval that is of any use: with one, it is 64 standard errors.
    let half_width = if old.len() + new.len() >= 4 {
        across_runs(&old_logs, &new_logs)
    } else {
        within_runs(&old, &new).unwrap_or((floor_pct / 100.0).ln_1p())
    };
    let measured = old.len().min(new.len()) >= MEASURED_RUNS;
    let noise_pct = if measured { percent(half_width) } else { percent(half_width).max(floor_pct) };
    let log_change = mean(&new_logs) - mean(&old_logs);
    Some(Estimate { log_change, half_width, noise_pct, runs: (old.len(), new.len()) })
}

/// A side's runs over all cases, the n-th runs of the cases together; those that cannot be used in every case are left out.
fn processes(cases: &[&[Run]], replays: impl Fn(&Run) -> Option<Vec<f64>>) -> Option<Vec<Process>> {
    let runs = cases.iter().map(|runs| runs.len()).min()?;
    let figures = |run: usize| -> Option<Vec<Figure>> {
        cases.iter().map(|runs| Figure::of(&replays(&runs[run])?)).collect()
    };
    let processes: Vec<Process> = (0..runs).filter_map(figures).map(|figures| process(&figures)).collect();
    (!processes.is_empty()).then_some(processes)
}

fn process(figures: &[Figure]) -> Process {
    let cases = figures.len() as f64;
    let logs: Vec<f64> = figures.iter().map(|figure| figure.log).collect();
    let part = |figure: &Figure| figure.variance.map(|variance| variance / (cases * cases));
    Process { log: mean(&logs), parts: figures.iter().map(part).collect() }
}

/// How sure an interval of so many runs in all is. 99 % would do for runs that scatter normally; with more than ten it is
/// 99.5 %, as for runs on two equally frequent levels a 99 % interval errs in up to 1.9 % of comparisons of the same code, a
/// 99.5 % one in at most 0.94 % (all numbers of runs from 5 to 40 were enumerated). Five a side err in 0.2 % there at 99 %.
fn confidence(runs: usize) -> f64 {
    if runs <= 2 * MEASURED_RUNS { 0.99 } else { 0.995 }
}

/// Half of Student's interval, pooled; from [`MEASURED_RUNS`] a side on the wider one of that and Welch's, as the former errs
/// where the sides scatter unlike, the latter where the side with fewer runs happens to scatter little.
fn across_runs(old: &[f64], new: &[f64]) -> f64 {
    let (runs, confidence) = ((old.len() as f64, new.len() as f64), confidence(old.len() + new.len()));
    // Of one run the variance is 0 / 0; it has no part in the sum.
    let squares =
        |side: &[f64]| if side.len() > 1 { variance(side) * (side.len() as f64 - 1.0) } else { 0.0 };
    let freedom = runs.0 + runs.1 - 2.0;
    let pooled = (squares(old) + squares(new)) / freedom * (1.0 / runs.0 + 1.0 / runs.1);
    let pooled = pooled.sqrt() * student(confidence, freedom);
    if old.len().min(new.len()) < MEASURED_RUNS {
        return pooled;
    }
    let parts = [(variance(old) / runs.0, runs.0 - 1.0), (variance(new) / runs.1, runs.1 - 1.0)];
    pooled.max(welch(&parts, confidence))
}

/// Half of the interval that the blocks within the runs give; `None` if a run has too few replays for blocks.
fn within_runs(old: &[Process], new: &[Process]) -> Option<f64> {
    let mut parts = Vec::new();
    for side in [old, new] {
        for process in side {
            let weight = 1.0 / (side.len() as f64).powi(2);
            parts.extend(process.parts.as_ref()?.iter().map(|part| (part * weight, BLOCKS as f64 - 1.0)));
        }
    }
    Some(welch(&parts, 0.995))
}

/// Half of the interval of a sum of independent estimates, each with its variance and degrees of freedom
/// (Welch, *Biometrika* 34, 1947; Satterthwaite, *Biometrics Bulletin* 2, 1946).
fn welch(parts: &[(f64, f64)], confidence: f64) -> f64 {
    let variance: f64 = parts.iter().map(|(variance, _)| variance).sum();
    let spent: f64 = parts.iter().map(|(variance, freedom)| variance * variance / freedom).sum();
    if spent > 0.0 { variance.sqrt() * student(confidence, variance * variance / spent) } else { 0.0 }
}

/// How many standard errors a two-sided interval of Student's t reaches.
fn student(confidence: f64, freedom: f64) -> f64 {
    // Freedom is 2 or more wherever this is called, and finite; if it ever were not, nothing could be told.
    StudentsT::new(0.0, 1.0, freedom).map_or(f64::INFINITY, |t| t.inverse_cdf(0.5 + confidence / 2.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    // SciPy 1.17.1: scipy.stats.t.ppf(0.5 + confidence / 2, freedom)
    const QUANTILES: [(f64, f64, f64); 8] = [
        (0.99, 2.0, 9.924843200918287),
        (0.99, 5.5, 3.8499114660010356),
        (0.99, 8.0, 3.355387331333395),
        (0.99, 9.37, 3.2176212856733337),
        (0.99, 38.0, 2.7115576019130825),
        (0.995, 3.0, 7.453318505150679),
        (0.995, 12.0, 3.428444242292264),
        (0.995, 500.25, 2.8195414963923886),
    ];

    #[test]
    fn quantiles_are_scipys() {
        for (confidence, freedom, expected) in QUANTILES {
            let found = student(confidence, freedom);
            assert!((found / expected - 1.0).abs() < 1e-9, "{confidence} {freedom}: {found} for {expected}");
        }
    }
}
