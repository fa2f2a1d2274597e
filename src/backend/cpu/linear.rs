//! `x · Wᵀ (+ bias)`: the gemm crate for many rows, [`super::dots`] for few.

use rayon::prelude::*;

use super::dots::{Rows, Target, dots};
use super::isa::Isa;
use super::shared::Shared;

/// Up to this many rows the dot products take less processor time than the gemm crate (measured; see `docs/cpu-race.md`).
const FEW_ROWS: usize = 256;

/// Weight elements a task: small enough to share work evenly, large enough to outweigh handing it over.
const TASK: usize = 64 * 1024;

/// `out [rows, n] = x [rows, k] · weight [n, k]ᵀ + bias [n]`.
pub(super) fn linear(isa: Isa, x: &[f32], weight: &[f32], k: usize, bias: Option<&[f32]>, out: &mut [f32]) {
    let (rows, n) = (x.len() / k, weight.len() / k);
    if rows <= FEW_ROWS {
        few(isa, x, weight, k, bias, out);
    } else {
        many(x, weight, (rows, k, n), bias, out);
    }
}

/// By dot products, over ranges of the weight's rows.
fn few(isa: Isa, x: &[f32], weight: &[f32], k: usize, bias: Option<&[f32]>, out: &mut [f32]) {
    let (rows, n) = (x.len() / k, weight.len() / k);
    let x = Rows { data: x, stride: k, count: rows };
    let out = Shared::new(out);
    let step = (TASK / k).max(1).next_multiple_of(4);
    weight.par_chunks(step * k).enumerate().with_max_len(1).for_each(|(i, part)| {
        let w = Rows { data: part, stride: k, count: part.len() / k };
        let bias = bias.map(|bias| &bias[i * step..]);
        // The columns from `i * step` on are this task's own.
        dots(isa, x, w, k, bias, Target { out, first: i * step, stride: n });
    });
}

/// By the gemm crate, with all threads of the pool.
fn many(
    x: &[f32],
    weight: &[f32],
    (rows, k, n): (usize, usize, usize),
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    assert!(x.len() >= rows * k && weight.len() >= n * k && out.len() >= rows * n);
    if let Some(bias) = bias {
        out.par_chunks_mut(n).for_each(|row| row.copy_from_slice(&bias[..n]));
    }
    // SAFETY: the three operands lie inside their slices by the assertion, and `out` is borrowed exclusively.
    unsafe {
        gemm::gemm(
            rows,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            bias.is_some(),
            x.as_ptr(),
            1,
            k as isize,
            weight.as_ptr(),
            k as isize,
            1,
            1.0_f32,
            1.0_f32,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(0),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::dummy;

    #[test]
    fn both_ways_agree() {
        let (rows, k, n) = (9, 70, 1030);
        let values = |stream, len| (0..len as u64).map(|i| dummy::uniform(stream, i)).collect::<Vec<f32>>();
        let (x, weight, bias) = (values(1, rows * k), values(2, n * k), values(3, n));
        for bias in [None, Some(bias.as_slice())] {
            let (mut a, mut b) = (vec![f32::NAN; rows * n], vec![0.0; rows * n]);
            few(Isa::detect(), &x, &weight, k, bias, &mut a);
            many(&x, &weight, (rows, k, n), bias, &mut b);
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4));
        }
    }
}
