//! Which part of a model one rank holds, as vLLM cuts it.
//!
//! Tensor-parallel ranks share query heads, KV heads (each is on several ranks where there are fewer heads than ranks), the MLP's
//! inner size and the vocabulary of the embedding. Experts are spread over data × tensor ranks, or the inner size of each is.
//! Norms and gates are everywhere.

use std::ops::Range;

use super::config::ModelConfig;
use super::fields::ModelError;
use crate::backend::All2All;
use crate::layout::Place;

/// What a rank holds, as ranges of the whole model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Which rank it is.
    pub place: Place,
    /// How tokens travel between data-parallel ranks.
    pub all2all: All2All,
    /// Query heads.
    pub q_heads: Range<usize>,
    /// KV heads.
    pub kv_heads: Range<usize>,
    /// The MLP's inner size.
    pub inter: Range<usize>,
    /// Rows of the embedding.
    pub vocabulary: Range<usize>,
    /// Experts.
    pub experts: Range<usize>,
    /// The inner size of each of them.
    pub expert_inter: Range<usize>,
}

/// The `index`-th of `parts` equal parts.
fn part(size: usize, index: usize, parts: usize) -> Range<usize> {
    let each = size / parts;
    index * each..(index + 1) * each
}

impl Shard {
    /// What the place holds of the model.
    ///
    /// # Errors
    /// One line with the numbers where something does not divide.
    pub fn of(config: &ModelConfig, place: Place, all2all: All2All) -> Result<Self, ModelError> {
        let divide = Divide { config, place };
        divide.supported(all2all)?;
        let (rank, ranks) = (place.tensor(), place.layout.tensor);
        let tensor = format!("--tensor-parallel-size {ranks}");
        let (has_mlp, fits) = (divide.has_mlp(), |ranks| divide.fits_tensor(ranks));
        divide.even("num_attention_heads", config.num_attention_heads, (&tensor, ranks), &fits)?;
        if has_mlp {
            divide.even("intermediate_size", config.intermediate_size, (&tensor, ranks), &fits)?;
        }
        let (experts, expert_inter) = divide.experts()?;
        Ok(Self {
            place,
            all2all,
            q_heads: part(config.num_attention_heads, rank, ranks),
            kv_heads: divide.kv_heads(config.num_key_value_heads)?,
            inter: if has_mlp { part(config.intermediate_size, rank, ranks) } else { 0..0 },
            vocabulary: divide.vocabulary(config.vocab_size)?,
            experts,
            expert_inter,
        })
    }

    /// Whether this rank adds the bias of a product whose inputs are shared by tensor-parallel ranks.
    pub(super) fn adds_row_bias(&self) -> bool {
        self.place.tensor() == 0
    }

    /// Whether it adds the bias of its experts' second product.
    pub(super) fn adds_expert_bias(&self) -> bool {
        self.place.layout.expert_parallel || self.place.expert() == 0
    }
}

/// The cuts of one model.
struct Divide<'a> {
    config: &'a ModelConfig,
    place: Place,
}

