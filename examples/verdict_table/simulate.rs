//! Simulated process-level runs, and how often the verdict errs on them; shared with `tests/calibration.rs`.

use forward_bench::stats::verdict::{Rules, Run, Sides, State, Verdict, judge, overall};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal, StudentT};

/// Replays of a run, as `--iters 20 --samples 5` times them.
pub const REPLAYS: usize = 100;

/// What happens from one replay to the next, by the same law on both sides.
#[derive(Debug, Clone, Copy)]
pub enum Replays {
    /// Independent and normal, with this standard deviation in percent.
    Independent(f64),
    /// Normal with the standard deviation in percent, and this correlation from one replay to the next.
    Correlated(f64, f64),
    /// Independent with 1 %, and one in twenty takes up to five times as long.
    Outliers,
    /// Independent with 0.2 %; the clock switches between two frequencies 2 % apart every 25 replays on average.
    Switching,
    /// All alike.
    Constant,
}

/// What happens from one process to the next.
#[derive(Debug, Clone, Copy)]
pub enum Runs {
    /// Nothing.
    Alike,
    /// A normal offset with this standard deviation in percent.
    Normal(f64),
    /// An offset with Student's t of 3 degrees of freedom, times this many percent.
    HeavyTails(f64),
    /// Two levels equally often, this many percent apart, with 0.02 % around each.
    TwoLevels(f64),
    /// 0, 0.8 and 1.7 % in 50, 30 and 20 % of the runs, with 0.05 % around each: a small GEMM on an H200.
    ThreeLevels,
    /// Normal with 0.25 %, and one run in ten is slower by 5 %.
    Stragglers,
    /// Normal with 0.1 %, and the whole run has one of two clocks, this many percent apart.
    TwoClocks(f64),
}

/// A law that replays follow.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// What it is.
    pub name: &'static str,
    /// Within a run.
    pub replays: Replays,
    /// Between runs.
    pub runs: Runs,
}

/// What the issue of the verdict names, and what was seen on an H200.
pub const SCENARIOS: [Scenario; 15] = [
    scenario("independent replays, sd 1 %", Replays::Independent(1.0), Runs::Alike),
    scenario("independent replays, sd 10 %", Replays::Independent(10.0), Runs::Alike),
    scenario("AR(1) replays, ρ = 0.5, sd 3 %", Replays::Correlated(3.0, 0.5), Runs::Alike),
    scenario("AR(1) replays, ρ = 0.9, sd 1 %", Replays::Correlated(1.0, 0.9), Runs::Alike),
    scenario("AR(1) replays, ρ = 0.9, sd 10 %", Replays::Correlated(10.0, 0.9), Runs::Alike),
    scenario("outliers among replays", Replays::Outliers, Runs::Alike),
    scenario("clock switching within runs, 2 %", Replays::Switching, Runs::Normal(0.1)),
    scenario("runs offset by sd 0.25 %", Replays::Independent(0.5), Runs::Normal(0.25)),
    scenario("runs offset by sd 0.5 %", Replays::Independent(0.5), Runs::Normal(0.5)),
    scenario("runs offset by sd 1 %", Replays::Independent(0.5), Runs::Normal(1.0)),
    scenario("runs offset by 0.5 % × t(3)", Replays::Constant, Runs::HeavyTails(0.5)),
    scenario("runs on two levels, 1.7 % apart", Replays::Constant, Runs::TwoLevels(1.7)),
    scenario("runs on three levels within 1.7 %", Replays::Constant, Runs::ThreeLevels),
    scenario("runs with one of two clocks, 3 % apart", Replays::Independent(0.2), Runs::TwoClocks(3.0)),
    scenario("one run in ten slower by 5 %", Replays::Constant, Runs::Stragglers),
];

const fn scenario(name: &'static str, replays: Replays, runs: Runs) -> Scenario {
    Scenario { name, replays, runs }
}

/// Runs of so many processes on the old and the new side.
pub type Counts = (usize, usize);

/// Draws runs; the same seed draws the same.
pub struct Simulator(SmallRng);

