//! Which experts a token uses, and how their results are weighted.

use rayon::prelude::*;

use super::moe::TOKENS;
use crate::backend::{Moe, Scoring};

/// The experts of each token and their weights.
pub(super) fn choose(moe: &Moe, logits: &[f32], chosen: &mut [u32], weights: &mut [f32]) {
    let k = moe.top_k;
    let tasks = logits.par_chunks(TOKENS * moe.experts);
    let outputs = chosen.par_chunks_mut(TOKENS * k).zip(weights.par_chunks_mut(TOKENS * k));
    tasks.zip(outputs).for_each(|(logits, (chosen, weights))| {
        let rows = chosen.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
        for (logits, (chosen, weights)) in logits.chunks_exact(moe.experts).zip(rows) {
            top_k(logits, chosen);
            score(moe.scoring, logits, chosen, weights);
        }
    });
}

/// The indices of the greatest values, in falling order, the lower index first among equals; never a NaN's before a number's.
fn top_k(values: &[f32], chosen: &mut [u32]) {
    for j in 0..chosen.len() {
        let (earlier, rest) = chosen.split_at_mut(j);
        let free = (0..values.len()).filter(|&i| !earlier.contains(&(i as u32)));
        let better = |best: usize, i: usize| {
            if values[i] > values[best] || (values[best].is_nan() && !values[i].is_nan()) { i } else { best }
        };
        rest[0] = free.reduce(better).unwrap_or(0) as u32;
    }
}

/// The chosen experts' weights.
fn score(scoring: Scoring, logits: &[f32], chosen: &[u32], weights: &mut [f32]) {
    let max = logits[chosen[0] as usize];
    for (weight, &expert) in weights.iter_mut().zip(chosen) {
        *weight = (logits[expert as usize] - max).exp();
    }
    let total = match scoring {
        Scoring::SoftmaxThenTopK { renormalize: false } => logits.iter().map(|l| (l - max).exp()).sum(),
        Scoring::SoftmaxThenTopK { renormalize: true } | Scoring::TopKThenSoftmax => {
            weights.iter().sum::<f32>()
        }
    };
    weights.iter_mut().for_each(|weight| *weight /= total);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greatest_are_chosen_and_the_lower_index_wins_a_tie() {
        let choose = |values: &[f32], k: usize| {
            let mut chosen = vec![0; k];
            top_k(values, &mut chosen);
            chosen
        };
        assert_eq!(choose(&[1.0, 3.0, 2.0, 3.0], 3), [1, 3, 2]);
        assert_eq!(choose(&[0.0; 4], 2), [0, 1]);
        assert_eq!(choose(&[f32::NAN, 1.0, f32::NEG_INFINITY], 3), [1, 2, 0]);
        assert_eq!(choose(&[f32::NAN; 3], 2), [0, 1]);
    }

    #[test]
    fn scores_are_softmax_over_all_or_over_the_chosen() {
        let logits = [0.0, 2.0_f32.ln(), 5.0_f32.ln(), -1e9];
        let score = |scoring| {
            let mut weights = [0.0; 2];
            super::score(scoring, &logits, &[2, 1], &mut weights);
            weights
        };
        let near = |found: [f32; 2], expected: [f32; 2]| {
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} {expected:?}");
        };
        near(score(Scoring::SoftmaxThenTopK { renormalize: false }), [5.0 / 8.0, 2.0 / 8.0]);
        near(score(Scoring::SoftmaxThenTopK { renormalize: true }), [5.0 / 7.0, 2.0 / 7.0]);
        near(score(Scoring::TopKThenSoftmax), [5.0 / 7.0, 2.0 / 7.0]);
    }
}
