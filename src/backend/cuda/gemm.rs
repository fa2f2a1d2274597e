//! Dense products through cuBLASLt: descriptors, algorithm and workspace of our own, kept per shape; and a kernel of ours
//! for few rows.
//!
//! `out[T, N] = x[T, K] · w[N, K]ᵀ (+ bias[N])`, all row-major. cuBLASLt sees column-major matrices, so it is given
//! `outᵀ[N, T] = (wᵀ)ᵀ · xᵀ`, where wᵀ is `[K, N]` and xᵀ is `[K, T]` with the same bytes.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};

use super::compile::File;
use super::descriptor::{Plan, Preference};
use super::error::blas;
use super::gpu::Gpu;
use super::kernels::{Arg, Grid, Kernels};
use super::memory::Buffer;
use crate::backend::{BackendError, Dtype};

/// Workspace of cuBLASLt, 64 MiB: enough for every split of the shapes here.
const WORKSPACE: usize = 64 << 20;

/// The kernel for few rows serves up to so many.
const GEMV_ROWS: usize = 16;

/// Its variants: N_TILES, UNROLL, WARPS, MIN_BLOCKS. Which is best depends on the shape and the device.
const GEMV_VARIANTS: [[usize; 4]; 5] = [[2, 4, 8, 3], [1, 4, 8, 4], [2, 4, 4, 6], [2, 2, 8, 4], [1, 2, 8, 6]];
/// The same for more than 8 rows.
const GEMV_HIGH_VARIANTS: [[usize; 4]; 2] = [[2, 4, 8, 2], [2, 2, 8, 4]];

/// The variants that serve `t` rows.
fn gemv_variants(t: usize) -> &'static [[usize; 4]] {
    match t {
        ..=8 => &GEMV_VARIANTS,
        9..=GEMV_ROWS => &GEMV_HIGH_VARIANTS,
        _ => &[],
    }
}

fn defines(t: usize, [tiles, unroll, warps, blocks]: [usize; 4]) -> [(&'static str, usize); 5] {
    [
        ("HIGH_ROWS", usize::from(t > 8)),
        ("N_TILES", tiles),
        ("UNROLL", unroll),
        ("WARPS", warps),
        ("MIN_BLOCKS", blocks),
    ]
}

/// The defines of every variant of the kernel for few rows that is ever compiled.
#[must_use]
pub fn gemv_defines() -> Vec<[(&'static str, usize); 5]> {
    [1, GEMV_ROWS]
        .iter()
        .flat_map(|&t| gemv_variants(t).iter().map(move |variant| defines(t, *variant)))
        .collect()
}

/// What decides how a product is best computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Rows of x.
    pub t: usize,
    /// Rows of w.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
    pub bias: bool,
}

impl Shape {
    /// Reads back what `Display` writes.
    fn parse(text: &str) -> Option<Self> {
        let (x, rest) = text.strip_prefix('[')?.split_once("] x [")?;
        let (w, bias) = rest.split_once(']')?;
        let pair = |text: &str| {
            let (a, b) = text.split_once(", ")?;
            Some((a.parse::<usize>().ok()?, b.parse::<usize>().ok()?))
        };
        let ((t, k), (n, same)) = (pair(x)?, pair(w)?);
        (k == same).then_some(Self { t, n, k, bias: bias == " + bias" })
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { t, n, k, bias } = self;
        write!(f, "[{t}, {k}] x [{n}, {k}]{}", if *bias { " + bias" } else { "" })
    }
}

/// Device addresses of a product's matrices.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands {
    pub x: u64,
    pub w: u64,
    /// Zero where there is none.
    pub bias: u64,
    pub out: u64,
}

/// Who computes the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Products {
    /// Whichever kernel is the fastest, cuBLASLt's or ours.
    #[default]
    Fastest,
    /// Ours alone, 16 rows at a time however many there are: sanitizers take minutes to load cuBLASLt, so it is not even
    /// started. Slow, and of no use for timing.
    Ours,
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    /// A variant of the kernel for few rows.
    Gemv(usize),
    /// cuBLASLt's own description of an algorithm.
    Lt([u64; 8]),
}

impl Algorithm {
    /// One line; [`Algorithm::parse`] reads it back.
    pub(super) fn to_text(self) -> String {
        match self {
            Self::Gemv(variant) => format!("gemv {variant}"),
            Self::Lt(words) => words.map(|word| format!("{word:016x}")).join(" "),
        }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        if let Some(variant) = text.strip_prefix("gemv ") {
            return variant.parse().ok().map(Self::Gemv);
        }
        let words: Option<Vec<u64>> =
            text.split(' ').map(|word| u64::from_str_radix(word, 16).ok()).collect();
        Some(Self::Lt(words?.try_into().ok()?))
    }
}

