//! Checkpoints as they are found: sharded, prefixed, in 16 bits; and broken ones, each with one clear line.

use std::fs;
use std::path::{Path, PathBuf};

use forward_bench::backend::{WeightSource, WeightSpec};
use forward_bench::model::{Checkpoint, Model, ModelConfig};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/qwen3-tiny")
}

fn model() -> Model {
    Model::new(ModelConfig::from_dir(&source(), None).unwrap(), 16, 256).unwrap()
}

/// The fixture's tensors.
fn tensors() -> Tensors {
    let bytes = fs::read(source().join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let all = file.tensors().into_iter();
    all.map(|(name, view)| (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())).collect()
}

fn write(path: &Path, tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)]) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    serialize_to_file(views, None, path).unwrap();
}

/// The error of opening a folder whose only file has these tensors.
fn refused(tensors: &Tensors) -> String {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("model.safetensors"), tensors);
    let error = Checkpoint::open(folder.path(), &model().spec).err().expect("it must be refused").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

fn read(checkpoint: &Checkpoint, spec: &WeightSpec) -> Vec<f32> {
    let mut out = vec![f32::NAN; spec.rows * spec.cols];
    checkpoint.read(spec, &mut out).unwrap();
    out
}

/// All weights of a folder equal the fixture's after `round`.
fn equals_fixture(folder: &Path, round: fn(f32) -> f32) {
    let model = model();
    let whole = Checkpoint::open(&source(), &model.spec).unwrap();
    let other = Checkpoint::open(folder, &model.spec).unwrap();
    for spec in &model.spec.weights {
        let expected: Vec<f32> = read(&whole, spec).into_iter().map(round).collect();
        assert_eq!(read(&other, spec), expected, "{}", spec.name);
    }
}

#[test]
fn shards_prefixes_and_ignored_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let mut all = tensors();
    all.iter_mut().for_each(|tensor| tensor.0.insert_str(0, "model."));
    all.push(("lm_head.weight".into(), Dtype::F32, vec![1], vec![0; 4]));
    all.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), Dtype::F32, vec![1], vec![0; 4]));
    let map: Vec<String> = all
        .chunks(7)
        .enumerate()
        .flat_map(|(i, part)| {
            let file = format!("model-{i}.safetensors");
            write(&folder.path().join(&file), part);
            part.iter().map(move |tensor| format!("{:?}: {file:?}", tensor.0)).collect::<Vec<_>>()
        })
        .collect();
    let index = format!("{{\"metadata\": {{}}, \"weight_map\": {{{}}}}}", map.join(", "));
    fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    equals_fixture(folder.path(), |x| x);
}

#[test]
fn sixteen_bit_tensors() {
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let convert = |dtype: Dtype, narrow: fn(f32) -> [u8; 2], round: fn(f32) -> f32| {
        let folder = tempfile::tempdir().unwrap();
        let mut all = tensors();
        for (_, kind, _, data) in &mut all {
            (*kind, *data) = (dtype, floats(data).into_iter().flat_map(narrow).collect());
        }
        write(&folder.path().join("model.safetensors"), &all);
        equals_fixture(folder.path(), round);
    };
    convert(Dtype::BF16, |x| half::bf16::from_f32(x).to_le_bytes(), |x| half::bf16::from_f32(x).to_f32());
    convert(Dtype::F16, |x| half::f16::from_f32(x).to_le_bytes(), |x| half::f16::from_f32(x).to_f32());
}

#[test]
fn wrong_tensors_are_named_with_both_shapes() {
    let without = |name: &str| tensors().into_iter().filter(|tensor| tensor.0 != name).collect::<Tensors>();
    let name = "layers.1.self_attn.k_proj.weight";
    let error = refused(&without(name));
    assert!(error.contains(&format!("tensor {name} is missing; the model has it as [32, 64]")), "{error}");

    let mut all = without(name);
    all.push((name.into(), Dtype::F32, vec![64, 32], vec![0; 64 * 32 * 4]));
    let error = refused(&all);
    assert!(error.contains(&format!("tensor {name} is [64, 32], the model has it as [32, 64]")), "{error}");

    let mut all = without(name);
    all.push((name.into(), Dtype::F64, vec![32, 64], vec![0; 64 * 32 * 8]));
    let error = refused(&all);
    assert!(error.contains("is F64; supported are F32, BF16 and F16"), "{error}");

    let mut all = tensors();
    all.push(("layers.2.extra".into(), Dtype::F32, vec![3], vec![0; 12]));
    all.push(("layers.3.extra".into(), Dtype::F32, vec![3], vec![0; 12]));
    let error = refused(&all);
    assert!(error.contains("tensor layers.2.extra [3] (and 1 more) is not part of the model"), "{error}");

    let mut all = tensors();
    all.push(("model.norm.weight".into(), Dtype::F32, vec![64], vec![0; 256]));
    assert!(refused(&all).contains("tensor norm.weight is there twice"));
}

#[test]
fn broken_files_are_one_clear_line() {
    let whole = fs::read(source().join("model.safetensors")).unwrap();
    let mut huge_header = whole.clone();
    huge_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    for (case, bytes) in [
        ("empty", &whole[..0]),
        ("cut in the header", &whole[..100]),
        ("cut in the data", &whole[..whole.len() - 1]),
        ("no safetensors", &b"hello, this is not a checkpoint"[..]),
        ("a header of 2^64 bytes", &huge_header),
    ] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        let error = Checkpoint::open(folder.path(), &model().spec).err().expect(case).to_string();
        assert!(error.contains("model.safetensors: ") && !error.contains('\n'), "{case}: {error}");
    }
}

#[test]
fn an_index_does_not_lead_out_of_its_folder() {
    for file in ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b"] {
        let folder = tempfile::tempdir().unwrap();
        let index = format!("{{\"weight_map\": {{\"norm.weight\": {file:?}}}}}");
        fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        let error = Checkpoint::open(folder.path(), &model().spec).err().expect(file).to_string();
        assert!(error.contains("is no plain file name"), "{file}: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(folder.path(), &model().spec).err().unwrap().to_string();
    assert!(error.contains("neither model.safetensors nor"), "{error}");
    fs::write(
        folder.path().join("model.safetensors.index.json"),
        "{\"weight_map\": {\"a\": \"gone.safetensors\"}}",
    )
    .unwrap();
    let error = Checkpoint::open(folder.path(), &model().spec).err().unwrap().to_string();
    assert!(error.contains("gone.safetensors: "), "{error}");
}
