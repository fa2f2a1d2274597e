//! Which algorithm computes a product: the fastest by measurement that repeats bit for bit.
//!
//! Candidates are timed as the step runs them, in a graph that goes from layer to layer, so that no weight is still in the
//! L2 cache. The choice is kept on disk by device, driver, library version, element type and shape, under a lock, so that two
//! processes choose alike.

use std::path::PathBuf;

use super::cache;
use super::compile::{File, hash_of};
use super::gemm::{Algorithm, Gemm, Operands, Shape};
use super::gpu::Event;
use super::graph::Graph;
use super::memory::Buffer;
use super::timed::read_sum;
use super::weights::uniform;
use crate::backend::BackendError;
use crate::stats::median;

/// Algorithms that cuBLASLt is asked for.
const CANDIDATES: usize = 16;
/// Those that are measured a second time.
const FINALISTS: usize = 4;
/// A measurement goes on for about this long.
const NANOS_A_CANDIDATE: f64 = 1.5e6;

/// A shape and the matrices that it is tuned on: the weights of all layers that have it.
pub(super) struct Job {
    pub shape: Shape,
    pub x: u64,
    /// One or more.
    pub weights: Vec<u64>,
    pub bias: u64,
    pub out: u64,
}

/// Chooses algorithms for a device.
pub(super) struct Tuner {
    /// What choices depend on, the shape apart.
    key: String,
    folder: Option<PathBuf>,
    /// Measure again what is already known.
    pub retune: bool,
}

impl Tuner {
    pub(super) fn new(gemm: &Gemm, retune: bool) -> Self {
        let gpu = gemm.gpu();
        // Of our kernels, only those that a choice is made among: two commits that differ elsewhere choose alike.
        let (driver, library, kernels) = (gpu.driver, Gemm::version(), hash_of(&[File::Gemv]));
        let (dtype, products) = (gemm.dtype, gemm.products);
        let key = format!("{} {driver} {library} {kernels} {dtype:?} {products:?}", gpu.name);
        Self { key, folder: cache::folder().map(|folder| folder.join("gemm")), retune }
    }

    fn path(&self, shape: Shape) -> Option<PathBuf> {
        let key = cache::hash([format!("{} {shape:?}", self.key).as_bytes()]);
        self.folder.as_ref().map(|folder| folder.join(key))
    }

    /// Makes sure that the shape has an algorithm.
    pub(super) fn choose(&self, gemm: &Gemm, job: &Job) -> Result<(), BackendError> {
        if gemm.chosen.borrow().contains_key(&job.shape) {
            return Ok(());
        }
        let path = self.path(job.shape);
        let _lock = path.as_ref().and_then(|path| cache::lock(&path.with_extension("lock")));
        let kept = path.as_ref().filter(|_| !self.retune).and_then(|path| cache::read(path));
        let kept = kept.and_then(|text| Algorithm::parse(&String::from_utf8(text).ok()?));
        let algorithm = match kept.filter(|algorithm| works(gemm, job, *algorithm)) {
            Some(algorithm) => algorithm,
            None => {
                let algorithm = fastest(gemm, job)?;
                if let Some(path) = path {
                    let _ = cache::write(&path, algorithm.to_text().as_bytes());
                }
                algorithm
            }
        };
        gemm.chosen.borrow_mut().insert(job.shape, algorithm);
        Ok(())
    }
}

/// Whether an algorithm from the cache still runs.
fn works(gemm: &Gemm, job: &Job, algorithm: Algorithm) -> bool {
    run(gemm, job, algorithm, 0).is_ok() && gemm.gpu().synchronize().is_ok()
}

fn run(gemm: &Gemm, job: &Job, algorithm: Algorithm, index: usize) -> Result<(), BackendError> {
    let w = job.weights[index % job.weights.len()];
    gemm.run(job.shape, algorithm, &Operands { x: job.x, w, bias: job.bias, out: job.out })
}

