//! Whether CUDA can be used at all: libraries, driver, devices. cudarc panics where a library is missing, so it is asked first.

use cudarc::driver::{result, sys};

use super::error::driver;
use crate::backend::BackendError;

/// The oldest driver that runs what this crate is built against.
const MIN_DRIVER: i32 = 13_000;

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
        driver_version()?;
        devices().map(|_| ())
    })
}

/// Runs `body`; a symbol that a library does not have, on which cudarc panics, becomes an error.
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

/// Every library that is needed, each with its remedy.
fn libraries() -> Result<(), BackendError> {
    #[cfg(feature = "cuda")]
    {
        let wheel = |library: &str, wheel: &str| {
            format!(
                "{library} was not found; put its folder on LD_LIBRARY_PATH (it comes with the CUDA toolkit, or `pip install {wheel}`)"
            )
        };
        // SAFETY: loading these libraries runs their initialisers and nothing else.
        let (cuda, nvrtc, cublaslt) = unsafe {
            (
                sys::is_culib_present(),
                cudarc::nvrtc::sys::is_culib_present(),
                cudarc::cublaslt::sys::is_culib_present(),
            )
        };
        if !cuda {
            return Err(missing("libcuda was not found; it comes with NVIDIA's driver: install that".into()));
        }
        if !nvrtc {
            return Err(missing(wheel("libnvrtc", "nvidia-cuda-nvrtc")));
        }
        if !cublaslt {
            return Err(missing(wheel("libcublasLt", "nvidia-cublas")));
        }
    }
    Ok(())
}

/// The driver's CUDA version, 1000 × major + 10 × minor.
pub(super) fn driver_version() -> Result<i32, BackendError> {
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
