//! Which cases run: shape files and `--case`, with every setting decided and every id known.

use std::path::{Path, PathBuf};

use regex::Regex;

use super::ids::{self, component};
use super::{Failure, project};
use crate::case::Case;
use crate::cli::Cli;
use crate::shapes::{self, CASE_GROUP, ShapeFile};

/// Jitter where neither the command line nor the file says.
const DEFAULT_JITTER: f64 = 0.5;

/// Tolerance where neither the command line nor the file says, in percent.
const DEFAULT_TOLERANCE_PCT: f64 = 1.0;

/// A case with its settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// `group/model/case`.
    pub id: String,
    /// The case as it was asked for.
    pub asked: Case,
    /// Name or folder of its model.
    pub model: String,
    /// Jitter of its prefix lengths.
    pub jitter: f64,
    /// Draft tokens that a request may have.
    pub num_speculative_tokens: u32,
    /// A change must be larger than this to count, in percent.
    pub tolerance_pct: f64,
    /// Whether `--routing` or the file asks for a routing.
    pub routing: Option<String>,
}

impl Entry {
    /// Group, model and case, as they stand in the id.
    #[must_use]
    pub fn parts(&self) -> (&str, &str, &str) {
        let mut parts = self.id.splitn(3, '/');
        let mut next = || parts.next().unwrap_or_default();
        (next(), next(), next())
    }
}

/// All cases, in the order in which they run.
#[derive(Debug, Clone, PartialEq)]
pub struct Suite {
    /// Every case, whether the filter selects it or not.
    pub entries: Vec<Entry>,
}

impl Suite {
    /// Reads the shape files and cases that the command line asks for.
    ///
    /// # Errors
    /// A bad file or case (exit 2).
    pub fn load(cli: &Cli, default_model: &str, default_folder: &str) -> Result<Self, Failure> {
        let mut entries = Vec::new();
        for file in shape_files(cli, default_folder)? {
            entries.extend(file.cases.iter().map(|case| entry(cli, Some(&file), case, default_model)));
        }
        for text in &cli.case {
            let case: Case =
                text.parse().map_err(|error| Failure::usage(format!("--case {text:?}: {error}")))?;
            entries.push(entry(cli, None, &case, default_model));
        }
        Ok(Self { entries })
    }

    /// Checks that every id can be a folder of its own.
    ///
    /// # Errors
    /// If one cannot (exit 2).
    pub fn check_ids(&self) -> Result<(), Failure> {
        ids::check(self.entries.iter().map(|entry| (entry.id.as_str(), entry.asked.name.as_str())))
            .map_err(|error| Failure::usage(error.to_string()))
    }

    /// The cases that the filter selects, by Criterion's rules.
    ///
    /// # Errors
    /// A bad regular expression, or no match, unless `may_be_empty` (exit 2).
    pub fn select(&self, cli: &Cli, may_be_empty: bool) -> Result<Vec<&Entry>, Failure> {
        if cli.criterion.ignored {
            return Ok(Vec::new());
        }
        let filter = cli.filter.as_deref();
        let regex = match filter {
            Some(text) if !cli.criterion.exact => {
                Some(Regex::new(text).map_err(|error| bad_regex(text, &error))?)
            }
            _ => None,
        };
        let matches = |id: &str| match (&regex, filter) {
            (Some(regex), _) => regex.is_match(id),
            (None, Some(exact)) => id == exact,
            (None, None) => true,
        };
        let selected: Vec<&Entry> = self.entries.iter().filter(|entry| matches(&entry.id)).collect();
        if selected.is_empty() && !may_be_empty {
            return Err(self.no_match(filter.unwrap_or_default()));
        }
        Ok(selected)
    }

