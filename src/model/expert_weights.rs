//! The weights of experts, in the ways that checkpoints lay them out, cut to what a rank holds.

use std::ops::Range;

use super::architecture::Architecture;
use super::experts::Experts;
use super::shard::Shard;
use super::weights::{Weights, plain, with_form};
use crate::backend::{Activation, Form, Moe, TensorSpec, WeightRole};

/// The weights of layer `layer`, which is MoE layer `index`.
pub(super) fn moe(
    (architecture, experts, hidden): (Architecture, &Experts, usize),
    shard: &Shard,
    (layer, index): (usize, usize),
    weights: &mut Weights,
) -> Moe {
    let (count, inter) = (experts.count, experts.inter);
    let name = |rest: &str| format!("layers.{layer}.{rest}");
    let layouts = Layouts { name: &name, count, inter, hidden };
    let gate_names = match architecture {
        Architecture::Mixtral => ["block_sparse_moe.gate", "mlp.gate"],
        Architecture::Qwen3Moe => ["mlp.gate", "mlp.router"],
        _ => ["mlp.router", "mlp.gate"],
    };
    let [one, other] = gate_names.map(|gate| vec![plain(name(&format!("{gate}.weight")), &[count, hidden])]);
    let linear = WeightRole::Linear;
    let gate = weights.add_any(&name("mlp.gate.weight"), vec![one, other], (count, hidden), linear);
    let (w13, w2) = (layouts.w13(architecture), layouts.w2(architecture));
    let w13 = weights.add_any(&name("mlp.experts.w13"), w13, (count * 2 * inter, hidden), linear);
    let w2 = weights.add_any(&name("mlp.experts.w2"), w2, (count * hidden, inter), linear);
    let mut bias = |what: &str, tensor: &str, shape: &[usize]| {
        let tensors = vec![vec![plain(name(tensor), shape)]];
        let elements = shape.iter().product();
        experts.bias.then(|| weights.add_any(&name(what), tensors, (1, elements), WeightRole::Bias))
    };
    let gate_bias = bias("mlp.gate.bias", "mlp.router.bias", &[count]);
    let w13_bias = bias("mlp.experts.w13_bias", "mlp.experts.gate_up_proj_bias", &[count, 2 * inter]);
    let w2_bias = bias("mlp.experts.w2_bias", "mlp.experts.down_proj_bias", &[count, hidden]);
    let (first_rows, second_rows) = (gate_up_rows(experts, shard), whole_experts(shard, hidden));
    weights.keep_rows(w13, &first_rows);
    w13_bias.map(|bias| weights.keep_cols(bias, &first_rows));
    weights.keep_rows(w2, std::slice::from_ref(&second_rows));
    weights.keep_cols(w2, std::slice::from_ref(&shard.expert_inter));
    w2_bias.map(|bias| weights.keep_cols(bias, std::slice::from_ref(&second_rows)));
    Moe {
        index,
        gate,
        gate_bias,
        experts: count,
        first: shard.experts.start,
        local: shard.experts.len(),
        top_k: experts.top_k,
        inter: shard.expert_inter.len(),
        w13,
        w13_bias,
        w2,
        w2_bias: w2_bias.filter(|_| shard.adds_expert_bias()),
        data: shard.place.layout.data,
        all2all: shard.all2all,
        scoring: experts.scoring,
        activation: experts.activation,
    }
}

/// The rows of the local experts, `each` rows an expert.
fn whole_experts(shard: &Shard, each: usize) -> Range<usize> {
    shard.experts.start * each..shard.experts.end * each
}

/// The rows of `w13` that are the local experts' part of gate and up.
fn gate_up_rows(experts: &Experts, shard: &Shard) -> Vec<Range<usize>> {
    let (inter, own) = (experts.inter, &shard.expert_inter);
    let in_turns = matches!(experts.activation, Activation::ClampedSwiglu { interleaved: true, .. });
    let of = |expert: usize| {
        let first = expert * 2 * inter;
        let at = |begin: usize, end: usize| first + begin..first + end;
        match in_turns {
            true => vec![at(2 * own.start, 2 * own.end)],
            false => vec![at(own.start, own.end), at(inter + own.start, inter + own.end)],
        }
    };
    shard.experts.clone().flat_map(of).collect()
}

/// The ways in which checkpoints lay out experts.
struct Layouts<'a> {
    name: &'a dyn Fn(&str) -> String,
    count: usize,
    inter: usize,
    hidden: usize,
}

impl Layouts<'_> {
    /// One tensor for each expert and each of `names`.
    fn single(&self, folder: &str, names: &[&str], shape: [usize; 2]) -> Vec<TensorSpec> {
        let of = |expert: usize| {
            let tensor = move |name: &&str| format!("{folder}.experts.{expert}.{name}.weight");
            names.iter().map(move |name| plain((self.name)(&tensor(name)), &shape))
        };
        (0..self.count).flat_map(of).collect()
    }

    /// One tensor for all experts.
    fn stacked(&self, tensor: &str, shape: [usize; 2], form: Form) -> Vec<TensorSpec> {
        vec![with_form(
            (self.name)(&format!("mlp.experts.{tensor}")),
            &[self.count, shape[0], shape[1]],
            form,
        )]
    }

    fn w13(&self, architecture: Architecture) -> Vec<Vec<TensorSpec>> {
        let (one, both) = ([self.inter, self.hidden], [2 * self.inter, self.hidden]);
        let stacked = self.stacked("gate_up_proj", both, Form::Plain);
        match architecture {
            Architecture::Mixtral => vec![self.single("block_sparse_moe", &["w1", "w3"], one), stacked],
            Architecture::GptOss => vec![
                self.stacked("gate_up_proj", [self.hidden, 2 * self.inter], Form::Transposed),
                self.stacked("gate_up_proj", both, Form::Mxfp4),
            ],
            _ => vec![self.single("mlp", &["gate_proj", "up_proj"], one), stacked],
        }
    }

    fn w2(&self, architecture: Architecture) -> Vec<Vec<TensorSpec>> {
        let shape = [self.hidden, self.inter];
        let stacked = self.stacked("down_proj", shape, Form::Plain);
        match architecture {
            Architecture::Mixtral => vec![self.single("block_sparse_moe", &["w2"], shape), stacked],
            Architecture::GptOss => vec![
                self.stacked("down_proj", [self.inter, self.hidden], Form::Transposed),
                self.stacked("down_proj", shape, Form::Mxfp4),
            ],
            _ => vec![self.single("mlp", &["down_proj"], shape), stacked],
        }
    }
}
