//! Each op alone against the CPU backend: ragged batches, odd sizes, poisoned outputs.

use forward_bench::backend::{Act, Attention, Dtype, Ops, WeightId, WeightRole};

use crate::support::{VOCABULARY, batch, compare, group, spec, weight};

const DTYPES: [Dtype; 2] = [Dtype::Bfloat16, Dtype::Float16];

/// Sizes of batches: one token, the few-row kernels' limits, odd ones, and more than a tile.
const CASES: [&str; 7] = ["a=1", "a=8*1@20", "a=3", "a=9", "a=16*1@33", "a=17", "a=3*1@50,131,2@9"];

fn embedding(width: usize) -> forward_bench::backend::WeightSpec {
    weight("embedding", VOCABULARY, width, WeightRole::Embedding)
}

fn poison(width: usize) -> forward_bench::backend::WeightSpec {
    weight("poison", VOCABULARY, width, WeightRole::Embedding)
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn embed_gather_and_add_rmsnorm() {
    for (dtype, hidden) in DTYPES.into_iter().flat_map(|d| [8, 64, 576, 4096, 5120, 8200].map(|h| (d, h))) {
        let weights = vec![
            embedding(hidden),
            weight("b", VOCABULARY, hidden, WeightRole::Embedding),
            weight("n", 1, hidden, WeightRole::Norm),
            poison(hidden),
        ];
        let acts = [(Act::Residual, hidden), (Act::Delta, hidden), (Act::Normed, hidden), (Act::Context, 16)];
        let spec = spec(weights, &acts, (1, 16), group(16, None));
        for with_delta in [false, true] {
            let forward = move |ops: &mut dyn Ops| {
                ops.embed_gather(WeightId(0), Act::Residual)?;
                ops.embed_gather(WeightId(1), Act::Delta)?;
                ops.embed_gather(WeightId(3), Act::Normed)?;
                ops.add_rmsnorm(
                    with_delta.then_some(Act::Delta),
                    Act::Residual,
                    WeightId(2),
                    1e-5,
                    Act::Normed,
                )
            };
            for case in ["a=1", "a=3*1@50,131,2@9"] {
                let what = format!("add_rmsnorm {hidden} {with_delta} {case}");
                compare(&what, &spec, &batch(case, group(16, None), 1), dtype, 1.0, &forward);
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn silu_mul() {
    for (dtype, width) in DTYPES.into_iter().flat_map(|d| [8, 1536, 3080, 12288].map(|w| (d, w))) {
        let acts = [(Act::GateUp, 2 * width), (Act::Normed, width), (Act::Context, 16)];
        let spec = spec(vec![embedding(2 * width), poison(width)], &acts, (1, 16), group(16, None));
        let forward = |ops: &mut dyn Ops| {
            ops.embed_gather(WeightId(0), Act::GateUp)?;
            ops.embed_gather(WeightId(1), Act::Normed)?;
            ops.silu_mul(Act::GateUp, Act::Normed)
        };
        compare(
            &format!("silu_mul {width}"),
            &spec,
            &batch(CASES[6], group(16, None), 2),
            dtype,
            1.0,
            &forward,
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn linear() {
    for (dtype, (n, k)) in
        DTYPES.into_iter().flat_map(|d| [(64, 64), (960, 576), (1032, 2056), (6144, 4096)].map(|s| (d, s)))
    {
        let weights = vec![
            embedding(k),
            weight("w", n, k, WeightRole::Linear),
            weight("bias", 1, n, WeightRole::Bias),
            poison(n),
        ];
        let acts = [(Act::Gated, k), (Act::Normed, n), (Act::Context, 16)];
        let spec = spec(weights, &acts, (1, 16), group(16, None));
        for (case, bias) in CASES.iter().flat_map(|case| [(case, None), (case, Some(WeightId(2)))]) {
            let forward = move |ops: &mut dyn Ops| {
                ops.embed_gather(WeightId(0), Act::Gated)?;
                ops.embed_gather(WeightId(3), Act::Normed)?;
                ops.linear(Act::Gated, WeightId(1), bias, Act::Normed)
            };
            let what = format!("linear [{n}, {k}] {case} bias {}", bias.is_some());
            compare(&what, &spec, &batch(case, group(16, None), 3), dtype, 1.0, &forward);
        }
    }
}

/// (head_dim, query heads a KV head, KV heads, block size, window)
type Shape = (usize, usize, usize, u32, Option<u32>);

const SHAPES: [Shape; 9] = [
    (128, 4, 8, 16, None),
    (128, 8, 2, 32, Some(100)),
    (64, 3, 3, 16, None),
    (16, 2, 2, 16, Some(7)),
    (256, 2, 1, 64, None),
    (80, 7, 1, 64, None),
    (24, 1, 3, 32, Some(33)),
    (192, 4, 1, 16, None),
    (96, 16, 1, 16, Some(64)),
];

fn attention((head_dim, query, kv_heads, _, window): Shape, norms: bool) -> Attention {
    Attention {
        kv_layer: 0,
        q_heads: query * kv_heads,
        kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window,
        rope: 0,
        q_norm: norms.then_some(WeightId(1)),
        k_norm: norms.then_some(WeightId(2)),
        eps: 1e-6,
        sinks: None,
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn qk_norm_rope() {
    for (shape, norms) in SHAPES.into_iter().flat_map(|s| [(s, false), (s, true)]) {
        let (head_dim, query, kv_heads, block_size, window) = shape;
        let width = (query + 2) * kv_heads * head_dim;
        let norm = |name| weight(name, 1, head_dim, WeightRole::Norm);
        let weights = vec![embedding(width), norm("q"), norm("k")];
        let acts = [(Act::Normed, width), (Act::Context, query * kv_heads * head_dim)];
        let group = group(block_size, window);
        let spec = spec(weights, &acts, (kv_heads, head_dim), group);
        let attention = attention(shape, norms);
        let forward = move |ops: &mut dyn Ops| {
            ops.embed_gather(WeightId(0), Act::Normed)?;
            ops.qk_norm_rope_kvwrite(Act::Normed, &attention)
        };
        for dtype in DTYPES {
            let what = format!("qk_norm_rope {shape:?} norms {norms}");
            // The CPU rotates K and leaves V in place where a GPU writes them to the cache alone: only queries are alike.
            let queries = query * kv_heads * head_dim;
            crate::support::compare_columns(
                &what,
                &spec,
                &batch("a=3*1@900,37,9@2000", group, 4),
                dtype,
                (width, queries),
                &forward,
            );
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn paged_attention_with_its_kv_write() {
    let cases = [
        "a=1",
        "a=1@5000",
        "a=5*1@17,2@64,1@1",
        "a=4@4000:3,4@35:3,1@700,1@16",
        "a=17@60:16,9@9",
        "a=131,65@700,1@2000,16@16,300@301",
        "a=7*1@1000,513@900c,40",
    ];
    for (shape, case) in SHAPES.into_iter().flat_map(|s| cases.map(|c| (s, c))) {
        let (head_dim, query, kv_heads, block_size, window) = shape;
        let width = (query + 2) * kv_heads * head_dim;
        let out = query * kv_heads * head_dim;
        let acts = [(Act::Qkv, width), (Act::Normed, out), (Act::Context, out)];
        let norm = |name| weight(name, 1, head_dim, WeightRole::Norm);
        let weights = vec![embedding(width), norm("q"), norm("k"), poison(out)];
        let group = group(block_size, window);
        let spec = spec(weights, &acts, (kv_heads, head_dim), group);
        let attention = attention(shape, false);
        let forward = move |ops: &mut dyn Ops| {
            ops.embed_gather(WeightId(0), Act::Qkv)?;
            ops.embed_gather(WeightId(3), Act::Normed)?;
            ops.qk_norm_rope_kvwrite(Act::Qkv, &attention)?;
            ops.attention(Act::Qkv, &attention, Act::Normed)
        };
        for dtype in DTYPES {
            let what = format!("attention {shape:?} {case}");
            compare(&what, &spec, &batch(case, group, 5), dtype, 2.0, &forward);
        }
    }
}
