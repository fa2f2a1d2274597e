//! Checkpoints over ranks, against the hidden states that transformers computes, in every phase that a step can have.

use forward_bench::backend::{Device, Ops, WeightSource, Weights};
use forward_bench::layout::Place;
use forward_bench::model::verify::{Expected, Row, verify};
use forward_bench::model::{Checkpoint, Model};

use super::*;

/// The fixture's sequence, its tokens in another order for each data-parallel rank, with the hidden states of one rank.
fn expected(name: &str, data: usize) -> Vec<Expected> {
    let first = Expected::read(&folder(name).join("expected.safetensors")).unwrap();
    let one = model(&config(name, None), Place::ONE, All2All::default());
    let checkpoint = Checkpoint::open(&folder(name), &one.spec).unwrap();
    let mut device = device(&one, &Weights::Read(&checkpoint));
    let of_rank = |rank: usize| {
        if rank == 0 {
            return first.clone();
        }
        let mut input_ids = first.input_ids.clone();
        input_ids.rotate_left(rank * 5);
        input_ids.swap(0, rank);
        let hidden = prefill(&one, &mut device, &input_ids);
        Expected { input_ids, hidden, width: first.width }
    };
    (0..data).map(of_rank).collect()
}

/// The hidden states of a sequence, in one step.
fn prefill(model: &Model, device: &mut dyn Device, ids: &[u32]) -> Vec<f32> {
    let mut batch = steps::batch(model, &format!("a={}", ids.len()), 0);
    batch.token_ids = ids.to_vec();
    device.init_kv(&batch).unwrap();
    let forward = |ops: &mut dyn Ops| model.forward(ops);
    let mut capture = device.capture(&batch, &forward).unwrap();
    capture.eager().unwrap();
    capture.output().unwrap()
}

/// The rows of every phase on every rank; `source` may change a rank's checkpoint.
fn rows(
    name: &str,
    spread: Spread,
    source: &(dyn Fn(Checkpoint) -> Box<dyn WeightSource> + Sync),
) -> Vec<Vec<Row>> {
    let config = config(name, None);
    let expected = expected(name, spread.layout.data);
    ranks::on_ranks(spread.layout, |place, communicator| {
        let model = model(&config, place, spread.all2all);
        let source = source(Checkpoint::open(&folder(name), &model.spec).unwrap());
        let mut device = device(&model, &Weights::Read(&*source));
        device.set_communicator(communicator).unwrap();
        verify(&model, &mut device, &expected[place.data()]).unwrap()
    })
}

fn agrees(name: &str, spreads: &[Spread]) {
    for spread in spreads {
        for (rank, rows) in rows(name, *spread, &|checkpoint| Box::new(checkpoint)).iter().enumerate() {
            let phases: Vec<&str> = rows.iter().map(|row| row.phase).collect();
            assert_eq!(phases, ["prefill", "chunk", "prefix_hit", "decode", "verify", "mixed"]);
            for row in rows {
                assert!(row.relative_rms <= TOLERANCE, "{name} {spread:?} rank {rank}: {row:?}");
                assert!(row.rows > 40, "{name}: nothing was compared: {row:?}");
            }
        }
    }
}

/// Layouts of models whose heads are 4 over 2.
const DENSE: [Spread; 4] =
    [spread(1, 2, false), spread(1, 4, false), spread(2, 1, false), spread(2, 2, false)];

/// The same of models with experts, of which each rank has a part of every one.
const SHARED: [Spread; 4] = DENSE;

#[test]
fn llama() {
    agrees("llama-tiny", &DENSE);
}

#[test]
fn qwen3_with_head_norms() {
    agrees("qwen3-tiny", &DENSE);
}

#[test]
fn qwen2_with_biases() {
    agrees("qwen2-tiny", &DENSE);
}

#[test]
fn llama_with_all_biases() {
    agrees("llama3-rope-tiny", &DENSE);
}

#[test]
fn mistral_with_a_window() {
    agrees("mistral-swa-tiny", &DENSE);
}

#[test]
fn yarn_with_wide_heads() {
    agrees("yarn-tiny", &DENSE);
}

#[test]
fn mixtral() {
    agrees("mixtral-tiny", &SHARED);
    let whole = [spread(1, 2, true), spread(1, 4, true), spread(2, 1, true), spread(2, 2, true), sent(2)];
    agrees("mixtral-tiny", &whole);
}

#[test]
fn mixtral_with_one_tensor_for_all_experts() {
    agrees("mixtral-stacked-tiny", &SHARED);
    agrees("mixtral-stacked-tiny", &[spread(5, 1, true), sent(5)]);
}

#[test]
fn qwen3_moe() {
    agrees("qwen3-moe-tiny", &SHARED);
    let whole = [spread(1, 4, true), spread(2, 1, true), spread(2, 2, true), sent(2), sent(4), sent(8)];
    agrees("qwen3-moe-tiny", &whole);
}

#[test]
fn qwen3_moe_with_dense_layers_in_between() {
    agrees("qwen3-moe-sparse-tiny", &SHARED);
    agrees("qwen3-moe-sparse-tiny", &[spread(1, 2, true), spread(3, 1, true), spread(3, 2, true), sent(3)]);
}

#[test]
fn gpt_oss() {
    agrees("gpt-oss-tiny", &SHARED);
    agrees("gpt-oss-tiny", &[spread(1, 4, true), spread(2, 1, true), spread(2, 2, true), sent(4)]);
}

#[test]
fn gpt_oss_with_other_layers() {
    agrees("gpt-oss-deep-tiny", &[spread(1, 2, false), spread(2, 2, false)]);
    agrees("gpt-oss-deep-tiny", &[spread(3, 1, true), sent(3)]);
}

#[test]
fn gpt_oss_in_mxfp4() {
    agrees("gpt-oss-mxfp4-tiny", &SHARED);
    agrees("gpt-oss-mxfp4-tiny", &[spread(1, 2, true), spread(2, 2, true), sent(2)]);
}

/// A checkpoint of which one weight is slightly wrong on one rank.
struct Broken(Checkpoint, &'static str);

impl WeightSource for Broken {
    fn read(
        &self,
        spec: &forward_bench::backend::WeightSpec,
        out: &mut [f32],
    ) -> Result<(), forward_bench::backend::BackendError> {
        self.0.read(spec, out)?;
        if spec.name == self.1 {
            out.iter_mut().step_by(7).for_each(|w| *w *= 1.01);
        }
        Ok(())
    }
}

#[test]
fn a_broken_weight_fails() {
    for weight in ["embed_tokens.weight", "layers.0.self_attn.qkv_proj.weight", "layers.1.mlp.experts.w2"] {
        for spread in [spread(2, 2, true), sent(2)] {
            let broken = rows("qwen3-moe-tiny", spread, &|checkpoint| Box::new(Broken(checkpoint, weight)));
            let worst = broken.iter().flatten().map(|row| row.relative_rms).fold(f64::INFINITY, f64::min);
            assert!(worst > 10.0 * TOLERANCE, "{weight} {spread:?}: {worst}");
        }
    }
}
