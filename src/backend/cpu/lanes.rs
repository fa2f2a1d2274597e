//! Vectors of floats: as wide as a kernel's instructions have them.
//!
//! The compiler cannot be trusted to keep arrays of sums in registers, so the inner loops name their vectors.

/// A vector of floats in a register. The methods of a processor's own vectors may only be called, and are only ever inlined,
/// where [`super::isa::Isa`] found its instructions.
pub(super) trait Lanes: Copy {
    /// Floats in it.
    const N: usize;
    /// All lanes `x`.
    fn splat(x: f32) -> Self;
    /// The first floats of `from`; panics if there are fewer.
    fn load(from: &[f32]) -> Self;
    /// To the first floats of `to`; panics if there are fewer.
    fn store(self, to: &mut [f32]);
    /// `self * b + c`
    fn fma(self, b: Self, c: Self) -> Self;
    /// Lane by lane.
    fn add(self, b: Self) -> Self;
    /// The greater, lane by lane; `self` where either is not a number.
    fn max(self, b: Self) -> Self;
    /// The sum of all lanes, always in one order.
    fn sum(self) -> f32;
    /// The greatest lane.
    fn greatest(self) -> f32;
}

/// Eight floats in an array, for processors without vectors of their own here.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 8]);

/// One float.
#[derive(Clone, Copy)]
pub(super) struct One<const FMA: bool>(f32);

/// The halves added up, again and again.
#[inline(always)]
fn fold<const L: usize>(mut lanes: [f32; L], with: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = L / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = with(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn greater(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

impl Lanes for Portable {
    const N: usize = 8;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; 8])
    }

    #[inline(always)]
    fn load(from: &[f32]) -> Self {
        let mut lanes = [0.0; 8];
        lanes.copy_from_slice(&from[..8]);
        Self(lanes)
    }

    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        to[..8].copy_from_slice(&self.0);
    }

    #[inline(always)]
    fn fma(mut self, b: Self, c: Self) -> Self {
        for l in 0..8 {
            self.0[l] = super::isa::fma::<{ super::isa::NATIVE_FMA }>(self.0[l], b.0[l], c.0[l]);
        }
        self
    }

    #[inline(always)]
    fn add(mut self, b: Self) -> Self {
        for l in 0..8 {
            self.0[l] += b.0[l];
        }
        self
    }

    #[inline(always)]
    fn max(mut self, b: Self) -> Self {
        for l in 0..8 {
            self.0[l] = greater(self.0[l], b.0[l]);
        }
        self
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        fold(self.0, |a, b| a + b)
    }

    #[inline(always)]
    fn greatest(self) -> f32 {
        fold(self.0, greater)
    }
}

impl<const FMA: bool> Lanes for One<FMA> {
    const N: usize = 1;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self(x)
    }

    #[inline(always)]
    fn load(from: &[f32]) -> Self {
        Self(from[0])
    }

    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        to[0] = self.0;
    }

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Self(super::isa::fma::<FMA>(self.0, b.0, c.0))
    }

    #[inline(always)]
    fn add(self, b: Self) -> Self {
        Self(self.0 + b.0)
    }

    #[inline(always)]
    fn max(self, b: Self) -> Self {
        Self(greater(self.0, b.0))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        self.0
    }

    #[inline(always)]
    fn greatest(self) -> f32 {
        self.0
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Lanes, fold, greater};

    macro_rules! lanes {
        ($(#[$doc:meta])* $name:ident, $vector:ty, $n:literal, $splat:ident, $load:ident, $store:ident, $fma:ident,
         $add:ident, $max:ident) => {
            $(#[$doc])*
            #[derive(Clone, Copy)]
            pub(in crate::backend::cpu) struct $name($vector);

            // SAFETY (of every block below): the type is named only by kernels that `Isa` chose because the processor has
            // these instructions; loads and stores go to slices of the checked length.
            impl Lanes for $name {
                const N: usize = $n;

                #[inline(always)]
                fn splat(x: f32) -> Self {
                    // SAFETY: see above.
                    Self(unsafe { $splat(x) })
                }

                #[inline(always)]
                fn load(from: &[f32]) -> Self {
                    // SAFETY: see above.
                    Self(unsafe { $load(from[..$n].as_ptr()) })
                }

                #[inline(always)]
                fn store(self, to: &mut [f32]) {
                    // SAFETY: see above.
                    unsafe { $store(to[..$n].as_mut_ptr(), self.0) }
                }

                #[inline(always)]
                fn fma(self, b: Self, c: Self) -> Self {
                    // SAFETY: see above.
                    Self(unsafe { $fma(self.0, b.0, c.0) })
                }

                #[inline(always)]
                fn add(self, b: Self) -> Self {
                    // SAFETY: see above.
                    Self(unsafe { $add(self.0, b.0) })
                }

                #[inline(always)]
                fn max(self, b: Self) -> Self {
                    // SAFETY: see above. Of `max(b, a)` the processor takes `a` where either is not a number.
                    Self(unsafe { $max(b.0, self.0) })
                }

                #[inline(always)]
                fn sum(self) -> f32 {
                    let mut lanes = [0.0; $n];
                    self.store(&mut lanes);
                    fold(lanes, |a, b| a + b)
                }

                #[inline(always)]
                fn greatest(self) -> f32 {
                    let mut lanes = [0.0; $n];
                    self.store(&mut lanes);
                    fold(lanes, greater)
                }
            }
        };
    }

    lanes! {
        /// Sixteen floats of AVX-512.
        Avx512, __m512, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps,
        _mm512_max_ps
    }
    lanes! {
        /// Eight floats of AVX2.
        Avx2, __m256, 8, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_add_ps,
        _mm256_max_ps
    }
}
