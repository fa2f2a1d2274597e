//! Numbers, dates, commits and links as the pages write them.

use std::path::Path;

use maud::{Markup, html};

use crate::stats::verdict::{Effect, State, Verdict};

/// A minus sign as wide as a plus.
fn sign(text: String) -> String {
    text.replace('-', "−")
}

/// Microseconds with one decimal, more where the number is small.
pub fn micros(us: f64) -> String {
    let digits = if us.abs() < 1.0 {
        4
    } else if us.abs() < 100.0 {
        2
    } else {
        1
    };
    sign(format!("{us:.digits$}"))
}

/// A number with the decimals that tell it from one that is `step` away.
pub fn with_step(value: f64, step: f64) -> String {
    let digits = (-(step.log10() + 1e-9).floor()).clamp(0.0, 9.0) as usize;
    sign(format!("{value:.digits$}"))
}

/// A change in percent, with its sign.
pub fn change(pct: f64) -> String {
    sign(format!("{pct:+.2} %"))
}

/// The ends of an interval in percent.
pub fn interval(effect: &Effect) -> String {
    sign(format!("[{:+.2}, {:+.2}]", effect.low, effect.high))
}

/// A change with its interval.
pub fn effect(effect: &Effect) -> String {
    format!("{} {}", change(effect.pct), interval(effect))
}

/// A number with a prefix of three digits: `1.23 T`.
pub fn si(value: f64) -> String {
    let steps = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")];
    let &(step, prefix) = steps.iter().find(|(step, _)| value.abs() >= *step).unwrap_or(&(1.0, ""));
    let value = value / step;
    let digits = if value.abs() < 10.0 { 2 } else { usize::from(value.abs() < 100.0) };
    format!("{value:.digits$} {prefix}").trim_end().to_owned()
}

/// The same for a tick of an axis: no zeros after the point.
pub fn si_tick(value: f64) -> String {
    let text = si(value);
    let (number, prefix) = text.split_once(' ').unwrap_or((&text, ""));
    let number =
        if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number };
    format!("{number} {prefix}").trim_end().to_owned()
}

/// RFC 3339 in UTC to the minute, for reading; anything else as it is.
pub fn date(date: &str) -> String {
    match (date.get(..10), date.get(10..11), date.get(11..16)) {
        (Some(day), Some("T"), Some(minute)) if date.ends_with('Z') => format!("{day} {minute}"),
        _ => date.to_owned(),
    }
}

/// A commit, or that there is none.
pub fn commit(commit: Option<&str>) -> String {
    commit.map_or_else(|| "no commit".to_owned(), |commit| format!("commit {commit}"))
}

/// A side's name, commit and date, in one line.
pub fn side(name: &str, of: Option<&str>, when: &str) -> String {
    format!("{name} ({}, {} UTC)", commit(of), date(when))
}

/// A side's name, commit and date.
pub fn side_cell(name: &str, of: Option<&str>, when: &str) -> Markup {
    html! {
        b { (name) } " "
        @match of { Some(of) => code { (of) }, None => span.quiet { "no commit" } }
        br;
        time.quiet datetime=(when) { (date(when)) }
    }
}

/// A state in a word, with a sign that does not depend on colour.
pub fn state(state: State) -> (&'static str, &'static str, &'static str) {
    match state {
        State::Faster => ("faster", "▼", "faster"),
        State::Slower => ("slower", "▲", "slower"),
        State::Same => ("same", "=", "same"),
        State::Ambiguous => ("ambiguous", "?", "ambiguous"),
    }
}

/// A verdict's word, with the reason of an ambiguous one.
pub fn verdict(verdict: &Verdict) -> Markup {
    let (class, sign, word) = state(verdict.state);
    html! {
        span.state.(class) {
            span.word { span aria-hidden="true" { (sign) } " " (word) }
            @if let Some(why) = &verdict.why { span.why { " (" (why) ")" } }
        }
    }
}

/// A relative path as a link: what has a meaning in an address is percent-encoded (RFC 3986, section 2.3).
pub fn href(path: &Path) -> String {
    let encode = |part: &std::ffi::OsStr| -> String {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~@=,+".contains(&byte);
        let byte = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
        part.as_encoded_bytes().iter().copied().map(byte).collect()
    };
    path.iter().map(encode).collect::<Vec<_>>().join("/")
}
