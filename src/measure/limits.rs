//! What surrounds a case's times: the device's ceilings, the floors that follow, and what its sensors said.

use serde::{Deserialize, Serialize};

use crate::backend::{GemmRate, Telemetry};
use crate::units::{Bytes, Flops, Nanos};

/// The ceilings that a device showed in this process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Bytes a second of a large read.
    pub read_bytes_per_second: f64,
    /// Rates of a large matrix product: one, or two directly before and after a case whose floor they decide.
    pub gemm: Vec<GemmRate>,
}

/// Rates before and after a case that differ by more than this are both shown.
const ALIKE: f64 = 0.03;

impl Measured {
    /// The mean rate of the products, in floating point operations a second.
    #[must_use]
    pub fn gemm_flops_per_second(&self) -> f64 {
        self.gemm.iter().map(|rate| rate.flops_per_second).sum::<f64>() / self.gemm.len().max(1) as f64
    }

    /// The rates of the products in TFLOP/s, where they are not alike.
    #[must_use]
    pub fn unlike(&self) -> Option<(f64, f64)> {
        let &[before, after] = self.gemm.as_slice() else { return None };
        let (before, after) = (before.flops_per_second, after.flops_per_second);
        let apart = (before - after).abs() > ALIKE * self.gemm_flops_per_second();
        apart.then_some((before / 1e12, after / 1e12))
    }
}

/// The least times of a case, and what they follow from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Floors {
    /// If reading and computing overlapped over the whole step, in microseconds.
    pub floor_us: f64,
    /// If they overlapped within an operation but operations followed each other, in microseconds.
    pub serial_floor_us: f64,
    /// The ceilings.
    pub ceilings: Measured,
    /// What a forward must read, in bytes; zero in files from before this was kept.
    #[serde(default)]
    pub bytes: f64,
    /// What a forward must compute, in floating point operations; zero in files from before this was kept.
    #[serde(default)]
    pub flops: f64,
}

impl Floors {
    /// From the floors of the model's cost, and what they follow from.
    #[must_use]
    pub fn new(
        (floor, serial_floor): (Nanos, Nanos),
        (bytes, flops): (Bytes, Flops),
        ceilings: Measured,
    ) -> Self {
        Self {
            floor_us: floor.micros(),
            serial_floor_us: serial_floor.micros(),
            ceilings,
            bytes: bytes.0 as f64,
            flops: flops.0 as f64,
        }
    }
}

/// What is kept of a case beside its times.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Surroundings {
    /// Hash of the device's kernels.
    pub kernels: Option<String>,
    /// The device's sensors, directly after the timed replays.
    pub telemetry: Option<Telemetry>,
    /// The case's floors.
    pub floors: Option<Floors>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(tera: f64) -> GemmRate {
        GemmRate { flops_per_second: tera * 1e12, clock_mhz: None }
    }

    #[test]
    fn rates_that_are_alike_are_averaged_in_silence() {
        let measured = |gemm: Vec<GemmRate>| Measured { read_bytes_per_second: 4e12, gemm };
        assert_eq!(measured(vec![rate(700.0), rate(710.0)]).unlike(), None);
        assert_eq!(measured(vec![rate(700.0), rate(800.0)]).unlike(), Some((700.0, 800.0)));
        assert_eq!(measured(vec![rate(700.0), rate(800.0)]).gemm_flops_per_second(), 7.5e14);
        assert_eq!(measured(vec![rate(700.0)]).unlike(), None);
    }
}
