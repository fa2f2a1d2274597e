//! One step of one batch on the GPU: run eagerly, then recorded as a timed graph and replayed.

use std::collections::BTreeMap;

use super::device::Parts;
use super::memory::Buffer;
use super::pool::{Direction, Segments};
use super::profile::profile;
use super::step::{Launch, Prepare, Step};
use super::timed::Timed;
use super::tune::Tuner;
use super::weights::from_bits;
use crate::backend::tape::Checked;
use crate::backend::{Act, BackendError, Capture, Forward, L2, Replay, Routing, Tracing};
use crate::batch::Batch;
use crate::units::Bytes;

/// A [`Capture`] of our own models.
pub(super) struct CudaCapture<'a> {
    // Dropped first: its graph uses the rest.
    timed: Timed,
    saved: Option<Saved>,
    step: Step,
    prepared: bool,
    parts: &'a Parts,
    tuner: &'a Tuner,
    routing: Option<&'a Routing>,
    batch: &'a Batch,
    forward: Forward<'a>,
}

/// Copies of the KV blocks that the step may write.
struct Saved {
    segments: Segments,
    _copies: Buffer,
}

impl<'a> CudaCapture<'a> {
    pub(super) fn new(
        parts: &'a Parts,
        (tuner, routing): (&'a Tuner, Option<&'a Routing>),
        l2: L2,
        batch: &'a Batch,
        forward: Forward<'a>,
    ) -> Result<Self, BackendError> {
        let tokens = batch.num_tokens();
        if tokens > parts.max_tokens {
            return Err(BackendError::NoRoom(format!(
                "the batch has {tokens} query tokens, there is room for {}; raise --max-num-batched-tokens",
                parts.max_tokens
            )));
        }
        Ok(Self {
            timed: Timed::new(&parts.kernels, l2, parts.collectives.as_ref())?,
            saved: None,
            step: Step::new(parts, batch)?,
            prepared: false,
            parts,
            tuner,
            routing,
            batch,
            forward,
        })
    }

    /// Compiles, plans and tunes what the forward needs; the first time only.
    fn prepare(&mut self) -> Result<(), BackendError> {
        if !self.prepared {
            let Self { parts, step, batch, tuner, routing, .. } = self;
            let routing = *routing;
            (self.forward)(&mut Checked { spec: &parts.spec, then: |_| Ok(()) })?;
            (self.forward)(&mut Prepare { parts, step, batch, tuner, routing })?;
            parts.kernels.gpu.synchronize()?;
            self.prepared = true;
        }
        Ok(())
    }
}

impl Capture for CudaCapture<'_> {
    fn timer(&self) -> &'static str {
        "CUDA events in the graph"
    }

    fn snapshot(&mut self) -> Result<Bytes, BackendError> {
        let parts = self.parts;
        let pages = parts.kv.pages(&self.batch.snapshot_blocks(0));
        let bytes = pages.len() * parts.kv.page;
        self.saved = None;
        let copies =
            Buffer::new(&parts.kernels.gpu, bytes, "the copy of the KV blocks that the step writes")?;
        let saved = |(i, page): (usize, u64)| [page, copies.address() + (i * parts.kv.page) as u64];
        let list = pages.into_iter().enumerate().map(saved).collect();
        let segments = Segments::new(&parts.kernels, list, parts.kv.page)?;
        parts.kernels.no_overlap();
        segments.copy(&parts.kernels, Direction::Save)?;
        parts.kernels.gpu.synchronize()?;
        self.saved = Some(Saved { segments, _copies: copies });
        Ok(Bytes(bytes as u128))
    }

    fn restore(&mut self) -> Result<(), BackendError> {
        let kernels = &self.parts.kernels;
        kernels.no_overlap();
        self.saved.as_ref().map_or(Ok(()), |saved| saved.segments.copy(kernels, Direction::Restore))
    }

    fn eager(&mut self) -> Result<(), BackendError> {
        self.prepare()?;
        self.parts.kernels.no_overlap();
        (self.forward)(&mut Launch { parts: self.parts, step: &self.step })?;
        self.parts.kernels.gpu.synchronize()
    }

    fn record(&mut self) -> Result<(), BackendError> {
        self.prepare()?;
        let Self { timed, saved, step, parts, forward, .. } = self;
        let kernels = &parts.kernels;
        timed.record(
            || saved.as_ref().map_or(Ok(()), |saved| saved.segments.copy(kernels, Direction::Restore)),
            || forward(&mut Launch { parts, step }),
        )
    }

    fn replay(&mut self) -> Result<Replay, BackendError> {
        self.timed.replay()
    }

    fn tune(&mut self, agreed: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, BackendError> {
        self.parts.gemm.adopt(agreed);
        self.prepare()?;
        Ok(self.parts.gemm.choices(self.step.tokens))
    }

    fn profile(&mut self, name: &str, replays: u32) -> Result<Tracing, BackendError> {
        let kernels = self.parts.kernels.clone();
        let meets = self.timed.meets();
        profile(self, (&kernels, meets), name, replays)
    }

    fn expert_loads(&mut self) -> Result<Option<Vec<Vec<u32>>>, BackendError> {
        self.step.experts.loads()
    }

    fn output(&mut self) -> Result<Vec<f32>, BackendError> {
        let found = self.parts.acts.iter().find(|(act, ..)| *act == Act::Normed);
        let (_, width, buffer) =
            found.ok_or_else(|| BackendError::Device("the model has no output".into()))?;
        let bits: Vec<u16> = buffer.read(0, self.step.tokens * width)?;
        Ok(from_bits(&bits, self.parts.gemm.dtype))
    }
}
