//! The CPU backend: float32 compute, rayon and the gemm crate.
