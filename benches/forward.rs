//! The bench target.

fn main() {}
