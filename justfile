# What CI runs.
check:
    .ci/run

# Format, lint and the quick tests.
quick:
    cargo fmt
    cargo clippy --all-targets -- -D warnings
    cargo test --lib
