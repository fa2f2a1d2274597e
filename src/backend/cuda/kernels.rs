//! Loaded kernels and how they are launched.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::compile::{Compiler, File};
use super::error::driver;
use super::gpu::Gpu;
use crate::backend::{BackendError, Dtype};

/// A kernel argument.
#[derive(Debug, Clone, Copy)]
pub(super) enum Arg {
    /// An address on the device, or zero.
    Address(u64),
    U64(u64),
    U32(u32),
    I32(i32),
    F32(f32),
}

impl Arg {
    /// The argument in the low bytes of a word, where a little-endian machine's pointer finds it.
    fn bits(self) -> u64 {
        match self {
            Self::Address(value) | Self::U64(value) => value,
            Self::U32(value) => u64::from(value),
            Self::I32(value) => u64::from(value.cast_unsigned()),
            Self::F32(value) => u64::from(value.to_bits()),
        }
    }
}

/// A kernel that is loaded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Function(sys::CUfunction);

/// How a kernel is spread over the GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub blocks: (u32, u32),
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
}

impl Grid {
    pub(super) fn new(blocks: usize, threads: u32) -> Self {
        Self::wide((blocks, 1), threads)
    }

    pub(super) fn wide((x, y): (usize, usize), threads: u32) -> Self {
        let clamp = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Self { blocks: (clamp(x), clamp(y)), threads, shared: 0 }
    }

    pub(super) fn shared(self, shared: usize) -> Self {
        Self { shared, ..self }
    }
}

/// A file and the defines that it was compiled under.
type ModuleKey = (File, Vec<String>);

/// The modules of one GPU and element type. Functions live as long as this does.
pub(super) struct Kernels {
    pub gpu: Arc<Gpu>,
    compiler: Compiler,
    dtype: Dtype,
    modules: RefCell<HashMap<ModuleKey, sys::CUmodule>>,
    functions: RefCell<HashMap<(ModuleKey, &'static str), Function>>,
    /// Whether the next launch may overlap the end of the kernel before it.
    overlap: Cell<bool>,
}

impl Kernels {
    pub(super) fn new(gpu: &Arc<Gpu>, dtype: Dtype) -> Result<Self, BackendError> {
        if dtype == Dtype::Float32 {
            return Err(BackendError::Unsupported(
                "--dtype float32 runs on the CPU only; CUDA takes bfloat16 and float16".into(),
            ));
        }
        Ok(Self {
            gpu: gpu.clone(),
            compiler: Compiler::new(&gpu.arch())?,
            dtype,
            modules: RefCell::default(),
            functions: RefCell::default(),
            overlap: Cell::new(false),
        })
    }

    /// A kernel of a file compiled under `defines`. Compiles and loads at the first call, so no capture may be going on then.
    pub(super) fn get(
        &self,
        file: File,
        defines: &[(&str, usize)],
        kernel: &'static str,
    ) -> Result<Function, BackendError> {
        let defines: Vec<String> = defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let key = ((file, defines), kernel);
        if let Some(function) = self.functions.borrow().get(&key) {
            return Ok(*function);
        }
        let module = self.module(&key.0)?;
        let name = CString::new(kernel).unwrap_or_default();
        // SAFETY: the module is loaded, and stays so until `self` is dropped.
        let function = unsafe { result::module::get_function(module, name) }.map_err(driver(kernel))?;
        let function = Function(function);
        self.functions.borrow_mut().insert(key, function);
        Ok(function)
    }

    fn module(&self, key: &ModuleKey) -> Result<sys::CUmodule, BackendError> {
        if let Some(module) = self.modules.borrow().get(key) {
            return Ok(*module);
        }
        let (file, defines) = key;
        let mut all = vec![dtype_define(self.dtype).to_owned()];
        all.extend_from_slice(defines);
        let cubin = self.compiler.cubin(*file, &all)?;
        self.gpu.bind()?;
        // SAFETY: a whole cubin, made by NVRTC for this architecture; the driver copies it.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
            .map_err(driver(&format!("loading kernels/{}.cu", file.name())))?;
        self.modules.borrow_mut().insert(key.clone(), module);
        Ok(module)
    }

