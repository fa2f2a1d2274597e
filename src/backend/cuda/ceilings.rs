//! What the GPU can do at most, measured in the process that uses it: the rate of reads, and of a large matrix product.
//!
//! Both use the KV pool's memory, whose contents are lost.

use super::compile::File;
use super::device::Parts;
use super::gemm::{Operands, Shape};
use super::memory::Buffer;
use super::timed::{Timed, read_sum};
use super::tune::{Job, Tuner};
use super::weights::{to_bits, uniform};
use crate::backend::{BackendError, GemmRate, L2, dummy};
use crate::stats::median;

/// The data that is read: far more than any cache holds.
const READ_BYTES: usize = 4 << 30;
/// Reads that are timed.
const READS: usize = 20;
/// Rows and columns of the product.
const SIZE: usize = 8192;
/// The product is repeated for at least this long.
const GEMM_NANOS: f64 = 1.2e9;
/// Launches of the product in a graph.
const LAUNCHES: usize = 32;
/// Random numbers that a matrix repeats: the bits of 16 MiB in a row are all different.
const NORMALS: usize = 8 << 20;

/// Bytes a second of a sum over random data.
pub(super) fn read_rate(parts: &Parts) -> Result<f64, BackendError> {
    let (kernels, pool) = (&parts.kernels, &parts.kv.buffer);
    let bytes = pool.bytes().min(READ_BYTES) / 16 * 16;
    if bytes < 8 * kernels.gpu.l2_bytes {
        return Err(small(bytes));
    }
    uniform(kernels, pool.address(), bytes / 2, 0xbead, (1.0, 0.0))?;
    let function = kernels.get(File::State, &[], "read_sum")?;
    let sums = Buffer::new(&kernels.gpu, 16 * kernels.gpu.multiprocessors as usize * 4, "sums")?;
    let mut timed = Timed::new(kernels, L2::Warm, None)?;
    timed.record(|| Ok(()), || read_sum(kernels, function, pool.address(), bytes, &sums))?;
    timed.replay()?;
    let times =
        (0..READS).map(|_| Ok(timed.replay()?.time.seconds())).collect::<Result<Vec<_>, BackendError>>()?;
    Ok(bytes as f64 / median(&times).unwrap_or(f64::INFINITY))
}

fn small(bytes: usize) -> BackendError {
    BackendError::NoRoom(format!(
        "the ceilings are measured in the KV pool, whose {bytes} bytes are too few; raise --gpu-memory-utilization"
    ))
}

/// Operations a second of an 8192³ product of normally distributed numbers, by the algorithm that tuning chooses.
pub(super) fn gemm_rate(parts: &Parts, tuner: &Tuner) -> Result<GemmRate, BackendError> {
    let (pool, matrix) = (&parts.kv.buffer, SIZE * SIZE * 2);
    if pool.bytes() < 3 * matrix {
        return Err(small(pool.bytes()));
    }
    for (index, seed) in [(0, 1), (1, 2)] {
        let bits = to_bits(&normals(seed, NORMALS), parts.gemm.dtype);
        pool.write(index * matrix, &bits)?;
        pool.repeat(index * matrix, NORMALS * 2, matrix)?;
    }
    let address = |index: usize| pool.address() + (index * matrix) as u64;
    let shape = Shape { t: SIZE, n: SIZE, k: SIZE, bias: false };
    let operands = Operands { x: address(0), w: address(1), bias: 0, out: address(2) };
    let Operands { x, w, bias, out } = operands;
    // Tuning overwrites x with uniform numbers, at the first time only: the normal ones are put there again.
    tuner.choose(&parts.gemm, &Job { shape, x, weights: vec![w], bias, out })?;
    pool.write(0, &to_bits(&normals(1, NORMALS), parts.gemm.dtype))?;
    pool.repeat(0, NORMALS * 2, matrix)?;
    let algorithm = parts.gemm.chosen.borrow().get(&shape).copied();
    let algorithm = algorithm.ok_or_else(|| BackendError::Device("the product was not tuned".into()))?;
    let mut timed = Timed::new(&parts.kernels, L2::Warm, None)?;
    timed
        .record(|| Ok(()), || (0..LAUNCHES).try_for_each(|_| parts.gemm.run(shape, algorithm, &operands)))?;
    let (mut times, mut clocks, mut total) = (Vec::new(), Vec::new(), 0.0);
    while total < GEMM_NANOS {
        let replay = timed.replay()?;
        total += replay.time.0;
        times.push(replay.time.seconds());
        clocks.extend(replay.clock_mhz);
    }
    let flops = 2.0 * (SIZE as f64).powi(3) * LAUNCHES as f64;
    let seconds = median(&times).unwrap_or(f64::INFINITY);
    Ok(GemmRate { flops_per_second: flops / seconds, clock_mhz: median(&clocks) })
}

/// Normally distributed numbers, by the method of Box and Muller.
fn normals(seed: u64, count: usize) -> Vec<f32> {
    use rayon::prelude::*;
    let stream = dummy::stream(seed, 0x6e6f_726d);
    let mut values = vec![0.0; count];
    values.par_chunks_mut(2).enumerate().for_each(|(i, pair)| {
        let at = |j: u64| f64::from(dummy::uniform(stream, 2 * i as u64 + j)).mul_add(0.5, 0.5);
        let radius = (-2.0 * (1.0 - at(0)).max(1e-12).ln()).sqrt();
        let (sine, cosine) = (std::f64::consts::TAU * at(1)).sin_cos();
        for (value, factor) in pair.iter_mut().zip([cosine, sine]) {
            *value = (radius * factor) as f32;
        }
    });
    values
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_numbers_are_normal() {
        let values = super::normals(3, 100_000);
        let moment = |power: i32| values.iter().map(|v| f64::from(*v).powi(power)).sum::<f64>() / 1e5;
        assert!(moment(1).abs() < 0.02 && (moment(2) - 1.0).abs() < 0.02 && (moment(4) - 3.0).abs() < 0.15);
    }
}
