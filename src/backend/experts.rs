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

/// How tokens travel between data-parallel ranks in a block of experts.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum All2All {
    /// Every rank gets the tokens of all, and its tokens' parts of all results are summed back to it.
    #[default]
    AllgatherReducescatter,
    /// Each token is sent to the ranks whose experts it chose, and comes back from there. The messages are as long as if every
    /// token went to every rank, since no size is known beforehand.
    AllToAll,
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
    /// The first of them that this rank holds.
    pub first: usize,
    /// How many it holds.
    pub local: usize,
    /// How many of all experts a token uses.
    pub top_k: usize,
    /// Width between an expert's two products, of the part that this rank holds.
    pub inter: usize,
    /// `[local * 2 * inter, hidden]`, expert by expert; [`Activation`] says which rows are gate and which up.
    pub w13: WeightId,
    /// `[1, local * 2 * inter]`
    pub w13_bias: Option<WeightId>,
    /// `[local * hidden, inter]`, expert by expert.
    pub w2: WeightId,
    /// `[1, local * hidden]`; none as well where another rank adds it.
    pub w2_bias: Option<WeightId>,
    /// Data-parallel ranks, each with equally many tokens of its own, that share the experts.
    pub data: usize,
    /// How their tokens travel.
    pub all2all: All2All,
    /// How the chosen experts are weighted.
    pub scoring: Scoring,
    /// What lies between the products.
    pub activation: Activation,
}

impl Moe {
    /// Whether each token is sent only to where its experts are.
    #[must_use]
    pub fn is_all_to_all(&self) -> bool {
        self.data > 1 && self.all2all == All2All::AllToAll
    }

    /// Slots (choices of a token) that this rank's experts can have at most, of so many tokens of each data-parallel rank.
    #[must_use]
    pub fn most_slots(&self, tokens: usize) -> usize {
        self.data * tokens * self.top_k.min(self.local)
    }

    /// The local number of an expert; none if another rank holds it.
    #[must_use]
    pub fn local_expert(&self, expert: usize) -> Option<usize> {
        expert.checked_sub(self.first).filter(|local| *local < self.local)
    }
}

/// Logits that replace those of the gates: the products still run, and the choice among the replaced logits.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// `[MoE layers][tokens * experts]` in the order of [`Moe::index`], row-major, each exact in bfloat16 and float16.
    pub logits: Vec<Vec<f32>>,
}
