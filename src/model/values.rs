//! Tensors of a checkpoint to float32 values, of which only the wanted ones are converted.

use std::collections::VecDeque;

use rayon::prelude::*;
use safetensors::Dtype as Stored;

use super::mxfp4::{self, BLOCK};

/// Memory for elements that follow each other in a tensor, with the index of the first.
pub(super) type Piece<'a> = (usize, &'a mut [f32]);

/// Takes off the pieces of a weight that lie before element `end`, where those before `first` are gone; indices count from `first`.
pub(super) fn take_before<'a>(pieces: &mut VecDeque<Piece<'a>>, first: usize, end: usize) -> Vec<Piece<'a>> {
    let mut taken = Vec::new();
    while pieces.front().is_some_and(|(at, _)| *at < end) {
        let Some((at, piece)) = pieces.pop_front() else { break };
        if at + piece.len() > end {
            let (here, after) = piece.split_at_mut(end - at);
            pieces.push_front((end, after));
            taken.push((at - first, here));
        } else {
            taken.push((at - first, piece));
        }
    }
    taken
}

/// Elements as they lie.
pub(super) fn plain(dtype: Stored, bytes: &[u8], wanted: Vec<Piece<'_>>) {
    let width = width(dtype);
    wanted.into_par_iter().with_min_len(8).for_each(|(first, out)| {
        convert(dtype, &bytes[first * width..][..out.len() * width], out);
    });
}

/// Elements of a tensor `[…, columns, rows]` whose matrices are transposed.
pub(super) fn transposed(dtype: Stored, shape: &[usize], bytes: &[u8], wanted: Vec<Piece<'_>>) {
    let &[.., cols, rows] = shape else { return };
    let bytes_each = cols * rows * width(dtype);
    by_matrix(cols * rows, wanted, |matrix, out| {
        transpose(dtype, (cols, rows), &bytes[matrix * bytes_each..][..bytes_each], out);
    });
}

/// Elements of a tensor of that shape, `[…, rows, columns]`, in MXFP4.
pub(super) fn mxfp4((blocks, scales): (&[u8], &[u8]), shape: &[usize], wanted: Vec<Piece<'_>>) {
    let &[.., rows, cols] = shape else { return };
    let each = rows * cols / BLOCK;
    by_matrix(rows * cols, wanted, |matrix, out| {
        let blocks = &blocks[matrix * each * BLOCK / 2..][..each * BLOCK / 2];
        mxfp4::dequantise(blocks, &scales[matrix * each..][..each], out);
    });
}

/// Makes each matrix, of `size` elements, of which anything is wanted, and copies what is.
fn by_matrix(size: usize, wanted: Vec<Piece<'_>>, make: impl Fn(usize, &mut [f32]) + Sync) {
    let (mut pieces, mut matrices): (VecDeque<_>, _) = (wanted.into(), Vec::new());
    while let Some((at, _)) = pieces.front() {
        let matrix = at / size;
        matrices.push((matrix, take_before(&mut pieces, matrix * size, (matrix + 1) * size)));
    }
    matrices.into_par_iter().for_each(|(matrix, wanted)| {
        let mut values = vec![0.0; size];
        make(matrix, &mut values);
        for (first, out) in wanted {
            out.copy_from_slice(&values[first..][..out.len()]);
        }
    });
}

fn width(dtype: Stored) -> usize {
    if dtype == Stored::F32 { 4 } else { 2 }
}

/// A matrix `[columns, rows]` to `[rows, columns]`.
fn transpose(dtype: Stored, (cols, rows): (usize, usize), bytes: &[u8], out: &mut [f32]) {
    const TILE: usize = 64;
    let mut values = vec![0.0; cols * rows];
    convert(dtype, bytes, &mut values);
    out.par_chunks_mut(TILE * cols).enumerate().for_each(|(tile, out)| {
        for (i, row) in out.chunks_exact_mut(cols).enumerate() {
            let from = values[tile * TILE + i..].iter().step_by(rows);
            row.iter_mut().zip(from).for_each(|(o, v)| *o = *v);
        }
    });
}

/// Little-endian values of the stored type to float32.
fn convert(dtype: Stored, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Stored::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        Stored::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = half::bf16::from_le_bytes(*b).to_f32();
            }
        }
        _ => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = half::f16::from_le_bytes(*b).to_f32();
            }
        }
    }
}
