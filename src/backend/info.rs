//! What a device is, can do at most, and says of itself.

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DeviceInfo {
    /// `cpu` or another backend's name.
    pub backend: String,
    /// The device's name, such as the processor's model.
    pub name: String,
    /// Driver or library version, where there is one.
    pub driver: Option<String>,
    /// Threads or multiprocessors that a step runs on.
    pub units: usize,
}

/// How fast a device multiplies large matrices.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GemmRate {
    /// Floating point operations a second (a multiply-add is two).
    pub flops_per_second: f64,
    /// The device's clock meanwhile, in MHz.
    pub clock_mhz: Option<f64>,
}

/// What a device's sensors say.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Telemetry {
    /// Power in watts.
    pub power_w: Option<f64>,
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Clock of the multiprocessors in MHz, now.
    pub sm_clock_mhz: Option<u32>,
    /// The most that it can be.
    pub max_sm_clock_mhz: Option<u32>,
    /// The limits that hold the clock back, in words.
    pub throttled: Vec<String>,
    /// Other processes that compute on the device.
    pub other_processes: Vec<String>,
}

/// Reads a device's sensors.
pub type Sensors = Box<dyn Fn() -> Telemetry>;
