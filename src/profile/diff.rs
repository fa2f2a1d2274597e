//! Two profiles, kernel by kernel.

use std::fmt::Write as _;

use super::{KernelTime, Profile};

/// One kernel on both sides; what a side does not have is none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change<'a> {
    /// The side that is compared with.
    pub old: Option<&'a KernelTime>,
    /// The other.
    pub new: Option<&'a KernelTime>,
}

impl<'a> Change<'a> {
    /// Its short name, the new side's where both have it.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.new.or(self.old).map_or("", |kernel| &kernel.name)
    }

    /// How much longer the new side spends in it, in microseconds.
    #[must_use]
    pub fn us(&self) -> f64 {
        let us = |kernel: Option<&KernelTime>| kernel.map_or(0.0, |kernel| kernel.us);
        us(self.new) - us(self.old)
    }
}

/// The kernels of both sides, the most changed first. A kernel is the same if its full name is; where a full name is on one side
/// only, if its short name is: an argument type may have changed.
#[must_use]
pub fn changes<'a>(old: &'a Profile, new: &'a Profile) -> Vec<Change<'a>> {
    let mut changes: Vec<Change<'a>> =
        old.kernels.iter().map(|kernel| Change { old: Some(kernel), new: None }).collect();
    let mut left: Vec<&KernelTime> = new.kernels.iter().collect();
    for same in [same_example, same_name] {
        left.retain(|kernel| {
            let is_it = |change: &&mut Change<'a>| {
                change.new.is_none() && change.old.is_some_and(|old| same(old, kernel))
            };
            let found = changes.iter_mut().find(is_it);
            let unknown = found.is_none();
            if let Some(change) = found {
                change.new = Some(kernel);
            }
            unknown
        });
    }
    changes.extend(left.into_iter().map(|kernel| Change { old: None, new: Some(kernel) }));
    changes.sort_by(|a, b| b.us().abs().total_cmp(&a.us().abs()).then_with(|| a.name().cmp(b.name())));
    changes
}

fn same_example(old: &KernelTime, new: &KernelTime) -> bool {
    old.example == new.example
}

fn same_name(old: &KernelTime, new: &KernelTime) -> bool {
    old.name == new.name
}

/// A table: every kernel, the most changed first, then all kernels together and the span.
#[must_use]
pub fn table(old: &Profile, new: &Profile) -> String {
    let mut text = row("A µs", "B µs", "B − A µs", "%", "calls", "kernel");
    let calls =
        |kernel: Option<&KernelTime>| kernel.map_or_else(|| "0".to_owned(), |kernel| number(kernel.calls));
    for change in changes(old, new) {
        let us =
            |kernel: Option<&KernelTime>| kernel.map_or_else(|| "-".to_owned(), |k| format!("{:.2}", k.us));
        let relative = match (change.old, change.new) {
            (Some(old), Some(new)) => percent(old.us, new.us),
            (Some(_), None) => "gone".to_owned(),
            _ => "new".to_owned(),
        };
        let (before, after) = (calls(change.old), calls(change.new));
        let calls = if before == after { after } else { format!("{before} → {after}") };
        let difference = format!("{:+.2}", change.us());
        text += &row(&us(change.old), &us(change.new), &difference, &relative, &calls, change.name());
    }
    let totals = [
        ("all kernels", old.busy_us, new.busy_us),
        ("from the first start to the last end", old.span_us, new.span_us),
    ];
    for (name, old, new) in totals {
        let (a, b, difference) = (format!("{old:.2}"), format!("{new:.2}"), format!("{:+.2}", new - old));
        text += &row(&a, &b, &difference, &percent(old, new), "", name);
    }
    text
}

fn row(a: &str, b: &str, difference: &str, relative: &str, calls: &str, name: &str) -> String {
    let mut line = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(line, "{a:>12} {b:>12} {difference:>12} {relative:>10} {calls:>9}  {name}");
    line
}

fn percent(old: f64, new: f64) -> String {
    if old > 0.0 { format!("{:+.2}", (new / old - 1.0) * 100.0) } else { "new".to_owned() }
}

/// A mean of counts: whole where it is.
pub(crate) fn number(mean: f64) -> String {
    if mean.fract() == 0.0 { format!("{mean:.0}") } else { format!("{mean:.2}") }
}

#[cfg(test)]
pub(crate) mod tests;
