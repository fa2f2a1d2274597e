//! Which backend runs, and the defaults that depend on it.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use super::ranks::Links;
use super::{Failure, refuse};
use crate::backend::cpu::{self, CpuDevice, CpuOptions};
use crate::backend::{BackendError, Device, DeviceInfo, Dtype, Weights};
use crate::cli::{BackendArg, Cli, DtypeArg, LoadFormat};
use crate::measure::Protocol;
use crate::model::cost::ElementBytes;
use crate::model::{Checkpoint, Model};
use crate::units::Bytes;

/// The KV pool of the CPU where the command line does not say.
const CPU_KV_BYTES: Bytes = Bytes(1 << 30);

/// The backend of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda(DeviceInfo),
}

/// Decides once a process.
pub fn of(cli: &Cli) -> Result<&'static Backend, Failure> {
    static CHOSEN: OnceLock<Result<Backend, Failure>> = OnceLock::new();
    CHOSEN.get_or_init(|| choose(cli)).as_ref().map_err(Clone::clone)
}

fn choose(cli: &Cli) -> Result<Backend, Failure> {
    match cli.backend {
        BackendArg::Cpu => Ok(Backend::Cpu),
        BackendArg::Auto if cli.dtype == DtypeArg::Float32 => Ok(Backend::Cpu), // no kernel serves it
        BackendArg::Auto => Ok(cuda::info(cli.device).map_or(Backend::Cpu, Backend::Cuda)),
        BackendArg::Cuda => cuda::info(cli.device)
            .map(Backend::Cuda)
            .map_err(|error| Failure::usage(format!("--backend cuda: {error}"))),
    }
}

impl Backend {
    /// What it is.
    pub fn info(&self) -> DeviceInfo {
        match self {
            Self::Cpu => cpu::info(),
            Self::Cuda(info) => info.clone(),
        }
    }

    /// The device's name and size, for people and for comparisons.
    pub fn device(&self) -> String {
        let info = self.info();
        let units = if *self == Self::Cpu { "threads" } else { "multiprocessors" };
        format!("{}, {} {units}", info.name, info.units)
    }

    /// The folder of shape files where the command line names none.
    pub fn default_folder(&self) -> &'static str {
        if *self == Self::Cpu { "shapes/cpu" } else { "shapes" }
    }

    /// The model where neither the command line nor a file names one.
    pub fn default_model(&self, cli: &Cli) -> &'static str {
        if *self == Self::Cpu { "smollm2-135m" } else { cuda::default_model(cli) }
    }

    /// Bytes of an element as stored: the CPU holds everything in float32.
    pub fn element(&self) -> ElementBytes {
        if *self == Self::Cpu { ElementBytes { weight: 4, kv: 4 } } else { ElementBytes { weight: 2, kv: 2 } }
    }

    /// The type that weights and KV are rounded to.
    pub fn dtype(&self, cli: &Cli) -> Dtype {
        match cli.dtype {
            DtypeArg::Auto if *self == Self::Cpu => Dtype::Float32,
            DtypeArg::Float32 => Dtype::Float32,
            DtypeArg::Auto | DtypeArg::Bfloat16 => Dtype::Bfloat16,
            DtypeArg::Float16 => Dtype::Float16,
        }
    }

    /// What a measurement must satisfy: steady replays agree to 5 % on a shared processor, and on a GPU the medians of two
    /// seconds to 0.2 %: its power control swings with a period of about a second and takes several to settle.
    /// Where processes take turns, the other side has just warmed the device with the same case.
    pub fn protocol(&self, takes_turns: bool) -> Protocol {
        if *self == Self::Cpu {
            return Protocol::own_models(0.05);
        }
        let (min, max) = if takes_turns { (1, 6) } else { (3, 15) };
        let (min_warm_up, max_warm_up) = (Duration::from_secs(min), Duration::from_secs(max));
        Protocol { min_warm_up, max_warm_up, ..Protocol::own_models(0.002) }
    }

    /// Samples' medians that spread by more than this, in percent, are warned about.
    pub fn spread_limit_pct(&self) -> f64 {
        if *self == Self::Cpu { 5.0 } else { 0.5 }
    }

    /// What two runs of the same code may differ by, in percent, where a side has one run.
    pub fn single_run_noise_pct(&self) -> f64 {
        if *self == Self::Cpu { 5.0 } else { 2.0 }
    }

    /// What keeps a profile from being traced, as far as that is known before the device is opened.
    pub fn cannot_trace(&self) -> Option<BackendError> {
        if *self == Self::Cpu { None } else { cuda::can_trace().err() }
    }

    /// Opens the device and gives it a model.
    pub fn open(
        &self,
        cli: &Cli,
        links: &Links,
        model_name: &str,
        model: &Model,
    ) -> Result<Box<dyn Device>, BackendError> {
        let kv = kv_bytes(cli).map_err(|failure| BackendError::Unsupported(failure.message))?;
        let load = |weights: &Weights<'_>| match self {
            Self::Cpu => cpu_device((cli, links), model, weights, self.dtype(cli), kv),
            Self::Cuda(_) => cuda::device((cli, links), model, weights, self.dtype(cli), kv),
        };
        match cli.load_format {
            LoadFormat::Dummy => load(&Weights::Dummy { seed: cli.seed }),
            LoadFormat::Safetensors => {
                let checkpoint = Checkpoint::open(Path::new(model_name), &model.spec)?;
                load(&Weights::Read(&checkpoint))
            }
        }
    }
}

