//! Blocks of experts: what a device must know of one, and logits that replace its gate's.

use super::WeightId;

/// How the gate's logits become the weights of the chosen experts; computed in float32.
///
/// The experts with the `top_k` greatest logits are chosen, the lower index first among equals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts, then the choice.
    SoftmaxThenTopK {
        /// Whether the chosen ones' weights are divided by their sum.
        renormalize: bool,
    },
    /// The choice, then softmax over the chosen ones.
    TopKThenSoftmax,
}

/// What lies between an expert's two products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`; an expert's rows of `w13` are those of the gate, then those of up.
    SiluMul,
    /// `(up + 1) * gate * sigmoid(alpha * gate)`, gate at most `limit`, up within plus or minus `limit`.
    ClampedSwiglu {
        /// The clamp.
        limit: f32,
        /// The sigmoid's factor.
        alpha: f32,
        /// Whether an expert's rows of `w13` are gate and up in turns (row 2i is gate i) rather than all of the gate's first.
        interleaved: bool,
    },
}

/// One layer's experts, as [`super::Ops::moe`] needs them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moe {
    /// Which of the model's MoE layers it is, from 0.
    pub index: usize,
    /// `[experts, hidden]`
    pub gate: WeightId,
    /// `[1, experts]`
    pub gate_bias: Option<WeightId>,
    /// How many experts there are.
    pub experts: usize,
    /// How many of them a token uses.
    pub top_k: usize,
    /// Width between an expert's two products.
    pub inter: usize,
    /// `[experts * 2 * inter, hidden]`, expert by expert; [`Activation`] says which rows are gate and which up.
    pub w13: WeightId,
    /// `[1, experts * 2 * inter]`
    pub w13_bias: Option<WeightId>,
    /// `[experts * hidden, inter]`, expert by expert.
    pub w2: WeightId,
    /// `[1, experts * hidden]`
    pub w2_bias: Option<WeightId>,
    /// How the chosen experts are weighted.
    pub scoring: Scoring,
    /// What lies between the products.
    pub activation: Activation,
}

/// Logits that replace those of the gates: the products still run, and the choice among the replaced logits.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// `[MoE layers][tokens * experts]` in the order of [`Moe::index`], row-major, each exact in bfloat16 and float16.
    pub logits: Vec<Vec<f32>>,
}
