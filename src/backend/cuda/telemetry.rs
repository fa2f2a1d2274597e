//! Power, temperature, throttling and neighbours, from NVML; a machine without NVML has none of it. Read between samples only.

use nvml_wrapper::Nvml as Library;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};

use crate::backend::Telemetry;

/// NVML, and which of its devices is ours.
pub(super) struct Nvml {
    library: Library,
    uuid: String,
}

impl Nvml {
    /// None where there is no NVML or it does not know the device.
    pub(super) fn open(uuid: &str) -> Option<Self> {
        let library = Library::init().ok()?;
        library.device_by_uuid(uuid).ok()?;
        Some(Self { library, uuid: uuid.to_owned() })
    }

    /// What can be read now; what cannot be read is left out.
    pub(super) fn read(&self) -> Telemetry {
        let Ok(device) = self.library.device_by_uuid(self.uuid.as_str()) else { return Telemetry::default() };
        let reasons = device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
        let own = std::process::id();
        let others = device.running_compute_processes().unwrap_or_default();
        Telemetry {
            power_w: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1e3),
            temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
            sm_clock_mhz: device.clock_info(Clock::SM).ok(),
            max_sm_clock_mhz: device.max_clock_info(Clock::SM).ok(),
            throttled: throttled(reasons),
            other_processes: others
                .iter()
                .filter(|p| p.pid != own)
                .map(|p| name(&self.library, p.pid))
                .collect(),
        }
    }
}

/// The reasons that are about limits, in words; idling and clocks that an application set are none.
fn throttled(reasons: ThrottleReasons) -> Vec<String> {
    let names = [
        (ThrottleReasons::SW_POWER_CAP, "power limit"),
        (ThrottleReasons::HW_SLOWDOWN, "hardware slowdown"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "temperature"),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "temperature (hardware)"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake"),
        (ThrottleReasons::SYNC_BOOST, "sync boost"),
    ];
    names.iter().filter(|(reason, _)| reasons.contains(*reason)).map(|(_, name)| (*name).to_owned()).collect()
}

fn name(library: &Library, pid: u32) -> String {
    library
        .sys_process_name(pid, 80)
        .map_or_else(|_| format!("pid {pid}"), |name| format!("{name} (pid {pid})"))
}

/// The driver's version, with CUDA's.
pub(super) fn driver(cuda: i32) -> String {
    let cuda = format!("CUDA {}.{}", cuda / 1000, cuda % 1000 / 10);
    let version = Library::init().and_then(|library| library.sys_driver_version());
    version.map_or_else(|_| cuda.clone(), |version| format!("{version} ({cuda})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_limits_are_throttling() {
        let reasons = ThrottleReasons::GPU_IDLE
            | ThrottleReasons::SW_POWER_CAP
            | ThrottleReasons::APPLICATIONS_CLOCKS_SETTING;
        assert_eq!(throttled(reasons), ["power limit"]);
    }
}
