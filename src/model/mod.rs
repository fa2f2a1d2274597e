//! Hugging Face configuration to layers and weights, and the forward over [`Ops`](crate::backend::Ops).

mod architecture;
mod config;
pub mod cost;
mod decoder;
mod experts;
mod fields;
mod load;
mod mxfp4;
mod overrides;
mod presets;
mod rope;
pub mod routing;
pub mod verify;
mod weights;

pub use architecture::Architecture;
pub use config::ModelConfig;
pub use decoder::{Layer, Mlp, Model};
pub use experts::Experts;
pub use fields::ModelError;
pub use load::Checkpoint;
pub use presets::names as preset_names;
