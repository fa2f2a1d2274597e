//! Benchmark ids: `group/model[-layout]/case`, each part safe as a folder's name and never shortened by Criterion.

use std::collections::HashMap;

/// Criterion cuts a component to this many bytes, which could mix two baselines.
const MAX_COMPONENT: usize = 64;

/// Folders that Criterion or we put beside benchmarks.
const RESERVED: [&str; 7] = ["new", "base", "change", "report", "forward", ".", ".."];

/// The parts of an id, and how to shorten each.
const PARTS: [(&str, &str); 3] = [
    ("its group", "rename the shape file"),
    ("its model", "rename the model's folder"),
    ("its name", "give the case a shorter name: NAME=REQS"),
];

/// An id that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct IdError(String);

/// A text as a component of an id: `*` becomes `x`, any other character outside `[A-Za-z0-9._@=,+-]` becomes `_`.
#[must_use]
pub fn component(text: &str) -> String {
    let safe = |c: char| match c {
        '*' => 'x',
        c if c.is_ascii_alphanumeric() || "._@=,+-".contains(c) => c,
        _ => '_',
    };
    text.chars().map(safe).collect()
}

/// Checks that every id can be a folder of its own; `ids` has each id's parts with the text that they came from.
///
/// # Errors
/// A component that is too long or reserved, or two ids that are equal.
pub fn check<'a>(ids: impl Iterator<Item = (&'a str, &'a str)>) -> Result<(), IdError> {
    let mut seen: HashMap<&str, &str> = HashMap::new();
    for (id, source) in ids {
        for (part, (what, advice)) in id.split('/').zip(PARTS) {
            if part.len() > MAX_COMPONENT || part.is_empty() {
                let length = part.len();
                return Err(IdError(format!(
                    "case {source:?}: {what} {part:?} has {length} bytes, and 1 to {MAX_COMPONENT} make an id; {advice}"
                )));
            }
            if RESERVED.contains(&part) {
                return Err(IdError(format!(
                    "case {source:?}: {part:?} is a name of Criterion's folders; choose another name"
                )));
            }
        }
        if let Some(other) = seen.insert(id, source) {
            return Err(IdError(format!(
                "cases {other:?} and {source:?} have the same id {id}; name one of them differently: NAME=REQS"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_safe_characters_are_left() {
        assert_eq!(component("64*1@8192"), "64x1@8192");
        assert_eq!(component("mix: 8 ,4@8c:3/é\n"), "mix__8_,4@8c_3___");
        assert_eq!(component("a=b+c.d-e_f"), "a=b+c.d-e_f");
    }

    #[test]
    fn ids_that_would_share_a_folder_are_refused() {
        let error = |ids: &[(&str, &str)]| check(ids.iter().copied()).unwrap_err().to_string();
        assert!(error(&[("g/m/a_b", "a:b"), ("g/m/a_b", "a_b")]).contains("\"a:b\" and \"a_b\""));
        assert!(error(&[("g/m/base", "base")]).contains("\"base\""));
        assert!(error(&[("g/m/..", "..")]).contains("choose another"));
        let long = "x".repeat(65);
        assert!(error(&[(&format!("g/m/{long}"), "long")]).contains("65 bytes"));
        let fits = format!("g/m/{}", "x".repeat(64));
        check([(fits.as_str(), "fits"), ("g/n/a", "a"), ("h/n/a", "a")].into_iter()).unwrap();
    }
}
