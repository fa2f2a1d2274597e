//! Opening a device for a model, and everything of a case that depends on both.

use std::path::Path;

use serde_json::{Value, json};

use super::backend::{self, Backend};
use super::progress::Progress;
use super::ranks::Links;
use super::routing::Route;
use super::suite::Entry;
use super::{CASE, Failure};
use crate::backend::{BackendError, Capture, Device, DeviceInfo, Ops, Routing};
use crate::baseline::Configuration;
use crate::batch::{Batch, BatchPlan, Limits, token_seed};
use crate::case::Case;
use crate::cli::{Cli, LoadFormat};
use crate::layout::Place;
use crate::measure::loads::ExpertLoads;
use crate::model::cost::{self, OpCost, Reached, Traffic, traffic};
use crate::model::routing::Rule;
use crate::model::{Model, ModelConfig, Shard};

/// A case on its model, as far as it is known without a device.
pub struct Plan {
    /// The case after jitter.
    pub case: Case,
    /// The model's layers and weights.
    pub model: Model,
    /// What each request schedules, and its blocks.
    pub batch: BatchPlan,
    /// Positions that a request may reach.
    pub max_model_len: u32,
    /// How tokens choose experts; none for a model without.
    pub route: Option<Route>,
}

impl Plan {
    /// Decides everything that `entry` leaves open.
    pub fn of(cli: &Cli, entry: &Entry) -> Result<Self, Failure> {
        // A model that a shape file names is not the command line's fault: say which case asks for it.
        let origin = if cli.model.is_some() { String::new() } else { format!("{}: ", entry.id) };
        let config = ModelConfig::resolve(&entry.model, cli.hf_overrides.as_deref())
            .map_err(|error| Failure::usage(format!("{origin}{error}")))?;
        let max_model_len = cli.max_model_len.unwrap_or(config.max_position_embeddings);
        let in_case = |error: &dyn std::fmt::Display| Failure::usage(format!("{}: {error}", entry.id));
        let case = entry
            .asked
            .with_jitter(entry.jitter, cli.seed, max_model_len)
            .map_err(|error| in_case(&error))?;
        let tokens = case.requests.iter().map(|request| u64::from(request.query_len)).sum();
        let route = Route::of(cli, entry, &config, tokens)?;
        let model = Model::shard(config, cli.block_size, max_model_len, cli.place(), cli.all2all_backend)
            .map_err(|error| in_case(&error))?;
        let batch = BatchPlan::new(&case, &model.spec.kv_groups, 0);
        Ok(Self { case, model, batch, max_model_len, route })
    }

    /// Bytes and FLOPs by operation, of rank 0; of experts that the gates choose, what is expected.
    pub fn costs(&self, cli: &Cli, backend: &Backend) -> Vec<OpCost> {
        let reached = self.route.map_or(Reached::Expected, |route| route.reached(cli.max_num_batched_tokens));
        let Model { config, shard, .. } = &self.model;
        cost::costs(config, shard, &self.case.requests, backend.element(), &reached)
    }

    /// The same of every rank, whose experts did what `loads` says.
    pub fn costs_of_ranks(
        &self,
        cli: &Cli,
        backend: &Backend,
        loads: &[Vec<ExpertLoads>],
    ) -> Result<Vec<Vec<OpCost>>, Failure> {
        let config = &self.model.config;
        let of_rank = |place: Place| {
            let shard = Shard::of(config, place, cli.all2all_backend)
                .map_err(|error| Failure::usage(error.to_string()))?;
            let counts = loads.get(place.rank).map(|layers| layers.iter().map(|layer| layer.counts.clone()));
            let reached = counts.map_or(Reached::Expected, |counts| Reached::of(&counts.collect::<Vec<_>>()));
            Ok(cost::costs(config, &shard, &self.case.requests, backend.element(), &reached))
        };
        cli.layout().places().map(of_rank).collect()
    }

    /// What a rank sends and gets in a step.
    pub fn traffic(&self, backend: &Backend) -> Traffic {
        let tokens = self.case.requests.iter().map(|request| u64::from(request.query_len)).sum();
        traffic(&self.model.config, &self.model.shard, tokens, backend.element().weight)
    }
}

/// Refuses what no case could run with, before anything does; a case that cannot run by itself is told of later.
pub fn check_settings(cli: &Cli, selected: &[&Entry]) -> Result<(), Failure> {
    backend::kv_bytes(cli)?;
    for entry in selected {
        if let Err(failure) = Plan::of(cli, entry).map(drop)
            && failure.status != CASE
        {
            return Err(failure);
        }
        if cli.load_format == LoadFormat::Safetensors && !Path::new(&entry.model).is_dir() {
            return Err(Failure::usage(format!(
                "--load-format safetensors: {} is a preset and has no weights; name a model folder by --model DIR",
                entry.model
            )));
        }
    }
    Ok(())
}

/// Warns, for each model, of requests that may be longer than it was made for.
pub fn warn_of_length(cli: &Cli, selected: &[&Entry]) {
    let Some(length) = cli.max_model_len else { return };
    let mut models: Vec<&str> = selected.iter().map(|entry| entry.model.as_str()).collect();
    models.sort_unstable();
    models.dedup();
    for model in models {
        let config = ModelConfig::resolve(model, cli.hf_overrides.as_deref());
        if let Some(own) =
            config.ok().map(|config| config.max_position_embeddings).filter(|own| length > *own)
        {
            eprintln!("warning: --max-model-len {length}: {model}'s own limit is {own}");
        }
    }
}

