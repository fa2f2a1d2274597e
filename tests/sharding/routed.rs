//! Routing that is made, over ranks: every token goes where one rank would send it, and the rows that experts compute add up.

use forward_bench::backend::{Capture, Weights};
use forward_bench::measure::loads::{self, ExpertLoads, Wanted};
use forward_bench::model::cost::Reached;
use forward_bench::model::routing::{Layout, RankRouting, Rule};

use super::*;

const TOKENS: usize = 21;
const CASE: &str = "a=5*1@30,16";

fn routing(config: &ModelConfig, place: Place, rule: Rule) -> RankRouting {
    let layout = Layout::of(config, place.layout).unwrap();
    RankRouting { rule, layout, place, tokens: TOKENS, seed: 3 }
}

/// Each rank's output and loads, checked against what its routing asks of it.
fn routed(config: &ModelConfig, spread: Spread, rule: Rule) -> Vec<(Vec<f32>, Vec<ExpertLoads>)> {
    ranks::on_ranks(spread.layout, |place, communicator| {
        let model = model(config, place, spread.all2all);
        let mut device = device(&model, &Weights::Dummy { seed: 5 });
        device.set_communicator(communicator).unwrap();
        let routing = routing(config, place, rule);
        let logits = routing.own().unwrap().unwrap().routing();
        let wanted = Wanted::Exactly(routing.loads().unwrap().unwrap());
        let batch = steps::batch(&model, CASE, place.data());
        steps::step((&model, &mut device), &batch, Some(logits), |capture| {
            loads::check(capture, &wanted).unwrap()
        })
    })
}

/// What one rank with the tokens of a data-parallel rank computes.
fn alone(config: &ModelConfig, rule: Rule, place: Place) -> Vec<f32> {
    let one = model(config, Place::ONE, All2All::default());
    let mut device = device(&one, &Weights::Dummy { seed: 5 });
    let logits = routing(config, place, rule).own().unwrap().unwrap().routing();
    let batch = steps::batch(&one, CASE, place.data());
    steps::step((&one, &mut device), &batch, Some(logits), |_| ()).0
}

const SPREADS: [Spread; 7] = [
    spread(1, 2, false),
    spread(1, 2, true),
    spread(2, 1, false),
    spread(2, 1, true),
    spread(2, 2, false),
    spread(2, 2, true),
    sent(4),
];

#[test]
fn made_routings_reach_the_experts_of_all_ranks() {
    for name in ["qwen3-moe-tiny", "gpt-oss-tiny"] {
        let config = config(name, None);
        for spread in SPREADS {
            for rule in [Rule::Balanced, Rule::Zipf(1.5)] {
                let found = routed(&config, spread, rule);
                for (place, (output, _)) in spread.layout.places().zip(&found) {
                    let distance = relative_rms(output, &alone(&config, rule, place));
                    assert!(distance <= TOLERANCE, "{name} {spread:?} {rule} {place:?}: {distance}");
                }
                // Together: what the routing of all tokens asks, and nothing twice.
                let first = routing(&config, Place { layout: spread.layout, rank: 0 }, rule);
                let wanted = Wanted::Exactly(first.all().unwrap().unwrap().loads());
                let loads: Vec<Vec<ExpertLoads>> = found.into_iter().map(|(_, loads)| loads).collect();
                let whole = loads::whole(spread.layout, &loads, &wanted).unwrap();
                let top_k = config.experts.as_ref().unwrap().top_k;
                let rows = (TOKENS * spread.layout.data * top_k) as u32;
                assert!(whole.iter().all(|layer| layer.counts.iter().sum::<u32>() == rows));
            }
        }
    }
}

#[test]
fn balanced_ranks_get_equally_many_rows() {
    let config = config("qwen3-moe-tiny", None);
    for spread in [spread(1, 4, true), spread(2, 2, true), sent(4)] {
        let rows: Vec<u64> = spread
            .layout
            .places()
            .map(|place| {
                let routing = routing(&config, place, Rule::Balanced);
                let loads = routing.loads().unwrap().unwrap();
                assert_eq!(routing.reached(4096), Reached::of(&loads), "{place:?}");
                loads[0].iter().map(|load| u64::from(*load)).sum()
            })
            .collect();
        let (least, most) = (rows.iter().min().unwrap(), rows.iter().max().unwrap());
        assert!(most - least <= 1, "{spread:?}: {rows:?}");
    }
}

#[test]
fn what_a_zipf_reaches_is_each_ranks_own() {
    let config = config("qwen3-moe-tiny", None);
    let layout = spread(2, 2, true).layout;
    let of = |place| routing(&config, place, Rule::Zipf(2.0));
    let hits: Vec<Reached> = layout.places().map(|place| of(place).reached(4096)).collect();
    assert!(hits.iter().any(|hit| *hit != hits[0]), "{hits:?}");
    // More tokens than a step may have are not drawn.
    assert_eq!(of(Place { layout, rank: 0 }).reached(20), Reached::Expected);
}

#[test]
fn loads_that_do_not_add_up_are_an_error() {
    let config = config("qwen3-moe-tiny", None);
    let check = |spread: Spread, change: &dyn Fn(&mut Vec<Vec<ExpertLoads>>)| {
        let found = routed(&config, spread, Rule::Balanced);
        let mut loads: Vec<Vec<ExpertLoads>> = found.into_iter().map(|(_, loads)| loads).collect();
        change(&mut loads);
        let first = routing(&config, Place { layout: spread.layout, rank: 0 }, Rule::Balanced);
        let wanted = Wanted::Exactly(first.all().unwrap().unwrap().loads());
        loads::whole(spread.layout, &loads, &wanted).map(drop).map_err(|error| error.to_string())
    };
    for spread in [spread(2, 1, true), spread(2, 1, false)] {
        assert_eq!(check(spread, &|_| ()), Ok(()));
        let error = check(spread, &|loads| loads[1][1].counts[2] += 1).unwrap_err();
        assert!(error.contains("MoE layer 1 computed"), "{error}");
        let error = check(spread, &|loads| drop(loads.pop())).unwrap_err();
        assert!(error.contains("1 ranks counted rows of experts, not 2"), "{error}");
        let error = check(spread, &|loads| drop(loads[1].pop())).unwrap_err();
        assert!(error.contains("1 layers of rank 1 have experts, not 2"), "{error}");
    }
}

#[test]
fn gates_that_decide_are_checked_as_far_as_a_rank_can() {
    let config = config("qwen3-moe-tiny", None);
    let spread = spread(2, 1, true);
    let rows = (2 * TOKENS * 2) as u64;
    let loads = ranks::on_ranks(spread.layout, |place, communicator| {
        let model = model(&config, place, spread.all2all);
        let mut device = device(&model, &Weights::Dummy { seed: 5 });
        device.set_communicator(communicator).unwrap();
        let batch = steps::batch(&model, CASE, place.data());
        let look = |capture: &mut dyn Capture| {
            assert!(loads::check(capture, &Wanted::AtMost { layers: 2, rows: 5 }).is_err());
            loads::check(capture, &Wanted::AtMost { layers: 2, rows }).unwrap()
        };
        steps::step((&model, &mut device), &batch, None, look).1
    });
    assert!(loads::whole(spread.layout, &loads, &Wanted::InAll { layers: 2, rows }).is_ok());
    assert!(loads::whole(spread.layout, &loads, &Wanted::InAll { layers: 2, rows: rows + 1 }).is_err());
}
