//! What is wrong with a shape file: one line with file, line and case, what was found and what to change.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::case::quoted;

/// What is wrong with a shape file or folder.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ShapeError {
    /// The file or folder.
    pub path: PathBuf,
    /// The line in the file, from 1, where one is known.
    pub line: Option<u64>,
    /// The case, by name or by its place in the file.
    pub case: Option<String>,
    /// What was found and what to change.
    pub what: String,
}

impl ShapeError {
    /// An error of the whole file or folder.
    pub(super) fn of(path: &Path, what: impl Into<String>) -> Self {
        Self { path: path.into(), line: None, case: None, what: what.into() }
    }
}

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", one_line(&self.path.to_string_lossy()))?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if let Some(case) = &self.case {
            write!(f, ": case {}", quoted(case))?;
        }
        write!(f, ": {}", one_line(&self.what))
    }
}

/// `text` with runs of white space as one space and other control characters escaped.
pub(super) fn one_line(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    if text.contains(char::is_control) {
        let words: Vec<&str> = text.split_whitespace().collect();
        words.join(" ").chars().map(escape).collect()
    } else {
        text.to_owned()
    }
}
