//! `--routing` of a case: which rule it is, what that chooses, and what the experts must then have done.

use super::Failure;
use super::suite::Entry;
use crate::backend::Routing;
use crate::cli::{Cli, LoadFormat};
use crate::measure::loads::Wanted;
use crate::model::ModelConfig;
use crate::model::cost::Reached;
use crate::model::routing::{Asked, Choices, Layout, Rule, Slice};

/// The routing of a case on a model with experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    /// Who decides.
    pub rule: Rule,
    layout: Layout,
    tokens: usize,
    seed: u64,
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
        let text = entry.routing.as_deref().unwrap_or("auto");
        let asked = || format!("{}: --routing {text}, or its file's routing", entry.id);
        let Some(layout) = Layout::of(config) else {
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
        Ok(Some(Self { rule, layout, tokens, seed: cli.seed }))
    }

    fn choices(&self) -> Result<Option<Choices>, String> {
        Choices::of(self.rule, self.layout, Slice { first: 0, tokens: self.tokens }, self.seed)
    }

    /// The routing itself.
    pub fn make(&self) -> Result<Made, Failure> {
        let Some(choices) = self.choices().map_err(Failure::usage)? else {
            let rows = self.tokens as u64 * self.layout.top_k as u64;
            return Ok(Made { logits: None, wanted: Wanted::InAll { layers: self.layout.layers, rows } });
        };
        Ok(Made { logits: Some(choices.routing()), wanted: Wanted::Exactly(choices.loads()) })
    }

    /// How many experts of each layer the step reaches; nothing is drawn for more tokens than `most`, which no step may have.
    pub fn reached(&self, most: u32) -> Reached {
        let Layout { layers, experts, top_k, .. } = self.layout;
        match self.rule {
            Rule::Balanced if self.layout.groups.is_none() => {
                Reached::Exactly(vec![experts.min(self.tokens.saturating_mul(top_k)); layers])
            }
            Rule::Real => Reached::Expected,
            _ if self.tokens > most as usize => Reached::Expected,
            _ => match self.choices() {
                Ok(Some(choices)) => {
                    Reached::Exactly(choices.loads().iter().map(|loads| hit(loads)).collect())
                }
                _ => Reached::Expected,
            },
        }
    }
}

fn hit(loads: &[u32]) -> usize {
    loads.iter().filter(|load| **load > 0).count()
}
