//! Verdicts for people and for machines: a pull request's comment, and the Bencher Metric Format.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::stats::verdict::{Effect, State, Verdict};

/// One side of a case's comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    /// The baseline's name, or what stands for it.
    pub name: String,
    /// Its commit.
    pub commit: Option<String>,
    /// Median of the runs' medians in microseconds.
    pub median_us: f64,
    /// Process-level runs.
    pub runs: usize,
}

/// A case's comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The benchmark's id.
    pub id: String,
    /// What it was compared with.
    pub old: Side,
    /// What was judged.
    pub new: Side,
    /// The verdict.
    pub verdict: Verdict,
    /// The kernels that explain it.
    pub explained: Option<String>,
    /// Whether it was asked to be fatal.
    pub fatal: bool,
}

/// All comparisons of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Summary {
    /// Case by case.
    pub rows: Vec<Row>,
    /// On all of them together, where there are several.
    pub overall: Option<Verdict>,
    /// Ids of cases of which a side has nothing to compare.
    pub unjudged: Vec<String>,
}

/// The verdicts as Markdown: a headline, a table, and what explains the slower cases.
#[must_use]
pub fn markdown(summary: &Summary, device: &str) -> String {
    let mut text = String::from("### Forward pass\n\n");
    for id in &summary.unjudged {
        let _ = writeln!(text, "{} could not be judged: a side has nothing to compare.\n", cell(id));
    }
    let Some(first) = summary.rows.first() else {
        if summary.unjudged.is_empty() {
            text.push_str("No case was compared: there was no baseline.\n");
        }
        return text;
    };
    let count = |state| summary.rows.iter().filter(|row| row.verdict.state == state).count();
    let states = [State::Slower, State::Faster, State::Same, State::Ambiguous];
    let counts: Vec<String> = states
        .iter()
        .filter(|state| count(**state) > 0)
        .map(|state| format!("{} {state}", count(*state)))
        .collect();
    let _ = writeln!(
        text,
        "**{}**: {} → {} on {}\n",
        counts.join(", "),
        named(&first.old),
        named(&first.new),
        cell(device)
    );
    text.push_str("| case | before, µs | now, µs | time | cycles | margin | verdict |\n");
    text.push_str("| --- | ---: | ---: | ---: | ---: | ---: | --- |\n");
    for row in &summary.rows {
        let cycles = row.verdict.cycles.as_ref().map_or("–".to_owned(), effect);
        let _ = writeln!(
            text,
            "| {} | {:.1} | {:.1} | {} | {cycles} | ±{:.2} % | {} |",
            cell(&row.id),
            row.old.median_us,
            row.new.median_us,
            effect(&row.verdict.time),
            row.verdict.margin_pct,
            state(&row.verdict)
        );
    }
    if let Some(overall) = &summary.overall {
        let cycles = overall.cycles.as_ref().map_or("–".to_owned(), effect);
        let (time, margin) = (effect(&overall.time), overall.margin_pct);
        let _ = writeln!(
            text,
            "| all (geometric mean) | | | {time} | {cycles} | ±{margin:.2} % | {} |",
            state(overall)
        );
    }
    let explained = summary.rows.iter().filter_map(|row| Some((&row.id, row.explained.as_ref()?)));
    for (id, explained) in explained {
        let _ = writeln!(text, "\n{}: {}", cell(id), cell(explained));
    }
    let _ = writeln!(
        text,
        "\n{} and {} runs a side. Intervals at 99 %; a change counts if its interval excludes 0 and it is larger than the margin.",
        first.old.runs, first.new.runs
    );
    text
}

fn named(side: &Side) -> String {
    match &side.commit {
        Some(commit) if *commit != side.name => format!("{} ({})", cell(&side.name), cell(commit)),
        _ => cell(&side.name),
    }
}

