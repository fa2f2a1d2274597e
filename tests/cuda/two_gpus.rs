//! What two GPUs of one machine are to each other: peer access, NVLink, memory shared between processes, and how long NCCL's sums take. One
//! process for each GPU; they meet by files in a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forward_bench::backend::cuda::custom::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result, sys};
use forward_bench::backend::cuda::custom::{CustomCapture, CustomForward};
use forward_bench::backend::cuda::{Collectives, Gpu, Nccl, Span, nccl_available};
use forward_bench::backend::{BackendError, Capture, Dtype, L2};
use forward_bench::layout::{Group, Layout, Place};

/// The rank of the process that has it.
const RANK: &str = "FORWARD_BENCH_TWO_GPUS_RANK";

/// Where the ranks meet.
const FOLDER: &str = "FORWARD_BENCH_TWO_GPUS_FOLDER";

/// A rank that waits longer for the other has lost it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes of the sums.
const SIZES: [usize; 6] = [8 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20];

/// Sums in one graph, one after the other.
const CHAINED: usize = 100;

const WARM_UP: usize = 10;
const REPLAYS: usize = 31;

/// One rank.
pub(crate) struct Rank {
    pub rank: usize,
    folder: PathBuf,
    pub gpu: Arc<Gpu>,
}

impl Rank {
    /// Says something to the other, whole or not at all.
    pub(crate) fn say(&self, what: &str, bytes: &[u8]) {
        let own = self.folder.join(format!(".{}", self.rank));
        fs::write(&own, bytes).unwrap();
        fs::rename(own, self.folder.join(format!("{what}-{}", self.rank))).unwrap();
    }

    /// What the other says.
    pub(crate) fn hear(&self, what: &str) -> Vec<u8> {
        let path = self.folder.join(format!("{what}-{}", 1 - self.rank));
        let start = Instant::now();
        while !path.exists() {
            assert!(start.elapsed() < PATIENCE, "rank {}: the other does not say its {what}", self.rank);
            std::thread::sleep(Duration::from_millis(2));
        }
        fs::read(path).unwrap()
    }

    /// Joins the other by NCCL; `id` is told once under this name.
    pub(crate) fn joined(&self, layout: Layout, id: &str) -> Rc<Nccl> {
        let told = if self.rank == 0 {
            let own = Nccl::unique_id().unwrap();
            self.say(id, &own);
            own
        } else {
            self.hear(id)
        };
        Nccl::new(&self.gpu, Place { layout, rank: self.rank }, &told).unwrap()
    }

    pub(crate) fn tell(&self, text: &str) {
        println!("rank {}: {text}", self.rank);
    }
}