    /// Lets a kernel use up to `shared` bytes of dynamic shared memory; fails if the device has less.
    pub(super) fn allow_shared(
        &self,
        function: Function,
        shared: usize,
        what: &str,
    ) -> Result<(), BackendError> {
        if shared > self.gpu.max_shared {
            return Err(BackendError::Unsupported(format!(
                "{what} needs {shared} bytes of shared memory a block, {} has {}",
                self.gpu.name, self.gpu.max_shared
            )));
        }
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe { result::function::set_function_attribute(function.0, attribute, shared as i32) }
            .map_err(driver("allowing shared memory"))
    }

    /// Blocks of the grid's size that all multiprocessors hold at a time, at least one each.
    pub(super) fn resident(&self, function: Function, grid: Grid) -> Result<usize, BackendError> {
        let mut blocks = 0;
        // SAFETY: the function is loaded; one integer is written.
        let status = unsafe {
            let threads = grid.threads as i32;
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                function.0,
                threads,
                grid.shared,
            )
        };
        status.result().map_err(driver("asking for occupancy"))?;
        Ok(blocks.max(1) as usize * self.gpu.multiprocessors as usize)
    }

    /// The kernel of [`Kernels::keep_busy`]; loads it at the first call.
    pub(super) fn spin(&self) -> Result<Function, BackendError> {
        self.get(File::State, &[], "spin_nanos")
    }

    /// Keeps the stream busy for so long, so that what is put on it meanwhile is all there when its turn comes.
    pub(super) fn keep_busy(&self, spin: Function, nanos: u64) -> Result<(), BackendError> {
        self.no_overlap();
        // SAFETY: `spin_nanos` takes one 64-bit number.
        unsafe { self.launch(spin, Grid::new(1, 1), &[Arg::U64(nanos)]) }
    }

    /// The next launch waits for all before it in the ordinary way: it follows an event or a copy.
    pub(super) fn no_overlap(&self) {
        self.overlap.set(false);
    }

    /// Something that is no kernel of ours was put on the stream; the next kernel may overlap its end.
    pub(super) fn other_kernel(&self) {
        self.overlap.set(true);
    }

    /// Puts a kernel on the stream.
    ///
    /// # Safety
    /// The arguments are those of the kernel in number, order and width, and the addresses lead to what it reads and
    /// writes until it has run.
    pub(super) unsafe fn launch(
        &self,
        function: Function,
        grid: Grid,
        args: &[Arg],
    ) -> Result<(), BackendError> {
        let mut words: Vec<u64> = args.iter().map(|arg| arg.bits()).collect();
        let mut pointers: Vec<*mut c_void> = words.iter_mut().map(|word| (&raw mut *word).cast()).collect();
        let overlap = self.overlap.replace(true) && self.gpu.capability >= (9, 0);
        let mut attribute = sys::CUlaunchAttribute_st {
            id: sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue_union { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig_st {
            gridDimX: grid.blocks.0,
            gridDimY: grid.blocks.1,
            gridDimZ: 1,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared as u32,
            hStream: self.gpu.stream.cu_stream(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(overlap),
        };
        // SAFETY: the caller vouches for the arguments; everything else lives until the call returns.
        let status = unsafe {
            sys::cuLaunchKernelEx(&raw const config, function.0, pointers.as_mut_ptr(), std::ptr::null_mut())
        };
        status.result().map_err(driver("launching a kernel"))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        for module in self.modules.get_mut().values() {
            // SAFETY: loaded by this struct, and nothing that runs uses it: graphs are dropped before.
            let _ = unsafe { result::module::unload(*module) };
        }
    }
}

/// The define that chooses the element type.
#[must_use]
pub(super) fn dtype_define(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float16 => "DTYPE_F16=1",
        Dtype::Float32 | Dtype::Bfloat16 => "DTYPE_BF16=1",
    }
}
