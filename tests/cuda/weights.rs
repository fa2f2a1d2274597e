//! Dummy weights and memory.

use forward_bench::backend::cpu::CpuDevice;
use forward_bench::backend::cuda::CudaDevice;
use forward_bench::backend::{Act, BackendError, Dtype, WeightId, WeightRole, Weights, dummy};
use forward_bench::units::Bytes;
use half::{bf16, f16};

use crate::support::{cuda_options, group, spec, weight};

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn dummy_weights_are_the_hosts() {
    let weights = vec![
        weight("a", 100, 24, WeightRole::Embedding),
        weight("b", 3000, 1000, WeightRole::Linear),
        weight("c", 1, 1000, WeightRole::Norm),
        weight("d", 1, 24, WeightRole::Bias),
    ];
    let spec = spec(weights, &[(Act::Normed, 24), (Act::Context, 16)], (1, 16), group(16, None));
    for dtype in [Dtype::Bfloat16, Dtype::Float16] {
        let cuda = CudaDevice::new(&spec, &Weights::Dummy { seed: 42 }, &cuda_options(dtype)).unwrap();
        for (id, weight) in spec.weights.iter().enumerate() {
            let stream = dummy::stream(42, id as u64);
            let value = |i: usize| dummy::weight(weight.role, stream, i as u64);
            let round = |v: f32| {
                if dtype == Dtype::Float16 { f16::from_f32(v).to_f32() } else { bf16::from_f32(v).to_f32() }
            };
            let expected: Vec<f32> = (0..weight.rows * weight.cols).map(|i| round(value(i))).collect();
            assert!(cuda.weight(WeightId(id)).unwrap() == expected, "{} {dtype:?}", weight.name);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn too_little_memory_is_said_with_numbers_and_a_flag() {
    let spec = spec(
        vec![weight("a", 100, 24, WeightRole::Embedding)],
        &[(Act::Normed, 24), (Act::Context, 16)],
        (1, 16),
        group(16, None),
    );
    let mut options = cuda_options(Dtype::Bfloat16);
    options.kv_bytes = Some(Bytes(1000));
    let error = CudaDevice::new(&spec, &Weights::Dummy { seed: 0 }, &options).err().unwrap();
    assert!(matches!(error, BackendError::NoRoom(_)), "{error}");
    assert!(error.to_string().contains("--kv-cache-memory-bytes"), "{error}");
    options.kv_bytes = None;
    options.memory_utilization = 1e-9;
    let error = CudaDevice::new(&spec, &Weights::Dummy { seed: 0 }, &options).err().unwrap();
    assert!(error.to_string().contains("--gpu-memory-utilization"), "{error}");
    options.device = 99;
    let error = CudaDevice::new(&spec, &Weights::Dummy { seed: 0 }, &options).err().unwrap();
    assert!(error.to_string().starts_with("--device 99: there are"), "{error}");
    options.device = 0;
    options.dtype = Dtype::Float32;
    let error = CudaDevice::new(&spec, &Weights::Dummy { seed: 0 }, &options).err().unwrap();
    assert!(error.to_string().contains("float32"), "{error}");
    drop(
        CpuDevice::new(&spec, &Weights::Dummy { seed: 0 }, &crate::support::cpu_options(Dtype::Float32))
            .unwrap(),
    );
}