impl Divide<'_> {
    fn refuse<T>(&self, field: &str, value: usize, supported: String) -> Result<T, ModelError> {
        let (model, field, value) = (self.config.name.clone(), field.to_owned(), value.to_string());
        Err(ModelError::Field { model, field, value, supported })
    }

    /// Layouts that no model is cut by.
    fn supported(&self, all2all: All2All) -> Result<(), ModelError> {
        let layout = self.place.layout;
        if layout.pipeline != 1 {
            let supported = "stages of layers are not in this version: leave it at 1".to_owned();
            return self.refuse("--pipeline-parallel-size", layout.pipeline, supported);
        }
        if self.config.experts.is_none() && layout.expert_parallel {
            let supported = "the model has no experts: leave it out".to_owned();
            return self.refuse("--enable-expert-parallel", 1, supported);
        }
        let travels = self.config.experts.is_some() && layout.data > 1 && all2all == All2All::AllToAll;
        if travels && !layout.expert_parallel {
            let supported = "--all2all-backend all_to_all sends tokens to whole experts: add --enable-expert-parallel, \
                             or choose allgather_reducescatter";
            return self.refuse("--data-parallel-size", layout.data, supported.to_owned());
        }
        if travels && layout.tensor > 1 {
            let supported = format!(
                "--all2all-backend all_to_all would send each token {} times: choose allgather_reducescatter, or leave --tensor-parallel-size at 1",
                layout.tensor
            );
            return self.refuse("--tensor-parallel-size", layout.tensor, supported);
        }
        Ok(())
    }

    /// Fails if the size is not a multiple of the ranks; `by` says where their number comes from, `fits` which numbers would do.
    fn even(
        &self,
        field: &str,
        size: usize,
        (by, ranks): (&str, usize),
        fits: &dyn Fn(usize) -> bool,
    ) -> Result<(), ModelError> {
        if size.is_multiple_of(ranks) {
            return Ok(());
        }
        self.refuse(field, size, format!("{by} does not divide it; {}", choices(size, ranks, fits)))
    }

    /// Whether the attention and the MLP can be shared by so many ranks.
    fn fits_tensor(&self, ranks: usize) -> bool {
        let config = self.config;
        let (heads, kv) = (config.num_attention_heads, config.num_key_value_heads);
        let kv_fits = kv.is_multiple_of(ranks) || ranks.is_multiple_of(kv);
        heads.is_multiple_of(ranks)
            && kv_fits
            && (!self.has_mlp() || config.intermediate_size.is_multiple_of(ranks))
    }

    /// Whether some layer has an MLP.
    fn has_mlp(&self) -> bool {
        self.config.experts.as_ref().is_none_or(|experts| experts.layers.contains(&false))
    }

    /// This rank's KV heads: each is on several ranks where there are fewer of them than ranks.
    fn kv_heads(&self, heads: usize) -> Result<Range<usize>, ModelError> {
        let (rank, ranks) = (self.place.tensor(), self.place.layout.tensor);
        if heads.is_multiple_of(ranks) {
            return Ok(part(heads, rank, ranks));
        }
        if ranks.is_multiple_of(heads) {
            let head = rank / (ranks / heads);
            return Ok(head..head + 1);
        }
        let supported = format!(
            "--tensor-parallel-size {ranks} neither divides it nor is a multiple of it; {}",
            choices(self.config.num_attention_heads, ranks, &|ranks| self.fits_tensor(ranks))
        );
        self.refuse("num_key_value_heads", heads, supported)
    }

    /// This rank's experts, and the part of each.
    fn experts(&self) -> Result<(Range<usize>, Range<usize>), ModelError> {
        let Some(experts) = &self.config.experts else { return Ok((0..0, 0..0)) };
        let layout = self.place.layout;
        let (rank, ranks) = (self.place.expert(), layout.data * layout.tensor);
        let by = format!("data × tensor parallel ranks = {} × {}", layout.data, layout.tensor);
        if layout.expert_parallel {
            let fits = |ranks: usize| experts.count.is_multiple_of(ranks);
            self.even("the number of experts", experts.count, (&by, ranks), &fits)?;
            return Ok((part(experts.count, rank, ranks), 0..experts.inter));
        }
        let fits = |ranks: usize| experts.inter.is_multiple_of(ranks);
        self.even("the experts' intermediate size", experts.inter, (&by, ranks), &fits)?;
        Ok((0..experts.count, part(experts.inter, rank, ranks)))
    }

    /// This rank's rows of the embedding: equally many, rounded up, and what is left on the last.
    fn vocabulary(&self, rows: usize) -> Result<Range<usize>, ModelError> {
        let (rank, ranks) = (self.place.tensor(), self.place.layout.tensor);
        let each = rows.div_ceil(ranks);
        if (ranks - 1) * each >= rows {
            let supported = format!("--tensor-parallel-size {ranks} leaves a rank without rows");
            return self.refuse("vocab_size", rows, supported);
        }
        Ok(rank * each..rows.min((rank + 1) * each))
    }
}

/// Which numbers of ranks would do, next to one that does not.
fn choices(most: usize, ranks: usize, fits: &dyn Fn(usize) -> bool) -> String {
    let below = (1..ranks).rev().find(|ranks| fits(*ranks)).unwrap_or(1);
    match (ranks + 1..=most).find(|ranks| fits(*ranks)) {
        Some(above) => format!("{below} or {above} would"),
        None => format!("{below} would"),
    }
}
