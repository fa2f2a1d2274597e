//! Checkpoints in safetensors: one `model.safetensors`, or several with a `model.safetensors.index.json`.
//!
//! Files are mapped, not read, and each tensor is converted straight into the device's memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype as Stored, SafeTensors};

use super::{mxfp4, values};
use crate::backend::{BackendError, Form, StepSpec, TensorSpec, WeightSource, WeightSpec};

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
    /// types other than F32, BF16 and F16 (of MXFP4: U8), are errors. `lm_head.weight` and `rotary_emb.inv_freq` are passed over.
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
        for part in spec.weights.iter().flat_map(|weight| self.parts(weight)) {
            if part.form == Form::Mxfp4 && !columns(part).is_multiple_of(mxfp4::BLOCK) {
                let (name, columns) = (&part.name, columns(part));
                return Err(fail(dir, format!("MXFP4 comes in blocks of 32; {name} has {columns} columns")));
            }
            for tensor in tensors(part) {
                self.find(&tensor).map_err(|reason| fail(dir, reason))?;
                known.insert(tensor.name);
            }
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

    /// The way in which this checkpoint has the weight: the first of which any tensor is there, else the usual one.
    fn parts<'a>(&self, weight: &'a WeightSpec) -> &'a [TensorSpec] {
        let is_here = |parts: &&Vec<TensorSpec>| {
            parts.iter().flat_map(tensors).any(|tensor| self.tensors.contains_key(&tensor.name))
        };
        weight.parts.iter().find(is_here).or(weight.parts.first()).map_or(&[], Vec::as_slice)
    }

    /// The tensor, if it is as the model has it.
    fn find(&self, wanted: &Stores) -> Result<&Tensor, String> {
        let Stores { name, shape, types } = wanted;
        let tensor = self.tensors.get(name);
        let tensor =
            tensor.ok_or_else(|| format!("tensor {name} is missing; the model has it as {shape:?}"))?;
        if tensor.shape != *shape {
            return Err(format!("tensor {name} is {:?}, the model has it as {shape:?}", tensor.shape));
        }
        if !types.contains(&tensor.dtype) {
            let names = if *types == FLOATS { "supported are F32, BF16 and F16" } else { "supported is U8" };
            return Err(format!("tensor {name} is {:?}; {names}", tensor.dtype));
        }
        Ok(tensor)
    }

    fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.shards[tensor.shard][tensor.bytes.clone()]
    }
}

const FLOATS: &[Stored] = &[Stored::F32, Stored::BF16, Stored::F16];

/// A tensor as a file should have it.
struct Stores {
    name: String,
    shape: Vec<usize>,
    types: &'static [Stored],
}

fn columns(part: &TensorSpec) -> usize {
    part.shape.last().copied().unwrap_or(0)
}

/// The tensors that a part is stored in.
fn tensors(part: &TensorSpec) -> Vec<Stores> {
    let TensorSpec { name, shape, form } = part;
    if *form != Form::Mxfp4 {
        return vec![Stores { name: name.clone(), shape: shape.clone(), types: FLOATS }];
    }
    let rows = &shape[..shape.len().saturating_sub(1)];
    let scales = [rows, &[columns(part) / mxfp4::BLOCK]].concat();
    let blocks = [scales.as_slice(), &[mxfp4::BLOCK / 2]].concat();
    let stores = |kind: &str, shape| Stores { name: format!("{name}_{kind}"), shape, types: &[Stored::U8] };
    vec![stores("blocks", blocks), stores("scales", scales)]
}

impl WeightSource for Checkpoint {
    fn read(&self, spec: &WeightSpec, out: &mut [f32]) -> Result<(), BackendError> {
        let short = || BackendError::Weights(format!("{}: the tensors do not fill it", spec.name));
        if out.len() < spec.rows * spec.cols {
            return Err(short());
        }
        let mut pieces = spec.pieces(out).into();
        let mut end = 0;
        for part in self.parts(spec) {
            let first = end;
            end += part.shape.iter().product::<usize>();
            let wanted = values::take_before(&mut pieces, first, end);
            if wanted.is_empty() {
                continue; // another rank's
            }
            let found: Vec<&Tensor> = tensors(part)
                .iter()
                .map(|tensor| self.find(tensor).map_err(BackendError::Weights))
                .collect::<Result<_, _>>()?;
            match (part.form, found.as_slice()) {
                (Form::Plain, [tensor]) => values::plain(tensor.dtype, self.bytes(tensor), wanted),
                (Form::Transposed, [tensor]) => {
                    values::transposed(tensor.dtype, &tensor.shape, self.bytes(tensor), wanted);
                }
                (Form::Mxfp4, [blocks, scales]) => {
                    values::mxfp4((self.bytes(blocks), self.bytes(scales)), &part.shape, wanted);
                }
                _ => return Err(short()),
            }
        }
        if pieces.is_empty() { Ok(()) } else { Err(short()) }
    }
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
