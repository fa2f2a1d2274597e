//! Which kernels are the same on both sides, and the table.

use super::*;

pub(crate) fn kernel(name: &str, us: f64, calls: f64) -> KernelTime {
    KernelTime { name: name.to_owned(), us, pct: 0.0, calls, example: format!("void {name}()") }
}

pub(crate) fn profile(kernels: Vec<KernelTime>, gaps: f64) -> Profile {
    let busy_us = kernels.iter().map(|kernel| kernel.us).sum();
    Profile { span_us: busy_us + gaps, busy_us, kernels, ..Profile::default() }
}

#[test]
fn the_most_changed_comes_first() {
    let old = profile(vec![kernel("a", 100.0, 1.0), kernel("b", 50.0, 2.0), kernel("gone", 3.0, 1.0)], 1.0);
    let new = profile(vec![kernel("a", 98.0, 1.0), kernel("b", 60.0, 2.0), kernel("came", 0.5, 4.0)], 2.0);
    let changes = changes(&old, &new);
    let found: Vec<(&str, f64)> = changes.iter().map(|change| (change.name(), change.us())).collect();
    assert_eq!(found, [("b", 10.0), ("gone", -3.0), ("a", -2.0), ("came", 0.5)]);
    let total: f64 = changes.iter().map(Change::us).sum();
    assert!((total - (new.busy_us - old.busy_us)).abs() < 1e-9);
}

#[test]
fn a_kernel_that_another_run_called_differently_is_the_same() {
    let short =
        |name: &str, example: &str| KernelTime { example: example.to_owned(), ..kernel(name, 1.0, 1.0) };
    // There, two variants clashed and kept more of their names.
    let old = profile(vec![short("k", "void k<A<1>>()")], 0.0);
    let new = profile(vec![short("k<A<1>>", "void k<A<1>>()"), short("k<A<2>>", "void k<A<2>>()")], 0.0);
    let found: Vec<(bool, &str)> = changes(&old, &new).iter().map(|c| (c.old.is_some(), c.name())).collect();
    assert_eq!(found, [(false, "k<A<2>>"), (true, "k<A<1>>")]);
    // An argument became another type.
    let (old, new) = (profile(vec![short("f", "f(int)")], 0.0), profile(vec![short("f", "f(long)")], 0.0));
    assert_eq!(changes(&old, &new).len(), 1);
}

#[test]
fn the_table_has_each_kernel_and_the_totals() {
    let old = profile(vec![kernel("a", 100.0, 1.0), kernel("b", 50.0, 2.0), kernel("gone", 3.0, 1.0)], 1.0);
    let new = profile(vec![kernel("a", 100.0, 1.0), kernel("b", 60.0, 2.5), kernel("came", 0.5, 4.0)], 2.0);
    let text = table(&old, &new);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[1], ["50.00", "60.00", "+10.00", "+20.00", "2", "→", "2.50", "b"]);
    assert_eq!(rows[2], ["3.00", "-", "-3.00", "gone", "1", "→", "0", "gone"]);
    assert_eq!(rows[3], ["-", "0.50", "+0.50", "new", "0", "→", "4", "came"]);
    assert_eq!(rows[4], ["100.00", "100.00", "+0.00", "+0.00", "1", "a"]);
    assert_eq!(rows[5], ["153.00", "160.50", "+7.50", "+4.90", "all", "kernels"]);
    assert_eq!(rows[6][..4], ["154.00", "162.50", "+8.50", "+5.52"]);
}
