//! The rule, state by state, and the intervals against SciPy's. How often it errs is the matter of `tests/calibration.rs`.

use super::*;

const RULES: Rules = Rules { tolerance_pct: 1.0, single_run_noise_pct: 2.0 };

fn run(times: &[f64]) -> Run {
    Run { times_us: times.to_vec(), clock_mhz: Vec::new(), iters: 20 }
}

/// Runs of one replay each.
fn runs(times: &[f64]) -> Vec<Run> {
    times.iter().map(|&time| run(&[time])).collect()
}

fn clocked(times: &[f64], clocks: &[f64]) -> Vec<Run> {
    times.iter().zip(clocks).map(|(&time, &clock)| Run { clock_mhz: vec![clock], ..run(&[time]) }).collect()
}

fn verdict(old: &[Run], new: &[Run]) -> Verdict {
    judge(Sides { old, new }, &RULES).expect("both sides have replays")
}

fn assert_effect(found: Effect, expected: [f64; 3]) {
    for (found, expected) in [found.pct, found.low, found.high].into_iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{found} for {expected}");
    }
}

const OLD: [f64; 5] = [100.0, 100.4, 99.8, 100.1, 99.9];
const NEW: [f64; 5] = [101.5, 101.2, 101.9, 101.4, 101.0];

// SciPy 1.17.1, in percent: np.expm1 of the difference of the means of np.log(...) and of the ends of
// stats.ttest_ind(new, old, equal_var=False).confidence_interval(0.99).
#[test]
fn five_runs_a_side_have_welchs_interval() {
    let verdict = verdict(&runs(&OLD), &runs(&NEW));
    assert_effect(verdict.time, [1.359_217_60, 0.720_548_50, 2.001_936_51]);
    assert!((verdict.noise_pct - 0.634_069).abs() < 1e-4, "{}", verdict.noise_pct);
    assert_eq!((verdict.state, verdict.margin_pct, verdict.runs), (State::Slower, 1.0, (5, 5)));
}

// The same with equal_var=True and confidence_interval(0.995), which is the wider one here: Welch's is [−1.405, +4.251].
#[test]
fn unlike_numbers_of_runs_have_the_wider_interval() {
    let verdict = verdict(&runs(&[100.0, 100.4, 99.8, 100.1, 99.9, 103.0, 97.0]), &runs(&NEW));
    assert_effect(verdict.time, [1.383_778_65, -1.480_744_22, 4.331_589_72]);
}

// equal_var=True, confidence_interval(0.99).
#[test]
fn few_runs_have_the_pooled_interval_and_the_assumed_noise() {
    let verdict = verdict(&runs(&[100.0, 100.4, 99.8]), &runs(&[101.5, 101.2]));
    assert_effect(verdict.time, [1.282_681_90, -0.201_797_94, 2.789_243_11]);
    assert_eq!((verdict.noise_pct, verdict.state), (2.0, State::Ambiguous));
    assert_eq!(verdict.why.as_deref(), Some("fewer than 5 runs a side, for which a noise of 2 % is assumed"));
}

// A prediction interval: stats.t.ppf(0.995, 3) * np.log(old).std(ddof=1) * np.sqrt(1 + 1/4) around the difference.
#[test]
fn one_run_is_held_against_the_scatter_of_several() {
    let verdict = verdict(&runs(&[100.0, 100.4, 99.8, 100.1]), &runs(&[101.5]));
    assert_effect(verdict.time, [1.424_169_30, -0.216_437_55, 3.091_750_43]);
}