fn fastest(gemm: &Gemm, job: &Job) -> Result<Algorithm, BackendError> {
    let Shape { t, n, k, .. } = job.shape;
    uniform(&gemm.kernels, job.x, t * k, 0x7e57, (1.0, 0.0))?; // zeros would run faster than real inputs
    let l2 = gemm.gpu().l2_bytes;
    let launches = (5 * l2 / 2).div_ceil(2 * n * k).clamp(1, job.weights.len());
    let mut timed = Vec::new();
    for algorithm in gemm.candidates(job.shape, CANDIDATES)? {
        // One that fails at run time is passed over.
        if let Ok(bench) = Bench::new(gemm, job, algorithm, launches)
            && let Ok(nanos) = bench.nanos(1)
        {
            timed.push((nanos, algorithm, bench));
        }
    }
    timed.sort_by(|a, b| a.0.total_cmp(&b.0));
    timed.truncate(FINALISTS);
    let mut rounds = vec![Vec::new(); timed.len()];
    for _ in 0..3 {
        for (times, (nanos, _, bench)) in rounds.iter_mut().zip(&timed) {
            times.push(bench.nanos(1 + (NANOS_A_CANDIDATE / nanos) as usize)?);
        }
    }
    let mut finalists: Vec<(f64, Algorithm)> = rounds
        .iter()
        .zip(&timed)
        .map(|(times, (_, algorithm, _))| (median(times).unwrap_or(f64::MAX), *algorithm))
        .collect();
    finalists.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (_, algorithm) in finalists {
        if repeats(gemm, job, algorithm)? {
            return Ok(algorithm);
        }
    }
    Err(BackendError::Device(format!("no algorithm for [{t}, {k}] x [{n}, {k}] repeats bit for bit")))
}

/// A candidate in a graph of several launches.
struct Bench {
    graph: Graph,
    start: Event,
    end: Event,
    launches: usize,
}

impl Bench {
    fn new(gemm: &Gemm, job: &Job, algorithm: Algorithm, launches: usize) -> Result<Self, BackendError> {
        let gpu = gemm.gpu();
        run(gemm, job, algorithm, 0)?; // lazy initialisation is not for a capture
        gpu.synchronize()?;
        let graph = Graph::record(gpu, || {
            gemm.kernels.no_overlap();
            (0..launches).try_for_each(|index| run(gemm, job, algorithm, index))
        })?;
        Ok(Self { graph, start: Event::new(gpu)?, end: Event::new(gpu)?, launches })
    }

    /// Nanoseconds of one launch, from `graphs` graphs after one that warms up.
    fn nanos(&self, graphs: usize) -> Result<f64, BackendError> {
        let graphs = graphs.clamp(1, 20);
        self.graph.launch()?;
        self.start.record(false)?;
        for _ in 0..graphs {
            self.graph.launch()?;
        }
        self.end.record(false)?;
        self.end.wait()?;
        Ok(self.start.until(&self.end)?.0 / (graphs * self.launches) as f64)
    }
}

/// Whether two runs, each from a poisoned output, give the same bits, judged by a sum a block of the whole output.
fn repeats(gemm: &Gemm, job: &Job, algorithm: Algorithm) -> Result<bool, BackendError> {
    let gpu = gemm.gpu();
    let bytes = job.shape.t * job.shape.n * 2 / 16 * 16;
    let function = gemm.kernels.get(File::State, &[], "read_sum")?;
    let sums = Buffer::new(gpu, 4 * gpu.multiprocessors as usize * 4, "sums")?;
    let mut seen = Vec::new();
    for poison in [0xffff_ff7f_u32, 0x0000_ff80] {
        poisoned(gemm, job, poison)?;
        run(gemm, job, algorithm, 0)?;
        gemm.kernels.no_overlap();
        read_sum(&gemm.kernels, function, job.out, bytes, &sums)?;
        seen.push(sums.read::<u32>(0, sums.bytes() / 4)?);
    }
    Ok(seen[0] == seen[1])
}

/// Fills the output with values that no product gives.
fn poisoned(gemm: &Gemm, job: &Job, poison: u32) -> Result<(), BackendError> {
    let Shape { t, n, .. } = job.shape;
    uniform(&gemm.kernels, job.out, t * n, u64::from(poison), (1e4, 0.0))
}