/// The products of one device.
pub(super) struct Gemm {
    handle: OnceCell<sys::cublasLtHandle_t>,
    pub products: Products,
    workspace: Buffer,
    plans: RefCell<HashMap<Shape, Rc<Plan>>>,
    pub chosen: RefCell<HashMap<Shape, Algorithm>>,
    pub kernels: Rc<Kernels>,
    pub dtype: Dtype,
}

impl Gemm {
    pub(super) fn new(kernels: &Rc<Kernels>, dtype: Dtype, products: Products) -> Result<Self, BackendError> {
        kernels.gpu.bind()?;
        let workspace = Buffer::new(&kernels.gpu, WORKSPACE, "the workspace of matrix products")?;
        Ok(Self {
            handle: OnceCell::new(),
            products,
            workspace,
            plans: RefCell::default(),
            chosen: RefCell::default(),
            kernels: kernels.clone(),
            dtype,
        })
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.kernels.gpu
    }

    /// The algorithms of all products of so many rows, by shape.
    pub(super) fn choices(&self, rows: usize) -> BTreeMap<String, String> {
        let chosen = self.chosen.borrow();
        let of_step = chosen.iter().filter(|(shape, _)| shape.t == rows);
        of_step.map(|(shape, algorithm)| (shape.to_string(), algorithm.to_text())).collect()
    }

    /// Takes over what [`Gemm::choices`] said of another device of this kind; what cannot be read is left to be chosen here.
    pub(super) fn adopt(&self, choices: &BTreeMap<String, String>) {
        let parsed =
            choices.iter().filter_map(|(shape, text)| Some((Shape::parse(shape)?, Algorithm::parse(text)?)));
        self.chosen.borrow_mut().extend(parsed);
    }

