//! The random stream of NumPy's `default_rng([seed, key]).uniform(low, high)`, bit for bit, and the CRC-32 of its key.
//!
//! Sources: NumPy 2, `numpy/random/bit_generator.pyx` (`SeedSequence`, after M. O'Neill's `randutils` seed_seq_fe128),
//! `numpy/random/src/pcg64/pcg64.h` (PCG-XSL-RR-128/64, M. O'Neill, "PCG: A Family of Simple Fast Space-Efficient
//! Statistically Good Algorithms for Random Number Generation", 2014) and
//! `numpy/random/src/distributions/distributions.c` (`random_uniform`). CRC-32 is that of zlib (ISO 3309, reflected
//! polynomial 0xEDB88320), as Python's `zlib.crc32`.

use std::num::Wrapping;

const POOL: usize = 4;

/// `SeedSequence`'s running hash of one word; `constant` changes with each call.
fn hashmix(word: u32, constant: &mut Wrapping<u32>, multiplier: u32) -> u32 {
    let mut value = Wrapping(word) ^ *constant;
    *constant *= multiplier;
    value *= *constant;
    (value ^ (value >> 16)).0
}

/// `SeedSequence(entropy).generate_state(4, uint64)` for at most [`POOL`] words of entropy.
fn seed_sequence(entropy: &[u32]) -> [u64; 4] {
    debug_assert!(entropy.len() <= POOL);
    let mut constant = Wrapping(0x43b0_d7e5);
    let mut pool: [u32; POOL] =
        std::array::from_fn(|i| hashmix(entropy.get(i).copied().unwrap_or(0), &mut constant, 0x931e_8875));
    for source in 0..POOL {
        for target in (0..POOL).filter(|target| *target != source) {
            let mixed = hashmix(pool[source], &mut constant, 0x931e_8875);
            let value =
                Wrapping(0xca01_f9dd) * Wrapping(pool[target]) - Wrapping(0x4973_f715) * Wrapping(mixed);
            pool[target] = (value ^ (value >> 16)).0;
        }
    }
    let mut constant = Wrapping(0x8b51_f9dd);
    let words: [u32; 8] = std::array::from_fn(|i| hashmix(pool[i % POOL], &mut constant, 0x58f3_8ded));
    std::array::from_fn(|i| u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32)
}

/// The generator PCG-XSL-RR-128/64.
pub(super) struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    /// `default_rng([seed, key])`. As NumPy does it, a seed beyond 32 bits gives two words of entropy, low word first.
    pub(super) fn seeded(seed: u64, key: u32) -> Self {
        let (low, high) = (seed as u32, (seed >> 32) as u32);
        let state = match high {
            0 => seed_sequence(&[low, key]),
            _ => seed_sequence(&[low, high, key]),
        };
        let wide = |high: u64, low: u64| u128::from(high) << 64 | u128::from(low);
        let mut pcg = Self { state: 0, increment: wide(state[2], state[3]) << 1 | 1 };
        pcg.step();
        pcg.state = pcg.state.wrapping_add(wide(state[0], state[1]));
        pcg.step();
        pcg
    }

    fn step(&mut self) {
        const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next_u64(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// `uniform(low, high)`: 53 random bits over [low, high).
    pub(super) fn uniform(&mut self, low: f64, high: f64) -> f64 {
        let unit = (self.next_u64() >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0);
        low + (high - low) * unit
    }
}

/// CRC-32 as zlib's.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Row {
        seed: u64,
        name: String,
        crc32: u32,
        jitter: f64,
        /// The bits of each draw, in hexadecimal.
        uniforms: Vec<String>,
    }

    #[test]
    fn crc32_has_the_check_value_of_its_definition() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }

    #[test]
    fn every_draw_is_numpys_bit_for_bit() {
        let rows: Vec<Row> = serde_json::from_str(include_str!("../../tests/data/numpy-jitter.json"))
            .expect("the table that tests/data/numpy_jitter.py wrote");
        assert!(rows.len() >= 100);
        for row in rows {
            assert_eq!(crc32(row.name.as_bytes()), row.crc32, "{:?}", row.name);
            let mut stream = Pcg64::seeded(row.seed, row.crc32);
            for (i, expected) in row.uniforms.iter().enumerate() {
                let found = stream.uniform(1.0 - row.jitter, 1.0 + row.jitter);
                assert_eq!(
                    format!("{:016x}", found.to_bits()),
                    *expected,
                    "seed {}, {:?}, draw {i}",
                    row.seed,
                    row.name
                );
            }
        }
    }
}
