//! The device's ceilings and a case's floors.

use super::Failure;
use crate::backend::{BackendError, Device, GemmRate};
use crate::measure::limits::{Floors, Measured};
use crate::model::cost::{self, Ceilings, OpCost};
use crate::units::{Bytes, Flops};

/// What was measured in this process so far.
#[derive(Debug, Default)]
pub struct Known {
    read: Option<f64>,
    gemm: Option<GemmRate>,
    /// Whether the device has no room to measure them; said once.
    no_room: bool,
}

/// The ceilings directly before a case.
pub struct Before {
    read: f64,
    gemm: GemmRate,
    /// Whether the product's rate decides the floor, so that it is measured again afterwards.
    computes: bool,
}

impl Known {
    /// Measures what is not known yet, and the product's rate again if it decides the case's floor. None: the device measures
    /// no ceilings. KV blocks lose their contents.
    pub fn before(&mut self, device: &mut dyn Device, costs: &[OpCost]) -> Result<Option<Before>, Failure> {
        let failed = |error: BackendError| Failure::case(format!("the ceilings: {error}"));
        let fresh = self.gemm.is_none();
        if fresh && !self.no_room {
            match device.read_rate().and_then(|read| Ok((read, device.gemm_rate()?))) {
                Ok((read, gemm)) => (self.read, self.gemm) = (read, gemm),
                Err(BackendError::NoRoom(what)) => {
                    eprintln!("warning: no floors are shown: {what}");
                    self.no_room = true;
                }
                Err(error) => return Err(failed(error)),
            }
        }
        let Some(read) = self.read else { return Ok(None) };
        let Some(mut gemm) = self.gemm else { return Ok(None) };
        let seconds = cost::total_flops(costs).0 as f64 / gemm.flops_per_second;
        let computes = seconds > cost::total_bytes(costs).0 as f64 / read;
        if computes && !fresh {
            gemm = device.gemm_rate().map_err(failed)?.unwrap_or(gemm);
        }
        Ok(Some(Before { read, gemm, computes }))
    }
}

impl Before {
    /// The case's floors, those of the rank that needs longest; the product measured again if it decides them. `ranks` has each rank's
    /// costs.
    pub fn after(
        self,
        device: &mut dyn Device,
        ranks: &[Vec<OpCost>],
    ) -> Result<Option<Floors>, BackendError> {
        let mut gemm = vec![self.gemm];
        if self.computes {
            gemm.extend(device.gemm_rate()?);
        }
        let measured = Measured { read_bytes_per_second: self.read, gemm };
        let rates = Ceilings {
            read: Bytes(measured.read_bytes_per_second as u128),
            gemm: Flops(measured.gemm_flops_per_second() as u128),
        };
        let floors = ranks.iter().map(|costs| {
            let floors = (cost::floor(costs, rates), cost::serial_floor(costs, rates));
            Floors::new(floors, (cost::total_bytes(costs), cost::total_flops(costs)), measured.clone())
        });
        Ok(floors.max_by(|a, b| a.floor_us.total_cmp(&b.floor_us)))
    }
}
