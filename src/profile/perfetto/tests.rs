//! The trace as a reader of the format sees it.

use std::collections::BTreeMap;
use std::io::Read;

use flate2::read::GzDecoder;

use super::*;
use crate::profile::tests::activity;

fn replays() -> Vec<Traced> {
    let replay = |at: u64| Traced {
        activities: vec![
            activity("copy_segments", Part::Before, at, at + 800),
            activity("clock_probe", Part::Before, at + 900, at + 1_000),
            activity("_Z4gemmi", Part::Forward, at + 2_000, at + 5_500),
            activity("attention", Part::Forward, at + 5_000, at + 7_000), // launched early
            activity("norm", Part::Forward, at + 7_000, at + 7_100),
        ],
    };
    vec![replay(1_700_000_000_000_000_000), replay(1_700_000_000_000_010_000)]
}

fn read_back() -> Value {
    let replays = replays();
    let names = Names::of(replays.iter().flat_map(|replay| &replay.activities).map(|a| a.name.as_str()));
    let file = KernelsFile { id: "decode/tiny/1".to_owned(), rank: 2, ..KernelsFile::default() };
    let bytes = gzipped(&document(&file, &replays, &names)).unwrap();
    let mut text = String::new();
    GzDecoder::new(bytes.as_slice()).read_to_string(&mut text).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn events<'a>(trace: &'a Value, phase: &str) -> Vec<&'a Value> {
    trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == phase).collect()
}

#[test]
fn every_activity_is_an_event_at_its_time() {
    let trace = read_back();
    let complete = events(&trace, "X");
    assert_eq!(complete.len(), 10);
    assert!(complete.iter().all(|event| event["pid"] == 2));
    let total: f64 = complete.iter().map(|event| event["dur"].as_f64().unwrap()).sum();
    assert!((total - 2.0 * (0.8 + 0.1 + 3.5 + 2.0 + 0.1)).abs() < 1e-9);
    let gemm: Vec<&&Value> = complete.iter().filter(|event| event["name"] == "gemm").collect();
    assert_eq!((gemm[0]["ts"].as_f64(), gemm[1]["ts"].as_f64()), (Some(2.0), Some(12.0)));
    assert_eq!((&gemm[0]["args"]["full"], &gemm[1]["args"]["replay"]), (&json!("gemm(int)"), &json!(1)));
}

#[test]
fn events_of_a_thread_never_overlap_and_threads_are_named() {
    let trace = read_back();
    let mut ends: BTreeMap<u64, f64> = BTreeMap::new();
    for event in events(&trace, "X") {
        let (start, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        let end = ends.entry(event["tid"].as_u64().unwrap()).or_default();
        assert!(start >= *end - 1e-9, "{event}");
        *end = start + length;
    }
    let before: Vec<&Value> = events(&trace, "X").into_iter().filter(|event| event["tid"] == 0).collect();
    assert_eq!(before.len(), 4, "restore and probe");
    let names: BTreeMap<u64, &str> = events(&trace, "M")
        .into_iter()
        .filter(|event| event["name"] == "thread_name")
        .map(|event| (event["tid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap()))
        .collect();
    assert_eq!(
        names,
        BTreeMap::from([(0, "before the forward"), (1, "forward"), (2, "forward, overlapping")])
    );
    assert_eq!(ends.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
}
