//! Flags of runs on several ranks.

use clap::Args;
use serde::{Deserialize, Serialize};

use super::HEADINGS;

/// Where ranks are, and how long they wait for each other.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
pub struct RanksArgs {
    /// Hosts on which this is started by hand, each with as many ranks; a launcher (torchrun, srun, mpirun) needs none of these flags
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = HEADINGS[5])]
    pub nnodes: usize,
    /// Which of the hosts this is, from 0
    #[arg(long, value_name = "N", help_heading = HEADINGS[5])]
    pub node_rank: Option<usize>,
    /// Host of rank 0 [default: MASTER_ADDR, else this one]
    #[arg(long, value_name = "HOST", help_heading = HEADINGS[5])]
    pub master_addr: Option<String>,
    /// A port there, which a launcher may hold itself [default: MASTER_PORT, else 29500]
    #[arg(long, value_name = "PORT", help_heading = HEADINGS[5])]
    pub master_port: Option<u16>,
    /// Port on which rank 0 listens [default: the master port + 1; any free one where this process starts all ranks]
    #[arg(long, value_name = "PORT", help_heading = HEADINGS[5])]
    pub control_port: Option<u16>,
    /// Seconds for all ranks to join
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, help_heading = HEADINGS[5])]
    pub connect_timeout: f64,
    /// Seconds for all ranks to make a case ready
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, help_heading = HEADINGS[5])]
    pub prepare_timeout: f64,
}
