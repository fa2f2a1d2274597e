//! What a step costs, against sums written out.

use super::*;
use crate::backend::All2All;
use crate::layout::Place;

const FOUR: ElementBytes = ElementBytes { weight: 4, kv: 4 };

fn request(query_len: u32, kv_len: u32) -> Request {
    Request { query_len, kv_len, num_draft_tokens: 0, chunked: false }
}

fn preset(name: &str) -> ModelConfig {
    ModelConfig::resolve(name, None).unwrap()
}

fn whole(config: &ModelConfig) -> Shard {
    Shard::of(config, Place::ONE, All2All::default()).unwrap()
}

/// What the whole model costs.
fn costs(
    config: &ModelConfig,
    requests: &[Request],
    element: ElementBytes,
    reached: &Reached,
) -> Vec<OpCost> {
    super::costs(config, &whole(config), requests, element, reached)
}

/// Layers that each reach so many experts, of one row each at least.
fn reached(experts: usize, rows: u64, layers: usize) -> Reached {
    Reached::Exactly(vec![Hit { experts, rows }; layers])
}

fn of<'a>(costs: &'a [OpCost], op: &str) -> &'a OpCost {
    costs.iter().find(|cost| cost.op == op).unwrap()
}

#[test]
fn a_decode_step_reads_all_weights_and_the_cache() {
    let costs = costs(&preset("smollm2-135m"), &[request(1, 513)], FOUR, &Reached::Expected);
    let layer: u128 = 576 * 960 + 576 * 576 + 576 * 3072 + 1536 * 576;
    let norms = 61 * 576;
    let kv = 30 * 513 * 2 * 192;
    assert_eq!(total_bytes(&costs).0, 4 * (30 * layer + norms + kv + 576));
    assert_eq!(total_flops(&costs).0, 2 * 30 * layer + 30 * 4 * 576 * 513);
}

#[test]
fn the_closed_forms_are_the_sums() {
    for window in [None, Some(1), Some(5), Some(64)] {
        for (q, k) in [(1, 1), (1, 40), (7, 7), (7, 12), (30, 64)] {
            let least = |p: u32| window.map_or(p + 1, |w: u32| w.min(p + 1));
            let sum: u32 = (k - q..k).map(least).sum();
            assert_eq!(pairs(&request(q, k), window), u128::from(sum), "{q}@{k} {window:?}");
            let first = (k - q + 1).saturating_sub(window.unwrap_or(u32::MAX));
            assert_eq!(attended(&request(q, k), window), u128::from(k - first), "{q}@{k} {window:?}");
        }
    }
}

#[test]
fn no_length_is_too_long() {
    let long = vec![request(u32::MAX, u32::MAX); 1000];
    let costs = costs(&preset("qwen3-32b"), &long, FOUR, &Reached::Expected);
    assert!(total_flops(&costs).0 > u128::from(u64::MAX));
    let rates = Ceilings { read: Bytes(1), gemm: Flops(1) };
    assert!(floor(&costs, rates).0.is_finite());
}

#[test]
fn a_window_bounds_what_is_read() {
    let costs = costs(&preset("mistral-7b"), &[request(16, 100_000)], FOUR, &Reached::Expected);
    assert_eq!(of(&costs, "window_attention").bytes.0, 32 * 2 * (4096 + 15) * 1024 * 4);
}

#[test]
fn the_serial_floor_is_no_less_than_the_floor() {
    let costs =
        costs(&preset("qwen3-8b"), &[request(3000, 4000), request(1, 900_000)], FOUR, &Reached::Expected);
    let rates = Ceilings { read: Bytes(4_000_000_000_000), gemm: Flops(700_000_000_000_000) };
    let (low, serial) = (floor(&costs, rates), serial_floor(&costs, rates));
    assert!(low.0 > 0.0 && serial.0 > low.0 * 1.1, "{low} {serial}");
}

#[test]
fn experts_that_are_reached_are_read_and_slots_computed() {
    let config = preset("qwen3-30b-a3b");
    let requests = [request(1, 100); 4];
    let expert = 3 * 2048 * 768;
    let exactly = costs(&config, &requests, FOUR, &reached(32, 32, 48));
    let experts = of(&exactly, "experts");
    assert_eq!((experts.count, experts.bytes.0), (48, 48 * 32 * expert * 4));
    assert_eq!(experts.flops.0, 48 * 4 * 8 * 2 * expert);
    assert_eq!(of(&exactly, "router").bytes.0, 48 * 2048 * 128 * 4);
    assert_eq!(of(&exactly, "router").flops.0, 48 * 2 * 4 * 2048 * 128);
    assert!(exactly.iter().all(|cost| cost.op != "gate_up" && cost.op != "sinks"));
    let expected = costs(&config, &requests, FOUR, &Reached::Expected);
    let reached = 128.0 * (1.0 - (1.0_f64 - 8.0 / 128.0).powi(4));
    let bytes = of(&expected, "experts").bytes.0 as f64;
    assert!((bytes / (48.0 * reached * expert as f64 * 4.0) - 1.0).abs() < 1e-12, "{bytes}");
}

#[test]
fn biases_and_sinks_are_read() {
    let config = preset("gpt-oss-20b");
    let costs = costs(&config, &[request(3, 3)], FOUR, &reached(5, 12, 24));
    assert_eq!(of(&costs, "experts").bytes.0, 24 * 5 * (3 * 2880 * 2880 + 3 * 2880) * 4);
    assert_eq!(of(&costs, "experts").flops.0, 24 * 3 * 4 * 2 * 3 * 2880 * 2880);
    assert_eq!(of(&costs, "router").bytes.0, 24 * (2880 * 32 + 32) * 4);
    assert_eq!(of(&costs, "sinks").bytes.0, 24 * 64 * 4);
    assert_eq!((of(&costs, "attention").count, of(&costs, "window_attention").count), (12, 12));
}

#[test]
fn layers_without_experts_have_an_mlp() {
    let overrides = r#"{"decoder_sparse_step": 2, "mlp_only_layers": [1]}"#;
    let config = ModelConfig::resolve("qwen3-30b-a3b", Some(overrides)).unwrap();
    let costs = costs(&config, &[request(1, 1)], FOUR, &reached(8, 8, 23));
    assert_eq!((of(&costs, "gate_up").count, of(&costs, "experts").count), (25, 23));
    assert_eq!(of(&costs, "gate_up").bytes.0, 25 * 2048 * 2 * 6144 * 4);
}
