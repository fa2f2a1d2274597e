//! Names of kernels that people can read: C++ symbols without return types, arguments and namespaces, template arguments cut to what
//! tells kernels apart.
//!
//! `void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_64x6_tn_align8>(…)` becomes `Kernel2<cutlass_80_…>`. Of template
//! arguments only their own names stay, not *their* arguments, unless two kernels of one profile would then be called the same: those keep
//! more, level by level, up to everything.

use std::collections::{BTreeMap, BTreeSet};

/// Longer names lose their middle, unless they need it.
const MAX_CHARS: usize = 80;
/// Characters that stay at the end of such a name, where tile sizes and layouts stand.
const TAIL_CHARS: usize = 30;

/// Levels of nested template arguments that stay at most. After these comes the name in full length, then all of the symbol.
const MAX_DEPTH: usize = 6;
/// The last level: the demangled symbol as it is.
const WHOLE: usize = MAX_DEPTH + 1;

/// Ends of names that a library's kernels share.
const SHARED_ENDS: [&str; 3] = ["__5x_cublas", "_kernel", "_execute_segment_k_off"];

/// The names of one profile's kernels, by the tracer's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names(BTreeMap<String, Name>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Name {
    full: String,
    short: String,
}

impl Names {
    /// Names for all of these, as the tracer calls them. Different kernels get different names.
    #[must_use]
    pub fn of<'a>(raw: impl Iterator<Item = &'a str>) -> Self {
        let raw: BTreeSet<&str> = raw.collect();
        let full: BTreeMap<&str, String> = raw.iter().map(|name| (*name, demangle(name))).collect();
        let short = distinct(full.values().map(String::as_str).collect());
        let name = |(raw, full): (&&str, &String)| {
            let short = short.get(full.as_str()).unwrap_or(full).clone();
            ((*raw).to_owned(), Name { full: full.clone(), short })
        };
        Self(full.iter().map(name).collect())
    }

    /// The short name; of a kernel that is not among these, its own.
    #[must_use]
    pub fn short<'a>(&'a self, raw: &'a str) -> &'a str {
        self.0.get(raw).map_or(raw, |name| &name.short)
    }

    /// The whole name, demangled.
    #[must_use]
    pub fn full<'a>(&'a self, raw: &'a str) -> &'a str {
        self.0.get(raw).map_or(raw, |name| &name.full)
    }
}

/// A short name for each, no two alike: those that clash take the next level, until none does.
fn distinct(full: BTreeSet<&str>) -> BTreeMap<&str, String> {
    let mut levels: BTreeMap<&str, usize> = full.into_iter().map(|name| (name, 0)).collect();
    loop {
        let mut by_short: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for (name, level) in &levels {
            by_short.entry(at_level(name, *level)).or_default().push(name);
        }
        let clashing: Vec<&str> = by_short
            .into_values()
            .filter(|names| names.len() > 1)
            .flatten()
            .filter(|n| levels[n] < WHOLE)
            .collect();
        if clashing.is_empty() {
            return levels.into_iter().map(|(name, level)| (name, at_level(name, level))).collect();
        }
        for name in clashing {
            levels.entry(name).and_modify(|level| *level += 1);
        }
    }
}

fn at_level(full: &str, level: usize) -> String {
    if level >= WHOLE {
        return full.to_owned();
    }
    let without_end = |name: &str| {
        let cut = SHARED_ENDS.iter().fold(name, |name, end| name.strip_suffix(end).unwrap_or(name));
        elide(if cut.is_empty() { name } else { cut })
    };
    let Some(name) = without_signature(full) else {
        return if level == 0 { without_end(full) } else { full.to_owned() };
    };
    if level == MAX_DEPTH {
        return name.to_owned();
    }
    let cut = cut(name, level + 1).filter(|cut| !cut.is_empty());
    without_end(cut.as_deref().unwrap_or(name))
}

/// A C++ symbol as its author wrote it; anything else as it is.
fn demangle(raw: &str) -> String {
    let symbol = raw.starts_with("_Z").then(|| cpp_demangle::Symbol::new(raw.as_bytes()).ok()).flatten();
    symbol.and_then(|symbol| symbol.demangle().ok()).unwrap_or_else(|| raw.to_owned())
}

