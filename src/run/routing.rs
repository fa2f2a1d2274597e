//! `--routing` of a case: which rule it is, what that chooses, and what the experts must then have done.

use super::Failure;
use super::suite::Entry;
use crate::backend::Routing;
use crate::cli::{Cli, LoadFormat};
use crate::measure::loads::Wanted;
use crate::model::ModelConfig;
use crate::model::cost::Reached;
use crate::model::routing::{Asked, Layout, RankRouting, Rule};

/// The routing of a case on a model with experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    /// Who decides.
    pub rule: Rule,
    rank: RankRouting,
}

/// A routing that is made, or left to the gates.
pub struct Made {
    /// What replaces the gates' logits.
    pub logits: Option<Routing>,
    /// What the experts must have done.
    pub wanted: Wanted,
}

impl Route {
    /// The entry's routing for a step of so many tokens; none for a model without experts, which takes no other than `auto`.
    pub fn of(cli: &Cli, entry: &Entry, config: &ModelConfig, tokens: u64) -> Result<Option<Self>, Failure> {
        let place = cli.place();
        let text = entry.routing.as_deref().unwrap_or("auto");
        let asked = || format!("{}: --routing {text}, or its file's routing", entry.id);
        let Some(layout) = Layout::of(config, place.layout) else {
            return match text {
                "auto" => Ok(None),
                _ => Err(Failure::usage(format!(
                    "{}: {} has no experts to route to; leave it out",
                    asked(),
                    entry.model
                ))),
            };
        };
        let parsed: Result<Asked, String> = text.parse();
        let parsed = parsed.map_err(|needed| Failure::usage(format!("{}: {needed}", asked())))?;
        let rule = parsed.rule(cli.load_format == LoadFormat::Dummy);
        let tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
        let rank = RankRouting { rule, layout, place, tokens, seed: cli.seed };
        Ok(Some(Self { rule, rank }))
    }

    /// The routing itself.
    pub fn make(&self) -> Result<Made, Failure> {
        let (own, loads) = (self.rank.own(), self.rank.loads());
        let (own, loads) = (own.map_err(Failure::usage)?, loads.map_err(Failure::usage)?);
        let wanted = loads.map_or_else(|| self.left_to_gates(), Wanted::Exactly);
        Ok(Made { logits: own.map(|choices| choices.routing()), wanted })
    }

    /// What is known of the experts' work where the gates decide.
    fn left_to_gates(&self) -> Wanted {
        let RankRouting { layout, .. } = self.rank;
        let rows = self.rank.all_tokens() as u64 * layout.top_k as u64;
        let layers = layout.layers;
        if layout.ranks > 1 { Wanted::AtMost { layers, rows } } else { Wanted::InAll { layers, rows } }
    }

    /// What the experts of all ranks together must have done.
    pub fn whole(&self) -> Result<Wanted, Failure> {
        let RankRouting { layout, .. } = self.rank;
        let rows = self.rank.all_tokens() as u64 * layout.top_k as u64;
        let all = self.rank.all().map_err(Failure::usage)?;
        let gates = Wanted::InAll { layers: layout.layers, rows };
        Ok(all.map_or(gates, |choices| Wanted::Exactly(choices.loads())))
    }

    /// How many experts of each layer the step reaches; nothing is drawn for more tokens than `most`, which no step may have.
    pub fn reached(&self, most: u32) -> Reached {
        self.rank.reached(most)
    }
}