    fn no_match(&self, filter: &str) -> Failure {
        let mut groups: Vec<&str> = self.entries.iter().map(|entry| entry.parts().0).collect();
        groups.dedup();
        let hint = match component(filter) {
            written if written != filter && self.entries.iter().any(|entry| entry.id.contains(&written)) => {
                format!("; try {written:?}")
            }
            _ => String::new(),
        };
        Failure::usage(format!(
            "filter {filter:?} matches no benchmark; the groups are {}, and ids write `x` for `*`{hint} \
             (--list shows all ids)",
            groups.join(", ")
        ))
    }
}

fn bad_regex(text: &str, error: &regex::Error) -> Failure {
    let reason = error.to_string();
    let reason = reason.lines().last().unwrap_or_default().trim().trim_start_matches("error: ");
    Failure::usage(format!(
        "filter {text:?} is not a regular expression: {reason}; ids write `x` for `*`, and --exact takes the filter as it is"
    ))
}

fn shape_files(cli: &Cli, default_folder: &str) -> Result<Vec<ShapeFile>, Failure> {
    let paths = match (cli.shapes.is_empty(), cli.case.is_empty()) {
        (false, _) => cli.shapes.clone(),
        (true, false) => return Ok(Vec::new()),
        (true, true) => vec![find_folder(default_folder)?],
    };
    let files = shapes::load_all(&paths).map_err(|error| Failure::usage(error.to_string()))?;
    if !cli.case.is_empty() {
        shapes::refuse_case_group(&files).map_err(|error| Failure::usage(error.to_string()))?;
    }
    Ok(files)
}

/// The default folder, looked for from where this was started, then beside the package that was built.
fn find_folder(default_folder: &str) -> Result<PathBuf, Failure> {
    project::find(default_folder).ok_or_else(|| {
        Failure::usage(format!(
            "no folder {default_folder} here; start this in the project's folder, or name shape files by --shapes"
        ))
    })
}

fn entry(cli: &Cli, file: Option<&ShapeFile>, case: &Case, default_model: &str) -> Entry {
    let settings = file.map(|file| &file.settings);
    let group = file.map_or(CASE_GROUP, |file| file.group.as_str());
    let model = cli
        .model
        .clone()
        .or_else(|| settings.and_then(|settings| settings.model.clone()))
        .unwrap_or_else(|| default_model.to_owned());
    Entry {
        id: format!(
            "{}/{}{}/{}",
            component(group),
            component(&short_name(&model)),
            layout_tag(cli),
            component(&case.name)
        ),
        asked: case.clone(),
        jitter: cli
            .kv_len_jitter
            .or_else(|| settings.and_then(|settings| settings.kv_len_jitter))
            .unwrap_or(DEFAULT_JITTER),
        num_speculative_tokens: cli
            .num_speculative_tokens
            .or_else(|| settings.and_then(|settings| settings.num_speculative_tokens))
            .unwrap_or(0),
        tolerance_pct: cli
            .comparison
            .tolerance_pct
            .or_else(|| settings.and_then(|settings| settings.tolerance_pct))
            .unwrap_or(DEFAULT_TOLERANCE_PCT),
        routing: cli.routing.clone().or_else(|| settings.and_then(|settings| settings.routing.clone())),
        model,
    }
}

/// `-tp2`, `-dp2-ep` and so on: what the layout adds to a model in an id; nothing for one rank.
fn layout_tag(cli: &Cli) -> String {
    let layout = cli.layout();
    let size = |name: &str, size: usize| if size > 1 { format!("-{name}{size}") } else { String::new() };
    let ep = if layout.expert_parallel && layout.ranks() > 1 { "-ep" } else { "" };
    format!("{}{}{}{ep}", size("tp", layout.tensor), size("pp", layout.pipeline), size("dp", layout.data))
}

/// A preset's name, or a folder's base name.
fn short_name(model: &str) -> String {
    let path = Path::new(model);
    let resolved =
        if path.is_dir() { path.canonicalize().unwrap_or_else(|_| path.to_owned()) } else { path.to_owned() };
    resolved.file_name().map_or_else(|| model.to_owned(), |name| name.to_string_lossy().into_owned())
}
