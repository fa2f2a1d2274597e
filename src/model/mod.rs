//! Hugging Face configuration to layers and weights, and the forward over `Ops`.
