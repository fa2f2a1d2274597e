//! Holds the module table of `src/lib.rs` against the paths that the code names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Rows of the table in order: module, and what it may use.
fn table() -> Vec<(String, BTreeSet<String>)> {
    let text = fs::read_to_string(source().join("lib.rs")).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("//! | [`"));
    let mut table: Vec<(String, BTreeSet<String>)> = Vec::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_end_matches('|').split(" | ").collect();
        let module = cells[0].trim_matches('`').trim_end_matches("`]").to_owned();
        let uses = cells[2].trim();
        let uses = match uses {
            "everything above" => table.iter().map(|(above, _)| above.clone()).collect(),
            uses => uses.split(", ").filter(|used| !used.is_empty()).map(str::to_owned).collect(),
        };
        table.push((module, uses));
    }
    table
}

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let all = entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] });
    all.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// The module of the table that a file belongs to: the longest name that fits its path.
fn module_of(file: &Path, table: &[(String, BTreeSet<String>)]) -> Option<String> {
    let path = file.strip_prefix(source()).unwrap().with_extension("");
    let path = path.to_string_lossy().replace('/', "::");
    let fits = |module: &&String| path == **module || path.starts_with(&format!("{module}::"));
    table.iter().map(|(module, _)| module).filter(fits).max_by_key(|module| module.len()).cloned()
}

/// Every `crate::…` path that a file's code names, as a module of the table.
fn used(text: &str, table: &[(String, BTreeSet<String>)]) -> BTreeSet<String> {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let mut used = BTreeSet::new();
    for line in code {
        for path in line.split("crate::").skip(1) {
            let path: String =
                path.chars().take_while(|c| c.is_alphanumeric() || "_:".contains(*c)).collect();
            let fits = |module: &&String| path == **module || path.starts_with(&format!("{module}::"));
            let module =
                table.iter().map(|(module, _)| module).filter(fits).max_by_key(|module| module.len());
            used.extend(module.cloned());
        }
    }
    used
}

#[test]
fn each_module_uses_only_what_its_row_names() {
    let table = table();
    let rows: BTreeMap<_, _> = table.iter().cloned().collect();
    assert!(rows.len() >= 14, "the table was not found: {rows:?}");
    for file in files(&source()) {
        let Some(module) = module_of(&file, &table) else {
            assert_eq!(file.file_name().unwrap(), "lib.rs", "{} is in no row", file.display());
            continue;
        };
        for used in used(&fs::read_to_string(&file).unwrap(), &table) {
            assert!(
                used == module || rows[&module].contains(&used),
                "{} is in {module}, whose row does not name {used}",
                file.display()
            );
        }
    }
}

#[test]
fn rows_name_only_rows_above_them() {
    let table = table();
    for (index, (module, uses)) in table.iter().enumerate() {
        for used in uses {
            assert!(table[..index].iter().any(|(above, _)| above == used), "{module} uses {used}");
        }
    }
}

#[test]
fn one_module_names_criterion_and_one_names_cudarc() {
    for (name, allowed) in [("criterion", "measure/criterion"), ("cudarc", "backend/cuda")] {
        for file in files(&source()) {
            let text = fs::read_to_string(&file).unwrap();
            let named = text.lines().any(|line| {
                let line = line.trim_start();
                line.starts_with(&format!("use {name}::"))
                    || (!line.starts_with("//")
                        && line.contains(&format!(" {name}::"))
                        && !line.starts_with("use "))
            });
            let allowed = file.strip_prefix(source()).unwrap().starts_with(allowed)
                || file.strip_prefix(source()).unwrap() == Path::new(&format!("{allowed}.rs"));
            assert!(!named || allowed, "{} names {name}", file.display());
        }
    }
}

#[test]
fn every_file_says_what_it_is_for() {
    for file in files(&source()) {
        assert!(fs::read_to_string(&file).unwrap().starts_with("//! "), "{}", file.display());
    }
}

#[test]
fn every_unsafe_says_why_it_is_sound() {
    for file in files(&source()) {
        let text = fs::read_to_string(&file).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let line = line.trim_start();
            if line.starts_with("//")
                || !line.contains("unsafe ")
                || line.contains("unsafe fn")
                || line.contains("unsafe extern")
            {
                continue;
            }
            let above = lines[at.saturating_sub(6)..at].iter().any(|line| line.contains("// SAFETY:"));
            assert!(above, "{}:{}: no SAFETY line", file.display(), at + 1);
        }
    }
}
