//! Runs the bench executable that cargo built, each time into a Criterion folder of its own.
#![allow(dead_code, reason = "each test target uses its own part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

/// The bench target, as `cargo test` builds it.
pub static EXECUTABLE: LazyLock<PathBuf> =
    LazyLock::new(|| built(&["test", "--no-run", "--bench", "forward"], ("forward", "bench")));

/// Has cargo build something, and asks it for the executable of the target of that name and kind.
pub fn built(arguments: &[&str], (name, kind): (&str, &str)) -> PathBuf {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .arg("--message-format=json")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == name && message["target"]["kind"][0] == kind)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .expect("cargo names the executable")
}

/// A Criterion folder and a way to run the bench into it.
pub struct Bench {
    pub home: tempfile::TempDir,
}

/// What a run printed and how it ended.
pub struct Run {
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
}

/// Flags that make a measurement quick: a tiny model and little analysis.
pub const QUICK: &str = "--bench --model tests/data/llama-tiny --noplot --nresamples 100 --warm-up-time 0.02 \
                         --iters 4 --samples 5 --kv-cache-memory-bytes 16M";

impl Bench {
    pub fn new() -> Self {
        Self { home: tempfile::tempdir().unwrap() }
    }

    /// The executable with these arguments, separated by spaces, ready to run in the package's folder.
    pub fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(&*EXECUTABLE);
        command
            .args(arguments.split_whitespace())
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("CRITERION_HOME", self.home.path());
        for (variable, _) in std::env::vars_os() {
            let name = variable.to_string_lossy();
            let of_a_launcher =
                ["RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "CARGO_TARGET_DIR"];
            if of_a_launcher.iter().any(|start| name.starts_with(start)) {
                command.env_remove(&variable);
            }
        }
        command
    }

    pub fn run(&self, arguments: &str) -> Run {
        Run::of(self.command(arguments).output().unwrap())
    }

    /// Measures the case with the quick flags; `flags` come after them.
    pub fn measure(&self, flags: &str) -> Run {
        self.run(&format!("{QUICK} --case d=2*1@32 {flags}")).expect(0)
    }

    /// A file of the case that [`Bench::measure`] measures.
    pub fn file(&self, name: &str) -> PathBuf {
        self.home.path().join("case/llama-tiny/d").join(name)
    }

    pub fn json(&self, name: &str) -> serde_json::Value {
        read_json(&self.file(name))
    }
}

/// Runs git, which must succeed, in a folder; returns what it prints.
pub fn git(folder: &Path, arguments: &str) -> String {
    let output = Command::new("git")
        .args(["-c", "user.name=a", "-c", "user.email=a@b.c"])
        .args(arguments.split(' '))
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

pub fn read_json(path: &Path) -> serde_json::Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl Run {
    pub fn of(output: Output) -> Self {
        Self {
            status: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            // Criterion's own line, which no flag of ours can keep from the console.
            stderr: String::from_utf8_lossy(&output.stderr)
                .replace("Gnuplot not found, using plotters backend\n", ""),
        }
    }

    #[track_caller]
    pub fn expect(self, status: i32) -> Self {
        assert_eq!(self.status, status, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Checks that the run was refused in one line with this exit status, and that the line has all these words.
    #[track_caller]
    pub fn refused(self, status: i32, words: &[&str]) {
        let run = self.expect(status);
        let lines: Vec<&str> = run.stderr.lines().collect();
        assert_eq!(lines.len(), 1, "one line, found: {}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "{word:?} is missing in: {}", run.stderr);
        }
        assert!(!run.stderr.contains("bug"), "{}", run.stderr);
    }
}
