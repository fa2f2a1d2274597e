//! The token without which nobody joins: from the environment, or on one host from a file that only its user can read.
//!
//! It keeps other users of a machine, and whatever scans its ports, out of a run. It travels as it is, and what follows it is
//! neither encrypted nor signed: between several nodes the network is trusted, as NCCL trusts it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use subtle::ConstantTimeEq;

use super::RankError;

/// Where the token is taken from, if it is set.
pub const VARIABLE: &str = "FORWARD_BENCH_TOKEN";

/// Longest token that is accepted, in bytes.
const LONGEST: u64 = 256;

/// What a rank shows when it joins. Neither `Debug` nor `Display` tells it.
#[derive(Clone)]
pub struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// 128 random bits.
    ///
    /// # Errors
    /// If the system has no randomness.
    pub fn random() -> Result<Self, RankError> {
        let mut bytes = [0_u8; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| RankError::Usage(format!("no random token could be made: {error}")))?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// The one that the environment has.
    ///
    /// # Errors
    /// If it is too short or too long to be one.
    pub fn from_environment(env: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, RankError> {
        let Some(text) = env(VARIABLE) else { return Ok(None) };
        let length = text.len() as u64;
        if !(16..=LONGEST).contains(&length) {
            return Err(RankError::Usage(format!(
                "{VARIABLE} has {length} bytes; give every rank the same token of 16 to {LONGEST} bytes"
            )));
        }
        Ok(Some(Self(text)))
    }

    /// Whether they are equal, in a time that does not tell where they differ.
    #[must_use]
    pub fn is(&self, other: &str) -> bool {
        self.0.as_bytes().ct_eq(other.as_bytes()).into()
    }

    /// The token itself, for whom it is meant.
    #[must_use]
    pub fn secret(&self) -> &str {
        &self.0
    }
}

/// The line for users of several nodes.
#[must_use]
pub fn needed() -> RankError {
    RankError::Usage(format!(
        "several nodes join with a token of yours: on one node run `openssl rand -hex 16`, and on every node \
         `export {VARIABLE}=` what it printed"
    ))
}

/// A file that holds the token of one run on this host; removed when this value goes.
#[derive(Debug)]
pub struct TokenFile(PathBuf);

impl TokenFile {
    /// Puts the token where the other ranks of this user look for it, in the place of what a run left there that was killed.
    ///
    /// # Errors
    /// If it cannot be written, or the folder could be written to by others.
    pub fn create(port: u16, token: &Token) -> Result<Self, RankError> {
        let path = path(&folder()?, port);
        let failed = |error: std::io::Error| broken(&path, &error.to_string());
        let draft = path.with_extension(format!("{}.draft", std::process::id()));
        let _ = std::fs::remove_file(&draft); // of a process that had this id before
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft).map_err(failed)?;
        file.write_all(token.secret().as_bytes()).map_err(failed)?;
        std::fs::rename(&draft, &path).map_err(failed)?;
        Ok(Self(path))
    }

    /// Removes the file; what is gone already is as well.
    pub fn remove(&self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Drop for TokenFile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Reads the token that rank 0 of the same user put there; `None` if there is none yet.
///
/// # Errors
/// If there is a file that somebody else could have put there.
pub fn read(port: u16) -> Result<Option<Token>, RankError> {
    let path = path(&folder()?, port);
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(broken(&path, &error.to_string())),
    };
    check_owner(&file, &path)?;
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text).map_err(|error| broken(&path, &error.to_string()))?;
    Ok(Some(Token(text)))
}

fn check_owner(file: &File, path: &Path) -> Result<(), RankError> {
    let found = file.metadata().map_err(|error| broken(path, &error.to_string()))?;
    if !found.is_file() || found.uid() != user() || found.mode() & 0o077 != 0 {
        return Err(broken(path, "it is not a file of this user's alone; remove it"));
    }
    Ok(())
}

fn broken(path: &Path, why: &str) -> RankError {
    RankError::Usage(format!("the token of this host's ranks, {}: {why} (or set {VARIABLE})", path.display()))
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn path(folder: &Path, port: u16) -> PathBuf {
    folder.join(format!("forward-bench-{}-{port}.token", user()))
}

/// The user's folder for such files, else one below the folder for temporary files that nobody else can enter.
fn folder() -> Result<PathBuf, RankError> {
    if let Some(folder) = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
        && is_ours(&folder)
    {
        return Ok(folder);
    }
    let folder = std::env::temp_dir().join(format!("forward-bench-{}", user()));
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(broken(&folder, &error.to_string()))
        }
        _ if is_ours(&folder) => Ok(folder),
        _ => Err(broken(&folder, "others can write to it; remove it")),
    }
}

/// A folder, no link to one, of this user, which nobody else can enter.
fn is_ours(folder: &Path) -> bool {
    std::fs::symlink_metadata(folder)
        .is_ok_and(|found| found.is_dir() && found.uid() == user() && found.mode() & 0o077 == 0)
}

#[cfg(test)]
mod tests;
