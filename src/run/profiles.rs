//! `--profile-dir`: a second pass over the measured cases, after all timing, that traces their kernels.

use std::fs;
use std::path::{Path, PathBuf};

use super::device::{self, Loaded};
use super::progress::Progress;
use super::ranks::Crew;
use super::sidecar::now;
use super::suite::Entry;
use super::{CASE, Failure, backend, one_line};
use crate::backend::{Traced, Tracing};
use crate::baseline::{Store, write_atomically};
use crate::cli::Cli;
use crate::profile::diff::number;
use crate::profile::file::KernelsFile;
use crate::profile::names::Names;
use crate::profile::{Profile, collectives, perfetto};

/// Traced replays of a case.
const REPLAYS: u32 = 10;

/// Kernels that the console names.
const TOP: usize = 8;

fn refuse(folder: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("--profile-dir {}: {why}", folder.display()))
}

/// Makes the folder and checks that it can be written to, before an hour is spent on its contents; warns if nothing could be traced.
pub fn check(cli: &Cli, folder: &Path) -> Result<(), Failure> {
    if folder.exists() && !folder.is_dir() {
        return Err(refuse(folder, "this is no folder; name one"));
    }
    let probe = folder.join(format!(".forward-bench-{}", std::process::id()));
    let written = fs::create_dir_all(folder)
        .and_then(|()| fs::write(&probe, ""))
        .and_then(|()| fs::remove_file(&probe));
    written.map_err(|error| refuse(folder, format!("it cannot be made or written to: {error}")))?;
    if let Some(error) = backend::of(cli)?.cannot_trace() {
        eprintln!("warning: --profile-dir: no kernels will be traced: {}", one_line(&error.to_string()));
    }
    Ok(())
}

/// The second pass.
pub struct Profiles<'a> {
    cli: &'a Cli,
    store: &'a Store,
    folder: &'a Path,
    commit: Option<String>,
    loaded: Option<Loaded>,
    crew: &'a mut Crew,
    /// All cases, by whose numbers ranks know them.
    selected: &'a [&'a Entry],
    /// Why nothing was traced, told of once.
    untraced: Option<String>,
}