/// What a case is measured on, as far as comparisons care.
pub fn configuration(cli: &Cli, entry: &Entry, plan: &Plan) -> Result<Configuration, Failure> {
    let backend = backend::of(cli)?;
    let dtype = json!(backend.dtype(cli));
    let mut draws = json!({
        "requests": plan.case.requests.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "kv_init": cli.kv_init,
        "num_speculative_tokens": entry.num_speculative_tokens,
    });
    if *backend != Backend::Cpu {
        draws["l2"] = json!(cli.l2);
    }
    if let Some(route) = plan.route {
        draws["routing"] = json!(route.rule.to_string());
        if let Rule::Zipf(_) = route.rule {
            draws["routing_seed"] = json!(cli.seed);
        }
    }
    Ok(Configuration {
        backend: backend.info().backend,
        device: backend.device(),
        dtype: dtype.as_str().unwrap_or_default().to_owned(),
        model: json!({ "config": plan.model.config.json, "load_format": cli.load_format }),
        layout: layout(cli, plan),
        draws,
    })
}

/// Ranks and KV blocks.
fn layout(cli: &Cli, plan: &Plan) -> Value {
    let mut layout = json!({
        "tensor_parallel_size": cli.tensor_parallel_size, "data_parallel_size": cli.data_parallel_size,
        "pipeline_parallel_size": cli.pipeline_parallel_size, "enable_expert_parallel": cli.layout().expert_parallel,
        "block_size": cli.block_size,
    });
    if plan.route.is_some() && cli.data_parallel_size > 1 {
        layout["all2all_backend"] = json!(cli.all2all_backend);
    }
    layout
}

/// A device that holds a model.
pub struct Loaded {
    name: String,
    model: Model,
    device: Box<dyn Device>,
}

impl Loaded {
    /// What is loaded if it is this model, else the model, loaded in its stead: two at once may not fit.
    pub fn reuse(
        loaded: Option<Self>,
        cli: &Cli,
        links: &Links,
        model_name: &str,
        model: &Model,
    ) -> Result<Self, Failure> {
        match loaded {
            Some(loaded) if loaded.name == model_name => Ok(loaded),
            other => {
                drop(other);
                Self::load(cli, links, model_name, model.clone())
            }
        }
    }

    /// Opens the device and gives it the entry's model.
    pub fn load(cli: &Cli, links: &Links, model_name: &str, model: Model) -> Result<Self, Failure> {
        let _progress =
            (cli.part.rank == 0).then(|| Progress::start(format!("{model_name}: loading weights")));
        let device =
            backend::of(cli)?.open(cli, links, model_name, &model).map_err(|error| failure(&error))?;
        Ok(Self { name: model_name.to_owned(), model, device })
    }

    /// Hash of the device's kernels.
    pub fn kernels_hash(&self) -> Option<String> {
        self.device.kernels_hash().map(str::to_owned)
    }

    /// The device, to measure its ceilings on or to read its sensors.
    pub fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    /// What the device is.
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The device, and the model that it holds.
    pub fn parts(&mut self) -> (&Model, &mut dyn Device) {
        (&self.model, &mut *self.device)
    }

    /// The exact batch of a case, checked against what was asked for.
    pub fn batch(&self, cli: &Cli, entry: &Entry, plan: &Plan) -> Result<Batch, Failure> {
        let limits = Limits {
            num_kv_blocks: self.device.num_kv_blocks(),
            max_num_batched_tokens: cli.max_num_batched_tokens,
            max_num_seqs: cli.max_num_seqs,
            max_model_len: plan.max_model_len,
            num_speculative_tokens: entry.num_speculative_tokens,
        };
        let vocabulary = u32::try_from(plan.model.config.vocab_size).unwrap_or(u32::MAX);
        let seed = token_seed(cli.seed, cli.place().data());
        let batch = Batch::build(&plan.batch, &limits, seed, vocabulary)
            .map_err(|error| Failure::case(error.to_string()))?;
        batch
            .check(&plan.case, &plan.model.spec.kv_groups, 0)
            .map_err(|error| Failure::case(error.to_string()))?;
        Ok(batch)
    }

    /// Makes the batch's step ready, on fresh KV contents, with the logits that replace the gates', and hands it to `use_it`.
    pub fn with_capture<T>(
        &mut self,
        batch: &Batch,
        routing: Option<Routing>,
        use_it: impl FnOnce(&mut dyn Capture) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let Self { model, device, .. } = self;
        let forward = |ops: &mut dyn Ops| model.forward(ops);
        let failed = |error: BackendError| Failure::case(error.to_string());
        device.set_routing(routing).map_err(failed)?;
        device.init_kv(batch).map_err(failed)?;
        let mut capture = device.capture(batch, &forward).map_err(failed)?;
        use_it(&mut *capture)
    }
}

/// A device that cannot be had for lack of memory fails the case; anything else is bad usage.
fn failure(error: &BackendError) -> Failure {
    match error {
        BackendError::Weights(_) | BackendError::Unsupported(_) => Failure::usage(error.to_string()),
        _ => Failure::case(error.to_string()),
    }
}
