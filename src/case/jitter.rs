//! Jitter of the KV lengths: the same lengths as `vllm bench forward` draws for the same case, name and seed.

use super::numpy::{Pcg64, crc32};
use super::{Case, CaseError, Request};

impl Case {
    /// The case with every non-empty prefix scaled by a factor in [1 − `jitter`, 1 + `jitter`), and K capped at
    /// `max_model_len` tokens.
    ///
    /// A prefix becomes `max(1, round_half_even(prefix × u))`, u from NumPy's
    /// `default_rng([seed, crc32(name)]).uniform(1 - jitter, 1 + jitter)`, bit for bit; one u a request with a prefix, in
    /// the case's order. Requests without a prefix stay as they are.
    ///
    /// # Errors
    /// A jitter outside [0, 1) (NaN included), and a K that is above `max_model_len` before jitter.
    pub fn with_jitter(&self, jitter: f64, seed: u64, max_model_len: u32) -> Result<Self, CaseError> {
        if !(0.0..1.0).contains(&jitter) {
            return Err(CaseError::Jitter { jitter });
        }
        if let Some(over) = self.requests.iter().find(|request| request.kv_len > max_model_len) {
            return Err(CaseError::AboveModelLen {
                case: self.name.clone(),
                kv_len: over.kv_len,
                max_model_len,
            });
        }
        let mut stream = Pcg64::seeded(seed, crc32(self.name.as_bytes()));
        let mut draw = |request: &Request| {
            if request.prefix_len() == 0 {
                return *request;
            }
            let factor = stream.uniform(1.0 - jitter, 1.0 + jitter);
            let prefix = scaled(request.prefix_len(), factor);
            let kv_len = (prefix + u64::from(request.query_len)).min(u64::from(max_model_len));
            Request { kv_len: kv_len as u32, ..*request }
        };
        Ok(Self { name: self.name.clone(), requests: self.requests.iter().map(&mut draw).collect() })
    }
}

/// A prefix of `tokens` times a factor below 2, half to even as Python's `round`, at least 1.
fn scaled(tokens: u32, factor: f64) -> u64 {
    // Below 2^33, so the conversion is exact.
    (f64::from(tokens) * factor).round_ties_even().max(1.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_go_to_even_and_a_prefix_never_vanishes() {
        let halved: Vec<u64> = [1, 2, 3, 5, 7, u32::MAX].map(|tokens| scaled(tokens, 0.5)).into();
        assert_eq!(halved, [1, 1, 2, 2, 4, 1 << 31]);
        assert_eq!(scaled(100, 1e-9), 1);
        assert_eq!(scaled(u32::MAX, 1.999), 8_585_639_623);
    }

    #[test]
    fn a_jitter_outside_its_range_and_a_length_above_the_models_are_errors() {
        let case: Case = "a=1@9000".parse().expect("a case");
        for jitter in [-0.1, 1.0, f64::NAN, f64::INFINITY] {
            let error = case.with_jitter(jitter, 0, 10_000).expect_err("out of range");
            assert!(error.to_string().contains("--kv-len-jitter"), "{error}");
        }
        assert_eq!(
            case.with_jitter(0.0, 0, 8192).expect_err("too long").to_string(),
            "case \"a\": a KV length of 9000 is above the model's maximum of 8192: shorten the request or raise \
             --max-model-len to 9000"
        );
    }

    #[test]
    fn no_jitter_is_no_change() {
        let case: Case = "a=7,64*1@8192,5@4294967295".parse().expect("a case");
        assert_eq!(case.with_jitter(0.0, 3, u32::MAX).as_ref(), Ok(&case));
    }
}
