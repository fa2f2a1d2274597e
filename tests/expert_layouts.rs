//! The ways in which checkpoints lay out experts, and what is wrong with one, each in one clear line.

use std::fs;
use std::path::{Path, PathBuf};

use forward_bench::backend::WeightSource;
use forward_bench::model::{Checkpoint, Model, ModelConfig};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

/// Name, type, shape and bytes of each tensor.
type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn model(name: &str) -> Model {
    Model::new(ModelConfig::from_dir(&folder(name), None).unwrap(), 16, 256).unwrap()
}

fn tensors(name: &str) -> Tensors {
    let bytes = fs::read(folder(name).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let all = file.tensors().into_iter();
    all.map(|(name, view)| (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())).collect()
}

fn write(tensors: &Tensors) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

/// All weights of a folder with the model of a fixture.
fn weights(folder: &Path, model: &Model) -> Vec<(String, Vec<f32>)> {
    let checkpoint = Checkpoint::open(folder, &model.spec).unwrap();
    let read = |spec: &forward_bench::backend::WeightSpec| {
        let mut out = vec![f32::NAN; spec.rows * spec.cols];
        checkpoint.read(spec, &mut out).unwrap();
        (spec.name.clone(), out)
    };
    model.spec.weights.iter().map(read).collect()
}

fn refused(name: &str, tensors: &Tensors) -> String {
    let folder = write(tensors);
    let error =
        Checkpoint::open(folder.path(), &model(name).spec).err().expect("it must be refused").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

/// Stacks the tensors of single experts that match, in the order of experts and of `names`.
fn stack(all: &mut Tensors, (from, names): (&str, &[&str]), to: &str, shape: &[usize]) {
    for layer in 0..2 {
        let mut data = Vec::new();
        for expert in 0..shape[0] {
            for name in names {
                let tensor = format!("layers.{layer}.{from}.{expert}.{name}.weight");
                let at = all.iter().position(|other| other.0 == tensor).expect("a tensor of one expert");
                data.extend(all.remove(at).3);
            }
        }
        all.push((format!("layers.{layer}.mlp.experts.{to}"), Dtype::F32, shape.to_vec(), data));
    }
}

#[test]
fn single_tensors_and_stacked_ones_are_the_same_experts() {
    let mut qwen = tensors("qwen3-moe-tiny");
    stack(&mut qwen, ("mlp.experts", &["gate_proj", "up_proj"]), "gate_up_proj", &[8, 64, 64]);
    stack(&mut qwen, ("mlp.experts", &["down_proj"]), "down_proj", &[8, 64, 32]);
    let mut mixtral = tensors("mixtral-tiny");
    stack(&mut mixtral, ("block_sparse_moe.experts", &["w1", "w3"]), "gate_up_proj", &[4, 192, 64]);
    stack(&mut mixtral, ("block_sparse_moe.experts", &["w2"]), "down_proj", &[4, 64, 96]);
    for tensor in &mut mixtral {
        tensor.0 = tensor.0.replace("block_sparse_moe.gate", "mlp.gate");
    }
    for (name, tensors) in [("qwen3-moe-tiny", qwen), ("mixtral-tiny", mixtral)] {
        let model = model(name);
        assert_eq!(weights(write(&tensors).path(), &model), weights(&folder(name), &model), "{name}");
    }
}

/// gpt-oss in MXFP4 as it would be without: values of E2M1 by their definition, rows and columns exchanged.
fn unpacked(all: &Tensors) -> Tensors {
    let find = |name: &str| &all.iter().find(|tensor| tensor.0 == name).expect("a tensor").3;
    let value = |nibble: u8, scale: u8| {
        let (exponent, mantissa) = (i32::from(nibble >> 1 & 3), f32::from(nibble & 1));
        let size =
            if exponent == 0 { mantissa / 2.0 } else { (1.0 + mantissa / 2.0) * 2_f32.powi(exponent - 1) };
        let sign = if nibble < 8 { 1.0 } else { -1.0 };
        sign * size * 2_f32.powi(i32::from(scale) - 127)
    };
    let mut out: Tensors = all.iter().filter(|t| t.1 != Dtype::U8).cloned().collect();
    for (name, _, shape, blocks) in all.iter().filter(|tensor| tensor.0.ends_with("_blocks")) {
        let name = name.strip_suffix("_blocks").unwrap();
        let scales = find(&format!("{name}_scales"));
        let (experts, rows, cols) = (shape[0], shape[1], shape[2] * 32);
        let mut data = Vec::new();
        for (expert, col, row) in
            (0..experts).flat_map(|e| (0..cols).flat_map(move |c| (0..rows).map(move |r| (e, c, r))))
        {
            let at = (expert * rows + row) * cols + col;
            let nibble = if at % 2 == 0 { blocks[at / 2] & 15 } else { blocks[at / 2] >> 4 };
            data.extend(value(nibble, scales[at / 32]).to_le_bytes());
        }
        out.push((name.to_owned(), Dtype::F32, vec![experts, cols, rows], data));
    }
    out
}

#[test]
fn mxfp4_is_dequantised_and_transposed_tensors_are_turned() {
    let name = "gpt-oss-mxfp4-tiny";
    let model = model(name);
    let (packed, plain) =
        (weights(&folder(name), &model), weights(write(&unpacked(&tensors(name))).path(), &model));
    for ((name, packed), (_, plain)) in packed.iter().zip(&plain) {
        assert!(packed.iter().all(|value| value.is_finite()) && packed == plain, "{name}");
    }
}

#[test]
fn wrong_expert_tensors_are_named() {
    let without = |fixture: &str, name: &str| {
        let all = tensors(fixture);
        assert!(all.iter().any(|tensor| tensor.0 == name), "{name}");
        all.into_iter().filter(|tensor| tensor.0 != name).collect::<Tensors>()
    };
    let name = "layers.1.block_sparse_moe.experts.3.w3.weight";
    let error = refused("mixtral-tiny", &without("mixtral-tiny", name));
    assert!(error.contains(&format!("tensor {name} is missing; the model has it as [96, 64]")), "{error}");
    // With none of an expert's tensors in any layout the usual one is named.
    let none = tensors("mixtral-tiny").into_iter().filter(|tensor| !tensor.0.contains("moe")).collect();
    let error = refused("mixtral-tiny", &none);
    assert!(error.contains("tensor layers.0.block_sparse_moe.gate.weight is missing"), "{error}");

    let fixture = "gpt-oss-mxfp4-tiny";
    let name = "model.layers.0.mlp.experts.down_proj_scales";
    let error = refused(fixture, &without(fixture, name));
    assert!(error.contains("down_proj_scales is missing; the model has it as [4, 64, 1]"), "{error}");
    let mut all = without(fixture, name);
    all.push((name.into(), Dtype::F32, vec![4, 64, 1], vec![0; 1024]));
    let error = refused(fixture, &all);
    assert!(error.contains("down_proj_scales is F32; supported is U8"), "{error}");
    let mut all = without(fixture, name);
    all.push((name.into(), Dtype::U8, vec![4, 64, 2], vec![0; 512]));
    assert!(refused(fixture, &all).contains("is [4, 64, 2], the model has it as [4, 64, 1]"));
    let mut all = tensors("gpt-oss-deep-tiny");
    let at = all.iter().position(|tensor| tensor.0.ends_with("layers.0.mlp.experts.down_proj")).unwrap();
    all[at] = (format!("{}_blocks", all[at].0), Dtype::U8, vec![9, 48, 1, 16], vec![0; 9 * 48 * 16]);
    let error = refused("gpt-oss-deep-tiny", &all);
    assert!(error.contains("blocks of 32; layers.0.mlp.experts.down_proj has 40 columns"), "{error}");

    let mut both = tensors("qwen3-moe-tiny");
    both.push(("layers.0.mlp.experts.down_proj".into(), Dtype::F32, vec![8, 64, 32], vec![0; 65536]));
    let error = refused("qwen3-moe-tiny", &both);
    assert!(error.contains("layers.0.mlp.experts.down_proj [8, 64, 32] is not part of the model"), "{error}");
}
