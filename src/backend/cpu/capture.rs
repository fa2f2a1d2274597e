//! The CPU's capture: a forward's operations on a tape, replayed on the device's threads.

use std::time::Instant;

use rayon::ThreadPool;

use super::kv::Saved;
use super::step::Step;
use crate::backend::tape::{Checked, Op};
use crate::backend::{
    Act, Activity, BackendError, Capture, Forward, Part, Replay, StepSpec, Traced, Tracing, WeightId,
};
use crate::batch::Batch;
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

impl CpuCapture<'_> {
    /// One replay, each of its operations timed by itself; times are nanoseconds of `clock`.
    fn trace(&mut self, clock: Instant) -> Result<Traced, BackendError> {
        let now = || u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let start_ns = now();
        self.restore()?;
        let restore = Activity { name: "restore".to_owned(), start_ns, end_ns: now(), part: Part::Before };
        let tape = self.tape.as_deref().unwrap_or_default();
        let (step, spec, mut times) = (&mut self.step, self.spec, Vec::with_capacity(tape.len()));
        self.pool.install(|| {
            tape.iter().try_for_each(|&op| {
                let start = now();
                step.run(op)?;
                times.push((start, now()));
                Ok(())
            })
        })?;
        let phase = phase(self.step.batch);
        let activity = |(op, (start_ns, end_ns)): (&Op, (u64, u64))| Activity {
            name: name(op, spec, phase),
            start_ns,
            end_ns,
            part: Part::Forward,
        };
        let forward = tape.iter().zip(times).map(activity);
        Ok(Traced { activities: std::iter::once(restore).chain(forward).collect() })
    }
}

/// What the batch's requests are to attention: `decode` of one query token each, `prefill` of more, or both.
fn phase(batch: &Batch) -> &'static str {
    let lengths = || batch.query_start.windows(2).map(|pair| pair[1] - pair[0]);
    match (lengths().any(|length| length == 1), lengths().any(|length| length > 1)) {
        (true, true) => "mixed",
        (true, false) => "decode",
        _ => "prefill",
    }
}

/// The operation, with what tells it from others of its kind.
fn name(op: &Op, spec: &StepSpec, phase: &str) -> String {
    let shape = |weight: WeightId| {
        spec.weights.get(weight.0).map_or_else(String::new, |w| format!(" [{}, {}]", w.rows, w.cols))
    };
    match op {
        Op::EmbedGather { .. } => "embed_gather".to_owned(),
        Op::AddRmsnorm { .. } => "add_rmsnorm".to_owned(),
        Op::Linear { weight, .. } => format!("linear{}", shape(*weight)),
        Op::QkNormRopeKvwrite { .. } => "qk_norm_rope_kvwrite".to_owned(),
        Op::Attention { .. } => format!("attention {phase}"),
        Op::SiluMul { .. } => "silu_mul".to_owned(),
        Op::Moe { moe, .. } => {
            format!("moe top {} of {} × [{}, …]", moe.top_k, moe.experts, 2 * moe.inter)
        }
        Op::AllReduce { group, .. } => format!("all_reduce {group:?}").to_lowercase(),
    }
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
                pool.install(|| {
                    step.prepare(&op)?;
                    step.run(op)
                })
            },
        };
        (self.forward)(&mut ops)
    }

    fn record(&mut self) -> Result<(), BackendError> {
        let (step, mut tape) = (&mut self.step, Vec::new());
        let mut ops = Checked {
            spec: self.spec,
            then: |op| {
                step.prepare(&op)?;
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
            tape.iter().try_for_each(|&op| step.run(op))?;
            Ok(Nanos::from(start.elapsed()))
        })?;
        Ok(Replay { time, clock_mhz: None })
    }

    fn profile(&mut self, _name: &str, replays: u32) -> Result<Tracing, BackendError> {
        if self.tape.is_none() {
            self.record()?;
        }
        self.replay()?; // warms up
        let clock = Instant::now();
        (0..replays).map(|_| self.trace(clock)).collect::<Result<_, _>>().map(Tracing::Traced)
    }

    fn output(&mut self) -> Result<Vec<f32>, BackendError> {
        Ok(self.step.act(Act::Normed).to_vec())
    }

    fn expert_loads(&mut self) -> Result<Option<Vec<Vec<u32>>>, BackendError> {
        let loads = &self.step.experts.loads;
        Ok((!loads.is_empty()).then(|| loads.clone()))
    }
}
