//! MXFP4 of the OCP Microscaling Formats (MX) specification, version 1.0: blocks of 32 values of E2M1, two to a byte, the lower
//! nibble first, with one power of two (E8M0, bias 127) for all of them.

use rayon::prelude::*;

/// Values that share a scale.
pub(super) const BLOCK: usize = 32;

/// The values of E2M1: sign, two bits of exponent, one of mantissa.
const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Values of `blocks [n, 16]` with `scales [n]` to `out [n * 32]`.
pub(super) fn dequantise(blocks: &[u8], scales: &[u8], out: &mut [f32]) {
    const TASK: usize = 2048;
    let tasks = blocks.par_chunks(TASK * BLOCK / 2).zip(scales.par_chunks(TASK));
    out.par_chunks_mut(TASK * BLOCK).zip(tasks).for_each(|(out, (blocks, scales))| {
        let blocks = blocks.chunks_exact(BLOCK / 2).zip(scales);
        for (out, (block, scale)) in out.chunks_exact_mut(BLOCK).zip(blocks) {
            let scale = power(*scale);
            for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(block) {
                *pair = [byte & 15, byte >> 4].map(|nibble| VALUES[usize::from(nibble)] * scale);
            }
        }
    });
}

/// 2^(scale − 127), exact (a subnormal for 0); NaN for 255, as the specification has it.
fn power(scale: u8) -> f32 {
    match scale {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(scale) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_powers_of_two() {
        assert_eq!(
            [0, 1, 126, 127, 128, 254].map(power).map(f64::from),
            [-127, -126, -1, 0, 1, 127].map(|e| 2f64.powi(e))
        );
        assert!(power(255).is_nan());
    }

    #[test]
    fn the_lower_nibble_is_first() {
        let mut out = [f32::NAN; 64];
        let blocks: Vec<u8> = (0..16).map(|i| 0x10 * (15 - i) + i).chain([0x72; 16]).collect();
        dequantise(&blocks, &[127, 130], &mut out);
        assert_eq!(out[..6], [0.0, -6.0, 0.5, -4.0, 1.0, -3.0]);
        assert_eq!(out[30..34], [-6.0, 0.0, 8.0, 48.0]);
    }
}