/// What the GPU of that number is.
pub fn cuda_info(device: usize) -> Result<DeviceInfo, BackendError> {
    cuda::info(device)
}

/// Where the second stage of several ranks finds its libraries, if that is not where this process does.
pub fn library_path(cli: &Cli) -> Result<Option<std::ffi::OsString>, Failure> {
    if cli.layout().ranks() == 1 || *of(cli)? == Backend::Cpu {
        return Ok(None);
    }
    cuda::library_path().map_err(|error| Failure::usage(error.to_string()))
}

/// The GPU of a rank that is the so-manyth of its host; where each rank is shown but one GPU, that one.
pub fn device_of(local_rank: usize) -> usize {
    let only = cuda::info(0).is_ok() && cuda::info(1).is_err();
    if only { 0 } else { local_rank }
}

/// Memory that processes on the device can share, in bytes; none where it is not known.
pub fn memory(cli: &Cli) -> Result<Option<u64>, Failure> {
    Ok(match of(cli)? {
        Backend::Cpu => available_memory(),
        Backend::Cuda(_) => cuda::memory(cli.device),
    })
}

/// What Linux says can be taken without swapping.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

/// `--kv-cache-memory-bytes`, where it is given.
pub fn kv_bytes(cli: &Cli) -> Result<Option<Bytes>, Failure> {
    let text = cli.kv_cache_memory_bytes.as_deref();
    let parsed = text.map(|text| refuse::bytes("--kv-cache-memory-bytes", text)).transpose();
    parsed.map(|bytes| bytes.map(|bytes| Bytes(u128::from(bytes)))).map_err(Failure::usage)
}

/// Ranks of one host share its processor.
fn threads(cli: &Cli) -> Option<usize> {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    (cli.part.host_ranks > 1).then(|| (all / cli.part.host_ranks).max(1))
}

fn cpu_device(
    (cli, links): (&Cli, &Links),
    model: &Model,
    weights: &Weights<'_>,
    dtype: Dtype,
    kv: Option<Bytes>,
) -> Result<Box<dyn Device>, BackendError> {
    let kv_bytes = kv.unwrap_or(CPU_KV_BYTES);
    let options = CpuOptions { kv_bytes, dtype, kv_init: cli.kv_init, seed: cli.seed, threads: threads(cli) };
    let mut device = CpuDevice::new(&model.spec, weights, &options)?;
    if let Some(communicator) = &links.host {
        device.set_communicator(communicator.clone())?;
    }
    Ok(Box::new(device))
}