    /// cuBLASLt's version.
    pub(super) fn version() -> usize {
        // SAFETY: reads a constant of the library.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// cuBLASLt, started when it is first needed.
    fn handle(&self) -> Result<sys::cublasLtHandle_t, BackendError> {
        if let Some(handle) = self.handle.get() {
            return Ok(*handle);
        }
        let handle = result::create_handle().map_err(blas("starting cuBLASLt"))?;
        Ok(*self.handle.get_or_init(|| handle))
    }

    fn plan(&self, shape: Shape) -> Result<Rc<Plan>, BackendError> {
        if let Some(plan) = self.plans.borrow().get(&shape) {
            return Ok(plan.clone());
        }
        let plan = Rc::new(Plan::new(shape, self.dtype)?);
        self.plans.borrow_mut().insert(shape, plan.clone());
        Ok(plan)
    }

    /// What may compute the shape, cuBLASLt's best guess first.
    pub(super) fn candidates(&self, shape: Shape, most: usize) -> Result<Vec<Algorithm>, BackendError> {
        let mut all = match self.products {
            Products::Fastest => self.candidates_of_cublaslt(shape, most)?,
            Products::Ours => Vec::new(),
        };
        if shape.k.is_multiple_of(8) {
            let rows = if self.products == Products::Ours { shape.t.min(GEMV_ROWS) } else { shape.t };
            all.extend((0..gemv_variants(rows).len()).map(Algorithm::Gemv));
        }
        if all.is_empty() {
            let Shape { t, n, k, .. } = shape;
            return Err(BackendError::Device(format!("no kernel serves [{t}, {k}] x [{n}, {k}]")));
        }
        Ok(all)
    }

    fn candidates_of_cublaslt(&self, shape: Shape, most: usize) -> Result<Vec<Algorithm>, BackendError> {
        self.gpu().bind()?;
        let (handle, plan) = (self.handle()?, self.plan(shape)?);
        let preference = Preference::new(WORKSPACE)?;
        // SAFETY: a C struct of numbers, for which zero is a value; the library fills in as many as it counts.
        let mut found = vec![unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() }; most];
        let mut count = 0;
        // SAFETY: all descriptors are alive and `found` has `most` entries.
        let status = unsafe {
            let (a, b, d, most) = (plan.w.0, plan.x.0, plan.out.0, most as i32);
            let (found, count) = (found.as_mut_ptr(), &raw mut count);
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                plan.desc.0,
                a,
                b,
                d,
                d,
                preference.0,
                most,
                found,
                count,
            )
        };
        let usable = |found: &sys::cublasLtMatmulHeuristicResult_t| {
            found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= WORKSPACE
        };
        let count = if status.result().is_ok() { count.max(0) as usize } else { 0 };
        let found = found.iter().take(count).filter(|found| usable(found));
        Ok(found.map(|found| Algorithm::Lt(found.algo.data)).collect())
    }

    /// Puts a product on the stream. An algorithm that does not fit the shape is an error, not a wrong result.
    pub(super) fn run(
        &self,
        shape: Shape,
        algorithm: Algorithm,
        operands: &Operands,
    ) -> Result<(), BackendError> {
        match algorithm {
            Algorithm::Gemv(variant) if shape.t <= GEMV_ROWS => self.run_gemv(shape, variant, operands),
            Algorithm::Gemv(variant) => self.run_slices(shape, variant, operands),
            Algorithm::Lt(data) => self.run_lt(shape, sys::cublasLtMatmulAlgo_t { data }, operands),
        }
    }

    /// The kernel for few rows over many, 16 at a time; the last rows may be fewer, and still take the variant for more than 8.
    fn run_slices(&self, shape: Shape, variant: usize, operands: &Operands) -> Result<(), BackendError> {
        for first in (0..shape.t).step_by(GEMV_ROWS) {
            let slice = Shape { t: GEMV_ROWS.min(shape.t - first), ..shape };
            let after = |address: u64, width: usize| address + (first * width * 2) as u64;
            let (x, out) = (after(operands.x, shape.k), after(operands.out, shape.n));
            self.run_gemv(
                slice,
                variant.min(gemv_variants(slice.t).len() - 1),
                &Operands { x, out, ..*operands },
            )?;
        }
        Ok(())
    }

    fn run_gemv(&self, shape: Shape, variant: usize, operands: &Operands) -> Result<(), BackendError> {
        let Shape { t, n, k, .. } = shape;
        let Some(&[tiles, unroll, warps, blocks]) = gemv_variants(t).get(variant) else {
            return Err(BackendError::Device(format!("the kernel for few rows cannot serve [{t}, {k}]")));
        };
        let defines = defines(t, [tiles, unroll, warps, blocks]);
        let function = self.kernels.get(File::Gemv, &defines, "gemv")?;
        let Operands { x, w, bias, out } = *operands;
        let addresses = [x, w, bias, out].map(Arg::Address);
        let sizes = [t, n, k].map(|size| Arg::I32(size as i32));
        let args: Vec<Arg> = addresses.into_iter().chain(sizes).collect();
        // SAFETY: (x, w, bias, out, rows, n, k) as in gemv.cu; the matrices have the shape's sizes.
        unsafe { self.kernels.launch(function, Grid::new(n.div_ceil(8 * tiles), 32 * warps as u32), &args) }
    }

    fn run_lt(
        &self,
        shape: Shape,
        algorithm: sys::cublasLtMatmulAlgo_t,
        operands: &Operands,
    ) -> Result<(), BackendError> {
        let (handle, plan) = (self.handle()?, self.plan(shape)?);
        let Operands { x, w, bias, out } = *operands;
        if shape.bias {
            plan.desc.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let (one, zero) = (1.0_f32, 0.0_f32);
        let pointer = |address: u64| address as *mut c_void;
        let stream = self.gpu().stream.cu_stream();
        // SAFETY: the descriptors say the sizes that the operands have; the scalars are read before the call returns.
        let status = unsafe {
            let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
            let (a, b, d) = (plan.w.0, plan.x.0, plan.out.0);
            let (desc, workspace) = (plan.desc.0, pointer(self.workspace.address()));
            let (w, x, out) = (pointer(w), pointer(x), pointer(out));
            let algorithm = &raw const algorithm;
            sys::cublasLtMatmul(
                handle,
                desc,
                one,
                w,
                a,
                x,
                b,
                zero,
                out,
                d,
                out,
                d,
                algorithm,
                workspace,
                WORKSPACE,
                stream.cast(),
            )
        };
        self.kernels.other_kernel();
        status.result().map_err(blas("a matrix product"))
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        let _ = self.gpu().bind();
        // SAFETY: created by this struct, destroyed once; nothing is running, as graphs were dropped before.
        let _ = unsafe { result::destroy_handle(handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_round_trips() {
        for algorithm in [Algorithm::Gemv(3), Algorithm::Lt([0, 1, u64::MAX, 3, 4, 5, 6, 7])] {
            assert_eq!(Algorithm::parse(&algorithm.to_text()), Some(algorithm));
        }
        for bias in [false, true] {
            let shape = Shape { t: 3, n: 40, k: 8, bias };
            assert_eq!(Shape::parse(&shape.to_string()), Some(shape));
        }
        assert_eq!(Shape::parse("[3, 8] x [40, 9]"), None);
        assert_eq!(Algorithm::parse("1 2 3"), None);
        assert_eq!(Algorithm::parse(""), None);
    }
}
