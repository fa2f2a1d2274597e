//! A file's text as a tree of values that know their line, for YAML and JSON alike.
//!
//! JSON goes through the YAML parser too, since JSON is a part of YAML 1.2 and serde_json tells no lines of values; it is
//! first read by serde_json, so that a `.json` file is JSON and its mistakes are told as JSON's. The limits on nesting,
//! nodes and aliases hold for both.

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_yaml::options::NonFiniteFloatPolicy;
use serde_yaml::{Options, Spanned};

use crate::case::quoted;

/// The longest text of one value in bytes; with [`MAX_ALIASES`] it bounds the memory that aliases can ask for.
const MAX_TEXT: usize = 256 << 10;
/// The most aliases (`*name`) of a file.
const MAX_ALIASES: usize = 256;
/// The most values that aliases may repeat.
const MAX_REPLAYED: usize = 100_000;

/// A value and the line, from 1, where it begins.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) line: u64,
    pub(super) value: Value,
}

#[derive(Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<(Node, Node)>),
}

impl Value {
    /// The value for a message: `the text "x"`, `the number 3`.
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Null => "nothing".into(),
            Self::Bool(value) => format!("the truth value {value}"),
            Self::Int(value) => format!("the number {value}"),
            Self::Float(value) => format!("the number {value:?}"),
            Self::Text(text) => format!("the text {}", quoted(text)),
            Self::List(list) if list.is_empty() => "an empty list".into(),
            Self::List(_) => "a list".into(),
            Self::Map(_) => "a mapping".into(),
        }
    }
}

/// Reads `text`; an error is the line, where it is known, and what is wrong.
pub(super) fn parse(text: &str, is_json: bool) -> Result<Node, (Option<u64>, String)> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if is_json {
        serde_json::from_str::<IgnoredAny>(text)
            .map_err(|error| (Some(error.line() as u64), format!("not JSON: {error}")))?;
    }
    serde_yaml::from_str_with_options(text, options()).map_err(|error| {
        let line = error.location().map(|location| location.line());
        (line, explain(error.without_snippet(), if is_json { "JSON" } else { "YAML" }))
    })
}

/// What to change, for the mistakes whose message speaks of the parser's own settings.
fn explain(error: &serde_yaml::Error, format: &str) -> String {
    match error {
        serde_yaml::Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("a second key {}: keep one of the two", quoted(key))
        }
        serde_yaml::Error::MultipleDocuments { .. } => {
            "a second YAML document: put all cases under one `cases` key, or into two files".into()
        }
        serde_yaml::Error::UnknownAnchor { .. } => {
            "an alias (`*name`) of no anchor: put a text that begins with `*` in quotes".into()
        }
        serde_yaml::Error::AliasReplayLimitExceeded { .. } | serde_yaml::Error::AliasError { .. } => {
            format!("an alias (`*name`) that cannot be read: {error}: write its values out instead")
        }
        serde_yaml::Error::Budget { breach, .. } => {
            format!("more than a shape file may hold ({breach:?}): split the file or nest less")
        }
        _ => format!("not {format} that can be read: {error}"),
    }
}

fn options() -> Options {
    let budget = serde_yaml::budget! { max_aliases: MAX_ALIASES, max_documents: 2 };
    serde_yaml::options! {
        budget: budget,
        alias_limits: serde_yaml::alias_limits! { max_total_replayed_events: MAX_REPLAYED },
        // `0512` is 330 to YAML 1.1 and 512 to YAML 1.2: neither is guessed.
        leading_zero_numbers_as_strings: true,
        // `n` and `y` are names to most YAML readers; `yes` and `on` are read where a truth value is wanted.
        strict_booleans: true,
        // So that a jitter of `.nan` is told as such.
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        with_snippet: false,
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, .. } = Spanned::deserialize(deserializer)?;
        Ok(Self { line: referenced.line(), value })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a text, a number, a truth value, a list or a mapping")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        Value::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Int(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Int(value.into()))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
        Ok(Value::Int(value))
    }

    fn visit_u128<E>(self, value: u128) -> Result<Value, E> {
        Ok(i128::try_from(value).map_or(Value::Float(value as f64), Value::Int))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Value, E> {
        if text.len() > MAX_TEXT {
            let length = text.len();
            return Err(E::custom(format!("a text of {length} bytes: at most {MAX_TEXT} are allowed")));
        }
        Ok(Value::Text(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(node) = access.next_element()? {
            list.push(node);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Vec::new();
        while let Some(entry) = access.next_entry()? {
            map.push(entry);
        }
        Ok(Value::Map(map))
    }

    fn visit_bytes<E: serde::de::Error>(self, _: &[u8]) -> Result<Value, E> {
        Err(E::custom("binary data, which no setting takes"))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, _: D) -> Result<Value, D::Error> {
        Err(D::Error::custom("a tagged value, which no setting takes"))
    }
}