#[cfg(feature = "cuda-api")]
mod cuda {
    //! What is asked of the CUDA backend.

    use crate::backend::cuda::{self, CudaDevice, CudaOptions};
    use crate::backend::{BackendError, Device, DeviceInfo, Dtype, Weights};
    use crate::cli::Cli;
    use crate::model::{Model, ModelConfig, preset_names};
    use crate::run::ranks::Links;
    use crate::units::Bytes;

    pub(super) fn info(device: usize) -> Result<DeviceInfo, BackendError> {
        cuda::info(device)
    }

    pub(super) fn library_path() -> Result<Option<std::ffi::OsString>, BackendError> {
        cuda::nccl_library_path()
    }

    pub(super) fn can_trace() -> Result<(), BackendError> {
        cuda::can_trace()
    }

    /// qwen3-8b if it fits, else the largest preset that does.
    pub(super) fn default_model(cli: &Cli) -> &'static str {
        const PREFERRED: &str = "qwen3-8b";
        let parameters = |name: &str| {
            let config = ModelConfig::resolve(name, None).ok()?;
            let model = Model::new(config, 16, 16).ok()?;
            let fits = cuda::fits(cli.device, &model.spec, cli.gpu_memory_utilization).unwrap_or(false);
            let weights = model.spec.weights.iter();
            fits.then(|| weights.map(|weight| weight.rows as u128 * weight.cols as u128).sum::<u128>())
        };
        if parameters(PREFERRED).is_some() {
            return PREFERRED;
        }
        let fitting = preset_names().into_iter().filter_map(|name| Some((parameters(name)?, name)));
        fitting.max().map_or("smollm2-135m", |(_, name)| name)
    }

    pub(super) fn memory(device: usize) -> Option<u64> {
        cuda::total_memory(device).ok().and_then(|bytes| u64::try_from(bytes).ok())
    }

    pub(super) fn device(
        (cli, links): (&Cli, &Links),
        model: &Model,
        weights: &Weights<'_>,
        dtype: Dtype,
        kv_bytes: Option<Bytes>,
    ) -> Result<Box<dyn Device>, BackendError> {
        let options = CudaOptions {
            device: cli.device,
            memory_utilization: cli.gpu_memory_utilization,
            kv_bytes,
            dtype,
            kv_init: cli.kv_init,
            seed: cli.seed,
            max_tokens: cli.max_num_batched_tokens as usize,
            l2: cli.l2,
            retune: cli.retune,
            products: cuda::Products::Fastest,
        };
        let mut device = CudaDevice::new(&model.spec, weights, &options)?;
        if let Some(collectives) = &links.gpu {
            device.set_collectives(collectives.clone());
        }
        Ok(Box::new(device))
    }
}

#[cfg(not(feature = "cuda-api"))]
mod cuda {
    //! There is no CUDA backend in this executable.

    use crate::backend::{BackendError, Device, DeviceInfo, Dtype, Weights};
    use crate::cli::Cli;
    use crate::model::Model;
    use crate::run::ranks::Links;
    use crate::units::Bytes;

    fn absent() -> BackendError {
        BackendError::Unsupported(
            "this executable was built without the feature `cuda`; build it with".into(),
        )
    }

    pub(super) fn info(_device: usize) -> Result<DeviceInfo, BackendError> {
        Err(absent())
    }

    pub(super) fn library_path() -> Result<Option<std::ffi::OsString>, BackendError> {
        Err(absent())
    }

    pub(super) fn can_trace() -> Result<(), BackendError> {
        Err(absent())
    }

    pub(super) fn default_model(_cli: &Cli) -> &'static str {
        "smollm2-135m"
    }

    pub(super) fn memory(_device: usize) -> Option<u64> {
        None
    }

    pub(super) fn device(
        _with: (&Cli, &Links),
        _model: &Model,
        _weights: &Weights<'_>,
        _dtype: Dtype,
        _kv_bytes: Option<Bytes>,
    ) -> Result<Box<dyn Device>, BackendError> {
        Err(absent())
    }
}
