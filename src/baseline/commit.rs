//! Names of baselines that are commits: `@HEAD` and `@REV`, asked of git, and the order of commits.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{BaselineError, Store};

/// Hexadecimal digits of a commit in a baseline's name.
const DIGITS: usize = 12;

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The commit that `revision` names, as 12 hexadecimal digits.
fn abbreviate(revision: &str) -> Option<String> {
    let hash =
        git(&["rev-parse", "--verify", "--quiet", "--end-of-options", &format!("{revision}^{{commit}}")])?;
    hash.get(..DIGITS).map(str::to_owned)
}

/// HEAD, with `-dirty` where tracked files differ from it; `None` outside git.
#[must_use]
pub fn head() -> Option<String> {
    let commit = abbreviate("HEAD")?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() { commit } else { format!("{commit}-dirty") })
}

fn unknown(revision: &str) -> BaselineError {
    let why = match git(&["rev-parse", "--git-dir"]) {
        Some(_) => "git knows no such commit",
        None => "this is not a git repository (or git is not installed)",
    };
    BaselineError::Refused(format!("baseline @{revision}: {why}; name the baseline without @"))
}

/// The name to save under: `@HEAD` is the commit with `-dirty` where it applies, `@REV` the commit.
///
/// # Errors
/// If git does not know the revision, or there is no repository.
pub fn name_to_save(name: &str) -> Result<String, BaselineError> {
    match name.strip_prefix('@') {
        None => Ok(name.to_owned()),
        Some("HEAD") => head().ok_or_else(|| unknown("HEAD")),
        Some(revision) => abbreviate(revision).ok_or_else(|| unknown(revision)),
    }
}

/// The saved name that is meant: itself, the commit of `@REV`, or the one saved name that a hexadecimal prefix fits.
///
/// # Errors
/// If git does not know the revision, or the prefix fits several names.
pub fn name_to_read(name: &str, store: &Store) -> Result<String, BaselineError> {
    if let Some(revision) = name.strip_prefix('@') {
        return abbreviate(revision).ok_or_else(|| unknown(revision));
    }
    let names = store.names();
    let is_prefix = name.len() >= 4 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    if names.iter().any(|saved| saved == name) || !is_prefix {
        return Ok(name.to_owned());
    }
    let commit = |saved: &&String| {
        saved.get(..DIGITS).is_some_and(|head| head.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let fits: Vec<&String> = names.iter().filter(|saved| saved.starts_with(name)).filter(commit).collect();
    match fits.as_slice() {
        [] => Ok(name.to_owned()),
        [one] => Ok((*one).clone()),
        several => {
            let several: Vec<&str> = several.iter().map(|name| name.as_str()).collect();
            Err(BaselineError::Refused(format!(
                "baseline {name}: it fits {}; give more digits",
                several.join(" and ")
            )))
        }
    }
}

/// A hash of what tracked files differ from HEAD in, as git hashes a file's contents; none where they do not, or outside git.
#[must_use]
pub fn dirty_diff() -> Option<String> {
    let diff = Command::new("git").args(["diff", "--binary", "HEAD"]).output().ok()?.stdout;
    if diff.is_empty() {
        return None;
    }
    let mut hash = Command::new("git")
        .args(["hash-object", "--stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .ok()?;
    let written = hash.stdin.take()?.write_all(&diff);
    let output = hash.wait_with_output().ok()?;
    written.ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Positions of commits in the history of the repository around `folder`, parents before children (`git rev-list
/// --topo-order`). Commits are hexadecimal, in full or not; what git does not know, or what is no commit, has no position.
#[must_use]
pub fn order<'a>(folder: &Path, commits: &[&'a str]) -> HashMap<&'a str, usize> {
    order_if_known(folder, commits).unwrap_or_default()
}

fn order_if_known<'a>(folder: &Path, commits: &[&'a str]) -> Option<HashMap<&'a str, usize>> {
    let plain = |commit: &&&str| {
        (7..=64).contains(&commit.len()) && commit.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let commits: Vec<&str> = commits.iter().filter(plain).copied().collect();
    let hashes = full_hashes(folder, &commits)?;
    let mut known: Vec<&str> = hashes.iter().flatten().map(String::as_str).collect();
    known.sort_unstable();
    known.dedup();
    if known.is_empty() {
        return None;
    }
    // What all of them have in common need not be walked: it may be a long history.
    let base = git_in(folder, &["merge-base", "--octopus"], &known);
    let without = base.as_ref().map(|base| format!("^{base}"));
    let mut walk = known.clone();
    walk.extend(without.as_deref());
    let walked = git_in(folder, &["rev-list", "--topo-order", "--reverse"], &walk)?;
    let positions: HashMap<&str, usize> = base
        .iter()
        .map(String::as_str)
        .chain(walked.lines())
        .enumerate()
        .map(|(at, hash)| (hash, at))
        .collect();
    let position =
        |(commit, hash): (&'a str, &Option<String>)| Some((commit, *positions.get(hash.as_deref()?)?));
    Some(commits.into_iter().zip(&hashes).filter_map(position).collect())
}

fn git_in(folder: &Path, arguments: &[&str], more: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(folder).args(arguments).args(more).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The full hash of each commit that git knows.
fn full_hashes(folder: &Path, commits: &[&str]) -> Option<Vec<Option<String>>> {
    let mut git = Command::new("git")
        .arg("-C")
        .arg(folder)
        .args(["cat-file", "--batch-check"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let asked: String = commits.iter().map(|commit| format!("{commit}\n")).collect();
    let mut stdin = git.stdin.take()?;
    // From a thread of its own: git answers while it is still being asked, and a full pipe would stop both.
    let asking = std::thread::spawn(move || stdin.write_all(asked.as_bytes()));
    let output = git.wait_with_output().ok()?;
    let _ = asking.join(); // a git that stopped early is seen by its status
    let answer = String::from_utf8_lossy(&output.stdout);
    let hash = |line: &str| match line.split(' ').collect::<Vec<_>>().as_slice() {
        [hash, "commit", _] => Some((*hash).to_owned()),
        _ => None,
    };
    let hashes: Vec<_> = answer.lines().map(hash).collect();
    (output.status.success() && hashes.len() == commits.len()).then_some(hashes)
}
