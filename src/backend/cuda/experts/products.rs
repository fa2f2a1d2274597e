//! The two grouped products: which kernels and grids serve how many slots, and their launches.

use super::{Key, Sizes};
use crate::backend::cuda::compile::File;
use crate::backend::cuda::device::Parts;
use crate::backend::cuda::kernels::{Arg, Function, Grid};
use crate::backend::cuda::memory::Buffer;
use crate::backend::{Activation, BackendError, Moe, WeightId};

/// The two grouped products.
pub(super) struct Products {
    functions: [Function; 2],
    grids: [Grid; 2],
    pub tile_rows: usize,
    pub max_tiles: usize,
}

/// Rows of a tile of the grouped products, and columns of a block where the Hopper kernels serve; `slots` an expert decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// Slots of one expert that a block multiplies.
    pub tile_rows: usize,
    /// Weight rows of a block of the kernels for Hopper; none: the kernels for all architectures.
    pub hopper: Option<usize>,
}

impl Variant {
    /// For so many slots over so many experts: the smallest tile that takes an expert's rows where loads are even, as
    /// `tests/gpu/check_moe.py` timed them on an H200.
    #[must_use]
    pub fn of(slots: usize, experts: usize, is_hopper: bool) -> Self {
        let rows = slots.div_ceil(experts.min(slots).max(1));
        let tile_rows = match rows {
            0..=16 => 16,
            17..=32 => 32,
            33..=64 => 64,
            _ => 128,
        };
        Self { tile_rows, hopper: (is_hopper && tile_rows == 128).then_some(256) }
    }

    /// Dynamic shared memory, as moe_gemm.cu and moe_gemm_hopper.cu say.
    #[must_use]
    pub fn shared(&self) -> usize {
        if let Some(columns) = self.hopper {
            return 1024 + 4 * (128 + columns) * 128 + 8 * 16 * 80 + 128;
        }
        let (columns, depth, stages) = match self.tile_rows {
            16 => (64, 128, 4),
            32 => (64, 128, 3),
            64 => (128, 64, 4),
            _ => (128, 64, 3),
        };
        stages * (self.tile_rows + columns) * depth * 2
    }

    /// Columns of the result that a block of the first and of the second product writes.
    fn out_columns(&self) -> [usize; 2] {
        let columns = self.hopper.unwrap_or(if self.tile_rows <= 32 { 64 } else { 128 });
        [columns / 2, columns]
    }

    /// The file and the defines of a product, `kind` 1 or 2.
    #[must_use]
    pub fn compilation(
        &self,
        kind: usize,
        (top_k, clamped): (usize, bool),
    ) -> (File, Vec<(&'static str, usize)>) {
        let mut defines = vec![("KIND", kind)];
        if kind == 1 {
            let clamped = usize::from(clamped);
            defines.extend([("TOP_K", top_k), ("ACT", clamped), ("INTERLEAVED", clamped)]);
        }
        match self.hopper {
            Some(columns) => {
                defines.push(("BN", columns));
                (File::MoeGemmHopper, defines)
            }
            None => {
                defines.push(("BM", self.tile_rows));
                (File::MoeGemm, defines)
            }
        }
    }
}

impl Products {
    /// For so many tokens of each data-parallel rank.
    pub(super) fn new(parts: &Parts, key: &Key, tokens: usize) -> Result<Self, BackendError> {
        if !key.inter.is_multiple_of(8) {
            return Err(BackendError::Unsupported(format!(
                "the CUDA kernels take experts {} wide on each rank only in multiples of 8; choose fewer ranks",
                key.inter
            )));
        }
        if key.clamped != key.interleaved {
            return Err(BackendError::Unsupported(
                "the CUDA kernels take clamped experts with gate and up in turns only".into(),
            ));
        }
        let (kernels, slots) = (&parts.kernels, key.slots(tokens));
        let hopper = kernels.gpu.capability == (9, 0);
        let variant = Variant::of(slots, key.experts, hopper);
        // The worst load: all slots that can be are of this rank's experts.
        let most = key.most_slots(tokens);
        let used = key.local.min(most);
        let max_tiles = used + (most - used) / variant.tile_rows;
        let (shared, columns) = (variant.shared(), [key.inter, key.hidden]);
        let threads = if variant.hopper.is_some() { 384 } else { 128 };
        let make = |kind: usize, name: &'static str| -> Result<(Function, Grid), BackendError> {
            let (file, defines) = variant.compilation(kind, (key.top_k, key.clamped));
            let function = kernels.get(file, &defines, name)?;
            kernels.allow_shared(function, shared, "a product of experts")?;
            let blocks = max_tiles * columns[kind - 1].div_ceil(variant.out_columns()[kind - 1]);
            let at_once =
                if variant.hopper.is_some() { kernels.gpu.multiprocessors as usize } else { blocks };
            Ok((function, Grid::new(blocks.min(at_once), threads).shared(shared)))
        };
        let names = match variant.hopper {
            Some(_) => ["moe_gemm1_wgmma", "moe_gemm2_wgmma"],
            None => ["moe_gemm1", "moe_gemm2"],
        };
        let (first, second) = (make(1, names[0])?, make(2, names[1])?);
        Ok(Self {
            functions: [first.0, second.0],
            grids: [first.1, second.1],
            tile_rows: variant.tile_rows,
            max_tiles,
        })
    }
}

