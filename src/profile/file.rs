//! `<case>.rank<r>.kernels.json`: a profile, and what it is of.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Profile;

/// A kernel profile as it is kept in a file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct KernelsFile {
    /// The benchmark's id.
    pub id: String,
    /// The rank whose kernels these are.
    pub rank: usize,
    /// The commit, `-dirty` where tracked files differed from it; none outside git.
    pub commit: Option<String>,
    /// When it was traced, RFC 3339 in UTC.
    pub date: String,
    /// The device's name and size.
    pub device: String,
    /// Name or folder of the model.
    pub model: String,
    /// Traced replays, whose mean this is.
    pub replays: u32,
    /// The kernels, with their fields beside those above.
    #[serde(flatten)]
    pub profile: Profile,
}

/// A file that is no kernel profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// It cannot be read.
    #[error("{path}: {error}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It is something else.
    #[error("{path}: this is no kernel profile ({error}); name a .kernels.json that --profile-dir wrote", path = path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: serde_json::Error,
    },
}

impl KernelsFile {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, or is no kernel profile.
    pub fn read(path: &Path) -> Result<Self, ProfileError> {
        let text =
            fs::read_to_string(path).map_err(|error| ProfileError::Read { path: path.to_owned(), error })?;
        serde_json::from_str(&text).map_err(|error| ProfileError::Broken { path: path.to_owned(), error })
    }

    /// The file's contents.
    ///
    /// # Errors
    /// If a number in it is not finite.
    pub fn text(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}
