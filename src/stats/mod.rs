//! Statistics of replays: what one case's times amount to.

pub mod verdict;

use serde::{Deserialize, Serialize};

use crate::units::Nanos;

/// A case's times, as `vllm bench forward` names them; every figure in microseconds except the spread.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct Latency {
    /// What the times were read from.
    pub timer: String,
    /// Median of all replays.
    pub median: f64,
    /// (max − min of the samples' medians) / median, in percent.
    pub sample_spread_pct: f64,
    /// Mean of all replays.
    pub mean: f64,
    /// Standard deviation of all replays (population).
    pub std: f64,
    /// Fastest replay.
    pub min: f64,
    /// 90th percentile, linearly interpolated.
    pub p90: f64,
    /// Number of replays.
    pub count: usize,
    /// Every replay in order.
    pub samples_us: Vec<f64>,
}

impl Latency {
    /// Summarises replays, of which `iters` consecutive ones are a sample.
    ///
    /// # Panics
    /// If there is no replay; a case is always replayed at least once.
    #[must_use]
    pub fn of(timer: &str, replays: &[Nanos], iters: usize) -> Self {
        assert!(!replays.is_empty(), "a case without replays has no statistics");
        let micros: Vec<f64> = replays.iter().map(|time| time.micros()).collect();
        let sorted = sorted(&micros);
        let median = quantile(&sorted, 0.5);
        let mean = micros.iter().sum::<f64>() / micros.len() as f64;
        let variance = micros.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / micros.len() as f64;
        Self {
            timer: timer.to_owned(),
            median,
            sample_spread_pct: spread_pct(&micros, iters, median),
            mean,
            std: variance.sqrt(),
            min: sorted[0],
            p90: quantile(&sorted, 0.9),
            count: micros.len(),
            samples_us: micros,
        }
    }
}

/// The median of `values`; `None` if there are none.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    if values.is_empty() { None } else { Some(quantile(&sorted(values), 0.5)) }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// The `q`-quantile of ascending values, linearly interpolated between neighbours (NumPy's default, R's type 7).
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

fn spread_pct(micros: &[f64], iters: usize, all: f64) -> f64 {
    let medians = micros.chunks(iters.max(1)).filter_map(median);
    let (min, max) = medians.fold((f64::MAX, f64::MIN), |(min, max), m| (min.min(m), max.max(m)));
    if all > 0.0 { (max - min) / all * 100.0 } else { 0.0 }
}

/// How far two outputs lie apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// The largest absolute difference of two elements.
    pub max_abs: f64,
    /// Root of the mean squared difference over the root mean square of the reference.
    pub relative_rms: f64,
}

impl Difference {
    /// Of `out` from `reference`. Outputs of unlike length, or a NaN in one of them, differ by infinity.
    #[must_use]
    pub fn between(out: &[f32], reference: &[f32]) -> Self {
        if out.len() != reference.len() {
            return Self { max_abs: f64::INFINITY, relative_rms: f64::INFINITY };
        }
        let (mut max_abs, mut error, mut norm) = (0.0_f64, 0.0_f64, 0.0_f64);
        for (&a, &b) in out.iter().zip(reference) {
            let difference = (f64::from(a) - f64::from(b)).abs();
            let difference =
                if difference.is_nan() && a.to_bits() != b.to_bits() { f64::INFINITY } else { difference };
            max_abs = max_abs.max(difference);
            error += if difference.is_nan() { 0.0 } else { difference * difference };
            norm += f64::from(b).powi(2);
        }
        let relative_rms = if error == 0.0 { 0.0 } else { (error / norm).sqrt() };
        Self { max_abs, relative_rms }
    }

    /// Whether the outputs are the same, bit for bit in value.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.max_abs == 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nanos(micros: &[f64]) -> Vec<Nanos> {
        micros.iter().map(|us| Nanos(us * 1e3)).collect()
    }

    // Expected values from NumPy 2: np.median, np.percentile(x, 90), np.std(x), np.mean(x).
    #[test]
    fn figures_are_numpys() {
        let latency = Latency::of("test", &nanos(&[3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.5]), 5);
        assert_eq!(latency.median, 3.75);
        assert!((latency.p90 - 6.3).abs() < 1e-12);
        assert!((latency.std - 2.328_626_204_432_1).abs() < 1e-9, "{}", latency.std);
        assert_eq!(latency.mean, 3.95);
        assert_eq!((latency.min, latency.count), (1.0, 10));
    }

    #[test]
    fn spread_is_between_the_medians_of_samples() {
        let latency = Latency::of("test", &nanos(&[10.0, 10.0, 90.0, 11.0, 11.0, 11.0]), 3);
        assert!((latency.sample_spread_pct - 1.0 / 11.0 * 100.0).abs() < 1e-9);
    }

    #[test]
    fn one_replay_is_its_own_median() {
        let latency = Latency::of("test", &nanos(&[7.0]), 20);
        assert_eq!((latency.median, latency.p90, latency.sample_spread_pct), (7.0, 7.0, 0.0));
    }

    #[test]
    fn differences_are_relative_to_the_reference() {
        let difference = Difference::between(&[1.0, 2.0], &[1.0, 1.0]);
        assert_eq!(difference.max_abs, 1.0);
        assert!((difference.relative_rms - (0.5_f64).sqrt()).abs() < 1e-12);
        assert!(Difference::between(&[1.0], &[1.0]).is_zero());
        assert!(Difference::between(&[f32::NAN], &[1.0]).max_abs.is_infinite());
        assert!(Difference::between(&[1.0], &[1.0, 2.0]).relative_rms.is_infinite());
    }
}
