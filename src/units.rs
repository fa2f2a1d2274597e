//! Quantities with their unit in the type: no bare number of time, bytes, tokens or work crosses a module.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

/// Time in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct Nanos(pub f64);

/// An amount of memory or traffic in bytes. 128 bits, so that no product of user-given lengths can overflow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Bytes(pub u128);

/// Floating point operations (a multiply-add is two).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Flops(pub u128);

/// A number of query tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tokens(pub u64);

impl Nanos {
    /// The same time in microseconds.
    #[must_use]
    pub fn micros(self) -> f64 {
        self.0 / 1e3
    }

    /// The same time in seconds.
    #[must_use]
    pub fn seconds(self) -> f64 {
        self.0 / 1e9
    }
}

impl From<std::time::Duration> for Nanos {
    fn from(duration: std::time::Duration) -> Self {
        Self(duration.as_nanos() as f64)
    }
}

macro_rules! additive {
    ($($unit:ident),*) => {$(
        impl Add for $unit {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl AddAssign for $unit {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl Sum for $unit {
            fn sum<I: Iterator<Item = Self>>(values: I) -> Self {
                values.fold(Self::default(), Add::add)
            }
        }
    )*};
}
additive!(Nanos, Bytes, Flops, Tokens);

/// `value` with three significant digits or more and the largest prefix that keeps it at 1 or above.
fn scaled(value: f64, steps: &[(f64, &str)]) -> String {
    let &(divisor, unit) =
        steps.iter().rev().find(|(divisor, _)| value.abs() >= *divisor).unwrap_or(&steps[0]);
    let value = value / divisor;
    let digits = if value.abs() < 10.0 { 3 } else { usize::from(value.abs() < 1000.0) };
    format!("{value:.digits$} {unit}")
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&scaled(self.0, &[(1.0, "ns"), (1e3, "µs"), (1e6, "ms"), (1e9, "s")]))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.0 as f64;
        f.pad(&scaled(
            value,
            &[(1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"), (1e15, "PB")],
        ))
    }
}

impl fmt::Display for Flops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.0 as f64;
        let steps =
            [(1.0, "FLOP"), (1e3, "kFLOP"), (1e6, "MFLOP"), (1e9, "GFLOP"), (1e12, "TFLOP"), (1e15, "PFLOP")];
        f.pad(&scaled(value, &steps))
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantity_prints_with_the_prefix_that_keeps_it_above_one() {
        assert_eq!(Nanos(0.5).to_string(), "0.500 ns");
        assert_eq!(Nanos(1_234.0).to_string(), "1.234 µs");
        assert_eq!(Nanos(43_210_000.0).to_string(), "43.2 ms");
        assert_eq!(Bytes(512_000_000).to_string(), "512.0 MB");
        assert_eq!(Flops(u128::from(u64::MAX)).to_string(), "18447 PFLOP");
        assert_eq!(format!("{:>9}", Bytes(1)), "  1.000 B");
    }
}
