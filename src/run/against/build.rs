//! REF's executable: built in a worktree of its own, into a target folder of its own that is kept, so that it is built once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::run::Failure;
use crate::run::children::{Interrupt, Process, code};
use crate::run::handover::target_folder;

/// An executable to compare with.
pub struct Executable {
    /// Where it is.
    pub path: PathBuf,
    /// The commit that it was built from; none for a file that was given.
    pub commit: Option<String>,
}

/// The executable that `reference` names: a file, or a commit to build.
pub fn executable(reference: &str, interrupt: &Interrupt) -> Result<Executable, Failure> {
    let file = Path::new(reference);
    if file.is_file() {
        let path = std::path::absolute(file)
            .map_err(|error| Failure::usage(format!("--against {reference}: {error}")))?;
        return Ok(Executable { path, commit: None });
    }
    let commit = resolve(reference)?;
    let folder = target_folder().unwrap_or_else(|| PathBuf::from("target")).join("forward-against");
    let folder = std::path::absolute(&folder).unwrap_or(folder);
    let short = commit.get(..12).unwrap_or(&commit).to_owned();
    let path = folder.join(format!("{short}-{}", features().join("-"))).join("forward");
    if !path.is_file() {
        forget_trees(&folder);
        eprintln!("building {reference} ({short}) in {}", folder.display());
        let tree =
            Worktree::add(reference, &commit, &folder.join(format!("tree-{short}-{}", std::process::id())))?;
        let built = build(reference, &tree.path, &folder.join("target"), interrupt)?;
        copy(&built, &path)
            .map_err(|error| Failure::usage(format!("--against {reference}: {}: {error}", path.display())))?;
    }
    Ok(Executable { path, commit: Some(short) })
}

/// Why a reference names neither a commit nor an executable.
fn unknown(reference: &str) -> String {
    if Path::new(reference).is_dir() {
        return "this is a folder; name a commit, or an executable".to_owned();
    }
    match Command::new("git").args(["rev-parse", "--git-dir"]).output() {
        Ok(output) if !output.status.success() => {
            let text = String::from_utf8_lossy(&output.stderr);
            let line = text.lines().next().unwrap_or_default().trim_start_matches("fatal: ");
            format!("git cannot be asked here: {line}")
        }
        _ => {
            "git knows no such commit, and there is no such file; name a commit, or an executable".to_owned()
        }
    }
}

/// The features of this executable that the other one must have as well.
fn features() -> Vec<&'static str> {
    let features =
        [("cuda", cfg!(feature = "cuda")), ("cuda-dynamic-linking", cfg!(feature = "cuda-dynamic-linking"))];
    let on: Vec<&str> = features.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect();
    if on.is_empty() { vec!["cpu"] } else { on }
}

fn resolve(reference: &str) -> Result<String, Failure> {
    let revision = format!("{}^{{commit}}", reference.strip_prefix('@').unwrap_or(reference));
    let output = Command::new("git")
        .args(["rev-parse", "--verify", "--quiet", "--end-of-options", &revision])
        .output();
    match output {
        Ok(output) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        Ok(_) => Err(Failure::usage(format!("--against {reference}: {}", unknown(reference)))),
        Err(error) => {
            Err(Failure::usage(format!("--against {reference}: git could not be started: {error}")))
        }
    }
}

/// Removes worktrees whose processes were killed before they could.
fn forget_trees(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let process =
            name.strip_prefix("tree-").and_then(|name| name.rsplit_once('-')).map(|(_, process)| process);
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            drop(Worktree { path });
        }
    }
}

/// A worktree that is removed when this is dropped.
struct Worktree {
    path: PathBuf,
}

impl Worktree {
    fn add(reference: &str, commit: &str, path: &Path) -> Result<Self, Failure> {
        let guard = Self { path: path.to_owned() };
        let output = Command::new("git")
            .args(["worktree", "add", "--quiet", "--detach"])
            .arg(path)
            .arg(commit)
            .output();
        let why = match output {
            Ok(output) if output.status.success() => return Ok(guard),
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().replace('\n', " "),
            Err(error) => error.to_string(),
        };
        Err(Failure::usage(format!("--against {reference}: git could not make a worktree of it: {why}")))
    }
}

impl Drop for Worktree {
    fn drop(&mut self) {
        // What cannot be removed is only a folder below the target folder; `git worktree prune` forgets it.
        let _ = Command::new("git").args(["worktree", "remove", "--force"]).arg(&self.path).output();
        let _ = fs::remove_dir_all(&self.path);
        let _ = Command::new("git").args(["worktree", "prune"]).output();
    }
}

/// Builds the bench target; returns the executable that cargo names.
fn build(reference: &str, tree: &Path, target: &Path, interrupt: &Interrupt) -> Result<PathBuf, Failure> {
    let failed = |why: &dyn std::fmt::Display| {
        Failure::usage(format!("--against {reference}: building it failed: {why}"))
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let messages = tempfile::NamedTempFile::new().map_err(|error| failed(&error))?;
    let into = messages.reopen().map_err(|error| failed(&error))?;
    let mut command = Command::new(cargo);
    command
        .args(["bench", "--no-run", "--bench", "forward", "--message-format=json-render-diagnostics"])
        .args(["--no-default-features", "--features", &enabled()])
        .arg("--target-dir")
        .arg(target)
        .current_dir(tree)
        .stdout(Stdio::from(into));
    for variable in ["CARGO_TARGET_DIR", "CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH"] {
        command.env_remove(variable);
    }
    let status = Process::start(&mut command)?.wait(interrupt)?;
    if !status.success() {
        return Err(failed(&format_args!("cargo ended with {}; what it printed says why", code(status))));
    }
    let text = fs::read_to_string(messages.path()).map_err(|error| failed(&error))?;
    text.lines().find_map(named).ok_or_else(|| failed(&"it has no bench target `forward`"))
}

fn enabled() -> String {
    let on = features();
    if on == ["cpu"] { String::new() } else { on.join(",") }
}

/// The executable that one of cargo's messages names.
fn named(line: &str) -> Option<PathBuf> {
    #[derive(Deserialize)]
    struct Message {
        executable: Option<PathBuf>,
        target: Target,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
        kind: Vec<String>,
    }
    let message: Message = serde_json::from_str(line).ok()?;
    let bench = message.target.name == "forward" && message.target.kind.iter().any(|kind| kind == "bench");
    message.executable.filter(|_| bench)
}

/// Copies to where it is looked for only once it is whole.
fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    let folder = to.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let part = folder.join(format!("part-{}", std::process::id()));
    fs::copy(from, &part)?;
    fs::rename(&part, to)
}
