//! Kernels compiled several times: for AVX-512, for AVX2 with FMA, and for whatever the build targets; chosen at run time.
//!
//! A kernel's body is written once over the vectors of [`super::lanes`].

/// The instructions that kernels may use. Values other than `Portable` come from [`Isa::detect`] alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Isa {
    /// AVX-512 F, 16 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 and FMA, 8 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the build targets, 8 lanes.
    Portable,
}

impl Isa {
    /// The best that this processor has.
    pub(super) fn detect() -> Self {
        Self::all()[0]
    }

    /// All that this processor has, best first.
    pub(super) fn all() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            if is_x86_feature_detected!("avx512f") {
                found.push(Self::Avx512);
            }
            found.push(Self::Avx2);
        }
        found.push(Self::Portable);
        found
    }
}

/// Whether the build's own target multiplies and adds in one instruction.
pub(super) const NATIVE_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// Defines `fn $name(isa, args…)` that runs `$body::<V, FMA>(args…)` compiled for `isa`.
macro_rules! vectorised {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        pub(super) fn $name(isa: $crate::backend::cpu::isa::Isa, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($arg: $type),*) {
                    $body::<$crate::backend::cpu::lanes::Avx512, true>($($arg),*);
                }
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($arg: $type),*) {
                    $body::<$crate::backend::cpu::lanes::Avx2, true>($($arg),*);
                }
                match isa {
                    // SAFETY: `Isa::detect` found these instructions on this processor.
                    $crate::backend::cpu::isa::Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::backend::cpu::isa::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::backend::cpu::isa::Isa::Portable => {}
                }
            }
            let _ = isa;
            $body::<$crate::backend::cpu::lanes::Portable, { $crate::backend::cpu::isa::NATIVE_FMA }>($($arg),*);
        }
    };
}
pub(super) use vectorised;

/// `a * b + c`, in one rounding where the processor does that.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// e^x within 2 ulp (the range reduction and polynomial of Cephes' `expf`); 0 below -87, NaN for NaN.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    // Adding 1.5 · 2²³ rounds to an integer and leaves it in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > 88.0 { 88.0 } else { x };
    let shifted = fma::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, -0.693_359_4, clamped);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    let mut p = fma::<FMA>(1.987_569_1e-4, r, 1.398_199_9e-3);
    p = fma::<FMA>(p, r, 8.333_452e-3);
    p = fma::<FMA>(p, r, 4.166_579_6e-2);
    p = fma::<FMA>(p, r, 1.666_666_5e-1);
    p = fma::<FMA>(p, r, 0.5);
    p = fma::<FMA>(p, r * r, r) + 1.0;
    let result = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < -87.0 { 0.0 } else { result }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_standard_library() {
        for i in -870..=880 {
            let x = i as f32 * 0.1;
            for value in [exp::<false>(x), exp::<true>(x)] {
                let error = (f64::from(value) / f64::from(x).exp() - 1.0).abs();
                assert!(error < 3e-7, "{x}: {value} is off by {error:e}");
            }
        }
        assert_eq!(exp::<false>(f32::NEG_INFINITY), 0.0);
        assert!(exp::<false>(f32::NAN).is_nan());
        assert_eq!(exp::<false>(0.0), 1.0);
    }
}