/// Runs a test's body in two processes, one for each GPU; in the process that starts them, the folder where they met.
pub(crate) fn apart(test: &str, body: impl FnOnce(&Rank)) -> Option<tempfile::TempDir> {
    if let Ok(rank) = std::env::var(RANK) {
        let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
        let rank = rank.parse().unwrap();
        let gpu = Gpu::open(rank).unwrap();
        nccl_available().unwrap();
        body(&Rank { rank, folder, gpu });
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let child = |rank: usize| {
        let mut command = crate::nccl::again(test);
        command.env(RANK, rank.to_string()).env(FOLDER, folder.path()).spawn().unwrap()
    };
    let mut children = [child(0), child(1)];
    // One that fails leaves the other waiting in a collective.
    while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
        let failed = |child: &mut std::process::Child| {
            child.try_wait().unwrap().is_some_and(|status| !status.success())
        };
        if children.iter_mut().any(failed) {
            children.iter_mut().for_each(|child| {
                let _ = child.kill(); // it may have ended by itself
            });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let good = children.iter_mut().all(|child| child.wait().unwrap().success());
    assert!(good, "a rank failed");
    Some(folder)
}

#[test]
#[ignore = "needs two NVIDIA GPUs and NCCL"]
fn two_gpus_share_memory_and_add_up() {
    if let Some(folder) = apart("two_gpus::two_gpus_share_memory_and_add_up", run) {
        table(folder.path());
    }
}

fn run(rank: &Rank) {
    rank.tell(&format!("{}, {}", rank.gpu.name, rank.gpu.uuid));
    peer_access(rank);
    nvlink(rank);
    shared_memory(rank);
    sums(rank);
}

fn peer_access(rank: &Rank) {
    let devices = [0, 1].map(|ordinal| result::device::get(ordinal).unwrap());
    let mut can = 0;
    // SAFETY: both devices exist; one integer is written.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, devices[rank.rank], devices[1 - rank.rank]) }
        .result()
        .unwrap();
    rank.tell(&format!("peer access: {}", if can == 1 { "yes" } else { "no" }));
    assert_eq!(can, 1, "the GPUs cannot reach each other's memory");
}

fn nvlink(rank: &Rank) {
    let nvml = nvml_wrapper::Nvml::init().unwrap();
    let device = nvml.device_by_uuid(rank.gpu.uuid.as_str()).unwrap();
    let active = (0..18).filter(|link| device.link_wrapper_for(*link).is_active().unwrap_or(false)).count();
    rank.tell(&format!("NVLinks that are active: {active}"));
    assert!(active > 0, "no NVLink is active");
}

/// Rank 0's memory, opened by rank 1, which copies it to its own GPU and writes into it.
fn shared_memory(rank: &Rank) {
    const BYTES: usize = 64 << 20;
    let pattern = |seed: u32| -> Vec<u32> {
        (0..BYTES as u32 / 4).map(|i| i.wrapping_mul(2_654_435_761) ^ seed).collect()
    };
    // SAFETY: the context is current; freed below.
    let own = unsafe { result::malloc_sync(BYTES) }.unwrap();
    let read = || {
        let mut words = vec![0_u32; BYTES / 4];
        // SAFETY: as long as the allocation.
        unsafe { result::memcpy_dtoh_sync(&mut words, own) }.unwrap();
        words
    };
    let write = |seed: u32| {
        // SAFETY: as long as the allocation; the copy is waited for.
        unsafe { result::memcpy_htod_sync(own, &pattern(seed)) }.unwrap();
        rank.gpu.context.synchronize().unwrap();
    };
    if rank.rank == 0 {
        write(1);
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: an allocation of cuMemAlloc; one handle is written.
        unsafe { sys::cuIpcGetMemHandle(&raw mut handle, own) }.result().unwrap();
        rank.say("handle", &handle.reserved.map(|byte| byte as u8));
        rank.hear("written");
        assert!(read() == pattern(2), "what the other process wrote is not here");
    } else {
        let bytes: [u8; 64] = rank.hear("handle").try_into().unwrap();
        let handle = sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as std::ffi::c_char) };
        let flag = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut peer = 0;
        // SAFETY: a handle of the other process, whose memory lives until it is told that this is done.
        unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut peer, handle, flag) }.result().unwrap();
        copied(own, peer, BYTES, rank);
        assert!(read() == pattern(1), "what the other process has is not here");
        write(2);
        let micros = copied(peer, own, BYTES, rank);
        // SAFETY: opened above, used no more.
        unsafe { sys::cuIpcCloseMemHandle(peer) }.result().unwrap();
        rank.say("written", b"");
        let rate = BYTES as f64 / micros / 1e3;
        rank.tell(&format!("CUDA IPC: read and written; 64 MiB to the other GPU at about {rate:.0} GB/s"));
    }
    // SAFETY: allocated above, freed once.
    unsafe { result::free_sync(own) }.unwrap();
}

/// Microseconds of the best of a few copies, by the host's clock.
fn copied(to: u64, from: u64, bytes: usize, rank: &Rank) -> f64 {
    let copy = |_| {
        let start = Instant::now();
        // SAFETY: both allocations are so long.
        unsafe { result::memcpy_dtod_async(to, from, bytes, rank.gpu.stream.cu_stream()) }.unwrap();
        rank.gpu.synchronize().unwrap();
        start.elapsed().as_secs_f64() * 1e6
    };
    (0..5).map(copy).fold(f64::INFINITY, f64::min)
}

