//! The list of a model's weights, as it is laid out.

use std::ops::Range;

use crate::backend::{Form, TensorSpec, WeightId, WeightRole, WeightSpec};

/// A tensor of a checkpoint.
pub(super) fn with_form(name: String, shape: &[usize], form: Form) -> TensorSpec {
    TensorSpec { name, shape: shape.to_vec(), form }
}

/// A tensor whose elements are a weight's.
pub(super) fn plain(name: String, shape: &[usize]) -> TensorSpec {
    with_form(name, shape, Form::Plain)
}

/// The weights so far.
pub(super) struct Weights(pub Vec<WeightSpec>);

impl Weights {
    /// A weight that a checkpoint may have in any of the ways that `parts` lists.
    pub(super) fn add_any(
        &mut self,
        name: &str,
        parts: Vec<Vec<TensorSpec>>,
        (rows, cols): (usize, usize),
        role: WeightRole,
    ) -> WeightId {
        self.0.push(WeightSpec { name: name.to_owned(), parts, rows, cols, role, cut: None });
        WeightId(self.0.len() - 1)
    }

    /// Keeps these rows of a weight.
    pub(super) fn keep_rows(&mut self, id: WeightId, rows: &[Range<usize>]) -> WeightId {
        self.0[id.0].cut_rows(rows);
        id
    }

    /// Keeps these columns of a weight.
    pub(super) fn keep_cols(&mut self, id: WeightId, cols: &[Range<usize>]) -> WeightId {
        self.0[id.0].cut_cols(cols);
        id
    }

    /// Tensors of so many rows each, one below the other.
    pub(super) fn stacked(&mut self, name: &str, parts: Vec<(String, usize)>, cols: usize) -> WeightId {
        let rows = parts.iter().map(|(_, rows)| rows).sum();
        let parts = parts.into_iter().map(|(name, rows)| plain(name, &[rows, cols])).collect();
        self.add_any(name, vec![parts], (rows, cols), WeightRole::Linear)
    }

    /// Biases of so many elements each, side by side.
    pub(super) fn biases(&mut self, name: &str, parts: Vec<(String, usize)>) -> WeightId {
        let len = parts.iter().map(|(_, len)| len).sum();
        let parts = parts.into_iter().map(|(name, len)| plain(name, &[len])).collect();
        self.add_any(name, vec![parts], (1, len), WeightRole::Bias)
    }

    /// A matrix of that name.
    pub(super) fn matrix(&mut self, name: &str, rows: usize, cols: usize, role: WeightRole) -> WeightId {
        self.add_any(name, vec![vec![plain(name.to_owned(), &[rows, cols])]], (rows, cols), role)
    }

    /// A vector of that name.
    pub(super) fn vector(&mut self, name: &str, len: usize, role: WeightRole) -> WeightId {
        self.add_any(name, vec![vec![plain(name.to_owned(), &[len])]], (1, len), role)
    }
}
