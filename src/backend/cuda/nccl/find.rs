//! Where libnccl is. cudarc looks for `libnccl.so` alone, but a Python wheel, and a system without its development package, have
//! `libnccl.so.2`: then a link of the other name, in a folder of ours, is put on the library path of the process's second stage.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, io};

use cudarc::nccl::sys;

use crate::backend::BackendError;
use crate::backend::cuda::cache;

/// What cudarc finds.
const FOUND: &str = "libnccl.so";

/// What is looked for, in this order.
const NAMES: [&str; 2] = [FOUND, "libnccl.so.2"];

/// The variable of the dynamic loader, which reads it once, when a process starts.
const VARIABLE: &str = "LD_LIBRARY_PATH";

/// Libraries beside whose wheels NCCL's may lie, each with a symbol of its own.
const NEIGHBOURS: [(&CStr, &CStr); 4] = [
    (c"libnvrtc.so", c"nvrtcVersion"),
    (c"libnvrtc.so.13", c"nvrtcVersion"),
    (c"libcublasLt.so", c"cublasLtGetVersion"),
    (c"libcublasLt.so.13", c"cublasLtGetVersion"),
];

/// The `LD_LIBRARY_PATH` with which this program must be started again to find NCCL. None: it finds it as it is, or there is
/// no NCCL ([`super::nccl_available`] says so).
///
/// It is looked for in `LD_LIBRARY_PATH`, where the dynamic loader looks, and beside the wheels of NVRTC and cuBLASLt. The link is made in
/// the user's cache folder; several processes may do so at once.
///
/// # Errors
/// If there is an NCCL to which no link can be made.
pub fn nccl_library_path() -> Result<Option<OsString>, BackendError> {
    // SAFETY: loading a library runs its initialisers and nothing else.
    if unsafe { sys::is_culib_present() } {
        return Ok(None);
    }
    let set = env::var_os(VARIABLE).filter(|value| !value.is_empty());
    let folders: Vec<PathBuf> = set.iter().flat_map(env::split_paths).collect();
    let Some(library) = find(&folders, &loaded) else { return Ok(None) };
    let fail = |why: &dyn std::fmt::Display| {
        BackendError::Unsupported(format!(
            "{} was found, but not under the name {FOUND}, and no link to it could be made: {why}; make one and put its folder on {VARIABLE}",
            library.display()
        ))
    };
    let cache = cache::folder().ok_or_else(|| fail(&"neither HOME nor XDG_CACHE_HOME is set"))?;
    let link = link(&cache.join("nccl"), &library).map_err(|error| fail(&error))?;
    Ok(Some(path_with(&link, set.as_deref())))
}

/// The library, absolute.
fn find(folders: &[PathBuf], loaded: &dyn Fn(&CStr, &CStr) -> Option<PathBuf>) -> Option<PathBuf> {
    let within = |folder: &Path| NAMES.iter().find_map(|name| folder.join(name).canonicalize().ok());
    let listed = || folders.iter().find_map(|folder| within(folder));
    let by_loader = || loaded(c"libnccl.so.2", c"ncclGetVersion");
    let beside = || {
        let neighbours = NEIGHBOURS.iter().filter_map(|(name, symbol)| loaded(name, symbol));
        let theirs = neighbours.filter_map(|library| library.parent().map(Path::to_path_buf));
        folders.iter().cloned().chain(theirs).find_map(|folder| {
            // nvidia/cu13/lib or nvidia/cublas/lib, and nvidia/nccl/lib.
            let wheels = folder.canonicalize().ok()?.parent()?.parent()?.join("nccl/lib");
            within(&wheels)
        })
    };
    listed().or_else(by_loader).or_else(beside)
}

/// The file of a library that the dynamic loader finds by this name.
fn loaded(name: &CStr, symbol: &CStr) -> Option<PathBuf> {
    // SAFETY: a zero-terminated name; loading a library runs its initialisers and nothing else.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: the handle is alive, and the name zero-terminated.
    let address = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: any address may be asked for; the answer is written where it is not zero.
    let path = (!address.is_null() && unsafe { libc::dladdr(address, info.as_mut_ptr()) } != 0).then(|| {
        // SAFETY: written by the call, whose name is zero-terminated and lives as long as the library is loaded.
        let name = unsafe { CStr::from_ptr(info.assume_init().dli_fname) };
        PathBuf::from(OsStr::from_bytes(name.to_bytes()))
    });
    // SAFETY: opened above, closed once; nothing of it is used any more.
    unsafe { libc::dlclose(handle) };
    path?.canonicalize().ok()
}