/// Sums in place, one after the other, of ones at first: 2¹⁰⁰ in the end.
struct Sums {
    data: CudaSlice<u16>,
    count: usize,
    gpu: Arc<Gpu>,
    nccl: Rc<Nccl>,
}

/// One, and 2¹⁰⁰, in bfloat16.
const BITS: [u16; 2] = [0x3f80, 0x7180];

impl CustomForward for Sums {
    fn launch(&mut self, stream: &Arc<CudaStream>) -> Result<(), BackendError> {
        let (address, _done) = self.data.device_ptr(stream);
        let data = Span { address, count: self.count, dtype: Dtype::Bfloat16 };
        (0..CHAINED).try_for_each(|_| self.nccl.all_reduce(&self.gpu, Group::World, data))
    }

    fn restore(&mut self, stream: &Arc<CudaStream>) -> Result<(), BackendError> {
        let (address, _done) = self.data.device_ptr(stream);
        // SAFETY: `count` elements of 16 bits.
        let status = unsafe { sys::cuMemsetD16Async(address, BITS[0], self.count, stream.cu_stream()) };
        status.result().map_err(|error| BackendError::Device(error.to_string()))
    }
}

fn sums(rank: &Rank) {
    let nccl = rank.joined(Layout { tensor: 2, ..Layout::ONE }, "id");
    let collectives: Rc<dyn Collectives> = nccl.clone();
    for bytes in SIZES {
        let data = rank.gpu.stream.alloc_zeros::<u16>(bytes / 2).unwrap();
        let address = data.device_ptr(&rank.gpu.stream).0;
        let sums = Sums { data, count: bytes / 2, gpu: rank.gpu.clone(), nccl: nccl.clone() };
        let mut capture = CustomCapture::of_rank(&rank.gpu, L2::Warm, sums, &collectives).unwrap();
        capture.restore().unwrap();
        capture.eager().unwrap();
        capture.record().unwrap();
        let replay = |_| capture.replay().unwrap().time.micros() / CHAINED as f64;
        let times: Vec<f64> = (0..WARM_UP + REPLAYS).map(replay).skip(WARM_UP).collect();
        rank.say(&format!("times-{bytes}"), &serde_json::to_vec(&times).unwrap());
        let mut words = vec![0_u16; bytes / 2];
        // SAFETY: as long as the capture's data, which is alive.
        unsafe { result::memcpy_dtoh_sync(&mut words, address) }.unwrap();
        assert!(words.iter().all(|word| *word == BITS[1]), "{bytes} bytes: a sum is wrong");
    }
}

/// The medians of the slower rank of each replay.
fn table(folder: &Path) {
    let nvls = std::env::var("NCCL_NVLS_ENABLE").unwrap_or_else(|_| "unset".into());
    println!(
        "\nNCCL all-reduce of bfloat16 over 2 GPUs, {CHAINED} chained in a graph, of {REPLAYS} replays the"
    );
    println!("slower rank's, in µs a sum (NCCL_NVLS_ENABLE {nvls}):\n");
    println!("| bytes | median | least | most | GB/s |\n| ---: | ---: | ---: | ---: | ---: |");
    for bytes in SIZES {
        let times = [0, 1].map(|rank| -> Vec<f64> {
            serde_json::from_slice(&fs::read(folder.join(format!("times-{bytes}-{rank}"))).unwrap()).unwrap()
        });
        let mut slower: Vec<f64> = times[0].iter().zip(&times[1]).map(|(a, b)| a.max(*b)).collect();
        slower.sort_by(f64::total_cmp);
        assert_eq!(slower.len(), REPLAYS);
        let median = slower[REPLAYS / 2];
        let (least, most, rate) = (slower[0], slower[REPLAYS - 1], bytes as f64 / median / 1e3);
        println!("| {bytes} | {median:.2} | {least:.2} | {most:.2} | {rate:.1} |");
    }
}
