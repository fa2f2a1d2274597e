//! Hugging Face configuration to layers and weights, and the forward over [`Ops`](crate::backend::Ops).

mod config;
pub mod cost;
mod decoder;
mod fields;
mod load;
mod overrides;
mod presets;
mod rope;
pub mod verify;

pub use config::{Architecture, ModelConfig};
pub use decoder::{Layer, Model};
pub use fields::ModelError;
pub use load::Checkpoint;
pub use presets::names as preset_names;
