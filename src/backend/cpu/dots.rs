//! Products of few rows: dot products of rows with rows, for decode steps and for the scores of few queries.
//!
//! A general matrix product repacks the weights on every call, which at a few rows costs more than the product itself. Here
//! each weight is read once, straight from where it lies, and used for up to four rows of `x` at a time.

#![allow(clippy::needless_range_loop, reason = "indices run over several arrays of registers at a time")]

use super::isa::{fma, vectorised};
use super::lanes::Lanes;
use super::shared::Shared;

/// Rows of equal length, a fixed distance apart.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// The first row starts here.
    pub data: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
    /// How many rows.
    pub count: usize,
}

impl<'a> Rows<'a> {
    #[inline(always)]
    fn row(&self, index: usize, len: usize) -> &'a [f32] {
        &self.data[index * self.stride..][..len]
    }
}

/// Where `[m, n]` goes: `m * stride + first + n`.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    /// All of the output; the product writes only its own columns of its own rows.
    pub out: Shared<'a>,
    /// Offset of element `[0, 0]`.
    pub first: usize,
    /// Elements from one row of x to the next.
    pub stride: usize,
}

vectorised! {
    /// `out[m, n] = x[m] · w[n] (+ bias[n])` over the first `len` elements of each row.
    ///
    /// No other thread may use those elements of `out` meanwhile.
    fn dots(x: Rows<'_>, w: Rows<'_>, len: usize, bias: Option<&[f32]>, target: Target<'_>) = dots_body
}

#[inline(always)]
pub(super) fn dots_body<V: Lanes, const FMA: bool>(
    x: Rows<'_>,
    w: Rows<'_>,
    len: usize,
    bias: Option<&[f32]>,
    target: Target<'_>,
) {
    let mut n = 0;
    while n + 4 <= w.count {
        let mut m = 0;
        while m + 4 <= x.count {
            tile::<V, FMA, 4, 4>(x, m, w, n, len, bias, target);
            m += 4;
        }
        if m + 2 <= x.count {
            tile::<V, FMA, 2, 4>(x, m, w, n, len, bias, target);
            m += 2;
        }
        if m < x.count {
            tile::<V, FMA, 1, 4>(x, m, w, n, len, bias, target);
        }
        n += 4;
    }
    while n < w.count {
        for m in 0..x.count {
            tile::<V, FMA, 1, 1>(x, m, w, n, len, bias, target);
        }
        n += 1;
    }
}

/// `M` rows of x with `N` rows of w.
#[inline(always)]
fn tile<V: Lanes, const FMA: bool, const M: usize, const N: usize>(
    x: Rows<'_>,
    m: usize,
    w: Rows<'_>,
    n: usize,
    len: usize,
    bias: Option<&[f32]>,
    target: Target<'_>,
) {
    let whole = len / V::N * V::N;
    let mut xs: [&[f32]; M] = [&[]; M];
    let mut ws: [&[f32]; N] = [&[]; N];
    for i in 0..M {
        xs[i] = x.row(m + i, len);
    }
    for j in 0..N {
        ws[j] = w.row(n + j, len);
    }
    let mut acc = [[V::splat(0.0); N]; M];
    let mut k = 0;
    while k < whole {
        let mut row = [V::splat(0.0); N];
        for j in 0..N {
            row[j] = V::load(&ws[j][k..]);
        }
        for i in 0..M {
            let a = V::load(&xs[i][k..]);
            for j in 0..N {
                acc[i][j] = a.fma(row[j], acc[i][j]);
            }
        }
        k += V::N;
    }
    for i in 0..M {
        // SAFETY: the elements of this product belong to this call alone (see `dots`).
        let out = unsafe { target.out.part(target.first + (m + i) * target.stride + n, N) };
        let x_rest = &xs[i][whole..];
        for j in 0..N {
            let w_rest = &ws[j][whole..];
            let mut value = acc[i][j].sum();
            for (a, b) in x_rest.iter().zip(w_rest) {
                value = fma::<FMA>(*a, *b, value);
            }
            out[j] = value + bias.map_or(0.0, |bias| bias[n + j]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::isa::Isa;
    use crate::backend::dummy;

    #[test]
    fn every_instruction_set_agrees_with_the_sum() {
        let (m, n, len) = (7, 11, 83);
        let value = |stream, i: usize| dummy::uniform(stream, i as u64);
        let x: Vec<f32> = (0..m * len).map(|i| value(1, i)).collect();
        let w: Vec<f32> = (0..n * (len + 3)).map(|i| value(2, i)).collect();
        let bias: Vec<f32> = (0..n).map(|i| value(3, i)).collect();
        for isa in Isa::all() {
            let mut out = vec![f32::NAN; m * n];
            let target = Target { out: Shared::new(&mut out), first: 0, stride: n };
            let x_rows = Rows { data: &x, stride: len, count: m };
            let w_rows = Rows { data: &w, stride: len + 3, count: n };
            dots(isa, x_rows, w_rows, len, Some(&bias), target);
            for i in 0..m {
                for j in 0..n {
                    let exact: f64 = (0..len)
                        .map(|k| f64::from(x[i * len + k]) * f64::from(w[j * (len + 3) + k]))
                        .sum::<f64>()
                        + f64::from(bias[j]);
                    assert!((f64::from(out[i * n + j]) - exact).abs() < 1e-5, "{isa:?} [{i}, {j}]");
                }
            }
        }
    }
}
