//! Keeping, restoring and naming baselines, on a real folder.

use std::fs;

use serde_json::json;

use super::commit::name_to_read;
use super::*;

const ID: &str = "decode/tiny/1";

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store { home: folder.path().to_owned() };
    (folder, store)
}

fn save(store: &Store, baseline: &str, text: &str) {
    let folder = store.folder(ID).join(baseline);
    fs::create_dir_all(&folder).unwrap();
    for file in CRITERION_FILES {
        fs::write(folder.join(file), text).unwrap();
    }
}

fn text(store: &Store, baseline: &str) -> Option<String> {
    fs::read_to_string(store.folder(ID).join(baseline).join("sample.json")).ok()
}

#[test]
fn a_save_that_was_cut_short_is_undone() {
    let (_folder, store) = store();
    save(&store, "a", "old");
    save(&store, "new", "old");
    store.keep(ID, "a").unwrap();
    save(&store, "new", "new");
    fs::write(store.folder(ID).join("a/sample.json"), "half").unwrap();
    fs::write(store.folder(ID).join("a/forward.json"), "half").unwrap();
    assert_eq!(store.recover().unwrap().len(), 1);
    assert_eq!(text(&store, "a").as_deref(), Some("old"));
    assert_eq!(text(&store, "new").as_deref(), Some("old"));
    assert!(!store.folder(ID).join("a/forward.json").exists());
    assert!(store.recover().unwrap().is_empty());
}

#[test]
fn a_first_save_that_was_cut_short_leaves_nothing() {
    let (_folder, store) = store();
    store.keep(ID, "a").unwrap();
    fs::create_dir_all(store.folder(ID).join("a")).unwrap();
    fs::write(store.folder(ID).join("a/benchmark.json"), "{").unwrap();
    store.recover().unwrap();
    assert!(!store.folder(ID).join("a").exists());
}

#[test]
fn a_finished_save_stays() {
    let (_folder, store) = store();
    save(&store, "a", "old");
    store.keep(ID, "a").unwrap();
    save(&store, "a", "new");
    store.release(ID).unwrap();
    assert!(store.recover().unwrap().is_empty());
    assert_eq!(text(&store, "a").as_deref(), Some("new"));
}

#[test]
fn setting_aside_loses_nothing_and_can_be_done_twice() {
    let (_folder, store) = store();
    for round in ["first", "second"] {
        save(&store, "base", round);
        let path = store.set_aside(ID, "base").unwrap();
        assert!(fs::read_to_string(path).unwrap().contains(round));
        assert!(!store.has(ID, "base"));
    }
    assert_eq!(fs::read_dir(store.folder(ID)).unwrap().count(), 2);
}

#[test]
fn a_baseline_without_all_of_criterions_files_is_not_there() {
    let (_folder, store) = store();
    save(&store, "a", "{}");
    assert!(store.has(ID, "a"));
    assert_eq!(store.names(), ["a"]);
    fs::remove_file(store.folder(ID).join("a/estimates.json")).unwrap();
    assert!(!store.has(ID, "a"));
}

#[test]
fn a_hexadecimal_prefix_means_the_one_commit_that_it_fits() {
    let (_folder, store) = store();
    for name in ["0123456789ab", "0123456789ab-dirty", "feedfeedfeed", "dead"] {
        save(&store, name, "{}");
    }
    assert_eq!(name_to_read("feed", &store).unwrap(), "feedfeedfeed");
    assert_eq!(name_to_read("dead", &store).unwrap(), "dead");
    assert_eq!(name_to_read("0123456789ab", &store).unwrap(), "0123456789ab");
    assert!(name_to_read("01234", &store).unwrap_err().to_string().contains("more digits"));
    assert_eq!(name_to_read("other", &store).unwrap(), "other");
}

#[test]
fn names_that_criterion_would_trip_over_are_refused() {
    for name in ["", "new", "change", "report", ".", "..", "a/b", "a b", "é", &"x".repeat(65)] {
        assert!(check_name(name).is_err(), "{name}");
    }
    for name in ["base", "a", "1a2b3c4d5e6f-dirty", "v1.2_3", &"x".repeat(64)] {
        assert!(check_name(name).is_ok(), "{name}");
    }
}

#[test]
fn the_first_difference_of_each_field_is_named() {
    let here = Configuration {
        backend: "cpu".into(),
        device: "one".into(),
        dtype: "float32".into(),
        model: json!({"num_hidden_layers": 60, "hidden_size": 8}),
        layout: json!({}),
        draws: json!([]),
    };
    let there = Configuration {
        dtype: "bfloat16".into(),
        model: json!({"num_hidden_layers": 30, "hidden_size": 8}),
        ..here.clone()
    };
    assert!(here.differences(&here).is_empty());
    let found = here.differences(&there);
    assert_eq!(found[0], ("dtype", "\"bfloat16\" there, \"float32\" here".to_owned()));
    assert_eq!(found[1], ("model", "num_hidden_layers 30 there, 60 here".to_owned()));
}

#[test]
fn a_folder_is_one_processs_at_a_time() {
    let (_folder, store) = store();
    let held = store.lock().unwrap();
    assert!(store.lock().unwrap_err().to_string().contains("CRITERION_HOME"));
    drop(held);
    store.lock().unwrap();
}
