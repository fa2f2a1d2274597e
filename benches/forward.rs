//! The bench target: see the library's `run` module.

fn main() -> std::process::ExitCode {
    forward_bench::run::main()
}
