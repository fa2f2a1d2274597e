//! From a file's tree to its cases and settings, with every mistake told by line and case.

use std::collections::HashSet;
use std::path::Path;

use super::tree::{Node, Value};
use super::{FileSettings, ShapeError};
use crate::case::{Case, MAX_REQUESTS, Request, quoted};

/// The most requests of all cases of one file together.
const MAX_FILE_REQUESTS: usize = 1 << 20;

/// Where a value stands: what every message begins with.
#[derive(Clone, Copy)]
struct Place<'a> {
    path: &'a Path,
    case: Option<&'a str>,
}

impl Place<'_> {
    fn error(&self, line: u64, what: impl Into<String>) -> ShapeError {
        let line = (line > 0).then_some(line);
        ShapeError { path: self.path.into(), line, case: self.case.map(Into::into), what: what.into() }
    }

    fn wrong(&self, key: &str, node: &Node, wanted: &str) -> ShapeError {
        self.error(node.line, format!("{key} is {}: give {wanted}", node.value.shown()))
    }

    /// The values of the `known` keys of a mapping, in their order; a key with no value counts as not given.
    fn fields<'n, const N: usize>(
        &self,
        node: &'n Node,
        what: &str,
        known: [&str; N],
    ) -> Result<[Option<&'n Node>; N], ShapeError> {
        let Value::Map(entries) = &node.value else {
            return Err(self.wrong(what, node, &format!("a mapping with the keys {}", known.join(", "))));
        };
        let mut fields = [None; N];
        for (key, value) in entries {
            let Value::Text(name) = &key.value else {
                return Err(self.wrong(
                    &format!("a key of {what}"),
                    key,
                    &format!("one of {}", known.join(", ")),
                ));
            };
            let Some(index) = known.iter().position(|known| known == name) else {
                let nearest = known.iter().min_by_key(|known| distance(name, known)).unwrap_or(&"");
                let all = known.join(", ");
                let message = format!(
                    "{what} has the unknown key {}: the nearest known key is {nearest} (all: {all})",
                    quoted(name)
                );
                return Err(self.error(key.line, message));
            };
            fields[index] = Some(value).filter(|value| !matches!(value.value, Value::Null));
        }
        Ok(fields)
    }

    fn text(&self, key: &str, node: &Node) -> Result<String, ShapeError> {
        match &node.value {
            Value::Text(text) if !text.is_empty() => Ok(text.clone()),
            Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                Err(self.wrong(key, node, "a text, in quotes"))
            }
            _ => Err(self.wrong(key, node, "a text that is not empty")),
        }
    }

    fn whole(&self, key: &str, node: &Node) -> Result<u32, ShapeError> {
        match node.value {
            Value::Int(value) => u32::try_from(value).ok(),
            _ => None,
        }
        .ok_or_else(|| self.wrong(key, node, &format!("a whole number from 0 to {}", u32::MAX)))
    }

    /// A truth value; the spellings of YAML 1.1 count too, since vLLM reads its files that way.
    fn truth(&self, key: &str, node: &Node) -> Result<bool, ShapeError> {
        match &node.value {
            Value::Bool(value) => Ok(*value),
            Value::Text(text) if ["yes", "on"].iter().any(|word| text.eq_ignore_ascii_case(word)) => Ok(true),
            Value::Text(text) if ["no", "off"].iter().any(|word| text.eq_ignore_ascii_case(word)) => {
                Ok(false)
            }
            _ => Err(self.wrong(key, node, "true or false")),
        }
    }

    fn number(
        &self,
        key: &str,
        node: &Node,
        valid: fn(f64) -> bool,
        wanted: &str,
    ) -> Result<f64, ShapeError> {
        match node.value {
            Value::Int(value) => Some(value as f64),
            Value::Float(value) => Some(value),
            _ => None,
        }
        .filter(|value| value.is_finite() && valid(*value))
        .ok_or_else(|| self.wrong(key, node, wanted))
    }
}

/// The cases and settings of the file at `path`.
pub(super) fn read(path: &Path, root: &Node) -> Result<(Vec<Case>, FileSettings), ShapeError> {
    let place = Place { path, case: None };
    if let Value::Null = root.value {
        return Err(ShapeError::of(path, "the file is empty: give at least `cases: [NAME=REQS]`"));
    }
    let keys = ["cases", "model", "kv_len_jitter", "routing", "tolerance_pct", "num_speculative_tokens"];
    let [cases, model, jitter, routing, tolerance, drafts] = place.fields(root, "the file", keys)?;
    let text = |key, node: Option<&Node>| node.map(|node| place.text(key, node)).transpose();
    let settings = FileSettings {
        model: text("model", model)?,
        kv_len_jitter: jitter
            .map(|node| {
                let wanted = "a number from 0 up to, not including, 1";
                place.number("kv_len_jitter", node, |value| (0.0..1.0).contains(&value), wanted)
            })
            .transpose()?,
        routing: text("routing", routing)?,
        tolerance_pct: tolerance
            .map(|node| place.number("tolerance_pct", node, |value| value >= 0.0, "a number of 0 or more"))
            .transpose()?,
        num_speculative_tokens: drafts.map(|node| place.whole("num_speculative_tokens", node)).transpose()?,
    };
    match cases.map(|node| (node, &node.value)) {
        Some((_, Value::List(list))) if !list.is_empty() => Ok((read_cases(path, list)?, settings)),
        Some((node, _)) => Err(place.wrong("cases", node, "a list with at least one case")),
        None => Err(place.error(root.line, "no cases: give at least `cases: [NAME=REQS]`")),
    }
}

