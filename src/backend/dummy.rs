//! Made-up weights and KV contents: a counter-based generator, so that any device makes the same values in any order.
//!
//! The generator is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
//! 2014) over a counter. A *stream* is named by the seed and by what is filled; an element by its row-major index in the whole, of
//! which a rank may hold a part:
//!
//! - `mix(z)`: `z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9; z = (z ^ (z >> 27)) * 0x94D049BB133111EB; z ^ (z >> 31)`
//! - `stream(seed, id) = mix(mix(seed) + GOLDEN * (id + 1))`, all modulo 2⁶⁴
//! - `uniform(stream, element) = (mix(stream + GOLDEN * (element + 1)) >> 40) * 2⁻²³ - 1`, exact in float32, in [-1, 1)
//!
//! A weight's value is `uniform * DUMMY_SPREAD`, a norm's scale `1 + uniform * DUMMY_SPREAD` (product and sum rounded
//! separately, so a GPU must not contract them), each then rounded to the device's type.

use super::WeightRole;

/// Dummy weights are uniform in plus or minus this: wide enough that activations keep ordinary sizes through the layers.
pub const DUMMY_SPREAD: f32 = 0.02;

/// The odd increment of SplitMix64: 2⁶⁴ divided by the golden ratio.
pub const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64's finaliser, a bijection.
#[inline]
#[must_use]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The stream of the values of one thing: a weight by its [`super::WeightId`], or [`kv_stream`].
#[inline]
#[must_use]
pub fn stream(seed: u64, id: u64) -> u64 {
    mix(mix(seed).wrapping_add(GOLDEN.wrapping_mul(id.wrapping_add(1))))
}

/// The stream of one block of one layer's KV; its elements are those of `[2, block_size, all_heads, head_dim]`, of which a rank may
/// hold some heads.
#[inline]
#[must_use]
pub fn kv_stream(seed: u64, kv_layer: u32, block: u32) -> u64 {
    stream(!seed, (u64::from(kv_layer) << 32) | u64::from(block))
}

/// Uniform in [-1, 1), a multiple of 2⁻²³.
#[inline]
#[must_use]
pub fn uniform(stream: u64, element: u64) -> f32 {
    let bits = mix(stream.wrapping_add(GOLDEN.wrapping_mul(element.wrapping_add(1)))) >> 40;
    // 24 bits: exact as i32, exact as float32, and so is the scaling by a power of two.
    (bits as i32 - (1 << 23)) as f32 * (1.0 / (1 << 23) as f32)
}

/// The value of an element of a weight.
#[inline]
#[must_use]
pub fn weight(role: WeightRole, stream: u64, element: u64) -> f32 {
    let value = uniform(stream, element) * DUMMY_SPREAD;
    if role == WeightRole::Norm { 1.0 + value } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_finaliser_is_splitmix64s() {
        // The first outputs of SplitMix64 seeded with 1234567, as its authors publish them.
        let seed = 1_234_567_u64;
        let outputs: Vec<u64> = (1..=3).map(|i| mix(seed.wrapping_add(GOLDEN.wrapping_mul(i)))).collect();
        assert_eq!(
            outputs,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn values_are_uniform_and_streams_differ() {
        let (a, b) = (stream(0, 0), stream(0, 1));
        let values: Vec<f32> = (0..100_000).map(|i| uniform(a, i)).collect();
        assert!(values.iter().all(|v| (-1.0..1.0).contains(v)));
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / 1e5;
        let square = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.01 && (square - 1.0 / 3.0).abs() < 0.01, "{mean} {square}");
        assert_ne!(uniform(a, 0), uniform(b, 0));
        assert_ne!(stream(1, 0), stream(0, 1));
        assert_ne!(kv_stream(0, 0, 1), kv_stream(0, 1, 0));
    }

    #[test]
    fn a_norm_is_about_one() {
        let value = weight(WeightRole::Norm, stream(3, 4), 5);
        assert!((value - 1.0).abs() <= DUMMY_SPREAD && value != 1.0);
        assert!(weight(WeightRole::Linear, stream(3, 4), 5).abs() <= DUMMY_SPREAD);
    }
}