impl Sizes {
    /// The two grouped products.
    pub(super) fn multiply(
        &self,
        parts: &Parts,
        (x, moe, key): (u64, &Moe, &Key),
    ) -> Result<(), BackendError> {
        let bias = |id: Option<WeightId>, len: usize| id.map_or(Ok(0), |id| parts.vector(id, len));
        let (alpha, limit) = match moe.activation {
            Activation::SiluMul => (1.0, 0.0),
            Activation::ClampedSwiglu { alpha, limit, .. } => (alpha, limit),
        };
        let [slots, weights, tiles, middle, results] =
            [&self.slots, &self.weights, &self.tiles, &self.middle, &self.results].map(Buffer::address);
        let address = |list: &[u64]| list.iter().copied().map(Arg::Address).collect::<Vec<_>>();
        let int = |n: usize| Arg::I32(n as i32);
        let w13 = parts.matrix(moe.w13, key.hidden)?;
        let b13 = bias(moe.w13_bias, key.local * 2 * key.inter)?;
        let mut args = address(&[x, w13, b13, slots, tiles, middle]);
        args.extend([
            int(key.inter),
            int(key.hidden),
            int(self.products.max_tiles),
            Arg::F32(alpha),
            Arg::F32(limit),
        ]);
        let ([first, second], [first_grid, second_grid]) = (self.products.functions, self.products.grids);
        // SAFETY: (x, w13, b13, slots, tiles, mid, n, k, max_tiles, alpha, limit) as in moe_gemm.cu; the list is this step's.
        unsafe { parts.kernels.launch(first, first_grid, &args) }?;
        let w2 = parts.matrix(moe.w2, key.inter)?;
        let b2 = bias(moe.w2_bias, key.local * key.hidden)?;
        let mut args = address(&[middle, w2, b2, slots, weights, tiles, results]);
        args.extend([int(key.hidden), int(key.inter), int(self.products.max_tiles)]);
        // SAFETY: (mid, w2, b2, slots, weights, tiles, y, n, k, max_tiles) as in moe_gemm.cu.
        unsafe { parts.kernels.launch(second, second_grid, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_rows_an_expert_take_larger_tiles() {
        let of = |slots, hopper| Variant::of(slots, 128, hopper);
        assert_eq!(of(8, true), Variant { tile_rows: 16, hopper: None });
        assert_eq!([256, 257, 512, 1024].map(|t| of(t * 8, true).tile_rows), [16, 32, 32, 64]);
        assert_eq!(of(8192 * 8, true), Variant { tile_rows: 128, hopper: Some(256) });
        assert_eq!(of(8192 * 8, false), Variant { tile_rows: 128, hopper: None });
    }

    #[test]
    fn shared_memory_is_what_the_kernels_lay_out() {
        let shared = |tile_rows, hopper| Variant { tile_rows, hopper }.shared();
        assert_eq!([16, 32, 64, 128].map(|rows| shared(rows, None)), [81_920, 73_728, 98_304, 98_304]);
        assert_eq!([shared(128, Some(256)), shared(128, Some(192))], [208_000, 175_232]);
    }
}
