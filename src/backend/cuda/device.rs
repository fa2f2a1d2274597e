//! What one model on one GPU is made of, with checked look-ups.

use std::cell::RefCell;
use std::rc::Rc;

use rayon::prelude::*;

use super::collectives::Collectives;
use super::gemm::Gemm;
use super::kernels::Kernels;
use super::memory::Buffer;
use super::pool::KvPool;
use crate::backend::{Act, BackendError, Rope, StepSpec, WeightId, WeightRole, WeightSpec};

/// Weights, activations, KV and kernels.
pub(super) struct Parts {
    pub spec: StepSpec,
    pub gemm: Gemm,
    pub kv: KvPool,
    pub weights: Vec<Buffer>,
    pub acts: Vec<(Act, usize, Buffer)>,
    pub ropes: Ropes,
    /// Query tokens that the activations have room for.
    pub max_tokens: usize,
    /// The way to other ranks.
    pub collectives: Option<Rc<dyn Collectives>>,
    // Dropped last: all of the above use it.
    pub kernels: Rc<Kernels>,
}

/// An activation buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub address: u64,
    /// Elements of a row.
    pub width: usize,
}

fn bad(message: String) -> BackendError {
    BackendError::Device(message)
}

impl Parts {
    pub(super) fn act(&self, act: Act) -> Result<View, BackendError> {
        let found = self.acts.iter().find(|(name, ..)| *name == act);
        let (_, width, buffer) = found.ok_or_else(|| bad(format!("the model has no activation {act:?}")))?;
        Ok(View { address: buffer.address(), width: *width })
    }

    /// The address of an activation that must be so wide.
    pub(super) fn act_of(&self, act: Act, width: usize) -> Result<u64, BackendError> {
        let view = self.act(act)?;
        if view.width != width {
            return Err(bad(format!("activation {act:?} is {} wide, not {width}", view.width)));
        }
        Ok(view.address)
    }

    pub(super) fn weight_spec(&self, id: WeightId) -> Result<&WeightSpec, BackendError> {
        self.spec.weights.get(id.0).ok_or_else(|| bad(format!("the model has no weight {}", id.0)))
    }

    pub(super) fn weight(&self, id: WeightId) -> Result<u64, BackendError> {
        let buffer = self.weights.get(id.0).map(Buffer::address);
        buffer.ok_or_else(|| bad(format!("the model has no weight {}", id.0)))
    }

    /// The address of a weight that must have so many columns.
    pub(super) fn matrix(&self, id: WeightId, cols: usize) -> Result<u64, BackendError> {
        let spec = self.weight_spec(id)?;
        if spec.cols != cols {
            return Err(bad(format!("{} has {} columns, not {cols}", spec.name, spec.cols)));
        }
        self.weight(id)
    }

    /// The address of a weight that must be one row of so many elements.
    pub(super) fn vector(&self, id: WeightId, len: usize) -> Result<u64, BackendError> {
        let spec = self.weight_spec(id)?;
        if spec.rows != 1 {
            return Err(bad(format!("{} has {} rows, not one", spec.name, spec.rows)));
        }
        self.matrix(id, len)
    }

    /// The addresses of all linear weights of that size.
    pub(super) fn weights_of(&self, rows: usize, cols: usize) -> Vec<u64> {
        let fits =
            |spec: &WeightSpec| spec.role == WeightRole::Linear && (spec.rows, spec.cols) == (rows, cols);
        let pairs = self.spec.weights.iter().zip(&self.weights);
        pairs.filter(|(spec, _)| fits(spec)).map(|(_, buffer)| buffer.address()).collect()
    }
}

/// Tables of cosines and sines by position, made as far as batches have reached.
pub(super) struct Ropes {
    ropes: Vec<Rope>,
    tables: RefCell<Vec<Option<(usize, Buffer)>>>,
}

/// Positions of the first table.
const FIRST_POSITIONS: usize = 16_384;

impl Ropes {
    pub(super) fn new(ropes: &[Rope]) -> Self {
        Self { ropes: ropes.to_vec(), tables: RefCell::new(ropes.iter().map(|_| None).collect()) }
    }

    /// Makes the table of a rope reach `positions` positions. Recorded graphs keep the address of the table that they saw, and
    /// no graph outlives its capture, before whose recording this is called.
    pub(super) fn reserve(&self, parts: &Parts, rope: usize, positions: usize) -> Result<(), BackendError> {
        let table = self.ropes.get(rope).ok_or_else(|| bad(format!("the model has no rope {rope}")))?;
        if self.tables.borrow()[rope].as_ref().is_some_and(|(reach, _)| *reach >= positions) {
            return Ok(());
        }
        let reach = positions.next_power_of_two().max(FIRST_POSITIONS);
        let reach = reach.min((parts.spec.max_model_len as usize).max(positions));
        let buffer = Buffer::of(&parts.kernels.gpu, &angles(table, reach), "the rotary embedding's table")?;
        self.tables.borrow_mut()[rope] = Some((reach, buffer));
        Ok(())
    }

    pub(super) fn address(&self, rope: usize) -> Result<u64, BackendError> {
        let tables = self.tables.borrow();
        let table = tables.get(rope).and_then(Option::as_ref);
        table.map(|(_, buffer)| buffer.address()).ok_or_else(|| bad(format!("rope {rope} has no table")))
    }
}

/// `[positions, head_dim / 2]` of (cosine, sine). The angle is the float32 product, as on the CPU.
fn angles(rope: &Rope, positions: usize) -> Vec<[f32; 2]> {
    let half = rope.inv_freq.len().max(1);
    let mut table = vec![[0.0; 2]; positions * half];
    table.par_chunks_mut(half).enumerate().for_each(|(position, row)| {
        for (entry, frequency) in row.iter_mut().zip(&rope.inv_freq) {
            let (sine, cosine) = f64::from(position as f32 * frequency).sin_cos();
            *entry = [cosine as f32 * rope.factor, sine as f32 * rope.factor];
        }
    });
    table
}
