//! `--against`: another executable or commit, measured alternately with this one.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Bench, EXECUTABLE, QUICK, Run, git};
use serde_json::json;

/// A repository whose bench target builds in a moment: a `main` of this text.
fn repository(main: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::create_dir(path.join("src")).unwrap();
    fs::write(path.join("src/lib.rs"), "").unwrap();
    fs::write(
        path.join("Cargo.toml"),
        "[package]\nname = \"x\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[features]\ncuda = []\n\
         cuda-dynamic-linking = []\n[[bench]]\nname = \"forward\"\nharness = false\npath = \"main.rs\"\n",
    )
    .unwrap();
    fs::write(path.join("main.rs"), main).unwrap();
    git(path, "init -q");
    git(path, "add .");
    git(path, "commit -q -m one");
    folder
}

/// A `main` that becomes this project's own executable, after these statements.
fn passes_on(statements: &str) -> String {
    format!(
        "fn main() {{ use std::os::unix::process::CommandExt; {statements} \
         let error = std::process::Command::new({:?}).args(std::env::args_os().skip(1)).exec(); panic!(\"{{error}}\") }}",
        EXECUTABLE.display().to_string()
    )
}

fn command(bench: &Bench, repository: &Path, flags: &str) -> Command {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/llama-tiny");
    let quick = QUICK.replace("tests/data/llama-tiny", &model.to_string_lossy());
    let mut command = bench.command(&format!("{quick} --case d=2*1@32 --case e=5 {flags}"));
    command
        .current_dir(repository)
        .env("CARGO_TARGET_DIR", repository.join("target"))
        .env("CARGO", env!("CARGO"));
    command
}

fn no_worktree_is_left(repository: &Path) {
    let output = Command::new("git").args(["worktree", "list"]).current_dir(repository).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 1);
    let left = fs::read_dir(repository.join("target/forward-against")).unwrap();
    let left: Vec<String> = left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!left.iter().any(|name| name.starts_with("tree-")), "{left:?}");
}

#[test]
fn a_commit_is_built_and_measured_alternately() {
    let bench = Bench::new();
    let repository = repository(&passes_on(""));
    let path = repository.path();
    fs::write(path.join("src/lib.rs"), "// dirty").unwrap();
    let run = Run::of(command(&bench, path, "--against HEAD --runs 2").output().unwrap()).expect(0);
    assert!(run.stderr.contains("run 2 of 2: case/llama-tiny/e: "), "{}", run.stderr);
    assert!(
        run.stderr.contains("2 and 2 runs") && run.stderr.contains("all 2 cases together"),
        "{}",
        run.stderr
    );
    assert!(
        run.stdout.contains("Criterion's own verdict") && run.stdout.contains("change:"),
        "{}",
        run.stdout
    );
    no_worktree_is_left(path);
    let compared = &bench.json("new/forward.json")["compared"];
    let name = compared["baseline"].as_str().unwrap();
    assert!(name.starts_with("against-"), "{compared}");
    let old = bench.json(&format!("{name}/forward.json"));
    assert_eq!(old["runs"].as_array().unwrap().len(), 2);
    assert_eq!(old["configuration"], bench.json("new/forward.json")["configuration"], "the same draws");
    assert_eq!(compared["verdict"]["runs"], json!([2, 2]));
    // A second time nothing is built.
    let run = Run::of(command(&bench, path, "--against HEAD --runs 1 --summary-md s.md").output().unwrap())
        .expect(0);
    assert!(!run.stderr.contains("building"), "{}", run.stderr);
    assert!(fs::read_to_string(path.join("s.md")).unwrap().contains("HEAD ("));
}

#[test]
fn an_executable_can_stand_for_a_commit() {
    let bench = Bench::new();
    let folder = tempfile::tempdir().unwrap();
    let run = Run::of(
        command(&bench, folder.path(), &format!("--against {} --runs 1", EXECUTABLE.display()))
            .output()
            .unwrap(),
    );
    assert!(run.expect(0).stderr.contains("1 and 1 runs"));
}

#[test]
fn an_older_version_that_lacks_a_flag_says_so() {
    let bench = Bench::new();
    let lacks = "if std::env::args().any(|a| a.starts_with(\"--iters\")) { \
                 eprintln!(\"error: unexpected argument '--iters' found\"); std::process::exit(2) }";
    let repository = repository(&passes_on(lacks));
    let run = Run::of(command(&bench, repository.path(), "--against HEAD").output().unwrap()).expect(2);
    let line = run.stderr.lines().last().unwrap();
    for word in ["--against HEAD", "refuses what it is given", "unexpected argument '--iters'"] {
        assert!(line.contains(word), "{}", run.stderr);
    }
}

