//! Weights: what a model has, how a checkpoint may have it, and where the values come from.

use super::BackendError;
#[cfg(doc)]
use super::dummy;

/// What a weight is for: it decides how a device stores it and what dummy values it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightRole {
    /// `[out_features, in_features]`, applied as `x · Wᵀ`.
    Linear,
    /// `[vocabulary, hidden]`, gathered by token id.
    Embedding,
    /// `[1, features]`, a norm's scale.
    Norm,
    /// `[1, out_features]`, added to a product.
    Bias,
}

/// How a checkpoint's tensor becomes rows of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Its elements as they lie.
    Plain,
    /// `[…, columns, rows]`: each of its matrices is transposed.
    Transposed,
    /// Two tensors, `NAME_blocks` (U8, `[…, rows, columns / 32, 16]`) and `NAME_scales` (U8, `[…, rows, columns / 32]`), of
    /// the OCP Microscaling format MXFP4; `shape` is that of the values, `[…, rows, columns]`.
    Mxfp4,
}

/// A tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name without the `model.` prefix.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// How it becomes rows.
    pub form: Form,
}

/// One weight of a model, as the device stores it: perhaps several tensors of a checkpoint stacked by rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSpec {
    /// Name for messages, such as `layers.3.self_attn.qkv_proj.weight`.
    pub name: String,
    /// The ways in which a checkpoint may have it, the usual one first. Each is a list of tensors that fill the weight from top
    /// to bottom (a norm or bias: side by side).
    pub parts: Vec<Vec<TensorSpec>>,
    /// Rows in all.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// What it is for.
    pub role: WeightRole,
}

/// Reads a checkpoint; several weights may be read at a time.
pub trait WeightSource: Sync {
    /// Writes the weight to `out`, `[rows, cols]` row-major. Fails if a part is missing or has another shape.
    fn read(&self, spec: &WeightSpec, out: &mut [f32]) -> Result<(), BackendError>;
}

/// Where weights come from.
pub enum Weights<'a> {
    /// Made up by [`dummy`]: uniform in ±[`dummy::DUMMY_SPREAD`] (norm scales: one plus that).
    Dummy {
        /// Decides the values, together with the weight's number and the element's.
        seed: u64,
    },
    /// Read from a checkpoint.
    Read(&'a dyn WeightSource),
}
