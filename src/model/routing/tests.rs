//! Rules of routing: evenness as properties, draws against their exact distribution.

use super::*;
use proptest::prelude::*;

fn layout(experts: usize, top_k: usize) -> Layout {
    Layout { layers: 3, experts, top_k, ranks: 1, groups: None }
}

fn choices(rule: Rule, layout: Layout, first: usize, tokens: usize, seed: u64) -> Choices {
    Choices::of(rule, layout, Slice { first, tokens }, seed).unwrap().unwrap()
}

/// Loads summed over `parts` equal runs of experts.
fn sums(loads: &[u32], parts: usize) -> Vec<u32> {
    loads.chunks(loads.len() / parts).map(|part| part.iter().sum()).collect()
}

fn spread(loads: &[u32]) -> u32 {
    loads.iter().max().unwrap() - loads.iter().min().unwrap()
}

#[test]
fn rules_are_read_and_written() {
    for (text, asked) in [
        ("auto", Asked::Auto),
        ("real", Asked::By(Rule::Real)),
        ("balanced", Asked::By(Rule::Balanced)),
        ("zipf:1.25", Asked::By(Rule::Zipf(1.25))),
        ("zipf:0", Asked::By(Rule::Zipf(0.0))),
    ] {
        assert_eq!(text.parse(), Ok(asked));
        if let Asked::By(rule) = asked {
            assert_eq!(rule.to_string(), text);
        }
    }
    for bad in ["", "uniform", "zipf", "zipf:", "zipf:-1", "zipf:nan", "zipf:inf", "zipf:1e9", "Balanced"] {
        assert!(bad.parse::<Asked>().unwrap_err().contains("zipf:S"), "{bad}");
    }
    assert_eq!(Asked::Auto.rule(true), Rule::Balanced);
    assert_eq!(Asked::Auto.rule(false), Rule::Real);
    assert_eq!(Asked::By(Rule::Zipf(1.0)).rule(true), Rule::Zipf(1.0));
}

#[test]
fn the_gates_are_left_alone_where_they_decide() {
    assert_eq!(Choices::of(Rule::Real, layout(8, 2), Slice { first: 0, tokens: 5 }, 0), Ok(None));
}

#[test]
fn logits_win_in_the_order_of_the_choice() {
    let choices = choices(Rule::Zipf(1.0), layout(16, 5), 0, 20, 3);
    for (logits, experts) in choices.routing().logits.iter().zip(&choices.experts) {
        for (row, chosen) in logits.chunks(16).zip(experts.chunks(5)) {
            let mut order: Vec<u32> = (0..16).collect();
            order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]));
            assert_eq!(order[..5], *chosen);
            assert!(
                row.iter()
                    .all(|&l| half::bf16::from_f32(l).to_f32() == l && half::f16::from_f32(l).to_f32() == l)
            );
        }
    }
}

#[test]
fn what_cannot_be_balanced_is_said() {
    let refused = |ranks, groups: Option<(usize, usize)>| {
        let groups = groups.map(|(count, used)| Groups { count, used });
        let layout = Layout { ranks, groups, ..layout(12, 4) };
        Choices::of(Rule::Balanced, layout, Slice { first: 0, tokens: 1 }, 0).unwrap_err()
    };
    assert!(refused(5, None).contains("12 on 5"));
    assert!(refused(1, Some((5, 2))).contains("5 groups"));
    assert!(refused(1, Some((6, 1))).contains("4 experts of a token do not spread over 1 of 6 groups of 2"));
    assert!(refused(1, Some((12, 6))).contains("do not spread"));
}

