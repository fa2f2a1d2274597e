//! cuBLASLt's descriptors of a product and of its matrices.

use cudarc::cublaslt::{result, sys};

use super::error::blas;
use super::gemm::Shape;
use crate::backend::{BackendError, Dtype};

/// cuBLAS's CUBLAS_OP_T, which this library's bindings leave out.
const TRANSPOSED: i32 = 1;

/// The descriptors of a shape.
pub(super) struct Plan {
    pub desc: Desc,
    pub w: Layout,
    pub x: Layout,
    pub out: Layout,
}

impl Plan {
    pub(super) fn new(shape: Shape, dtype: Dtype) -> Result<Self, BackendError> {
        let kind = if dtype == Dtype::Float16 {
            sys::cudaDataType::CUDA_R_16F
        } else {
            sys::cudaDataType::CUDA_R_16BF
        };
        let desc = Desc::new()?;
        let transposed = TRANSPOSED;
        desc.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, &transposed)?;
        if shape.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            desc.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        let Shape { t, n, k, .. } = shape;
        Ok(Self {
            desc,
            w: Layout::new(kind, k, n)?,
            x: Layout::new(kind, k, t)?,
            out: Layout::new(kind, n, t)?,
        })
    }
}

/// A product's description.
pub(super) struct Desc(pub sys::cublasLtMatmulDesc_t);

impl Desc {
    fn new() -> Result<Self, BackendError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let desc = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F);
        desc.map(Self).map_err(blas("describing a matrix product"))
    }

    pub(super) fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), BackendError> {
        // SAFETY: the descriptor is alive, and the library copies as many bytes as the value has.
        unsafe {
            result::set_matmul_desc_attribute(self.0, attribute, (&raw const *value).cast(), size_of::<T>())
        }
        .map_err(blas("describing a matrix product"))
    }
}

impl Drop for Desc {
    fn drop(&mut self) {
        // SAFETY: created by this struct, destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// A column-major matrix without gaps.
pub(super) struct Layout(pub sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(kind: sys::cudaDataType, rows: usize, cols: usize) -> Result<Self, BackendError> {
        let layout = result::create_matrix_layout(kind, rows as u64, cols as u64, rows as i64);
        layout.map(Self).map_err(blas("describing a matrix"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created by this struct, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// What the search for algorithms may use.
pub(super) struct Preference(pub sys::cublasLtMatmulPreference_t);

impl Preference {
    pub(super) fn new(workspace: usize) -> Result<Self, BackendError> {
        let preference = Self(result::create_matmul_pref().map_err(blas("asking for algorithms"))?);
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the preference is alive, and the library copies the number.
        unsafe {
            let (value, size) = ((&raw const workspace).cast(), size_of::<usize>());
            result::set_matmul_pref_attribute(preference.0, attribute, value, size)
        }
        .map_err(blas("asking for algorithms"))?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by this struct, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
