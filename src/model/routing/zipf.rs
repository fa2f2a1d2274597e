//! `zipf:S`: the expert of rank r has probability ∝ 1 / r^S, and a token draws without replacement.
//!
//! Which expert has which rank is a permutation (Fisher and Yates) of each layer's own. Drawing one after the other without
//! replacement is the same as taking the largest of `log p + G`, G independent standard Gumbel numbers, in falling order
//! (Kool, van Hoof and Welling, "Stochastic beams and where to find them", 2019, section 2.3); that never divides by what is
//! left, however steep the distribution. Numbers come from the counter-based generator of [`dummy`].

use rayon::prelude::*;

use super::{Layout, Slice};
use crate::backend::dummy::{GOLDEN, mix, stream};

/// Tells the streams of routing from those of weights, which use the seed as it is.
const ROUTING: u64 = 0x726F_7574_696E_6721;

/// `[tokens * top_k]` experts of the slice in a layer.
pub(super) fn experts(layout: &Layout, s: f64, slice: Slice, (seed, layer): (u64, usize)) -> Vec<u32> {
    let Layout { experts, top_k, .. } = *layout;
    let stream = stream(seed ^ ROUTING, layer as u64);
    let mut log_p = vec![0.0; experts];
    for (rank, expert) in order(seed, layer, experts).into_iter().enumerate() {
        log_p[expert as usize] = -s * ((rank + 1) as f64).ln();
    }
    let mut chosen = vec![0; slice.tokens * top_k];
    chosen.par_chunks_mut(top_k).enumerate().with_min_len(64).for_each(|(token, chosen)| {
        let first = ((slice.first + token + 1) * experts) as u64;
        let key = |(expert, log_p): (usize, &f64)| (log_p + gumbel(stream, first + expert as u64), expert);
        let mut keys: Vec<(f64, usize)> = log_p.iter().enumerate().map(key).collect();
        let falling = |a: &(f64, usize), b: &(f64, usize)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if top_k < experts {
            keys.select_nth_unstable_by(top_k, falling);
        }
        keys[..top_k].sort_unstable_by(falling);
        chosen.iter_mut().zip(keys).for_each(|(chosen, (_, expert))| *chosen = expert as u32);
    });
    chosen
}

/// Uniform in (0, 1), a multiple of 2⁻⁵³ shifted by half of that.
fn uniform(stream: u64, element: u64) -> f64 {
    let bits = mix(stream.wrapping_add(GOLDEN.wrapping_mul(element.wrapping_add(1)))) >> 11;
    (bits as f64 + 0.5) * (1.0 / (1_u64 << 53) as f64)
}

fn gumbel(stream: u64, element: u64) -> f64 {
    -(-uniform(stream, element).ln()).ln()
}

/// The expert of each rank in a layer. Its numbers are the first ones of the layer's stream; those of tokens follow.
pub(super) fn order(seed: u64, layer: usize, experts: usize) -> Vec<u32> {
    let stream = stream(seed ^ ROUTING, layer as u64);
    let mut order: Vec<u32> = (0..experts as u32).collect();
    for i in (1..experts).rev() {
        order.swap(i, (uniform(stream, i as u64) * (i + 1) as f64) as usize);
    }
    order
}
