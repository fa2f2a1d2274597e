//! Checkpoints in safetensors: one `model.safetensors`, or several with a `model.safetensors.index.json`.
//!
//! Files are mapped, not read, and each tensor is converted straight into the device's memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::{Dtype as Stored, SafeTensors};

use crate::backend::{BackendError, StepSpec, WeightRole, WeightSource, WeightSpec};

/// Where a tensor lies.
struct Tensor {
    shard: usize,
    dtype: Stored,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

/// An opened checkpoint whose tensors are known to be those of a model.
pub struct Checkpoint {
    shards: Vec<Mmap>,
    tensors: HashMap<String, Tensor>,
}

fn fail(path: &Path, reason: impl std::fmt::Display) -> BackendError {
    BackendError::Weights(format!("{}: {reason}", path.display()))
}

impl Checkpoint {
    /// Opens the checkpoint of a folder and compares its tensors with the model's: missing, unknown and misshapen ones, and
    /// types other than F32, BF16 and F16, are errors. `lm_head.weight` and `rotary_emb.inv_freq` are passed over.
    pub fn open(dir: &Path, spec: &StepSpec) -> Result<Self, BackendError> {
        let mut checkpoint = Self { shards: Vec::new(), tensors: HashMap::new() };
        for path in shard_paths(dir)? {
            checkpoint.add(&path)?;
        }
        checkpoint.compare(dir, spec)?;
        Ok(checkpoint)
    }

    fn add(&mut self, path: &Path) -> Result<(), BackendError> {
        let file = File::open(path).map_err(|error| fail(path, error))?;
        // SAFETY: the mapping is read only. Should another process change the file meanwhile, numbers change with it; no
        // value of the mapping is trusted beyond the bounds that are checked below.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| fail(path, error))?;
        let parsed = SafeTensors::deserialize(&map)
            .map_err(|error| fail(path, format!("not a whole safetensors file: {error}")))?;
        for (name, view) in parsed.tensors() {
            let short = name.strip_prefix("model.").unwrap_or(&name);
            if short == "lm_head.weight" || short.ends_with("rotary_emb.inv_freq") {
                continue;
            }
            let start = view.data().as_ptr() as usize - map.as_ptr() as usize;
            let bytes = start..start + view.data().len();
            let shape = view.shape().to_vec();
            let tensor = Tensor { shard: self.shards.len(), dtype: view.dtype(), shape, bytes };
            if self.tensors.insert(short.to_owned(), tensor).is_some() {
                return Err(fail(path, format!("tensor {short} is there twice")));
            }
        }
        self.shards.push(map);
        Ok(())
    }

    fn compare(&self, dir: &Path, spec: &StepSpec) -> Result<(), BackendError> {
        let mut known = BTreeSet::new();
        for (weight, (name, size)) in
            spec.weights.iter().flat_map(|weight| weight.parts.iter().map(move |part| (weight, part)))
        {
            known.insert(name.as_str());
            self.find(weight, name, *size).map_err(|reason| fail(dir, reason))?;
        }
        let extra = self.tensors.iter().filter(|(name, _)| !known.contains(name.as_str()));
        let extra: BTreeMap<_, _> = extra.map(|(name, tensor)| (name, &tensor.shape)).collect();
        match extra.first_key_value() {
            None => Ok(()),
            Some((name, shape)) => {
                let others =
                    if extra.len() > 1 { format!(" (and {} more)", extra.len() - 1) } else { String::new() };
                Err(fail(dir, format!("tensor {name} {shape:?}{others} is not part of the model")))
            }
        }
    }

    /// The part `name` of a weight, with `size` rows (of a vector: elements).
    fn find(&self, weight: &WeightSpec, name: &str, size: usize) -> Result<&Tensor, String> {
        let shape = match weight.role {
            WeightRole::Linear | WeightRole::Embedding => vec![size, weight.cols],
            WeightRole::Norm | WeightRole::Bias => vec![size],
        };
        let tensor = self.tensors.get(name);
        let tensor =
            tensor.ok_or_else(|| format!("tensor {name} is missing; the model has it as {shape:?}"))?;
        if tensor.shape != shape {
            return Err(format!("tensor {name} is {:?}, the model has it as {shape:?}", tensor.shape));
        }
        if !matches!(tensor.dtype, Stored::F32 | Stored::BF16 | Stored::F16) {
            return Err(format!("tensor {name} is {:?}; supported are F32, BF16 and F16", tensor.dtype));
        }
        Ok(tensor)
    }
}

impl WeightSource for Checkpoint {
    fn read(&self, spec: &WeightSpec, out: &mut [f32]) -> Result<(), BackendError> {
        let mut rest = out;
        for (name, size) in &spec.parts {
            let tensor = self.find(spec, name, *size).map_err(BackendError::Weights)?;
            let len = tensor.shape.iter().product();
            let short = || BackendError::Weights(format!("{} has no room for {name}", spec.name));
            let (part, after) = rest.split_at_mut_checked(len).ok_or_else(short)?;
            convert(tensor.dtype, &self.shards[tensor.shard][tensor.bytes.clone()], part);
            rest = after;
        }
        Ok(())
    }
}

/// Little-endian values of the stored type to float32.
fn convert(dtype: Stored, bytes: &[u8], out: &mut [f32]) {
    const TASK: usize = 1 << 16;
    let width = if dtype == Stored::F32 { 4 } else { 2 };
    out.par_chunks_mut(TASK).zip(bytes.par_chunks(TASK * width)).for_each(|(out, bytes)| match dtype {
        Stored::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        Stored::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = half::bf16::from_le_bytes(*b).to_f32();
            }
        }
        _ => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = half::f16::from_le_bytes(*b).to_f32();
            }
        }
    });
}

/// The files of a folder's checkpoint.
fn shard_paths(dir: &Path) -> Result<Vec<PathBuf>, BackendError> {
    let (single, index) = (dir.join("model.safetensors"), dir.join("model.safetensors.index.json"));
    if single.is_file() {
        return Ok(vec![single]);
    }
    if !index.is_file() {
        return Err(fail(dir, "neither model.safetensors nor model.safetensors.index.json is there"));
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = std::fs::read_to_string(&index).map_err(|error| fail(&index, error))?;
    let parsed: Index = serde_json::from_str(&text).map_err(|error| fail(&index, error))?;
    let files: BTreeSet<String> = parsed.weight_map.into_values().collect();
    if files.is_empty() {
        return Err(fail(&index, "weight_map names no file"));
    }
    files
        .into_iter()
        .map(|file| {
            // A plain name only: an index must not lead out of its folder.
            let plain = Path::new(&file).file_name().is_some_and(|name| name == file.as_str());
            let odd = file.contains(['/', '\\', ':']);
            if plain && !odd {
                Ok(dir.join(&file))
            } else {
                Err(fail(&index, format!("{file:?} is no plain file name")))
            }
        })
        .collect()
}
