//! Whether CUDA can be used at all: libraries, their versions, driver, devices.
//!
//! cudarc panics where a library or a symbol is missing, so both are asked for first: each library must be there, have the call that
//! tells its version, and be no older than what cudarc's bindings were made from, which then has every symbol that they name.

use cudarc::driver::{result, sys};

use super::error::{driver, nvrtc};
use crate::backend::BackendError;

/// The CUDA version of cudarc's bindings (its feature `cuda-13000`), 1000 × major + 10 × minor: the oldest driver that will do.
const MIN_DRIVER: i32 = 13_000;

/// The oldest major version of NVRTC and cuBLASLt, likewise.
const MIN_MAJOR: usize = 13;

/// The oldest compute capability that the kernels are written for.
const MIN_CAPABILITY: (i32, i32) = (8, 0);

/// Whether a GPU can be used: the libraries are there, the driver is new enough, and it has a device.
///
/// Starts no context and never panics.
///
/// # Errors
/// One line that names what is missing and how to give it.
pub fn available() -> Result<(), BackendError> {
    guarded(|| {
        libraries()?;
        devices().map(|_| ())
    })
}

/// Runs `body`; a panic of cudarc becomes an error. The last resort, for a library that is broken: what is missing or too old was
/// found by [`available`] before.
pub(super) fn guarded<T>(body: impl FnOnce() -> Result<T, BackendError>) -> Result<T, BackendError> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown");
        Err(missing(format!("a CUDA library is too old or broken: {text}; update the driver and libraries")))
    })
}

fn missing(message: String) -> BackendError {
    BackendError::Unsupported(message)
}

/// Fails unless a library is there and has the symbol that tells its version.
#[cfg(feature = "cuda")]
macro_rules! present {
    ($($sys:ident)::+, $symbol:literal, $name:literal, $remedy:expr) => {{
        use cudarc::$($sys)::+ as library;
        // SAFETY: loading a library runs its initialisers and nothing else.
        if !unsafe { library::is_culib_present() } {
            return Err(missing(format!("{} was not found; {}", $name, $remedy)));
        }
        // SAFETY: the library is there; the symbol's address is neither called nor read.
        if unsafe { library::culib().get::<*const ()>($symbol) }.is_err() {
            return Err(missing(format!("{} is no such library or too old; {}", $name, $remedy)));
        }
    }};
}

/// What to do about a library that comes with a Python wheel.
fn remedy(wheel: &str) -> String {
    format!(
        "put the folder of version {MIN_MAJOR} or newer on LD_LIBRARY_PATH (it comes with the CUDA toolkit, or `pip install {wheel}`)"
    )
}

/// Every library that is needed is there and new enough.
fn libraries() -> Result<(), BackendError> {
    driver_version()?;
    nvrtc_version()?;
    cublaslt_version()
}

/// NVRTC's version, major and minor.
pub(super) fn nvrtc_version() -> Result<(i32, i32), BackendError> {
    #[cfg(feature = "cuda")]
    present!(nvrtc::sys, b"nvrtcVersion\0", "libnvrtc", remedy("nvidia-cuda-nvrtc"));
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there; two integers are written.
    let status = unsafe { cudarc::nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    status.result().map_err(nvrtc("asking for NVRTC's version"))?;
    new_enough("libnvrtc", (major.max(0) as usize, minor.max(0) as usize), "nvidia-cuda-nvrtc")?;
    Ok((major, minor))
}

fn cublaslt_version() -> Result<(), BackendError> {
    #[cfg(feature = "cuda")]
    present!(cublaslt::sys, b"cublasLtGetVersion\0", "libcublasLt", remedy("nvidia-cublas"));
    // SAFETY: the library is there; the call answers a number, 10000 × major + 100 × minor + patch.
    let version = unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() };
    new_enough("libcublasLt", (version / 10_000, version / 100 % 100), "nvidia-cublas")
}

/// CUPTI is there; only tracing needs it.
#[cfg(feature = "cuda")]
pub(super) fn cupti() -> Result<(), BackendError> {
    present!(cupti::sys, b"cuptiActivityRegisterCallbacks\0", "libcupti", remedy("nvidia-cuda-cupti"));
    Ok(())
}

