//! Named ranges for profilers from outside, where NVTX is there: `libnvtx3interop` (CUDA 13) or `libnvToolsExt` (before).
//!
//! cudarc's own binding knows only the older library, which CUDA 13 has not, and panics where it is missing. Two calls
//! are all that is needed.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// What is tried, in this order.
const LIBRARIES: [&CStr; 4] =
    [c"libnvtx3interop.so.1", c"libnvtx3interop.so", c"libnvToolsExt.so.1", c"libnvToolsExt.so"];

/// Begins a range of this thread; answers its depth.
type Push = unsafe extern "C" fn(*const c_char) -> c_int;
/// Ends the range of this thread that was begun last; answers its depth.
type Pop = unsafe extern "C" fn() -> c_int;

#[derive(Debug, Clone, Copy)]
struct Calls {
    push: Push,
    pop: Pop,
}

/// A range of this thread, from its making until it is dropped; nothing where NVTX is missing.
#[derive(Debug)]
pub(super) struct Range(Option<Calls>);

impl Range {
    pub(super) fn begin(name: &str) -> Self {
        let calls = calls();
        if let Some(calls) = calls {
            let name = CString::new(name.replace('\0', " ")).unwrap_or_default();
            // SAFETY: NVTX's own function, given a zero-terminated string that it copies.
            unsafe { (calls.push)(name.as_ptr()) };
        }
        Self(calls)
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(calls) = self.0 {
            // SAFETY: NVTX's own function; it takes nothing and ends the range that was begun in `begin`.
            unsafe { (calls.pop)() };
        }
    }
}

/// Whether there is a library to say ranges through.
pub(super) fn is_there() -> bool {
    calls().is_some()
}

fn calls() -> Option<Calls> {
    static CALLS: OnceLock<Option<Calls>> = OnceLock::new();
    *CALLS.get_or_init(|| LIBRARIES.iter().find_map(|name| load(name)))
}

/// The library's calls; it stays loaded until the process ends.
fn load(name: &CStr) -> Option<Calls> {
    // SAFETY: a zero-terminated name; loading runs the library's initialisers and nothing else.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return None;
    }
    // SAFETY: a loaded library and a zero-terminated name.
    let symbol = |symbol: &CStr| unsafe { libc::dlsym(library, symbol.as_ptr()) };
    let (push, pop) = (symbol(c"nvtxRangePushA"), symbol(c"nvtxRangePop"));
    if push.is_null() || pop.is_null() {
        return None;
    }
    // SAFETY: NVTX's function of this name, whose type nvToolsExt.h gives since version 1.
    let push = unsafe { std::mem::transmute::<*mut c_void, Push>(push) };
    // SAFETY: as above.
    let pop = unsafe { std::mem::transmute::<*mut c_void, Pop>(pop) };
    Some(Calls { push, pop })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_range_is_no_error_whether_nvtx_is_there_or_not() {
        let _outer = super::Range::begin("a\0b");
        drop(super::Range::begin("decode/tiny/1x1@64"));
    }
}
