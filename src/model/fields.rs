//! Reading of single fields of a `config.json`, with errors that name the field, what it is and what it may be.

use serde_json::{Map, Value};

/// What can be wrong with a model's configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file that cannot be read or is not JSON.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A field that is missing or has a value that is not supported.
    #[error("{model}: {field} is {value}; {supported}")]
    Field {
        /// The model's name.
        model: String,
        /// The field, dotted where nested.
        field: String,
        /// Its value as JSON, or `missing`.
        value: String,
        /// What is supported.
        supported: String,
    },
    /// Overrides that are no object or name no known field.
    #[error("--hf-overrides: {0}")]
    Overrides(String),
    /// No preset and no folder of that name.
    #[error("--model {name}: no preset and no folder of that name; presets are {presets}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// The presets.
        presets: String,
    },
}

/// An object of the configuration.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    /// The model's name, for messages.
    pub model: &'a str,
    /// `rope_scaling.` and the like, before a field's name in messages.
    pub prefix: &'a str,
    /// The object.
    pub map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The value, if it is there and not null.
    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Whether the field is there, if only as null.
    pub(super) fn has(&self, field: &str) -> bool {
        self.map.contains_key(field)
    }

    /// The error that `field` is not `supported`.
    pub(super) fn error(&self, field: &str, supported: impl Into<String>) -> ModelError {
        let value = self.map.get(field).map_or_else(|| "missing".to_owned(), shortened);
        let field = format!("{}{field}", self.prefix);
        ModelError::Field { model: self.model.to_owned(), field, value, supported: supported.into() }
    }

    /// A whole number in `1..=most`; `default` where it is missing or null.
    pub(super) fn size(&self, field: &str, default: Option<usize>, most: usize) -> Result<usize, ModelError> {
        let bad = || self.error(field, format!("it must be a whole number from 1 to {most}"));
        let Some(value) = self.get(field) else { return default.ok_or_else(bad) };
        let value = value.as_u64().and_then(|value| usize::try_from(value).ok());
        value.filter(|value| (1..=most).contains(value)).ok_or_else(bad)
    }

    /// A finite number above zero; `default` where it is missing or null.
    pub(super) fn positive(&self, field: &str, default: Option<f64>) -> Result<f64, ModelError> {
        let bad = || self.error(field, "it must be a number above 0");
        let Some(value) = self.get(field) else { return default.ok_or_else(bad) };
        value.as_f64().filter(|value| value.is_finite() && *value > 0.0).ok_or_else(bad)
    }

    /// True or false; `default` where it is missing or null.
    pub(super) fn flag(&self, field: &str, default: bool) -> Result<bool, ModelError> {
        let bad = || self.error(field, "it must be true or false");
        self.get(field).map_or(Ok(default), |value| value.as_bool().ok_or_else(bad))
    }

    /// Text, if it is there.
    pub(super) fn text(&self, field: &str) -> Result<Option<&'a str>, ModelError> {
        let bad = || self.error(field, "it must be text");
        self.get(field).map(|value| value.as_str().ok_or_else(bad)).transpose()
    }

    /// A nested object, if it is there and not empty.
    pub(super) fn object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>, ModelError> {
        let bad = || self.error(field, "it must be an object");
        let object = self.get(field).map(|value| value.as_object().ok_or_else(bad)).transpose()?;
        Ok(object.filter(|object| !object.is_empty()))
    }
}

/// A value as JSON of at most 60 characters.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
