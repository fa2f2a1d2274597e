//! Weights on the GPU: made there, or read from a checkpoint, rounded and copied.

use half::{bf16, f16};
use rayon::prelude::*;

use super::compile::File;
use super::kernels::{Arg, Grid, Kernels};
use super::memory::Buffer;
use super::pool::weight_stream;
use crate::backend::{
    BackendError, Block, Dtype, StepSpec, WeightRole, WeightSource, WeightSpec, Weights, dummy, fit,
};
use crate::units::Bytes;

/// All weights, in [`crate::backend::WeightId`] order.
pub(super) fn load(
    kernels: &Kernels,
    spec: &StepSpec,
    weights: &Weights<'_>,
    dtype: Dtype,
) -> Result<Vec<Buffer>, BackendError> {
    require_room(kernels, spec)?;
    let buffers: Vec<Buffer> = spec
        .weights
        .iter()
        .map(|weight| {
            Buffer::new(&kernels.gpu, (weight.rows * weight.cols * 2).next_multiple_of(16), &weight.name)
        })
        .collect::<Result<_, _>>()?;
    match weights {
        Weights::Dummy { seed } => {
            for (id, (weight, buffer)) in spec.weights.iter().zip(&buffers).enumerate() {
                fill(kernels, weight, buffer, weight_stream(*seed, id))?;
            }
            kernels.gpu.synchronize()?;
        }
        Weights::Read(source) => {
            for (weight, buffer) in spec.weights.iter().zip(&buffers) {
                buffer.write(0, &read(*source, weight, dtype)?)?;
            }
        }
    }
    Ok(buffers)
}

/// Says at once what all weights need, rather than at the weight for which there is no room.
fn require_room(kernels: &Kernels, spec: &StepSpec) -> Result<(), BackendError> {
    let needed = bytes(spec);
    let (free, _) = kernels.gpu.memory()?;
    if needed > free as u128 {
        return Err(BackendError::NoRoom(format!(
            "the weights need {}, {} are free on {}; {}",
            Bytes(needed),
            Bytes(free as u128),
            kernels.gpu.name,
            fit::advice(spec, 2, Bytes(free as u128))
        )));
    }
    Ok(())
}

/// Bytes of all weights in a 16-bit type.
pub(super) fn bytes(spec: &StepSpec) -> u128 {
    spec.weights.iter().map(|weight| weight.rows as u128 * weight.cols as u128 * 2).sum()
}

/// The values of [`dummy`], made on the GPU.
fn fill(kernels: &Kernels, weight: &WeightSpec, buffer: &Buffer, stream: u64) -> Result<(), BackendError> {
    let offset = if weight.role == WeightRole::Norm { 1.0 } else { 0.0 };
    if let Some(cut) = &weight.cut {
        let row = (weight.cols, cut.full.1);
        return cut.blocks().try_for_each(|block| {
            fill_block(kernels, buffer.address(), block, row, stream, (dummy::DUMMY_SPREAD, offset))
        });
    }
    uniform(kernels, buffer.address(), buffer.bytes() / 2, stream, (dummy::DUMMY_SPREAD, offset))
}

/// Fills a rectangle of a weight whose rows, and those of the whole of which it is a part, have so many elements.
fn fill_block(
    kernels: &Kernels,
    address: u64,
    block: Block,
    (width, full_width): (usize, usize),
    stream: u64,
    (spread, offset): (f32, f32),
) -> Result<(), BackendError> {
    let function = kernels.get(File::Fill, &[], "fill_part")?;
    let ((rows, cols), (row, col), (full_row, full_col)) = (block.size, block.part, block.full);
    let sizes = [rows, cols, width, full_width].map(|n| Arg::U32(n as u32));
    let first = (full_row * full_width + full_col) as u64;
    let mut args = vec![Arg::Address(address + ((row * width + col) * 2) as u64), Arg::U64(first)];
    args.extend(sizes);
    args.extend([Arg::U64(stream), Arg::F32(spread), Arg::F32(offset)]);
    let grid = Grid::wide((cols.div_ceil(256).min(65_535), rows.min(65_535)), 256);
    // SAFETY: (out, first, rows, cols, width, full_width, stream, spread, offset) as in fill.cu; the block lies in the weight.
    unsafe { kernels.launch(function, grid, &args) }
}

/// Fills `count` elements, a multiple of 8, with `offset + uniform * spread`.
pub(super) fn uniform(
    kernels: &Kernels,
    address: u64,
    count: usize,
    stream: u64,
    (spread, offset): (f32, f32),
) -> Result<(), BackendError> {
    let function = kernels.get(File::Fill, &[], "fill_weight")?;
    let count = count / 8 * 8;
    let args =
        [Arg::Address(address), Arg::U64(count as u64), Arg::U64(stream), Arg::F32(spread), Arg::F32(offset)];
    let grid = Grid::new(count.div_ceil(2048).clamp(1, 65_535), 256);
    // SAFETY: (out, count, stream, spread, offset) as in fill.cu; the caller's range exists.
    unsafe { kernels.launch(function, grid, &args) }
}

/// One weight of a checkpoint, rounded to nearest even.
fn read(source: &dyn WeightSource, weight: &WeightSpec, dtype: Dtype) -> Result<Vec<u16>, BackendError> {
    let mut values = vec![0.0_f32; weight.rows * weight.cols];
    source.read(weight, &mut values)?;
    Ok(to_bits(&values, dtype))
}

/// Rounds to a 16-bit type.
pub(super) fn to_bits(values: &[f32], dtype: Dtype) -> Vec<u16> {
    match dtype {
        Dtype::Float16 => values.par_iter().map(|v| f16::from_f32(*v).to_bits()).collect(),
        Dtype::Float32 | Dtype::Bfloat16 => values.par_iter().map(|v| bf16::from_f32(*v).to_bits()).collect(),
    }
}

/// The values of a 16-bit type.
pub(super) fn from_bits(bits: &[u16], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::Float16 => bits.par_iter().map(|v| f16::from_bits(*v).to_f32()).collect(),
        Dtype::Float32 | Dtype::Bfloat16 => bits.par_iter().map(|v| bf16::from_bits(*v).to_f32()).collect(),
    }
}
