//! Shape files: what reads, what the shipped ones hold, and one clear line for each kind of bad input.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forward_bench::shapes::{CASE_GROUP, FileSettings, ShapeFile, load_all, load_path, refuse_case_group};
use tempfile::TempDir;

/// Writes `content` to a file `name` of a new folder and loads it.
fn load(name: &str, content: impl AsRef<[u8]>) -> Result<ShapeFile, String> {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join(name);
    fs::write(&path, content).expect("a file");
    let started = Instant::now();
    let loaded = load_path(&path);
    assert!(started.elapsed() < Duration::from_secs(5), "{name} took {:?}", started.elapsed());
    match loaded {
        Ok(mut files) => Ok(files.pop().expect("one file")),
        Err(error) => {
            let message = error.to_string();
            assert_eq!(message.lines().count(), 1, "{message:?}");
            assert!(message.len() < 1000 + path.as_os_str().len(), "{message}");
            let message = message.strip_prefix(path.to_str().expect("UTF-8")).expect("the file comes first");
            Err(message.to_owned())
        }
    }
}

/// Asserts the whole message after the file's path.
#[track_caller]
fn refused(name: &str, content: impl AsRef<[u8]>, message: &str) {
    assert_eq!(load(name, content).expect_err(message), message);
}

/// Asserts that the message has each of the parts.
#[track_caller]
fn refused_with(name: &str, content: impl AsRef<[u8]>, parts: &[&str]) {
    let message = load(name, content).expect_err("an error");
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

fn texts(file: &ShapeFile) -> Vec<String> {
    file.cases.iter().map(ToString::to_string).collect()
}

#[test]
fn yaml_and_json_give_the_same_cases() {
    let yaml = "cases:\n  - name: mix\n    requests:\n      - {query_len: 8, kv_len: 16, chunked: true}\n      \
                - query_len: 4\n        kv_len: 9\n        num_draft_tokens: 3\n        count: 2\n      - query_len: 5\n  \
                - b=2*1@8\nkv_len_jitter: 0.25\nnum_speculative_tokens: 3\nmodel: qwen3-8b\nrouting: uniform\n\
                tolerance_pct: 1\n";
    let json = "{\"cases\": [{\"name\": \"mix\", \"requests\": [{\"query_len\": 8, \"kv_len\": 16, \"chunked\": true},\n\
                \t{\"query_len\": 4,\t\"kv_len\": 9, \"num_draft_tokens\": 3, \"count\": 2}, {\"query_len\": 5,\r\n\
                \"kv_len\": null}]}, \"b=2*1@8\"],\n\"kv_len_jitter\":2.5e-1,\"num_speculative_tokens\":3,\
                \"model\":\"qwen3-8b\",\"routing\":\"uniform\",\"tolerance_pct\":1}";
    for (name, content) in [("mine.yaml", yaml), ("mine.yml", yaml), ("mine.json", json)] {
        let file = load(name, content).expect(name);
        assert_eq!(file.group, "mine");
        assert_eq!(texts(&file), ["mix=8@16c,2*4@9:3,5", "b=2*1@8"]);
        let settings = FileSettings {
            model: Some("qwen3-8b".into()),
            kv_len_jitter: Some(0.25),
            routing: Some("uniform".into()),
            tolerance_pct: Some(1.0),
            num_speculative_tokens: Some(3),
        };
        assert_eq!(file.settings, settings);
    }
}

#[test]
fn line_ends_byte_order_marks_tabs_and_escapes_of_any_editor_read() {
    let crlf = load("a.yaml", "\u{feff}# note\r\ncases:\r\n  - 1*1@8\r\n").expect("CRLF and a BOM");
    assert_eq!(texts(&crlf), ["1*1@8=1@8"]);
    let json = "\u{feff}{\r\n\t\"cases\": [\r\n\t\t{\"name\": \"\\ud83d\\ude00 \\u00e9\\/\\\"\\n\", \"requests\": [{\"query_len\":1}]},\r\n\t\t\"x=2\"\r\n\t]\r\n}";
    let json = load("a.json", json).expect("tabs, CRLF, a BOM and escapes");
    assert_eq!(json.cases[0].name, "😀 é/\"\n");
    let long = format!(
        "{{\"cases\":[{}]}}",
        (0..20_000).map(|i| format!("\"n{i}=1@8\"")).collect::<Vec<_>>().join(",")
    );
    assert_eq!(load("a.json", long).expect("one long line").cases.len(), 20_000);
    let aliases =
        "cases:\n  - name: a\n    requests: &all\n      - query_len: 8\n  - name: b\n    requests: *all\n";
    assert_eq!(texts(&load("a.yaml", aliases).expect("an alias")), ["a=8", "b=8"]);
}

#[test]
fn a_broken_rule_is_told_with_file_line_and_case() {
    refused(
        "a.yaml",
        "cases:\n  - ok=8\n  - bad=4@3\n",
        ":3: case \"bad=4@3\": item \"4@3\" has a KV length of 3 with a query length of 4: the KV length includes the query, so give 4 or more",
    );
    refused(
        "a.json",
        "{\"cases\": [\n{\"name\": \"n\", \"requests\": [\n{\"query_len\": 4, \"kv_len\": 3}]}]}",
        ":3: case \"n\": the request has a KV length of 3 with a query length of 4: the KV length includes the query, so give 4 or more",
    );
    let request = |fields: &str| format!("cases:\n  - name: n\n    requests:\n      - {{{fields}}}\n");
    for (fields, part) in [
        ("query_len: 0", "a query length of 0"),
        ("query_len: 2, kv_len: 2, num_draft_tokens: 1", "1 draft tokens without a prefix"),
        ("query_len: 4, kv_len: 9, num_draft_tokens: 2", "the query length must be 3"),
        ("query_len: 8, chunked: true", "a chunk without a prefix"),
        ("query_len: 1, kv_len: 8, chunked: true", "a chunked decode"),
        ("query_len: 1, count: 0", "count is the number 0: give a whole number from 1 to 65536"),
        ("query_len: 1, count: 1000000000000", "a case has at most 65536"),
        ("query_len: 1, count: 1e3", "count is the number 1000.0"),
        (
            "query_len: 4294967296",
            "query_len is the number 4294967296: give a whole number from 0 to 4294967295",
        ),
        ("query_len: 123456789012345678901234567890123456789012345678901234567890", "query_len is"),
        ("query_len: -1", "query_len is the number -1"),
        ("query_len: 1.5", "query_len is the number 1.5"),
        ("query_len: 0512", "query_len is the text \"0512\""),
        ("query_len: [1]", "query_len is a list"),
        ("query_len: \"8\"", "query_len is the text \"8\""),
        ("query_len: 8, chunked: 1", "chunked is the number 1: give true or false"),
        ("kv_len: 8", "no query_len"),
        ("query_len: 8, kvlen: 9", "unknown key \"kvlen\": the nearest known key is kv_len"),
    ] {
        refused_with("a.yaml", request(fields), &[":4: case \"n\": ", part]);
    }
}

#[test]
fn wrong_structure_is_told_with_what_was_found() {
    for (content, part) in [
        (
            "casse: [a=8]\n",
            ":1: the file has the unknown key \"casse\": the nearest known key is cases (all: cases, model",
        ),
        (
            "cases: [a=8]\nkv_jitter: 0\n",
            ":2: the file has the unknown key \"kv_jitter\": the nearest known key is kv_len_jitter",
        ),
        (
            "cases:\n  - nam: a\n",
            ":2: case \"number 1\": the case has the unknown key \"nam\": the nearest known key is name",
        ),
        ("cases: [a=8]\n3: 4\n", ":2: a key of the file is the number 3"),
        ("- a=8\n", ":1: the file is a list: give a mapping with the keys cases"),
        ("a=8\n", ":1: the file is the text \"a=8\""),
        ("model: x\n", ":1: no cases"),
        ("cases:\n", "no cases"),
        ("cases: []\n", ":1: cases is an empty list: give a list with at least one case"),
        ("cases: a=8\n", ":1: cases is the text"),
        (
            "cases:\n  - 512\n",
            ":2: case \"number 1\": the case is the number 512: give a text NAME=REQS, in quotes",
        ),
        (
            "cases:\n  - {name: 512, requests: [{query_len: 8}]}\n",
            "name is the number 512: give a text, in quotes",
        ),
        ("cases:\n  - {name: \"\", requests: [{query_len: 8}]}\n", "name is the text \"\""),
        ("cases:\n  - {requests: [{query_len: 8}]}\n", ":2: case \"number 1\": no name"),
        ("cases:\n  - {name: a}\n", ":2: case \"a\": no requests"),
        ("cases:\n  - {name: a, requests: []}\n", "case \"a\": no request"),
        ("cases:\n  - {name: a, requests: [8]}\n", "case \"a\": the request is the number 8: give a mapping"),
        ("cases:\n  - a=8\n  - b=8\n  - a=9\n", ":4: case \"a\": a second case of that name"),
        ("cases: [a=8]\nmodel: [x]\n", ":2: model is a list"),
        ("cases: [a=8]\nkv_len_jitter: .nan\n", ":2: kv_len_jitter is the number NaN: give a number from 0"),
        ("cases: [a=8]\nkv_len_jitter: 1\n", ":2: kv_len_jitter is the number 1:"),
        ("cases: [a=8]\nkv_len_jitter: -0.1\n", ":2: kv_len_jitter is the number -0.1"),
        ("cases: [a=8]\ntolerance_pct: .inf\n", ":2: tolerance_pct is the number inf"),
        ("cases: [a=8]\ntolerance_pct: true\n", ":2: tolerance_pct is the truth value true"),
        ("cases: [a=8]\nnum_speculative_tokens: 1.5\n", ":2: num_speculative_tokens is the number 1.5"),
    ] {
        refused_with("a.yaml", content, &[part]);
    }
}

#[test]
fn what_is_not_yaml_or_json_is_told_with_its_line() {
    refused("a.yaml", "", ": the file is empty: give at least `cases: [NAME=REQS]`");
    refused("a.json", " \n", ": the file is empty: give at least `cases: [NAME=REQS]`");
    refused_with("a.yaml", "# nothing\n", &["the file is empty"]);
    refused_with("a.yaml", "cases: [a=8\n", &["not YAML that can be read: "]);
    refused_with("a.yaml", "cases:\n\t- a=8\n", &["not YAML that can be read: ", ":2: "]);
    refused_with("a.yaml", "cases: [a=8]\ncases: [b=8]\n", &[":2: a second key \"cases\": keep one"]);
    refused_with("a.yaml", "cases: [a=8]\n---\ncases: [b=8]\n", &[":3: a second YAML document"]);
    refused_with("a.yaml", "cases:\n  - *1@8\n", &[":2: an alias (`*name`) of no anchor: put"]);
    refused_with("a.json", "{\"cases\": [\"a=8\",\n]}", &[":2: not JSON: "]);
    refused_with("a.json", "cases: [a=8]\n", &[":1: not JSON: "]);
    refused_with("a.yaml", b"cases:\n  - a\xff=8\n", &[":2: byte 12 is not UTF-8"]);
    refused_with("a.yaml", b"cases: [a\0=8]\n", &["not YAML"]);
    refused_with("a.txt", "cases: [a=8]\n", &[".yaml, .yml or .json"]);
}

#[test]
fn hostile_files_are_refused_promptly() {
    let bomb: String = (1..30).map(|i| format!("a{i}: &a{i} [*a{0}, *a{0}, *a{0}]\n", i - 1)).collect();
    refused_with(
        "a.yaml",
        format!("a0: &a0 [x]\n{bomb}cases: *a29\n"),
        &[":10: an alias", "write its values out"],
    );
    let text = format!("a: &a {}\ncases: [{}]\n", "x".repeat(200_000), "*a,".repeat(5000));
    refused_with("a.yaml", text, &["more than a shape file may hold (Aliases"]);
    refused_with("a.yaml", format!("cases: {}", "[".repeat(100_000)), &["not YAML that can be read"]);
    refused_with(
        "a.json",
        format!("{{\"cases\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000)),
        &["read"],
    );
    refused_with("a.yaml", format!("cases: {}a", "- ".repeat(100_000)), &["not YAML that can be read"]);
    refused_with("a.yaml", "x".repeat(100 << 20), &["a file of 104857600 bytes or more"]);
    refused_with("a.yaml", format!("cases: [{}]", "9".repeat(8 << 20)), &["the number inf"]);
    refused_with("a.yaml", format!("cases:\n  - a={}@8\n", "9".repeat(10_000)), &["too large"]);
    refused_with("a.yaml", format!("cases: [a={}]", "9".repeat(8 << 20)), &["at most 262144 are allowed"]);
    let full: String = (0..17).map(|i| format!("  - n{i}=65536*1@8\n")).collect();
    refused_with("a.yaml", format!("cases:\n{full}"), &[":18: case \"n16\"", "a file has at most 1048576"]);
    let key = "k".repeat(500);
    refused_with("a.yaml", format!("cases: [a=8]\n{key}: 1\n"), &[":2: the file has the unknown key"]);
}

#[test]
fn a_folder_is_read_in_name_order_and_its_groups_are_distinct() {
    let folder = TempDir::new().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let message = |path: &Path| load_path(path).expect_err("an error").to_string();
    assert!(message(folder.path()).contains("the folder has no .yaml, .yml or .json file"));
    assert!(message(&at("none.yaml")).contains("cannot be read"));
    for name in ["b.yaml", "a.json", "c.yml"] {
        fs::write(at(name), "{\"cases\": [\"x=8\"]}").expect("a file");
    }
    for name in ["README.md", ".hidden.yaml"] {
        fs::write(at(name), "no shapes").expect("a file");
    }
    fs::create_dir(at("deeper")).expect("a folder");
    let groups: Vec<String> =
        load_path(folder.path()).expect("three files").into_iter().map(|file| file.group).collect();
    assert_eq!(groups, ["a", "b", "c"]);

    let twice = load_all(&[at("c.yml"), folder.path().into()]).expect_err("c twice").to_string();
    assert!(twice.contains("its group \"c\" is also that of"), "{twice}");
    fs::write(at("b.json"), "{\"cases\": [\"x=8\"]}").expect("a file");
    assert!(message(folder.path()).contains("its group \"b\" is also that of"));
    fs::remove_file(at("b.json")).expect("removed");

    fs::create_dir(at("d.yaml")).expect("a folder");
    assert!(message(folder.path()).contains("d.yaml: a folder where a file was expected"));
}

#[test]
fn a_file_named_case_is_refused_beside_cases_of_the_command_line() {
    let file = load("case.yaml", "cases: [x=8]\n").expect("a file of its own");
    assert_eq!(file.group, CASE_GROUP);
    let error = refuse_case_group(&[file]).expect_err("a collision").to_string();
    assert!(error.contains("--case"), "{error}");
    assert_eq!(refuse_case_group(&[load("b.yaml", "cases: [x=8]\n").expect("another")]), Ok(()));
}

#[cfg(unix)]
#[test]
fn devices_and_pipes_are_refused_without_being_opened() {
    let folder = TempDir::new().expect("a folder");
    let zero = folder.path().join("zero.yaml");
    std::os::unix::fs::symlink("/dev/zero", &zero).expect("a link");
    assert!(load_path(&zero).expect_err("a device").to_string().contains("not a regular file"));
    let pipe = folder.path().join("pipe.json");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    assert!(load_path(&pipe).expect_err("a pipe").to_string().contains("not a regular file"));
    std::os::unix::fs::symlink("/nowhere", folder.path().join("a.yaml")).expect("a link");
    assert!(
        load_path(folder.path()).expect_err("a dangling link").to_string().contains("a.yaml: cannot be read")
    );
}

/// The built-in models; a filter is a regular expression over ids, so no group may occur in a name.
const PRESETS: [&str; 10] = [
    "smollm2-135m",
    "llama-3.1-8b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-32b",
    "mistral-7b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "gpt-oss-120b",
];
const GROUPS: [&str; 6] = ["chunk", "decode", "mixed", "prefill", "prefix_hit", "verify"];

fn shipped(folder: &str) -> Vec<ShapeFile> {
    load_path(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(folder)).expect(folder)
}

#[test]
fn the_shipped_folders_have_the_same_six_groups_without_jitter() {
    for folder in ["shapes", "shapes/cpu"] {
        let files = shipped(folder);
        let groups: Vec<&str> = files.iter().map(|file| file.group.as_str()).collect();
        assert_eq!(groups, GROUPS);
        for file in &files {
            assert_eq!(file.settings.kv_len_jitter, Some(0.0), "{}", file.path.display());
            let drafts = (file.group == "verify").then_some(3);
            assert_eq!(file.settings.num_speculative_tokens, drafts, "{}", file.path.display());
            assert!(fs::read_to_string(&file.path).expect("a file").starts_with("# "));
        }
    }
}

#[test]
fn no_groups_name_occurs_in_another_name_that_a_filter_sees() {
    for folder in ["shapes", "shapes/cpu"] {
        let files = shipped(folder);
        for group in &files {
            let others =
                files.iter().filter(|other| other.group != group.group).map(|other| other.group.as_str());
            let cases = files.iter().flat_map(|file| file.cases.iter().map(|case| case.name.as_str()));
            for name in others.chain(cases).chain(PRESETS) {
                assert!(!name.contains(&group.group), "{:?} occurs in {name:?}", group.group);
            }
        }
    }
}

#[test]
fn the_shapes_for_gpus_hold_the_sizes_that_matter() {
    let names: Vec<(String, String)> = shipped("shapes")
        .iter()
        .flat_map(|file| file.cases.iter().map(|case| (file.group.clone(), case.name.clone())))
        .collect();
    for (group, name) in [
        ("decode", "1*1@8192"),
        ("decode", "8*1@1024"),
        ("decode", "32*1@8192"),
        ("decode", "64*1@8192"),
        ("decode", "256*1@1024"),
        ("prefill", "512"),
        ("prefill", "2048"),
        ("prefill", "8192"),
        ("prefix_hit", "2048@10240"),
        ("chunk", "2048@8192c"),
        ("verify", "32*4@4096:3"),
        ("mixed", "4096,32*1@8192"),
    ] {
        assert!(names.contains(&(group.into(), name.into())), "{group} lacks {name}");
    }
}
