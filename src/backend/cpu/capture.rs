//! The CPU's capture: a forward's operations on a tape, replayed on the device's threads.

use std::time::Instant;

use rayon::ThreadPool;

use super::kv::Saved;
use super::step::Step;
use crate::backend::tape::{Checked, Op};
use crate::backend::{Act, BackendError, Capture, Forward, Replay, StepSpec};
use crate::units::{Bytes, Nanos};

/// One step of one batch on the CPU.
pub(super) struct CpuCapture<'a> {
    pub spec: &'a StepSpec,
    pub pool: &'a ThreadPool,
    pub step: Step<'a>,
    pub forward: Forward<'a>,
    pub tape: Option<Vec<Op>>,
    pub saved: Option<Saved>,
}

impl Capture for CpuCapture<'_> {
    fn timer(&self) -> &'static str {
        "std::time::Instant"
    }

    fn snapshot(&mut self) -> Result<Bytes, BackendError> {
        let saved = self.step.kv.save(self.step.batch);
        let bytes = saved.bytes();
        self.saved = Some(saved);
        Ok(bytes)
    }

    fn restore(&mut self) -> Result<(), BackendError> {
        if let Some(saved) = &self.saved {
            self.step.kv.put_back(saved);
        }
        Ok(())
    }

    fn eager(&mut self) -> Result<(), BackendError> {
        let (step, pool) = (&mut self.step, self.pool);
        let mut ops = Checked {
            spec: self.spec,
            then: |op| {
                pool.install(|| step.run(op));
                Ok(())
            },
        };
        (self.forward)(&mut ops)
    }

    fn record(&mut self) -> Result<(), BackendError> {
        let (step, mut tape) = (&mut self.step, Vec::new());
        let mut ops = Checked {
            spec: self.spec,
            then: |op| {
                if let Op::Attention { attention, .. } = &op {
                    step.plan(attention);
                }
                tape.push(op);
                Ok(())
            },
        };
        (self.forward)(&mut ops)?;
        self.tape = Some(tape);
        Ok(())
    }

    fn replay(&mut self) -> Result<Replay, BackendError> {
        self.restore()?;
        let tape = self.tape.as_deref();
        let tape =
            tape.ok_or_else(|| BackendError::Device("a step is replayed before it is recorded".into()))?;
        let step = &mut self.step;
        // The clock starts on the pool's thread: handing the step over to it is not part of the forward.
        let time = self.pool.install(|| {
            let start = Instant::now();
            for &op in tape {
                step.run(op);
            }
            Nanos::from(start.elapsed())
        });
        Ok(Replay { time, clock_mhz: None })
    }

    fn output(&mut self) -> Result<Vec<f32>, BackendError> {
        Ok(self.step.act(Act::Normed).to_vec())
    }
}