/// A folder with a link to the library under the name that is found.
fn link(links: &Path, library: &Path) -> io::Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let folder = links.join(cache::hash([library.as_os_str().as_bytes()]));
    let link = folder.join(FOUND);
    if fs::read_link(&link).is_ok_and(|target| target == library) {
        return Ok(folder);
    }
    fs::create_dir_all(&folder)?;
    // Under another name first: of several processes, none sees anything but a whole link.
    let own = folder.join(format!(".{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    std::os::unix::fs::symlink(library, &own)?;
    fs::rename(&own, &link).inspect_err(|_| {
        let _ = fs::remove_file(&own);
    })?;
    Ok(folder)
}

/// The folder, then what was there; an empty entry would mean the current folder.
fn path_with(folder: &Path, set: Option<&OsStr>) -> OsString {
    let mut path = folder.as_os_str().as_bytes().to_vec();
    if let Some(set) = set {
        path.push(b':');
        path.extend_from_slice(set.as_bytes());
    }
    OsString::from_vec(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with an empty file.
    fn with(root: &Path, folder: &str, file: &str) -> PathBuf {
        let folder = root.join(folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(file), "").unwrap();
        folder
    }

    #[test]
    fn the_library_path_comes_first_then_the_loader_then_the_neighbours() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let wheel = with(&root, "nvidia/nccl/lib", "libnccl.so.2").join("libnccl.so.2");
        let cuda = with(&root, "nvidia/cu13/lib", "libnvrtc.so.13");
        let (other, system) =
            (root.join("elsewhere"), with(&root, "usr/lib", "libnccl.so.2").join("libnccl.so.2"));
        let nothing = |_: &CStr, _: &CStr| None;
        assert_eq!(find(std::slice::from_ref(&other), &nothing), None);
        assert_eq!(find(&[other.clone(), cuda.clone()], &nothing), Some(wheel.clone()));
        let by_loader = |name: &CStr, _: &CStr| (name == c"libnccl.so.2").then(|| system.clone());
        assert_eq!(find(std::slice::from_ref(&cuda), &by_loader), Some(system.clone()));
        let nvrtc = |name: &CStr, _: &CStr| (name == c"libnvrtc.so.13").then(|| cuda.join("libnvrtc.so.13"));
        assert_eq!(find(&[], &nvrtc), Some(wheel.clone()));
        let own = with(&root, "own", "libnccl.so.2");
        assert_eq!(find(&[other, own.clone()], &by_loader), Some(own.join("libnccl.so.2")));
        let named = with(&root, "own", "libnccl.so").join("libnccl.so");
        assert_eq!(find(&[own], &nothing), Some(named));
    }

    #[test]
    fn several_at_once_make_one_link() {
        let root = tempfile::tempdir().unwrap();
        let library = with(root.path(), "a", "libnccl.so.2").join("libnccl.so.2");
        let links = root.path().join("links");
        let folders: Vec<PathBuf> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(|| link(&links, &library).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(folders.iter().all(|folder| *folder == folders[0]));
        assert_eq!(fs::read_link(folders[0].join(FOUND)).unwrap(), library);
        assert_eq!(fs::read_dir(&folders[0]).unwrap().count(), 1, "nothing else is left");
        let other = with(root.path(), "b", "libnccl.so.2").join("libnccl.so.2");
        assert_ne!(link(&links, &other).unwrap(), folders[0], "each library has a folder of its own");
        fs::remove_file(folders[0].join(FOUND)).unwrap();
        fs::write(folders[0].join(FOUND), "").unwrap();
        link(&links, &library).unwrap();
        assert_eq!(
            fs::read_link(folders[0].join(FOUND)).unwrap(),
            library,
            "what is no such link is replaced"
        );
    }

    #[test]
    fn a_path_has_no_empty_entry() {
        assert_eq!(path_with(Path::new("/a"), None), "/a");
        assert_eq!(path_with(Path::new("/a"), Some(OsStr::new("/b:/c"))), "/a:/b:/c");
    }

    #[test]
    fn the_loader_tells_where_a_library_is() {
        let library = loaded(c"libc.so.6", c"malloc").unwrap();
        assert!(library.is_absolute() && library.is_file(), "{library:?}");
        assert_eq!(loaded(c"libno-such-library.so.1", c"malloc"), None);
    }
}