// Half the length of stats.ttest_ind(new, old, equal_var=False).confidence_interval(0.995), where old and new are np.log of
// the medians of blocks of two replays, around the difference of the logarithms of np.median over all replays.
#[test]
fn one_run_a_side_has_the_interval_of_its_blocks() {
    let old = [run(&[100.0, 101.0, 102.0, 100.0, 99.0, 101.0, 103.0, 102.0])];
    let new = [run(&[104.0, 105.0, 103.0, 104.0, 106.0, 105.0, 104.0, 107.0])];
    let verdict = verdict(&old, &new);
    assert_effect(verdict.time, [3.465_346_53, 0.339_546_89, 6.688_521_77]);
    assert_eq!((verdict.runs, verdict.state), ((1, 1), State::Slower));
}

#[test]
fn one_replay_a_side_is_as_sure_as_the_assumed_noise() {
    let told = |new: f64| verdict(&runs(&[100.0]), &runs(&[new]));
    assert_effect(told(100.0).time, [0.0, -100.0 * 2.0 / 102.0, 2.0]);
    assert_eq!(told(100.0).state, State::Same);
    assert_eq!(told(101.9).state, State::Ambiguous);
    assert_eq!(told(102.1).state, State::Slower);
    assert_eq!(told(97.9).state, State::Faster);
}

#[test]
fn all_four_states_of_several_runs() {
    let scaled = |factor: f64| runs(&OLD.map(|time| time * factor));
    let told = |factor: f64| verdict(&runs(&OLD), &scaled(factor));
    assert_eq!(told(0.98).state, State::Faster);
    assert_eq!(told(1.02).state, State::Slower);
    assert_eq!(told(1.0).state, State::Same);
    assert_eq!(told(0.998).state, State::Same);
    let near = told(1.008);
    assert_eq!(
        (near.state, near.why.as_deref()),
        (State::Ambiguous, Some("the change is about as large as the margin"))
    );
    let noisy =
        verdict(&runs(&[100.0, 103.0, 97.0, 101.0, 99.0]), &runs(&[102.0, 98.0, 100.0, 104.0, 100.0]));
    assert_eq!(noisy.margin_pct, noisy.noise_pct);
    let why = noisy.why.unwrap_or_default();
    assert!(why.ends_with("% is more than the tolerance of 1 %: more runs would tell"), "{why}");
}

#[test]
fn what_only_time_shows_is_the_clocks() {
    let old = clocked(&OLD, &[1500.0; 5]);
    let slower = OLD.map(|time| time * 1.05);
    let same_cycles = verdict(&old, &clocked(&slower, &[1500.0 / 1.05; 5]));
    assert_eq!((same_cycles.state, same_cycles.why.as_deref()), (State::Ambiguous, Some("clock")));
    let same_clock = verdict(&old, &clocked(&slower, &[1500.0; 5]));
    assert_eq!((same_clock.state, same_clock.why), (State::Slower, None));
    let third = verdict(&old, &clocked(&slower, &[1500.0 / 1.033; 5]));
    assert_eq!(third.why.as_deref(), Some("clock"), "{:?} is less than half", third.cycles);
    let other_way = verdict(&old, &clocked(&slower, &[1500.0 / 1.1; 5]));
    assert_eq!(other_way.why.as_deref(), Some("clock"), "{:?} is the other way", other_way.cycles);
    let no_clock = verdict(&old, &runs(&slower));
    assert_eq!((no_clock.state, no_clock.cycles), (State::Slower, None));
}

#[test]
fn a_run_without_clocks_switches_cycles_off() {
    let mut new = clocked(&OLD, &[1500.0; 5]);
    new[3].clock_mhz.clear();
    assert_eq!(verdict(&clocked(&OLD, &[1500.0; 5]), &new).cycles, None);
    new[3].clock_mhz = vec![f64::NAN];
    assert_eq!(verdict(&clocked(&OLD, &[1500.0; 5]), &new).cycles, None);
}

