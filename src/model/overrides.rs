//! `--hf-overrides`: a JSON object merged over a model's configuration, nested objects merged too.

use serde_json::{Map, Value};

use super::config::FIELDS;
use super::fields::ModelError;
use super::rope::ROPE_FIELDS;

/// Merges the overrides in `text` into `config`. A key that neither the configuration has nor anything reads is an error.
pub(super) fn merge(config: &mut Map<String, Value>, text: &str) -> Result<(), ModelError> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| ModelError::Overrides(format!("not valid JSON: {error}")))?;
    let Value::Object(overrides) = value else {
        return Err(ModelError::Overrides(format!(
            "it must be a JSON object, such as {{\"num_hidden_layers\": 4}}, not {text}"
        )));
    };
    let layers = overrides.get("num_hidden_layers").and_then(Value::as_u64);
    let given_types = overrides.contains_key("layer_types");
    let nested = config.get("rope_parameters").and_then(Value::as_object);
    if overrides.contains_key("rope_theta") && nested.is_some_and(|rope| rope.contains_key("rope_theta")) {
        let hint = "rope_theta is given in rope_parameters; use {\"rope_parameters\": {\"rope_theta\": …}}";
        return Err(ModelError::Overrides(hint.into()));
    }
    for (key, value) in overrides {
        known(&key, config, FIELDS)?;
        let is_rope = key == "rope_parameters" || key == "rope_scaling";
        match (config.get_mut(&key), value) {
            (Some(Value::Object(old)), Value::Object(new)) => merge_nested(old, new, is_rope)?,
            (_, Value::Object(new)) => {
                let mut fresh = Map::new();
                merge_nested(&mut fresh, new, is_rope)?;
                config.insert(key, Value::Object(fresh));
            }
            (_, value) => {
                config.insert(key, value);
            }
        }
    }
    // Fewer layers keep the kinds of the first ones.
    if let (Some(layers), false) = (layers, given_types)
        && let Some(Value::Array(types)) = config.get_mut("layer_types")
    {
        types.truncate(usize::try_from(layers).unwrap_or(usize::MAX));
    }
    Ok(())
}

fn merge_nested(
    old: &mut Map<String, Value>,
    new: Map<String, Value>,
    is_rope: bool,
) -> Result<(), ModelError> {
    for (key, value) in new {
        if is_rope && !value.is_object() {
            known(&key, old, ROPE_FIELDS)?;
        }
        match (old.get_mut(&key), value) {
            (Some(Value::Object(old)), Value::Object(new)) => merge_nested(old, new, is_rope)?,
            (_, value) => {
                old.insert(key, value);
            }
        }
    }
    Ok(())
}

/// Fails, with the nearest known name, if nothing knows `key`.
fn known(key: &str, config: &Map<String, Value>, fields: &[&str]) -> Result<(), ModelError> {
    if config.contains_key(key) || fields.contains(&key) {
        return Ok(());
    }
    let names = fields.iter().copied().chain(config.keys().map(String::as_str));
    let nearest = names.min_by_key(|name| distance(key, name)).unwrap_or_default();
    let shown: String = key.chars().take(60).collect();
    Err(ModelError::Overrides(format!("nothing reads {shown:?}; the nearest known field is {nearest:?}")))
}

/// Levenshtein's distance over the first 60 characters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(60).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(60).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
