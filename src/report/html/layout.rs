//! What all pages share: the shell, tables, figures.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::picture::{self, Drawn};

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("sort.js");

/// Nothing may be loaded from anywhere, and no form sent.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; form-action 'none'";

/// A whole page.
pub fn page(title: &str, body: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                link rel="icon" href="data:,";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(picture::style())) }
            }
            body {
                a.skip href="#main" { "Skip to the content" }
                (body)
                footer { "forward-bench " (env!("CARGO_PKG_VERSION")) ". Times are in microseconds, dates in UTC." }
                script { (PreEscaped(SCRIPT)) }
            }
        }
    }
}

/// A column's title, and whether it holds numbers.
pub type Column<'a> = (&'a str, bool);

/// A table in a box of its own that scrolls where it is too wide. Sorting is offered where there is something to sort.
pub fn table(caption: &str, columns: &[Column<'_>], rows: &[Markup]) -> Markup {
    table_with_sums(caption, columns, rows, &[])
}

/// The same with rows at the end that sorting leaves there.
pub fn table_with_sums(caption: &str, columns: &[Column<'_>], rows: &[Markup], sums: &[Markup]) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(caption) {
            table.sortable[rows.len() > 1] {
                caption { span { (caption) } }
                thead { tr { @for (title, number) in columns { th scope="col" .n[*number] { (title) } } } }
                tbody { @for row in rows { tr { (row) } } }
                @if !sums.is_empty() { tfoot { @for row in sums { tr { (row) } } } }
            }
        }
    }
}

/// A number's cell, sorted by its value.
pub fn number(value: f64, text: &str) -> Markup {
    html! { td.n data-value=(value) { (text) } }
}

/// A cell of a number that may be missing; missing ones are sorted last.
pub fn maybe(value: Option<(f64, String)>) -> Markup {
    match value {
        Some((value, text)) => number(value, &text),
        None => html! { td.n data-value="" { span.quiet { "–" } } },
    }
}

/// A picture beside its table where there is room, above it elsewhere.
pub fn beside(picture: &Markup, tables: &Markup) -> Markup {
    html! { div.beside { div { (picture) } div { (tables) } } }
}

/// Rows that most readers skip.
pub fn details(summary: &str, content: &Markup) -> Markup {
    html! { details { summary { (summary) } (content) } }
}

/// A picture with its alternative text and its caption; nothing if pictures are not wanted.
pub fn figure(alternative: &str, caption: &str, drawn: Option<Drawn>) -> Markup {
    match drawn {
        None => html! {},
        Some(Err(why)) => html! { p.note { "This picture could not be drawn: " (why) } },
        Some(Ok(svg)) => html! {
            figure {
                div.picture role="img" aria-label=(alternative) { (PreEscaped(svg)) }
                figcaption { (caption) }
            }
        },
    }
}