/// Experts, top_k, ranks, groups (count, used): sizes that go together.
fn layouts() -> impl Strategy<Value = Layout> {
    let sizes = (0_usize..5, 0_usize..4, 1_usize..5, 0_usize..3);
    (sizes, 1_usize..9, 1_usize..9, any::<bool>()).prop_filter_map(
        "sizes that go together",
        |((per, ranks, factor, groups), top_k, used, grouped)| {
            let (ranks, count) = (1 << ranks, 1 << groups);
            let experts = factor * (1 << per) * ranks.max(count);
            let groups = grouped.then_some(Groups { count, used });
            let layout = Layout { layers: 2, experts, top_k, ranks, groups };
            let fits = top_k <= experts
                && Choices::of(Rule::Balanced, layout, Slice { first: 0, tokens: 1 }, 0).is_ok();
            fits.then_some(layout)
        },
    )
}

proptest! {
    #[test]
    fn balanced_is_even_and_never_takes_an_expert_twice(layout in layouts(), tokens in 1_usize..40, first in 0_usize..50) {
        let choices = choices(Rule::Balanced, layout, first, tokens, 0);
        let groups = layout.groups.unwrap_or(Groups { count: 1, used: 1 });
        let size = layout.experts / groups.count;
        for experts in &choices.experts {
            prop_assert_eq!(experts.len(), tokens * layout.top_k);
            for token in experts.chunks(layout.top_k) {
                let mut own = token.to_vec();
                own.sort_unstable();
                own.dedup();
                prop_assert_eq!(own.len(), layout.top_k);
                own.iter_mut().for_each(|expert| *expert /= size as u32);
                own.dedup();
                prop_assert_eq!(own.len(), groups.used);
            }
        }
        for loads in choices.loads() {
            prop_assert_eq!(loads.iter().sum::<u32>() as usize, tokens * layout.top_k);
            if layout.groups.is_none() {
                prop_assert!(spread(&loads) <= 1 && spread(&sums(&loads, layout.ranks)) <= 1, "{:?}", loads);
            }
        }
    }

    /// Over as many tokens as there are experts every expert, and with it every rank and group, has the same load, wherever the
    /// tokens start in the stream.
    #[test]
    fn whole_rounds_are_exactly_even(layout in layouts(), rounds in 1_usize..3) {
        let tokens = rounds * layout.experts;
        for loads in choices(Rule::Balanced, layout, 0, tokens, 0).loads() {
            prop_assert_eq!(spread(&loads), 0, "{:?}", loads);
        }
    }

    #[test]
    fn ranks_take_their_slice_of_one_stream(layout in layouts(), s in 0.0..3.0, cut in 0_usize..20, seed: u64) {
        for rule in [Rule::Balanced, Rule::Zipf(s)] {
            let whole = choices(rule, layout, 0, 20, seed);
            let (a, b) = (choices(rule, layout, 0, cut, seed), choices(rule, layout, cut, 20 - cut, seed));
            for ((whole, a), b) in whole.experts.iter().zip(a.experts).zip(b.experts) {
                prop_assert_eq!(whole, &[a, b].concat());
            }
        }
    }

    #[test]
    fn zipf_never_takes_an_expert_twice(experts in 1_usize..40, k in 1_usize..9, s in 0.0..100.0, seed: u64) {
        let choices = choices(Rule::Zipf(s), layout(experts, k.min(experts)), 0, 30, seed);
        for token in choices.experts.iter().flat_map(|layer| layer.chunks(k.min(experts))) {
            let mut own = token.to_vec();
            own.sort_unstable();
            own.dedup();
            prop_assert_eq!(own.len(), token.len());
        }
    }
}

#[test]
fn a_token_of_grouped_top_k_reaches_all_ranks_that_it_can() {
    // DeepSeek-V3 on 2 ranks: each token has 4 of 8 groups, half of them on each rank, and half of its slots.
    let groups = Some(Groups { count: 8, used: 4 });
    let layout = Layout { layers: 1, experts: 256, top_k: 8, ranks: 2, groups };
    let choices = choices(Rule::Balanced, layout, 0, 50, 0);
    for token in choices.experts[0].chunks(8) {
        assert_eq!(token.iter().filter(|&&expert| expert < 128).count(), 4, "{token:?}");
    }
}

