//! What becomes of a measured case: the lines under Criterion's, its comparison, its sidecar, its place in the results.

use super::Bench;
use crate::baseline::{Configuration, Sidecar};
use crate::batch::Batch;
use crate::case::Case;
use crate::measure::limits::Surroundings;
use crate::report::results::{CaseResult, RankResult};
use crate::report::verdicts::Metric;
use crate::run::sidecar::{self, Measured, now};
use crate::run::suite::Entry;
use crate::run::verdicts::{Version, compared};
use crate::run::{Failure, backend, output, surroundings};
use crate::stats::{Latency, median};

impl Bench<'_> {
    /// Compares and saves what was measured.
    pub(super) fn keep(
        &mut self,
        (entry, case): (&Entry, &Case),
        batch: &Batch,
        configuration: Configuration,
        (measured, old): (Measured, Option<Sidecar>),
        driver: Option<String>,
    ) -> Result<(), Failure> {
        if let Some(path) = &self.cli.part.gather_into {
            self.gathered.insert(entry.id.clone(), vec![measured.run(self.cli)]);
            output::gathered(path, &self.gathered)?;
            return self.baselines.after(entry);
        }
        let runs = self.judge_and_save(entry, &configuration, driver, &measured, old.as_ref())?;
        self.targets.add(entry, &measured, median(&runs).unwrap_or(measured.latency.median));
        let tokens_per_second = self.tokens_per_second(batch, &measured.latency);
        self.metrics.push(Metric { id: entry.id.clone(), medians_us: runs, tokens_per_second });
        self.results.push(self.result(entry, case, batch, configuration, measured));
        Ok(())
    }

    /// Compares a case, and saves it unless nothing is to be saved; returns the medians of its runs in microseconds.
    fn judge_and_save(
        &mut self,
        entry: &Entry,
        configuration: &Configuration,
        driver: Option<String>,
        measured: &Measured,
        old: Option<&Sidecar>,
    ) -> Result<Vec<f64>, Failure> {
        let mut runs = self.earlier.remove(&entry.id).unwrap_or_default();
        runs.push(measured.run(self.cli));
        let medians: Vec<f64> = runs.iter().map(|run| run.median_us).collect();
        self.baselines.tell(entry, old, median(&medians).unwrap_or(measured.latency.median));
        let old_name = self.cli.compared_baseline().0;
        let compared = match old {
            Some(old) => {
                let name = self.cli.saved_baseline().unwrap_or("new");
                let commit = self.origin.commit.as_deref();
                let new = Version { name, commit, runs: &runs, profiles: &[] };
                let verdict = self.verdicts.judge(self.cli, entry, Version::of(old_name, old), new)?;
                verdict.map(|verdict| compared(old_name, old, verdict))
            }
            None => None,
        };
        if !self.cli.criterion.discard_baseline {
            let of = (self.cli, entry);
            let sidecar = self.origin.sidecar(of, configuration, driver, measured, (runs, compared));
            for baseline in [Some("new"), self.cli.saved_baseline()].into_iter().flatten() {
                self.store.write_sidecar(baseline, &sidecar)?;
            }
        }
        self.baselines.after(entry)?;
        Ok(medians)
    }

    /// The lines under Criterion's.
    pub(super) fn tell(&self, entry: &Entry, batch: &Batch, measured: &Measured) -> Result<(), Failure> {
        let limit = backend::of(self.cli)?.spread_limit_pct();
        let latency = &measured.latency;
        let rate = self.tokens_per_second(batch, latency);
        eprintln!(
            "{}: median {:.1} µs, min {:.1}, p90 {:.1} over {} replays, spread {:.2} %, {rate:.1} tok/s, checks passed",
            entry.id, latency.median, latency.min, latency.p90, latency.count, latency.sample_spread_pct
        );
        if latency.sample_spread_pct > limit {
            eprintln!(
                "warning: {}: the samples' medians spread by {:.2} %, more than {limit} %; quiet the machine or raise --iters",
                entry.id, latency.sample_spread_pct
            );
        }
        if let Some(line) = surroundings::of_ranks(measured) {
            eprintln!("{}: {line}", entry.id);
        }
        for line in surroundings::lines(&measured.around, latency.median, &measured.replays) {
            eprintln!("{}: {line}", entry.id);
        }
        Ok(())
    }

    fn result(
        &self,
        entry: &Entry,
        case: &Case,
        batch: &Batch,
        configuration: Configuration,
        measured: Measured,
    ) -> CaseResult {
        let skew_us = measured.skew_us();
        CaseResult {
            case: case.name.clone(),
            requests: case.requests.iter().map(Into::into).collect(),
            median_us: measured.latency.median,
            skew_us,
            traffic_bytes: (self.cli.layout().ranks() > 1).then_some(measured.traffic),
            id: entry.id.clone(),
            tokens_per_second: self.tokens_per_second(batch, &measured.latency),
            configuration,
            commit: self.origin.commit.clone(),
            date: now(),
            seed: self.cli.seed,
            ranks: (0..measured.ranks.len()).map(|rank| self.rank_result(rank, batch, &measured)).collect(),
        }
    }

    fn rank_result(&self, rank: usize, batch: &Batch, measured: &Measured) -> RankResult {
        let replays = &measured.ranks[rank];
        let times = crate::measure::times(replays);
        // Rank 0 has the device whose sensors were read.
        let around = if rank == 0 { measured.around.clone() } else { Surroundings::default() };
        RankResult {
            num_tokens: batch.num_tokens(),
            kv_blocks: batch.blocks_used,
            routing: measured.routing.clone(),
            expert_loads: measured.loads.get(rank).cloned(),
            num_local_tokens: batch.num_tokens(),
            num_tokens_after_padding: batch.num_tokens(),
            batch_order: batch.order.clone(),
            timing_scope: "forward",
            checks: measured.checks[rank].clone(),
            clock_mhz: sidecar::clocks(replays),
            latency_us: Latency::of(&measured.latency.timer, &times, self.cli.iters as usize),
            around,
        }
    }

    /// Of all data-parallel ranks.
    fn tokens_per_second(&self, batch: &Batch, latency: &Latency) -> f64 {
        (batch.num_tokens() as u64 * u64::from(self.cli.data_parallel_size)) as f64 / latency.median * 1e6
    }
}
