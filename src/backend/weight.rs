//! Weights: what a model has, how a checkpoint may have it, and where the values come from.

use std::ops::Range;

use super::BackendError;
use super::cut::{Cut, joined};
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
    /// Rows in all; of a rank's part, the part's.
    pub rows: usize,
    /// Columns; of a rank's part, the part's.
    pub cols: usize,
    /// What it is for.
    pub role: WeightRole,
    /// Which part of the weight this is; none: all of it. `parts` are the tensors of the whole.
    pub cut: Option<Cut>,
}

/// Elements that one task makes or converts.
const PIECE: usize = 1 << 16;

impl WeightSpec {
    /// Rows and columns of the whole weight.
    #[must_use]
    pub fn full(&self) -> (usize, usize) {
        self.cut.as_ref().map_or((self.rows, self.cols), |cut| cut.full)
    }

    /// The whole weight's row that is the first here.
    #[must_use]
    pub fn first_row(&self) -> usize {
        self.cut.as_ref().and_then(|cut| cut.rows.first()).map_or(0, |rows| rows.start)
    }

    /// The memory of the weight, `[rows, cols]`, in pieces of at most 65536 elements that are contiguous in the whole weight too,
    /// each with the index of its first element there; both ascend.
    ///
    /// # Panics
    /// If `out` is shorter than the weight.
    pub fn pieces<'a>(&self, out: &'a mut [f32]) -> Vec<(usize, &'a mut [f32])> {
        let whole = Cut::whole(self.rows, self.cols);
        let (mut pieces, mut rest) = (Vec::new(), out);
        for run in self.cut.as_ref().unwrap_or(&whole).runs() {
            for first in run.clone().step_by(PIECE) {
                let (piece, after) = rest.split_at_mut(PIECE.min(run.end - first));
                pieces.push((first, piece));
                rest = after;
            }
        }
        pieces
    }

    /// Keeps these rows of what is there. The ranges ascend and lie within the weight, which has not been cut by rows before.
    pub fn cut_rows(&mut self, rows: &[Range<usize>]) {
        let cut = self.cut.get_or_insert_with(|| Cut::whole(self.rows, self.cols));
        (cut.rows, self.rows) = (joined(rows), rows.iter().map(Range::len).sum());
        self.forget_a_whole_cut();
    }

    /// Keeps these columns of what is there. The ranges ascend and lie within the weight, which has not been cut by columns before.
    pub fn cut_cols(&mut self, cols: &[Range<usize>]) {
        let cut = self.cut.get_or_insert_with(|| Cut::whole(self.rows, self.cols));
        (cut.cols, self.cols) = (joined(cols), cols.iter().map(Range::len).sum());
        self.forget_a_whole_cut();
    }

    fn forget_a_whole_cut(&mut self) {
        if self.cut.as_ref().is_some_and(|cut| *cut == Cut::whole(cut.full.0, cut.full.1)) {
            self.cut = None;
        }
    }
}

/// Reads a checkpoint; several weights may be read at a time.
pub trait WeightSource: Sync {
    /// Writes the weight, or the part of it that the spec is cut to, to `out`, `[rows, cols]` row-major. Fails if a tensor is
    /// missing or has another shape.
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