fn read_cases(path: &Path, list: &[Node]) -> Result<Vec<Case>, ShapeError> {
    let mut cases: Vec<Case> = Vec::new();
    let mut names = HashSet::new();
    let mut requests = 0;
    for (index, node) in list.iter().enumerate() {
        let case = read_case(path, index, node)?;
        let place = Place { path, case: Some(&case.name) };
        requests += case.requests.len();
        if requests > MAX_FILE_REQUESTS {
            let what = format!(
                "{requests} requests up to here: a file has at most {MAX_FILE_REQUESTS}, so split it"
            );
            return Err(place.error(node.line, what));
        }
        if !names.insert(case.name.clone()) {
            return Err(place.error(node.line, "a second case of that name: give it another name"));
        }
        cases.push(case);
    }
    Ok(cases)
}

/// The case at `index`: a text `NAME=REQS` or a mapping.
fn read_case(path: &Path, index: usize, node: &Node) -> Result<Case, ShapeError> {
    let numbered = format!("number {}", index + 1);
    let place = Place { path, case: Some(&numbered) };
    if let Value::Text(text) = &node.value {
        let place = Place { case: Some(text), ..place };
        return text
            .parse()
            .map_err(|error: crate::case::CaseError| place.error(node.line, error.to_string()));
    }
    if !matches!(node.value, Value::Map(_)) {
        let wanted = "a text NAME=REQS, in quotes, or a mapping with the keys name, requests";
        return Err(place.wrong("the case", node, wanted));
    }
    let [name, requests] = place.fields(node, "the case", ["name", "requests"])?;
    let name = name.ok_or_else(|| place.error(node.line, "no name: give the case a name"))?;
    let name = place.text("name", name)?;
    let place = Place { case: Some(&name), ..place };
    let list = match requests.map(|node| (node, &node.value)) {
        Some((_, Value::List(list))) => list,
        Some((node, _)) => return Err(place.wrong("requests", node, "a list of requests")),
        None => return Err(place.error(node.line, "no requests: give a list of at least one")),
    };
    let mut requests = Vec::new();
    for node in list {
        let (count, request) = read_request(place, node, requests.len())?;
        requests.resize(requests.len() + count, request);
    }
    Case::new(name.clone(), requests).map_err(|error| place.error(node.line, error.to_string()))
}

/// The count and the request of one mapping; `before` requests stand before it.
fn read_request(place: Place<'_>, node: &Node, before: usize) -> Result<(usize, Request), ShapeError> {
    let keys = ["query_len", "kv_len", "num_draft_tokens", "chunked", "count"];
    let [query, kv, drafts, chunked, count] = place.fields(node, "the request", keys)?;
    let query =
        query.ok_or_else(|| place.error(node.line, "no query_len: give the request its query length"))?;
    let query_len = place.whole("query_len", query)?;
    let kv_len = kv.map_or(Ok(query_len), |node| place.whole("kv_len", node))?;
    let drafts = drafts.map_or(Ok(0), |node| place.whole("num_draft_tokens", node))?;
    let chunked = chunked.map_or(Ok(false), |node| place.truth("chunked", node))?;
    let room = MAX_REQUESTS - before;
    let count = match count.map(|node| (node, &node.value)) {
        None if room > 0 => 1,
        Some((_, Value::Int(count))) if (1..=room as i128).contains(count) => *count as usize,
        Some((node, Value::Int(count))) if *count > 0 => {
            let what = format!(
                "count is {count} after {before} requests: a case has at most {MAX_REQUESTS}, so give at most {room}"
            );
            return Err(place.error(node.line, what));
        }
        Some((node, _)) => {
            return Err(place.wrong("count", node, &format!("a whole number from 1 to {room}")));
        }
        None => {
            let what = format!("over {MAX_REQUESTS} requests: a case has at most that many");
            return Err(place.error(node.line, what));
        }
    };
    let request = Request::new(query_len, kv_len, drafts, chunked)
        .map_err(|rule| place.error(node.line, format!("the request has {rule}")))?;
    Ok((count, request))
}

/// Levenshtein's distance in characters: insertions, deletions and replacements from `a` to `b`. Of a long `a`, the
/// first 64 characters.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().take(64).enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::distance;

    #[test]
    fn the_distance_counts_single_changes() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kv_len", "kv_len"), 0);
        assert_eq!(distance("kvlen", "kv_len"), 1);
    }
}
