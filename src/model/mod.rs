//! Hugging Face configuration to layers and weights, and the forward over [`Ops`](crate::backend::Ops).

mod architecture;
mod config;
pub mod cost;
mod decoder;
mod expert_weights;
mod experts;
mod fields;
mod layers;
mod load;
mod mxfp4;
mod overrides;
mod presets;
mod rope;
pub mod routing;
mod shard;
mod values;
pub mod verify;
mod weights;

pub use architecture::Architecture;
pub use config::ModelConfig;
pub use decoder::Model;
pub use experts::Experts;
pub use fields::ModelError;
pub use layers::{Layer, Mlp};
pub use load::Checkpoint;
pub use presets::names as preset_names;
pub use shard::Shard;
