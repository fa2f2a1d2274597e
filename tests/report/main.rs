//! The pages: what they show, what they escape, and what cannot keep them from being written.

mod fixture;

use std::fs;
use std::path::{Path, PathBuf};

use fixture::{Made, put};
use forward_bench::baseline::Store;
use forward_bench::report::html::{Options, write};
use serde_json::json;

/// Where the pages of the fixture are also put, for the browser's test.
const KEEP: &str = "FORWARD_BENCH_REPORT";

#[test]
fn the_fixture_is_written_for_the_browser() {
    let folder = tempfile::tempdir().unwrap();
    let home = std::env::var_os(KEEP).map_or(folder.path().to_owned(), PathBuf::from);
    let index = write(&fixture::store(&home), &Options::default()).unwrap();
    assert_eq!(index, home.join("forward/index.html"));
}
