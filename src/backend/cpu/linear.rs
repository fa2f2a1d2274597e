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

/// Rows that go through one of several matrices.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    /// Which of the matrices.
    pub matrix: usize,
    /// The first of its rows of x and of the output.
    pub first: usize,
    /// How many.
    pub rows: usize,
}

/// [`linear`] of each segment of `x` with its own matrix of `weights [matrices, n, k]` and part of `bias [matrices, n]`.
/// The segments do not overlap, and together are all rows of `x` and `out`.
pub(super) fn grouped(
    isa: Isa,
    segments: &[Segment],
    x: &[f32],
    weights: &[f32],
    k: usize,
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    let n = out.len() / (x.len() / k);
    let of = |segment: &Segment| {
        let bias = bias.map(|bias| &bias[segment.matrix * n..][..n]);
        (&x[segment.first * k..][..segment.rows * k], &weights[segment.matrix * n * k..][..n * k], bias)
    };
    for segment in segments.iter().filter(|segment| segment.rows > FEW_ROWS) {
        let ((x, weight, bias), rows) = (of(segment), segment.rows);
        many(x, weight, (rows, k, n), bias, &mut out[segment.first * n..][..rows * n]);
    }
    let step = (TASK / k).max(1).next_multiple_of(4);
    let few = segments.iter().filter(|segment| segment.rows <= FEW_ROWS);
    let tasks: Vec<(&Segment, usize)> =
        few.flat_map(|segment| (0..n).step_by(step).map(move |column| (segment, column))).collect();
    let out = Shared::new(out);
    tasks.into_par_iter().with_max_len(1).for_each(|(segment, column)| {
        let (x, weight, bias) = of(segment);
        let x = Rows { data: x, stride: k, count: segment.rows };
        let w = Rows { data: &weight[column * k..], stride: k, count: step.min(n - column) };
        // The columns from `column` on of the segment's rows are this task's own.
        let target = Target { out, first: segment.first * n + column, stride: n };
        dots(isa, x, w, k, bias.map(|bias| &bias[column..]), target);
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
    fn segments_go_through_their_own_matrices() {
        let (k, n) = (37, 5);
        let values = |stream, len| (0..len as u64).map(|i| dummy::uniform(stream, i)).collect::<Vec<f32>>();
        let segments = [(3, 2), (0, FEW_ROWS + 1), (2, 7)];
        let rows: usize = segments.iter().map(|(_, rows)| rows).sum();
        let (x, weights, bias) = (values(1, rows * k), values(2, 4 * n * k), values(3, 4 * n));
        let mut first = 0;
        let segments = segments.map(|(matrix, rows)| {
            first += rows;
            Segment { matrix, first: first - rows, rows }
        });
        let mut out = vec![f32::NAN; rows * n];
        grouped(Isa::detect(), &segments, &x, &weights, k, Some(&bias), &mut out);
        for Segment { matrix, first, rows } in segments {
            let mut own = vec![0.0; rows * n];
            let weight = &weights[matrix * n * k..][..n * k];
            linear(
                Isa::detect(),
                &x[first * k..][..rows * k],
                weight,
                k,
                Some(&bias[matrix * n..][..n]),
                &mut own,
            );
            assert_eq!(own, out[first * n..][..rows * n]);
        }
    }

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
