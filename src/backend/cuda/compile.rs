//! Kernels from source to machine code: NVRTC for this GPU's architecture, kept on disk by everything that decides the result.

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;

use cudarc::nvrtc::sys;

use super::error::nvrtc;
use super::{cache, library};
use crate::backend::BackendError;

/// What every kernel file includes.
const COMMON: &str = include_str!("../../../kernels/common.cuh");

macro_rules! files {
    ($($variant:ident = $name:literal, $doc:literal;)*) => {
        /// A kernel file.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum File {
            $(#[doc = $doc] $variant,)*
        }

        impl File {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its name without the extension.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Its text.
            #[must_use]
            pub fn source(self) -> &'static str {
                match self { $(Self::$variant => include_str!(concat!("../../../kernels/", $name, ".cu")),)* }
            }
        }
    };
}
files! {
    Act = "act", "Gated activations.";
    Decode = "decode", "Split-KV attention.";
    Embed = "embed", "The embedding.";
    Fill = "fill", "Made-up weights and KV.";
    Gemv = "gemv", "Products of few rows.";
    MoeGemm = "moe_gemm", "Products of experts.";
    MoeGemmHopper = "moe_gemm_hopper", "The same on Hopper, for many rows.";
    MoeRoute = "moe_route", "The choice of experts, and their sum.";
    MoeTravel = "moe_travel", "Tokens on their way to experts.";
    Norm = "norm", "RMS norm.";
    Prefill = "prefill", "Attention of many queries.";
    PrefillHopper = "prefill_hopper", "The same on Hopper.";
    Rope = "rope", "Head norms, rotary embedding, KV write.";
    State = "state", "What surrounds a timed forward.";
}

/// A hash of all kernel sources: two executables with the same one run the same kernels.
#[must_use]
pub fn kernels_hash() -> String {
    hash_of(File::ALL)
}

/// The same of these files alone.
pub(super) fn hash_of(files: &[File]) -> String {
    let texts = files.iter().map(|file| file.source().as_bytes());
    cache::hash(std::iter::once(COMMON.as_bytes()).chain(texts))[..12].to_owned()
}

/// Compiles for one architecture.
#[derive(Debug)]
pub struct Compiler {
    arch: String,
    version: (i32, i32),
    folder: Option<PathBuf>,
}

impl Compiler {
    /// For `arch`, such as `sm_90a`. Needs NVRTC, but no GPU.
    ///
    /// # Errors
    /// If NVRTC is missing, too old or does not work.
    pub fn new(arch: &str) -> Result<Self, BackendError> {
        let version = library::nvrtc_version()?;
        let folder = cache::folder().map(|folder| folder.join("kernels"));
        Ok(Self { arch: arch.to_owned(), version, folder })
    }

    /// The cubin of a file under `defines` (`NAME=VALUE`), from the cache if it is there.
    ///
    /// # Errors
    /// The compiler's own messages.
    pub fn cubin(&self, file: File, defines: &[String]) -> Result<Vec<u8>, BackendError> {
        let options = self.options(defines);
        let version = format!("{}.{}", self.version.0, self.version.1);
        let parts = [file.source(), COMMON, &version].into_iter().chain(options.iter().map(String::as_str));
        let key = cache::hash(parts.map(str::as_bytes));
        let path =
            self.folder.as_ref().map(|folder| folder.join(format!("{}-{}-{key}", file.name(), self.arch)));
        if let Some(cubin) = path.as_deref().and_then(cache::read) {
            return Ok(cubin);
        }
        let (cubin, _) = self.compile(file, &options)?;
        if let Some(path) = path {
            let _ = cache::write(&path, &cubin); // a cache that cannot be written costs time, nothing else
        }
        Ok(cubin)
    }

    /// Compiles without the cache; returns the cubin and the compiler's log with resources and warnings.
    ///
    /// # Errors
    /// The compiler's own messages.
    pub fn fresh(&self, file: File, defines: &[String]) -> Result<(Vec<u8>, String), BackendError> {
        let mut options = self.options(defines);
        options.push("--ptxas-options=-v".to_owned());
        options.push("--ptxas-options=--warn-on-spills".to_owned());
        self.compile(file, &options)
    }

    fn options(&self, defines: &[String]) -> Vec<String> {
        let mut options = vec![format!("-arch={}", self.arch), "--std=c++17".to_owned()];
        options.extend(defines.iter().map(|define| format!("-D{define}")));
        options
    }

    fn compile(&self, file: File, options: &[String]) -> Result<(Vec<u8>, String), BackendError> {
        let program = Program::new(file)?;
        let options: Vec<CString> =
            options.iter().map(|option| c_string(option)).collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the pointers are those of living strings.
        let status = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
        let log = program.text(sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog)?;
        let log = CStr::from_bytes_until_nul(&log)
            .map_or_else(|_| String::new(), |log| log.to_string_lossy().into());
        if let Err(error) = status.result() {
            let (major, minor) = self.version;
            return Err(BackendError::Device(format!(
                "kernels/{}.cu does not compile for {} with NVRTC {major}.{minor} ({:?}): {}",
                file.name(),
                self.arch,
                error.0,
                log.trim()
            )));
        }
        let cubin = program.text(sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)?;
        Ok((cubin, log))
    }
}

fn c_string(text: &str) -> Result<CString, BackendError> {
    CString::new(text).map_err(|_| BackendError::Device(format!("a zero byte in {text:?}")))
}

/// An NVRTC program.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(file: File) -> Result<Self, BackendError> {
        let (text, name) = (c_string(file.source())?, c_string(&format!("{}.cu", file.name()))?);
        let header = c_string(COMMON)?;
        let (headers, names) = ([header.as_ptr()], [c"common.cuh".as_ptr()]);
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings live until the call returns; NVRTC copies them.
        let status = unsafe {
            let (headers, names) = (headers.as_ptr(), names.as_ptr());
            sys::nvrtcCreateProgram(&raw mut program, text.as_ptr(), name.as_ptr(), 1, headers, names)
        };
        status.result().map_err(nvrtc("creating a program"))?;
        Ok(Self(program))
    }

    /// What one pair of NVRTC's getters gives.
    fn text(
        &self,
        size: unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
        get: unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
    ) -> Result<Vec<u8>, BackendError> {
        let mut bytes = 0;
        // SAFETY: the program is alive; one integer is written.
        unsafe { size(self.0, &raw mut bytes) }.result().map_err(nvrtc("reading NVRTC's result"))?;
        let mut text = vec![0_u8; bytes];
        // SAFETY: `text` is as long as NVRTC asked for.
        unsafe { get(self.0, text.as_mut_ptr().cast()) }.result().map_err(nvrtc("reading NVRTC's result"))?;
        Ok(text)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by this struct and destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}