#[test]
fn an_older_version_that_takes_no_turns_is_measured_all_the_same() {
    let bench = Bench::new();
    let lacks = "if std::env::args().any(|a| a == \"--take-turns\") { std::process::exit(2) }";
    let repository = repository(&passes_on(lacks));
    let run =
        Run::of(command(&bench, repository.path(), "--against HEAD --runs 1").output().unwrap()).expect(0);
    assert!(
        run.stderr.contains("cannot take turns") && run.stderr.contains("1 and 1 runs"),
        "{}",
        run.stderr
    );
}

#[test]
fn what_cannot_be_built_or_found_is_one_line() {
    let bench = Bench::new();
    let repository = repository("fn main() { broken }");
    let path = repository.path();
    Run::of(command(&bench, path, "--against nothing").output().unwrap())
        .refused(2, &["--against nothing", "no such commit"]);
    let run = Run::of(command(&bench, path, "--against HEAD").output().unwrap()).expect(2);
    assert!(
        run.stderr.lines().last().unwrap().contains("--against HEAD: building it failed"),
        "{}",
        run.stderr
    );
    no_worktree_is_left(path);
}

#[test]
fn ctrl_c_leaves_neither_worktree_nor_process() {
    let bench = Bench::new();
    let sleeps = "if std::env::args().any(|a| a.starts_with(\"--output-json\")) { \
                  std::fs::write(\"started\", std::process::id().to_string()).unwrap(); \
                  std::thread::sleep(std::time::Duration::from_secs(600)) }";
    let repository = repository(&passes_on(sleeps));
    let path = repository.path();
    let mut command = command(&bench, path, "--against HEAD");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    let started = path.join("started");
    while !started.exists() || fs::read_to_string(&started).unwrap().is_empty() {
        assert!(
            begin.elapsed() < Duration::from_secs(120) && child.try_wait().unwrap().is_none(),
            "it never started"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let measuring = fs::read_to_string(&started).unwrap();
    // SAFETY: a signal to a child of ours that has not been waited for.
    unsafe { libc::kill(i32::try_from(child.id()).unwrap(), libc::SIGINT) };
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    no_worktree_is_left(path);
    assert!(!Path::new("/proc").join(measuring).exists(), "the other side's process is gone");
    assert!(!bench.file("new").exists(), "nothing was saved");
}

#[test]
fn a_version_with_other_defaults_is_not_compared() {
    let bench = Bench::new();
    let other = "let mut more = vec![\"--hf-overrides={\\\"num_hidden_layers\\\": 1}\".to_owned()]; \
                 more.extend(std::env::args().skip(1).filter(|a| !a.starts_with(\"--hf\"))); \
                 let all = more; let error = std::process::Command::new(EXE).args(all).exec(); panic!(\"{error}\");";
    let other = other.replace("EXE", &format!("{:?}", EXECUTABLE.display().to_string()));
    let repository = repository(&passes_on(&other));
    let run =
        Run::of(command(&bench, repository.path(), "--against HEAD --runs 1").output().unwrap()).expect(2);
    assert!(
        run.stderr.contains("the sides differ in model") && run.stderr.contains("num_hidden_layers"),
        "{}",
        run.stderr
    );
    assert!(!bench.file("new").exists());
    // Where that is meant, the deeper model is slower than the other side's, and that can be fatal.
    let flags = "--against HEAD --runs 1 --allow-mismatch model --hf-overrides {\"num_hidden_layers\":256} --fail-on-regression";
    let run = Run::of(command(&bench, repository.path(), flags).output().unwrap()).expect(1);
    assert!(run.stderr.contains("regression: case/llama-tiny/d: slower by"), "{}", run.stderr);
}

#[test]
fn a_worktree_of_a_killed_process_is_forgotten() {
    let bench = Bench::new();
    let repository = repository(&passes_on(""));
    let path = repository.path();
    let left = path.join("target/forward-against/tree-0123456789ab-999999999");
    git(path, &format!("worktree add --quiet --detach {} HEAD", left.display()));
    Run::of(command(&bench, path, "--against HEAD --runs 1").output().unwrap()).expect(0);
    no_worktree_is_left(path);
}