#[test]
fn cases_of_a_process_share_its_offset() {
    // Each process moves both cases alike, one up and the other down: their product does not scatter at all.
    let up = [1.0, 1.03, 0.98, 1.01, 0.99];
    let side = |change: f64| {
        let first = runs(&up.map(|offset| 100.0 * offset));
        (first, runs(&up.map(|offset| 50.0 * change / offset)))
    };
    let (old, new) = (side(1.0), side(1.0404));
    let cases = [Sides { old: &old.0, new: &new.0 }, Sides { old: &old.1, new: &new.1 }];
    let told = overall(&cases, &RULES).expect("replays");
    assert_effect(told.time, [2.0, 2.0, 2.0]);
    assert_eq!(told.state, State::Slower);
    let shorter = [Sides { old: &old.0[..3], new: &new.0 }, cases[1]];
    assert_eq!(overall(&shorter, &RULES).expect("replays").runs, (3, 5));
}

#[test]
fn nothing_that_is_fed_panics() {
    let odd = [
        vec![],
        vec![run(&[])],
        vec![run(&[f64::NAN, 0.0, -1.0, f64::INFINITY])],
        runs(&[1.0]),
        vec![run(&[1.0, f64::NAN, 2.0])],
        vec![run(&[f64::MIN_POSITIVE; 100]), run(&[f64::MAX; 3])],
        clocked(&[1.0, 2.0], &[f64::NAN, 0.0]),
        vec![Run { clock_mhz: vec![1.0; 7], ..run(&[1.0; 5]) }; 6],
        vec![
            run(&[f64::MIN_POSITIVE]),
            run(&[f64::MAX]),
            run(&[1.0]),
            run(&[1.0]),
            run(&[]),
            run(&[2.0]),
            run(&[3.0]),
        ],
    ];
    let usable =
        |runs: &[Run]| runs.iter().flat_map(|run| &run.times_us).any(|&time| time > 0.0 && time.is_finite());
    for rules in [RULES, Rules { tolerance_pct: f64::NAN, single_run_noise_pct: -3.0 }] {
        for (old, new) in odd.iter().flat_map(|old| odd.iter().map(move |new| (old, new))) {
            let verdict = judge(Sides { old, new }, &rules);
            assert_eq!(verdict.is_some(), usable(old) && usable(new), "{old:?} {new:?}");
            if let Some(verdict) = verdict {
                assert!(!verdict.line().is_empty());
                assert_eq!(verdict.why.is_some(), verdict.state == State::Ambiguous);
            }
        }
    }
    assert_eq!(overall(&[], &RULES), None);
}

#[test]
fn lines_say_all_of_it() {
    let old = clocked(&OLD, &[1500.0; 5]);
    assert_eq!(
        verdict(&old, &clocked(&NEW, &[1499.0; 5])).line(),
        "slower: +1.36 % [+0.72, +2.00] in time, +1.29 % in cycles; margin 1 %, noise 0.63 %, 5 and 5 runs"
    );
    assert_eq!(
        verdict(&runs(&[100.0]), &runs(&[101.9])).line(),
        "ambiguous (fewer than 5 runs a side, for which a noise of 2 % is assumed): +1.90 % [-0.10, +3.94] in time; \
         margin 2 %, noise 2 %, 1 and 1 runs"
    );
    assert_eq!(
        verdict(&runs(&OLD), &runs(&OLD)).line().split(';').next(),
        Some("same: +0.00 % [-0.49, +0.49] in time")
    );
}

/// From processes on a GPU whose clock swings: the interval is exactly as wide as the noise, so nothing is known to be the same.
#[test]
fn an_interval_as_wide_as_the_noise_shows_nothing() {
    let effect = |pct, low, high| Effect { pct, low, high };
    assert_eq!(state(&effect(-0.11, -6.48, 6.70), 6.82, 1.0), State::Ambiguous);
    assert_eq!(state(&effect(0.0, -95.4, 2062.0), 2062.0, 1.0), State::Ambiguous);
    assert_eq!(state(&effect(0.07, -0.06, 0.20), 1.0, 1.0), State::Same);
    assert_eq!(state(&effect(-99.88, -99.95, -99.71), 137.91, 1.0), State::Faster);
}
