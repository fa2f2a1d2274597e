//! Files that a later process may use again: compiled kernels and chosen algorithms, under the user's cache folder.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use sha2::{Digest, Sha256};

/// `$XDG_CACHE_HOME/forward-bench`, else `~/.cache/forward-bench`; none where neither variable is set.
pub(super) fn folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    Some(base.or_else(|| Some(set("HOME")?.join(".cache")))?.join("forward-bench"))
}

/// The first 128 bits of the SHA-256 of the parts, each preceded by its length, as hex.
pub(super) fn hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a file that [`write`] wrote; none if it is not there or not whole.
pub(super) fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    let (digest, contents) = bytes.split_at_checked(32)?;
    (digest == Sha256::digest(contents).as_slice()).then(|| contents.to_vec())
}

/// Writes a file at once or not at all, whatever other processes do: a digest, then the contents.
pub(super) fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let unique = format!(".{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let temporary = folder.join(unique);
    let written = fs::File::create(&temporary).and_then(|mut file| {
        file.write_all(&Sha256::digest(contents))?;
        file.write_all(contents)
    });
    written.and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

/// Holds a file lock until dropped; none where files cannot be locked.
pub(super) fn lock(path: &Path) -> Option<fs::File> {
    fs::create_dir_all(path.parent()?).ok()?;
    let file = fs::File::create(path).ok()?;
    file.lock().ok()?;
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_file_is_as_good_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        assert_eq!(read(&path), None);
        write(&path, b"hello").unwrap();
        assert_eq!(read(&path).as_deref(), Some(&b"hello"[..]));
        let mut bytes = fs::read(&path).unwrap();
        bytes.pop();
        fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path), None);
        fs::write(&path, b"short").unwrap();
        assert_eq!(read(&path), None);
        write(&path, b"again").unwrap();
        assert_eq!(read(&path).as_deref(), Some(&b"again"[..]));
        assert_eq!(fs::read_dir(folder.path().join("a")).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn the_hash_tells_parts_apart() {
        assert_ne!(hash([&b"ab"[..], b"c"]), hash([&b"a"[..], b"bc"]));
        assert_eq!(hash([&b"ab"[..]]).len(), 32);
    }
}
