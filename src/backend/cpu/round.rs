//! Rounding to the step's numeric type. Values are held and computed in float32 all the same.

use crate::backend::Dtype;

/// Rounds values to a [`Dtype`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Rounding(pub Dtype);

impl Rounding {
    /// The rounding as a function; none for float32.
    pub(super) fn function(self) -> Option<fn(f32) -> f32> {
        match self.0 {
            Dtype::Float32 => None,
            Dtype::Bfloat16 => Some(|x| half::bf16::from_f32(x).to_f32()),
            Dtype::Float16 => Some(|x| half::f16::from_f32(x).to_f32()),
        }
    }

    /// The nearest value of the type, ties to even.
    #[inline]
    pub(super) fn round(self, x: f32) -> f32 {
        self.function().map_or(x, |round| round(x))
    }
}