impl<'a> Profiles<'a> {
    /// A pass that writes to `folder`, and goes on with what is `loaded`.
    pub fn new(
        cli: &'a Cli,
        store: &'a Store,
        folder: &'a Path,
        commit: Option<String>,
        loaded: Option<Loaded>,
        (crew, selected): (&'a mut Crew, &'a [&'a Entry]),
    ) -> Self {
        Self { cli, store, folder, commit, loaded, crew, selected, untraced: None }
    }

    /// Profiles each of the measured cases; the status says whether one could not be.
    ///
    /// # Errors
    /// If a file cannot be written, or a device not be had.
    pub fn run(mut self, measured: &[&Entry]) -> Result<u8, Failure> {
        let mut status = 0;
        for entry in measured {
            match self.case(entry) {
                Ok(()) => {}
                Err(failure) if failure.status == CASE => {
                    eprintln!("error: {}: its profile: {}", entry.id, one_line(&failure.message));
                    status = CASE;
                }
                Err(failure) => return Err(failure),
            }
        }
        Ok(status)
    }

    fn case(&mut self, entry: &Entry) -> Result<(), Failure> {
        let plan = device::Plan::of(self.cli, entry)?;
        let case = self.selected.iter().position(|selected| selected.id == entry.id).unwrap_or(0);
        let (links, earlier, cli) = (self.crew.links(), self.loaded.take(), self.cli);
        let load = || Loaded::reuse(earlier, cli, &links, &entry.model, &plan.model);
        let mut loaded = self.crew.load(case, load)?;
        let tracings = self.trace((entry, case), &plan, &mut loaded);
        self.loaded = Some(loaded);
        let mut ranks = Vec::new();
        for tracing in tracings? {
            match tracing {
                Tracing::Traced(replays) => ranks.push(replays),
                Tracing::Untraced(why) => {
                    if self.untraced.as_ref() != Some(&why) {
                        eprintln!("warning: {}: no kernels were traced: {}", entry.id, one_line(&why));
                        self.untraced = Some(why);
                    }
                    return Ok(());
                }
            }
        }
        self.keep(entry, &ranks)
    }

    /// Makes the case ready again, without a warm-up, and traces its replays on all ranks.
    fn trace(
        &mut self,
        (entry, case): (&Entry, usize),
        plan: &device::Plan,
        loaded: &mut Loaded,
    ) -> Result<Vec<Tracing>, Failure> {
        let _progress = Progress::start(format!("{}: tracing its kernels", entry.id));
        let batch = loaded.batch(self.cli, entry, plan)?;
        let protocol = backend::of(self.cli)?.protocol(false).without_warm_up();
        let made = plan.route.map(|route| route.make()).transpose()?;
        let crew = &mut *self.crew;
        loaded.with_capture(&batch, made.and_then(|made| made.logits), |capture| {
            let traced = crew.capture(case).and_then(|()| {
                crew.check(capture, &protocol)?;
                crew.profile(capture, &entry.id, REPLAYS)
            });
            crew.finish()?;
            traced
        })
    }

    /// Writes each rank's files, and shows rank 0's.
    fn keep(&self, entry: &Entry, ranks: &[Vec<Traced>]) -> Result<(), Failure> {
        let mut files = Vec::new();
        for (rank, replays) in ranks.iter().enumerate() {
            let activities = replays.iter().flat_map(|replay| &replay.activities);
            let names = Names::of(activities.map(|activity| activity.name.as_str()));
            let file = KernelsFile {
                id: entry.id.clone(),
                rank,
                commit: self.commit.clone(),
                date: now(),
                device: backend::of(self.cli)?.device(),
                model: entry.model.clone(),
                replays: u32::try_from(replays.len()).unwrap_or(u32::MAX),
                profile: Profile::of(replays, &names),
            };
            self.write(&file, replays, &names)?;
            files.push(file);
        }
        self.add_to_sidecars(&files)?;
        for line in files.first().map(lines).unwrap_or_default() {
            eprintln!("{}", one_line(&line));
        }
        if let Some(line) = collectives::line(ranks) {
            eprintln!("{}: {line}", entry.id);
        }
        Ok(())
    }

    /// Writes `GROUP/MODEL/CASE.rank<r>.kernels.json` and `….trace.json.gz`; an id's parts are safe as names of folders.
    fn write(&self, file: &KernelsFile, replays: &[Traced], names: &Names) -> Result<(), Failure> {
        let path = |kind: &str| {
            PathBuf::from(format!("{}.rank{}.{kind}", self.folder.join(&file.id).display(), file.rank))
        };
        let failed = |error: &dyn std::fmt::Display| refuse(self.folder, error);
        let kernels = path("kernels.json");
        fs::create_dir_all(kernels.parent().unwrap_or(self.folder)).map_err(|error| failed(&error))?;
        write_atomically(&kernels, file.text().map_err(|error| failed(&error))?)?;
        let document = perfetto::document(file, replays, names);
        let trace = perfetto::gzipped(&document).map_err(|error| failed(&error))?;
        Ok(write_atomically(&path("trace.json.gz"), trace)?)
    }

    /// Keeps the profile with the baselines that this run saved, so that a later comparison has both sides.
    fn add_to_sidecars(&self, files: &[KernelsFile]) -> Result<(), Failure> {
        if self.cli.criterion.discard_baseline {
            return Ok(()); // `new` is an older run's again
        }
        for baseline in [Some("new"), self.cli.saved_baseline()].into_iter().flatten() {
            let Some(id) = files.first().map(|file| &file.id) else { continue };
            if let Some(mut sidecar) = self.store.sidecar(id, baseline)? {
                sidecar.profiles = files.iter().map(|file| file.profile.clone()).collect();
                self.store.write_sidecar(baseline, &sidecar)?;
            }
        }
        Ok(())
    }
}

/// What the console shows: the whole, and the kernels that take longest.
fn lines(file: &KernelsFile) -> Vec<String> {
    let Profile { span_us, busy_us, pre_forward_us, activities, kernels } = &file.profile;
    let head = format!(
        "{}: a forward traced, mean of {} replays: span {span_us:.1} µs, busy {busy_us:.1}, before it {pre_forward_us:.1}, {} kernels",
        file.id,
        file.replays,
        number(*activities)
    );
    let row = |us: f64, pct: f64, calls: f64, name: &str| {
        format!("{us:>14.2} µs {pct:>6.2} % {:>6} × {name}", number(calls))
    };
    let mut lines = vec![head];
    // A line for one more is no shorter than that one's own.
    let (top, rest) = kernels.split_at(if kernels.len() <= TOP + 1 { kernels.len() } else { TOP });
    lines.extend(top.iter().map(|kernel| row(kernel.us, kernel.pct, kernel.calls, &kernel.name)));
    if !rest.is_empty() {
        let sum = |value: fn(&crate::profile::KernelTime) -> f64| rest.iter().map(value).sum::<f64>();
        let name = format!("{} more", rest.len());
        lines.push(row(sum(|kernel| kernel.us), sum(|kernel| kernel.pct), sum(|kernel| kernel.calls), &name));
    }
    lines
}
