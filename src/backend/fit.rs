//! What to change where a model's weights do not fit into memory.

use super::StepSpec;
use crate::units::Bytes;

/// Of the memory that is free, this share is for the weights when layers are counted: the rest is for KV and activations.
const SHARE: f64 = 0.9;

/// Advice for a model whose weights, at so many bytes an element, need more than is `free`.
#[must_use]
pub fn advice(spec: &StepSpec, element_bytes: usize, free: Bytes) -> String {
    match layers_that_fit(spec, element_bytes, free) {
        Some(layers) => format!(
            "choose a smaller --model, or fewer layers, of which {layers} fit, with --hf-overrides '{{\"num_hidden_layers\": {layers}}}'"
        ),
        None => "choose a smaller --model: not even one of its layers fits".to_owned(),
    }
}

/// How many of the first layers fit, with what belongs to no layer, into the [`SHARE`]; none if not one does.
fn layers_that_fit(spec: &StepSpec, element_bytes: usize, free: Bytes) -> Option<usize> {
    let mut layers: Vec<u128> = Vec::new();
    let mut rest: u128 = 0;
    for weight in &spec.weights {
        let bytes = weight.rows as u128 * weight.cols as u128 * element_bytes as u128;
        match layer_of(&weight.name) {
            Some(layer) => {
                layers.resize(layers.len().max(layer + 1), 0);
                layers[layer] += bytes;
            }
            None => rest += bytes,
        }
    }
    let room = (free.0 as f64 * SHARE) as u128;
    let sums = layers.iter().scan(rest, |sum, layer| {
        *sum += layer;
        Some(*sum)
    });
    Some(sums.take_while(|sum| *sum <= room).count()).filter(|layers| *layers > 0)
}

/// The layer that a weight's name says it belongs to.
fn layer_of(name: &str) -> Option<usize> {
    let layer = name.strip_prefix("layers.")?.split('.').next()?.parse().ok()?;
    (layer < 1 << 16).then_some(layer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{WeightRole, WeightSpec};

    fn spec(names: &[(&str, usize)]) -> StepSpec {
        let weight = |&(name, rows): &(&str, usize)| WeightSpec {
            name: name.to_owned(),
            parts: Vec::new(),
            rows,
            cols: 1,
            role: WeightRole::Linear,
            cut: None,
        };
        StepSpec {
            weights: names.iter().map(weight).collect(),
            acts: Vec::new(),
            kv_groups: Vec::new(),
            kv_layers: Vec::new(),
            ropes: Vec::new(),
            max_model_len: 1,
        }
    }

    #[test]
    fn as_many_layers_as_fit_beside_the_rest() {
        let spec =
            spec(&[("embed", 100), ("layers.0.a", 30), ("layers.0.b", 20), ("layers.1.a", 50), ("norm", 8)]);
        let fitting = |free: u128| layers_that_fit(&spec, 2, Bytes(free));
        // Rest 216 bytes, a layer 100: one layer needs 316 / 0.9, two 416 / 0.9.
        assert_eq!([351, 352, 462, 463].map(fitting), [None, Some(1), Some(1), Some(2)]);
        assert!(advice(&spec, 2, Bytes(400)).contains("'{\"num_hidden_layers\": 1}'"));
        assert!(advice(&spec, 2, Bytes(1)).contains("not even one"));
    }
}