impl Simulator {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(SmallRng::seed_from_u64(seed))
    }

    fn normal(&mut self) -> f64 {
        StandardNormal.sample(&mut self.0)
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.0.random::<f64>() < probability
    }

    /// The offset of one process in percent.
    pub fn offset(&mut self, runs: Runs) -> f64 {
        match runs {
            Runs::Alike => 0.0,
            Runs::Normal(sd) => sd * self.normal(),
            Runs::TwoClocks(_) => 0.1 * self.normal(),
            Runs::HeavyTails(scale) => scale * StudentT::new(3.0).map_or(0.0, |t| t.sample(&mut self.0)),
            Runs::TwoLevels(apart) => (if self.chance(0.5) { apart } else { 0.0 }) + 0.02 * self.normal(),
            Runs::ThreeLevels => {
                let which = self.0.random::<f64>();
                let level = if which < 0.5 {
                    0.0
                } else if which < 0.8 {
                    0.8
                } else {
                    1.7
                };
                level + 0.05 * self.normal()
            }
            Runs::Stragglers => 0.25 * self.normal() + if self.chance(0.1) { 5.0 } else { 0.0 },
        }
    }

    /// One process that replays a step of 1000 µs, changed by so many percent.
    pub fn run(&mut self, replays: Replays, offset_pct: f64) -> Run {
        let step = 1000.0 * (offset_pct / 100.0).exp();
        // Equal replays need not be many: their median is the same.
        let count = if matches!(replays, Replays::Constant) { 4 } else { REPLAYS };
        let mut run = Run { iters: 20, ..Run::default() };
        let mut last = self.normal();
        let mut fast = self.chance(0.5);
        for _ in 0..count {
            let (percent, clock) = match replays {
                Replays::Constant => (0.0, 1500.0),
                Replays::Independent(sd) => (sd * self.normal(), 1500.0),
                Replays::Correlated(sd, rho) => {
                    last = rho * last + (1.0 - rho * rho).sqrt() * self.normal();
                    (sd * last, 1500.0)
                }
                Replays::Outliers if self.chance(0.05) => (100.0 * self.0.random_range(0.1..1.6), 1500.0),
                Replays::Outliers => (self.normal(), 1500.0),
                Replays::Switching => {
                    fast ^= self.chance(1.0 / 25.0);
                    let clock: f64 = if fast { 1530.0 } else { 1500.0 };
                    (0.2 * self.normal() - 100.0 * (clock / 1500.0).ln(), clock)
                }
            };
            run.times_us.push(step * (percent / 100.0).exp());
            run.clock_mhz.push(clock);
        }
        run
    }

    /// So many processes, all changed by so many percent.
    pub fn side(&mut self, scenario: &Scenario, runs: usize, change_pct: f64) -> Vec<Run> {
        let one = |_| {
            let offset = self.offset(scenario.runs);
            let mut run = self.run(scenario.replays, offset + change_pct);
            if let Runs::TwoClocks(apart) = scenario.runs
                && self.chance(0.5)
            {
                run.times_us.iter_mut().for_each(|time| *time /= 1.0 + apart / 100.0);
                run.clock_mhz.iter_mut().for_each(|clock| *clock *= 1.0 + apart / 100.0);
            }
            run
        };
        (0..runs).map(one).collect()
    }

    /// What `trials` comparisons with a true change find.
    pub fn found(
        &mut self,
        scenario: &Scenario,
        (old, new): Counts,
        change_pct: f64,
        rules: &Rules,
        trials: u32,
    ) -> Found {
        let mut found = Found::default();
        for _ in 0..trials {
            let (old, new) = (self.side(scenario, old, 0.0), self.side(scenario, new, change_pct));
            found.count(judge(Sides { old: &old, new: &new }, rules).as_ref(), trials);
        }
        found
    }

    /// False alarms of four cases together, whose processes share an offset of 0.5 % beside each one's own of 0.25 %.
    pub fn found_overall(&mut self, counts: Counts, rules: &Rules, trials: u32) -> Found {
        let mut found = Found::default();
        for _ in 0..trials {
            let (old, new) = (self.cases(counts.0), self.cases(counts.1));
            let cases: Vec<Sides<'_>> = old.iter().zip(&new).map(|(old, new)| Sides { old, new }).collect();
            found.count(overall(&cases, rules).as_ref(), trials);
        }
        found
    }

    fn cases(&mut self, runs: usize) -> [Vec<Run>; 4] {
        let shared: Vec<f64> = (0..runs).map(|_| 0.5 * self.normal()).collect();
        std::array::from_fn(|_| {
            let one = |shared: &f64| {
                let own = 0.25 * self.normal();
                self.run(Replays::Constant, shared + own)
            };
            shared.iter().map(one).collect()
        })
    }
}

/// Shares of verdicts in percent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Found {
    /// Called slower.
    pub slower: f64,
    /// Called faster.
    pub faster: f64,
    /// Called the same.
    pub same: f64,
}

impl Found {
    /// Called slower or faster: false alarms where nothing changed.
    pub fn alarms(&self) -> f64 {
        self.slower + self.faster
    }

    /// Adds one verdict of so many.
    pub fn count(&mut self, verdict: Option<&Verdict>, of: u32) {
        let share = 100.0 / f64::from(of);
        match verdict.map(|verdict| verdict.state) {
            Some(State::Slower) => self.slower += share,
            Some(State::Faster) => self.faster += share,
            Some(State::Same) => self.same += share,
            Some(State::Ambiguous) | None => {}
        }
    }
}