/// Text that a table's cell can hold as it is.
fn cell(text: &str) -> String {
    let mut cell = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '|' | '\\' | '`' | '*' | '_' | '[' | ']' | '<' | '>' | '#' | '@' => cell.extend(['\\', c]),
            c if c.is_control() => cell.push(' '),
            c => cell.push(c),
        }
    }
    cell
}

fn effect(effect: &Effect) -> String {
    format!("{:+.2} % [{:+.2}, {:+.2}]", effect.pct, effect.low, effect.high)
}

fn state(verdict: &Verdict) -> String {
    let name = verdict.state.to_string();
    let text = match (&verdict.why, verdict.state) {
        (Some(why), _) => format!("{name}: {}", cell(why)),
        (None, State::Slower | State::Faster) => format!("**{name}**"),
        (None, _) => name,
    };
    text.replace('\n', " ")
}

/// One measured case for [`bmf`].
#[derive(Debug, Clone, PartialEq)]
pub struct Metric {
    /// The benchmark's id.
    pub id: String,
    /// Medians of the runs in microseconds.
    pub medians_us: Vec<f64>,
    /// Query tokens a second at the median.
    pub tokens_per_second: f64,
}

/// The [Bencher Metric Format](https://bencher.dev/docs/reference/bencher-metric-format/): latency in nanoseconds, with the least and
/// the largest median of several runs, and throughput in query tokens a second.
#[must_use]
pub fn bmf(metrics: &[Metric]) -> Value {
    let entry = |metric: &Metric| {
        let nanos: Vec<f64> = metric.medians_us.iter().map(|us| us * 1e3).collect();
        let mut latency = json!({ "value": crate::stats::median(&nanos).unwrap_or_default() });
        if nanos.len() > 1 {
            latency["lower_value"] = json!(nanos.iter().copied().fold(f64::INFINITY, f64::min));
            latency["upper_value"] = json!(nanos.iter().copied().fold(0.0, f64::max));
        }
        (
            metric.id.clone(),
            json!({ "latency": latency, "throughput": { "value": metric.tokens_per_second } }),
        )
    };
    Value::Object(metrics.iter().map(entry).collect::<Map<String, Value>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: &str, state: State) -> Row {
        let side =
            |name: &str| Side { name: name.into(), commit: Some("abc".into()), median_us: 10.0, runs: 5 };
        let effect = Effect { pct: 1.5, low: 1.2, high: 1.8 };
        let verdict = Verdict {
            state,
            time: effect,
            cycles: None,
            margin_pct: 1.0,
            noise_pct: 0.3,
            runs: (5, 5),
            why: (state == State::Ambiguous).then(|| "clock".to_owned()),
        };
        Row { id: id.into(), old: side("main"), new: side("abc"), verdict, explained: None, fatal: false }
    }

    #[test]
    fn a_comment_names_both_sides_and_cannot_be_steered_by_a_name() {
        let rows = vec![row("decode/m/1x1|@all `x`", State::Slower), row("b", State::Ambiguous)];
        let text = markdown(&Summary { rows, ..Summary::default() }, "NVIDIA H200");
        assert!(text.contains("**1 slower, 1 ambiguous**: main (abc) → abc on NVIDIA H200"), "{text}");
        assert!(text.contains(r"decode/m/1x1\|\@all \`x\`"), "{text}");
        assert!(text.contains("| +1.50 % [+1.20, +1.80] | – | ±1.00 % | **slower** |"), "{text}");
        assert!(text.contains("ambiguous: clock"), "{text}");
    }

    #[test]
    fn metrics_are_nanoseconds() {
        let metric = Metric { id: "a/b/c".into(), medians_us: vec![2.0, 1.0, 4.0], tokens_per_second: 5.0 };
        let latency = &bmf(&[metric])["a/b/c"]["latency"];
        assert_eq!(latency, &json!({ "value": 2000.0, "lower_value": 1000.0, "upper_value": 4000.0 }));
    }
}
