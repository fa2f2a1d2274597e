//! Sides whose difference was made, and what is said of it.

use super::*;
use crate::profile::KernelTime;
use crate::profile::diff::tests::{kernel, profile};

fn side(times: &[(&str, f64)]) -> Profile {
    profile(times.iter().map(|(name, us)| kernel(name, *us, 4.0)).collect(), 0.0)
}

fn names(explanation: &Explanation) -> Vec<&str> {
    explanation.kernels.iter().map(|increase| increase.name.as_str()).collect()
}

#[test]
fn the_one_kernel_that_became_slower_is_named() {
    let old = side(&[("gemm", 100.0), ("attention", 50.0), ("norm", 5.0)]);
    let new = side(&[("gemm", 101.0), ("attention", 70.0), ("norm", 5.0)]);
    let found = explain(&old, &new, 21.0).unwrap();
    assert_eq!(names(&found), ["attention"]);
    assert!((found.pct - 100.0 * 20.0 / 21.0).abs() < 1e-9);
    assert_eq!(found.to_string(), "attention +20.0 µs: 95 % of the difference");
}

#[test]
fn as_few_as_do_and_never_more_than_three() {
    let old = side(&[("a", 10.0), ("b", 10.0), ("c", 10.0), ("d", 10.0)]);
    let new = side(&[("a", 40.0), ("b", 30.0), ("c", 20.0), ("d", 15.0)]);
    let found = explain(&old, &new, 65.0).unwrap();
    assert_eq!((names(&found), found.pct.round()), (vec!["a", "b", "c"], 92.0));
    assert_eq!(names(&explain(&old, &new, 62.0).unwrap()), ["a", "b"], "50 of 62 are enough");
    let even = side(&[("a", 20.0), ("b", 20.0), ("c", 20.0), ("d", 20.0)]);
    assert_eq!(explain(&old, &even, 40.0).unwrap().pct, 75.0);
}

#[test]
fn another_kernel_for_the_same_work_is_compared_with_the_one_before() {
    let old = side(&[("nvjet_64x64", 100.0), ("nvjet_8x8", 10.0), ("attention", 50.0)]);
    let new = side(&[("nvjet_128x64", 112.0), ("nvjet_8x16", 10.0), ("attention", 51.0)]);
    let found = explain(&old, &new, 13.0).unwrap();
    assert_eq!(found.to_string(), "nvjet_128x64 +12.0 µs (instead of nvjet_64x64): 92 % of the difference");
}

#[test]
fn a_kernel_that_came_on_top_is_named_with_all_of_its_time() {
    let old = side(&[("a", 10.0)]);
    let mut new = side(&[("a", 10.0)]);
    new.kernels.push(KernelTime { calls: 1.0, ..kernel("extra", 5.0, 1.0) });
    new.busy_us += 5.0;
    new.span_us += 5.0;
    assert_eq!(explain(&old, &new, 5.0).unwrap().to_string(), "extra +5.0 µs: 100 % of the difference");
}

#[test]
fn gaps_may_be_the_reason() {
    let (old, mut new) = (side(&[("a", 10.0)]), side(&[("a", 10.0)]));
    new.span_us += 8.0;
    assert_eq!(
        explain(&old, &new, 8.0).unwrap().to_string(),
        "gaps between kernels +8.0 µs: 100 % of the difference"
    );
}

#[test]
fn what_is_not_slower_is_not_explained_and_what_is_not_seen_is_not_made_up() {
    let (old, new) = (side(&[("a", 10.0)]), side(&[("a", 10.1)]));
    assert_eq!(explain(&old, &new, 0.0), None);
    assert_eq!(explain(&old, &new, f64::NAN), None);
    let found = explain(&old, &new, 10.0).unwrap();
    assert_eq!((found.kernels.len(), found.pct), (0, 0.0));
    assert_eq!(found.to_string(), "no kernel takes longer in the traced replays");
}
