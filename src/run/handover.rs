//! Handing the run over from the first stage to the second, and what a process must know of its surroundings.

use std::panic::PanicHookInfo;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use super::Failure;
use crate::cli::Cli;

/// Carries the whole command line to the second stage, which removes it at once.
const HANDED_OVER: &str = "FORWARD_BENCH_HANDED_OVER";

/// The arguments as the user gave them, as a JSON list, for what is written about the run.
pub const COMMAND_LINE: &str = "FORWARD_BENCH_COMMAND_LINE";

/// The process's arguments.
pub fn arguments() -> Result<Vec<String>, Failure> {
    let text = |argument: std::ffi::OsString| {
        argument.into_string().map_err(|bytes| {
            Failure::usage(format!(
                "argument {:?}: it is not UTF-8; write it in UTF-8",
                bytes.to_string_lossy()
            ))
        })
    };
    std::env::args_os().map(text).collect()
}

/// The command line that the first stage handed over; `None` in the first stage.
pub fn received() -> Option<Result<Cli, Failure>> {
    let text = std::env::var_os(HANDED_OVER)?;
    // SAFETY: called first thing in main, before any thread exists that could read the environment meanwhile.
    unsafe { std::env::remove_var(HANDED_OVER) };
    let broken = |_| {
        Failure::usage(format!("{HANDED_OVER} is set, and is for this program's own use alone; unset it"))
    };
    Some(serde_json::from_slice(text.as_encoded_bytes()).map_err(broken))
}

/// Of a second stage that does not start.
fn not_again(why: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("this program could not start itself again: {why}"))
}

/// Replaces this process with its second stage; returns only if that fails.
pub fn replace_process(cli: &Cli, home: &Path) -> Failure {
    match command(cli, home) {
        Ok(mut command) => not_again(std::os::unix::process::CommandExt::exec(&mut command)),
        Err(failure) => failure,
    }
}

/// This program's second stage, given what Criterion knows.
pub fn command(cli: &Cli, home: &Path) -> Result<Command, Failure> {
    let handed_over = serde_json::to_string(cli).map_err(not_again)?;
    let given: Vec<String> = arguments()?.into_iter().skip(1).collect();
    let mut command = Command::new(std::env::current_exe().map_err(not_again)?);
    command
        .args(cli.criterion.to_arguments(cli.filter.as_deref()))
        .env(HANDED_OVER, handed_over)
        .env(COMMAND_LINE, serde_json::to_string(&given).map_err(not_again)?)
        .env("CRITERION_HOME", home)
        .env_remove("CARGO_CRITERION_PORT");
    if let Some(path) = super::backend::library_path(cli)? {
        command.env("LD_LIBRARY_PATH", path);
    }
    if let Some(name) = std::env::args_os().next() {
        std::os::unix::process::CommandExt::arg0(&mut command, name);
    }
    Ok(command)
}

/// The folder that Criterion itself would write to, made absolute.
pub fn criterion_home() -> PathBuf {
    let home = std::env::var_os("CRITERION_HOME")
        .filter(|home| !home.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(target_folder()?.join("criterion")))
        .unwrap_or_else(|| PathBuf::from("target/criterion"));
    std::path::absolute(&home).unwrap_or(home)
}

/// Cargo's target folder, as set in the environment or configured.
pub fn target_folder() -> Option<PathBuf> {
    #[derive(Deserialize)]
    struct Metadata {
        target_directory: PathBuf,
    }
    if let Some(folder) = std::env::var_os("CARGO_TARGET_DIR") {
        return Some(folder.into());
    }
    let cargo = std::env::var_os("CARGO")?;
    let output =
        Command::new(cargo).args(["metadata", "--format-version", "1", "--no-deps"]).output().ok()?;
    Some(serde_json::from_slice::<Metadata>(&output.stdout).ok()?.target_directory)
}

/// Ends the process at the first panic, with one line: a panic is a bug of ours or of a library, or a console that can no
/// longer be written to, where Criterion's `println!` panics. What was being saved is put back by the next start.
pub fn end_at_a_panic() {
    std::panic::set_hook(Box::new(|panic: &PanicHookInfo<'_>| {
        let text = panic.payload_as_str().unwrap_or("no message").replace('\n', " ");
        let place = panic.location().map_or_else(String::new, |at| format!(" ({}:{})", at.file(), at.line()));
        let message = match text.strip_prefix("failed printing to ") {
            Some(stream) => stream.to_owned(),
            None => format!("this is a bug, please report it: {text}{place}"),
        };
        crate::rank::fail(if super::ranks::is_launched() { super::LOST } else { super::CASE }, &message);
    }));
}

/// Lets a closed pipe end the process in silence, as it ends other tools: Rust's start-up has it ignored.
pub fn end_with_a_closed_pipe() {
    // SAFETY: called first thing in main, before other threads exist; SIG_DFL installs no handler of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}