/// Probability of each expert's rank among the first `k` draws, by going through all orders of drawing.
fn inclusion(p: &[f64], k: usize) -> Vec<f64> {
    fn go(p: &[f64], taken: &mut Vec<usize>, k: usize, probability: f64, out: &mut [f64]) {
        if taken.len() == k {
            taken.iter().for_each(|&rank| out[rank] += probability);
            return;
        }
        let left: f64 = (0..p.len()).filter(|rank| !taken.contains(rank)).map(|rank| p[rank]).sum();
        for rank in 0..p.len() {
            if !taken.contains(&rank) {
                taken.push(rank);
                go(p, taken, k, probability * p[rank] / left, out);
                taken.pop();
            }
        }
    }
    let mut out = vec![0.0; p.len()];
    go(p, &mut Vec::new(), k, 1.0, &mut out);
    out
}

/// Pearson's statistic of counts against expected counts.
fn chi_square(found: &[f64], expected: &[f64]) -> f64 {
    found.iter().zip(expected).map(|(f, e)| (f - e) * (f - e) / e).sum()
}

#[test]
fn zipf_draws_follow_the_exact_distribution() {
    const TOKENS: usize = 20_000;
    for (s, k) in [(0.0, 2), (1.0, 1), (1.0, 3), (1.7, 2)] {
        let experts = 6;
        let weights: Vec<f64> = (1..=experts).map(|r| (r as f64).powf(-s)).collect();
        let total: f64 = weights.iter().sum();
        let p: Vec<f64> = weights.iter().map(|w| w / total).collect();
        let choices = choices(Rule::Zipf(s), layout(experts, k), 0, TOKENS, 11);
        for (layer, chosen) in choices.experts.iter().enumerate() {
            let ranks = ranks_of(11, layer, experts);
            // The first draws alone are independent: 5 degrees of freedom, 99.99 % below 25.7.
            let mut first = vec![0.0; experts];
            chosen.chunks(k).for_each(|token| first[ranks[token[0] as usize]] += 1.0);
            let expected: Vec<f64> = p.iter().map(|p| p * TOKENS as f64).collect();
            let found = chi_square(&first, &expected);
            assert!(found < 25.7, "zipf:{s}, top {k}, layer {layer}: {found}");
            // Later draws: each rank's frequency within five standard deviations of the exact one.
            let mut loads = vec![0.0; experts];
            chosen.iter().for_each(|&expert| loads[ranks[expert as usize]] += 1.0);
            for (load, q) in loads.iter().zip(inclusion(&p, k)) {
                let (mean, sd) = (q * TOKENS as f64, (TOKENS as f64 * q * (1.0 - q)).sqrt());
                assert!((load - mean).abs() < 5.0 * sd, "zipf:{s}, top {k}: {load}, {mean} ± {sd}");
            }
        }
    }
}

/// Rank of each expert, from 0.
fn ranks_of(seed: u64, layer: usize, experts: usize) -> Vec<usize> {
    let order = zipf::order(seed, layer, experts);
    let mut ranks = vec![0; experts];
    order.iter().enumerate().for_each(|(rank, &expert)| ranks[expert as usize] = rank);
    ranks
}

#[test]
fn each_layer_and_seed_has_a_permutation_of_its_own() {
    let orders: Vec<Vec<u32>> =
        (0..3).flat_map(|seed| (0..4).map(move |layer| zipf::order(seed, layer, 64))).collect();
    for (i, order) in orders.iter().enumerate() {
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..64).collect::<Vec<u32>>());
        assert!(orders[..i].iter().all(|other| other != order));
    }
    // All 6 orders of 3 experts are equally likely: 5 degrees of freedom, 99.99 % below 25.7.
    let mut counts = std::collections::BTreeMap::new();
    (0..6000).for_each(|seed| *counts.entry(zipf::order(seed, 0, 3)).or_insert(0.0) += 1.0);
    let counts: Vec<f64> = counts.into_values().collect();
    assert!(counts.len() == 6 && chi_square(&counts, &[1000.0; 6]) < 25.7, "{counts:?}");
}