/// NCCL is there and has every call that is used; only several ranks need it.
#[cfg(feature = "cuda")]
pub(super) fn nccl(calls: &[&str]) -> Result<(), BackendError> {
    const REMEDY: &str = "put the folder of libnccl.so.2, version 2.18 or newer, on LD_LIBRARY_PATH (`pip install nvidia-nccl-cu13`)";
    present!(nccl::sys, b"ncclGetVersion\0", "libnccl", REMEDY);
    let mut version = 0;
    // SAFETY: the library is there and has the call, which writes one integer, 10000 × major + 100 × minor + patch.
    unsafe { cudarc::nccl::sys::ncclGetVersion(&raw mut version) };
    for call in calls {
        // SAFETY: the library is there; the symbol's address is neither called nor read.
        if unsafe { cudarc::nccl::sys::culib().get::<*const ()>(call.as_bytes()) }.is_err() {
            let (major, minor) = (version / 10_000, version / 100 % 100);
            return Err(missing(format!("libnccl is version {major}.{minor} and lacks {call}; {REMEDY}")));
        }
    }
    Ok(())
}

fn new_enough(library: &str, (major, minor): (usize, usize), wheel: &str) -> Result<(), BackendError> {
    if major < MIN_MAJOR {
        return Err(missing(format!("{library} is version {major}.{minor}; {}", remedy(wheel))));
    }
    Ok(())
}

/// The driver's CUDA version, 1000 × major + 10 × minor.
pub(super) fn driver_version() -> Result<i32, BackendError> {
    #[cfg(feature = "cuda")]
    present!(driver::sys, b"cuDriverGetVersion\0", "libcuda", "it comes with NVIDIA's driver: install that");
    let mut version = 0;
    // SAFETY: the driver library is there, and the call writes one integer.
    let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    status.result().map_err(driver("asking for the driver's version"))?;
    if version < MIN_DRIVER {
        let name = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
        return Err(missing(format!(
            "the driver serves CUDA {}, needed is {}: install driver 580 or newer",
            name(version),
            name(MIN_DRIVER)
        )));
    }
    Ok(version)
}

/// How many devices there are; at least one.
fn devices() -> Result<i32, BackendError> {
    let none = || {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES");
        let hint = visible.map_or_else(|_| String::new(), |v| format!(" (CUDA_VISIBLE_DEVICES is {v:?})"));
        missing(format!("no NVIDIA GPU is visible{hint}; check with nvidia-smi"))
    };
    match result::init() {
        Ok(()) => {}
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => return Err(none()),
        Err(error) => return Err(driver("starting the driver")(error)),
    }
    match result::device::get_count().map_err(driver("counting devices"))? {
        0 => Err(none()),
        count => Ok(count),
    }
}

/// The device of that number, checked; fails with the numbers that exist.
pub(super) fn device(ordinal: usize) -> Result<sys::CUdevice, BackendError> {
    let count = devices()?;
    let number = i32::try_from(ordinal).ok().filter(|number| *number < count);
    let number = number
        .ok_or_else(|| missing(format!("--device {ordinal}: there are {count} devices, numbered from 0")))?;
    let device = result::device::get(number).map_err(driver("opening the device"))?;
    let attribute = |which| {
        // SAFETY: the device was just given by the driver.
        unsafe { result::device::get_attribute(device, which) }.map_err(driver("asking the device"))
    };
    let capability = (
        attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    if capability < MIN_CAPABILITY {
        let (major, minor) = capability;
        return Err(missing(format!(
            "--device {ordinal} has compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or newer"
        )));
    }
    Ok(device)
}

/// Bytes of a device's memory.
pub(super) fn total_memory(ordinal: usize) -> Result<usize, BackendError> {
    let device = device(ordinal)?;
    // SAFETY: the device was just given by the driver.
    unsafe { result::device::total_mem(device) }.map_err(driver("asking the device"))
}

/// A device's name and how many multiprocessors it has.
pub(super) fn name_and_units(ordinal: usize) -> Result<(String, usize), BackendError> {
    let device = device(ordinal)?;
    let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    // SAFETY: the device was just given by the driver.
    let units =
        unsafe { result::device::get_attribute(device, which) }.map_err(driver("asking the device"))?;
    let name = result::device::get_name(device).map_err(driver("asking the device"))?;
    Ok((name, units.max(0) as usize))
}