/// The first and the last characters of a name that is too long.
fn elide(name: &str) -> String {
    let count = name.chars().count();
    if count <= MAX_CHARS {
        return name.to_owned();
    }
    let head: String = name.chars().take(MAX_CHARS - TAIL_CHARS - 1).collect();
    let tail: String = name.chars().skip(count - TAIL_CHARS).collect();
    format!("{head}…{tail}")
}

/// What stands outside all brackets, an opening bracket included; none if they do not match.
fn top_level(text: &str) -> Option<Vec<(usize, char)>> {
    let mut open = Vec::new();
    let mut found = Vec::new();
    for (at, c) in text.char_indices() {
        if open.is_empty() {
            found.push((at, c));
        }
        match c {
            '<' | '(' | '[' | '{' if !is_operator(&text[..at]) => open.push(c),
            '>' if text[..at].ends_with('-') || is_operator(&text[..at]) => {}
            ')' | ']' if is_operator(&text[..at]) => {}
            '>' | ')' | ']' | '}' => {
                let pair = matches!((open.pop()?, c), ('<', '>') | ('(', ')') | ('[', ']') | ('{', '}'));
                if !pair {
                    return None;
                }
            }
            _ => {}
        }
    }
    open.is_empty().then_some(found)
}

/// Whether a bracket that follows this text belongs to an operator's name.
fn is_operator(before: &str) -> bool {
    let symbol = before.trim_end_matches(['<', '>', '=', '-', '(', '[']);
    before.len() - symbol.len() <= 2
        && symbol.ends_with("operator")
        && !symbol[..symbol.len() - "operator".len()].ends_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// The function's name with its template arguments: no return type, no parameters. None if this is no C++ name, or none that can be
/// taken apart.
fn without_signature(full: &str) -> Option<&str> {
    if !["::", "<", "("].iter().any(|mark| full.contains(mark)) {
        return None;
    }
    let is_parameters =
        |at: usize| !full[at..].starts_with("(anonymous namespace)") && !is_operator(&full[..at]);
    let outside = top_level(full)?;
    let parameters = outside.iter().rev().find(|(at, c)| *c == '(' && is_parameters(*at));
    let name = &full[..parameters.map_or(full.len(), |(at, _)| *at)];
    let space = top_level(name)?.iter().rev().find(|(_, c)| *c == ' ').map(|(at, _)| *at);
    let name = &name[space.map_or(0, |at| at + 1)..];
    (!name.is_empty()).then_some(name)
}

/// A name or type without its namespaces, its template arguments cut to `depth` levels.
fn cut(text: &str, depth: usize) -> Option<String> {
    let text = without_cast(text.trim());
    let last = top_level(text)?
        .windows(2)
        .rev()
        .find(|pair| (pair[0].1, pair[1].1) == (':', ':'))
        .map(|p| p[1].0 + 1);
    let own = &text[last.unwrap_or(0)..];
    let outside = top_level(own)?;
    let Some(open) = outside.iter().find(|(at, c)| *c == '<' && !is_operator(&own[..*at])).map(|(at, _)| *at)
    else {
        return Some(own.to_owned());
    };
    // The matching bracket is the one before whatever follows outside.
    let after = outside.iter().map(|(at, _)| *at).find(|at| *at > open).unwrap_or(own.len());
    let (name, arguments, rest) = (&own[..open], own.get(open + 1..after - 1)?, &own[after..]);
    if depth == 0 {
        return Some(format!("{name}{rest}"));
    }
    let arguments: Option<Vec<String>> =
        split(arguments)?.into_iter().map(|text| cut(text, depth - 1)).collect();
    Some(format!("{name}<{}>{rest}", arguments?.join(", ")))
}

/// An enumerator as demanglers write it, `(Layout)1`, without its type.
fn without_cast(text: &str) -> &str {
    let value = text.strip_prefix('(').and_then(|rest| rest.rsplit_once(')')).map(|(_, value)| value);
    value.filter(|value| value.parse::<i128>().is_ok()).unwrap_or(text)
}

/// Template arguments, at the commas between them.
fn split(arguments: &str) -> Option<Vec<&str>> {
    let mut parts = Vec::new();
    let mut begin = 0;
    for (at, _) in top_level(arguments)?.into_iter().filter(|(_, c)| *c == ',') {
        parts.push(&arguments[begin..at]);
        begin = at + 1;
    }
    parts.push(&arguments[begin..]);
    Some(parts)
}

#[cfg(test)]
mod tests;
