//! Runs of set-ups, compared with one device.
use super::failure::{FailureSource, RankFailure, one_reason};
use super::ranks::Ranks;
use super::report::Verdict;
use super::setup::Setup;
use super::setups::has_schedule;
use super::trainer::{Subject, forward, resume, train};
use super::trajectory::Trajectory;
use super::{PIPELINE, REPLICAS};
use candle_dist::RankContext;
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The runs on one device: the first steps, and the resumed one; or why there are none.
type ReferenceRuns = Result<[Trajectory; 2], Verdict>;

/// The runs of a model, with those on one device that were made so far.
pub(super) struct Comparison {
    subject: Arc<Subject>,
    deadline: Duration,
    /// The runs on one device by their set-up.
    alone: Mutex<Vec<(String, ReferenceRuns)>>,
}

/// What all ranks of a run found, or why it has no result.
enum Outcome {
    Trained(Vec<Trajectory>),
    /// All ranks refused for this reason.
    Refused(String),
    /// An op of candle failed on a rank.
    Failed(String),
    /// Ranks returned unlike errors, hung or panicked.
    Broken(String),
}

impl Comparison {
    pub(super) fn new(subject: Arc<Subject>, deadline: Duration) -> Self {
        Self { subject, deadline, alone: Mutex::default() }
    }

    pub(super) fn subject(&self) -> Arc<Subject> {
        self.subject.clone()
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Runs a set-up and compares it with one device.
    pub(super) fn verdict(&self, setup: &Setup) -> Verdict {
        if !setup.has_rows() {
            return Verdict::Refused("a replica or a pass has no rows".into());
        }
        if !has_schedule(setup) || setup.resumed().is_some_and(|next| !has_schedule(&next)) {
            return Verdict::Refused("the schedule does not support this number of microbatches".into());
        }
        let alone = match self.alone(&setup.alone()) {
            Ok(alone) => alone,
            Err(verdict) => return verdict,
        };
        let exact = match self.alone(&setup.exact()) {
            Ok(exact) => exact,
            Err(verdict) => return verdict,
        };
        let unbounded = (alone.iter().chain(&exact)).find_map(Trajectory::unbounded);
        if let Some((name, number)) = unbounded {
            let gives = if number.is_nan() { "NaN".to_string() } else { number.to_string() };
            return Verdict::Wrong(format!(
                "one device gives {gives} in the {name}, so nothing can be compared"
            ));
        }
        let folder = match tempfile::tempdir() {
            Ok(folder) => folder,
            Err(error) => return Verdict::Wrong(format!("no folder for a checkpoint: {error}")),
        };
        let saved = folder.path().join("saved");
        let first = self.outcome(setup, &saved, false);
        let verdict = judge(first, &alone[0], &exact[0], setup);
        match (setup.resumed(), &verdict) {
            (Some(next), Verdict::Right) => {
                match judge(self.outcome(&next, &saved, true), &alone[1], &exact[1], &next) {
                    Verdict::Wrong(why) => Verdict::Wrong(format!("resumed from the checkpoint: {why}")),
                    other => other,
                }
            }
            _ => verdict,
        }
    }

    /// Returns the first op of the forward pass whose result differs from one device's, if ranks see the whole batch.
    pub(super) fn first_op(&self, setup: &Setup) -> Option<String> {
        if setup.size_of(PIPELINE) * setup.size_of(REPLICAS) * setup.passes > 1 {
            return None;
        }
        let run = |setup: &Setup| {
            let (subject, at) = (self.subject.clone(), setup.clone());
            match self.ranks(setup, move |ctx| forward(&subject, &at, ctx).map_err(RankFailure::from)) {
                Outcome::Trained(mut found) => Some(found.remove(0)),
                Outcome::Refused(_) | Outcome::Failed(_) | Outcome::Broken(_) => None,
            }
        };
        let alone = run(&setup.alone())?;
        let exact = run(&setup.exact())?;
        let found = run(setup)?.like(&alone).like(&exact);
        let dtype = setup.compute.unwrap_or(setup.dtype);
        let difference = found.difference(&alone, &exact, dtype)?;
        Some(format!("the first {} {}", difference.name, difference.reason))
    }

    fn outcome(&self, setup: &Setup, folder: &std::path::Path, resumes: bool) -> Outcome {
        let (subject, at, folder) = (self.subject.clone(), setup.clone(), folder.to_path_buf());
        self.ranks(setup, move |ctx| match resumes {
            true => resume(&subject, &at, Some(&folder), ctx).map_err(RankFailure::from),
            false => train(&subject, &at, &folder, ctx).map_err(RankFailure::from),
        })
    }

    /// Runs `f` on the ranks of a set-up.
    fn ranks(
        &self,
        setup: &Setup,
        f: impl Fn(&RankContext) -> Result<Trajectory, RankFailure> + Send + Sync + 'static,
    ) -> Outcome {
        let ranks = Ranks::new(setup.ranks(), setup.to_string()).deadline(self.deadline);
        // A rank that returns its error as a value leaves the others to find the same one.
        let found = match ranks.run(move |ctx| Ok::<_, String>(f(ctx))) {
            Ok(found) => found,
            Err(error) => return Outcome::Broken(error.to_string()),
        };
        let errors: Vec<(usize, &RankFailure)> =
            found.iter().enumerate().filter_map(|(rank, made)| Some((rank, made.as_ref().err()?))).collect();
        if errors.is_empty() {
            return Outcome::Trained(found.into_iter().flatten().collect());
        }
        if let Some((rank, failure)) =
            errors.iter().find(|(_, failure)| failure.root == FailureSource::Candle)
        {
            return Outcome::Failed(format!("rank {rank}: an op of candle fails: {failure}"));
        }
        let failures: Vec<&RankFailure> = errors.iter().map(|(_, failure)| *failure).collect();
        let is_refused =
            errors.len() == found.len() && failures.iter().all(|failure| failure.root != FailureSource::Lost);
        // Ranks may fail at unlike places for one reason.
        if let Some(reason) = one_reason(&failures).filter(|_| is_refused) {
            // What each rank was doing, if the error has it.
            let more: Vec<&str> = failures[0].text.lines().skip(1).collect();
            return Outcome::Refused([&[reason], &more[..]].concat().join("\n"));
        }
        let all = errors.iter().map(|(rank, error)| format!("rank {rank}: {error}")).collect::<Vec<_>>();
        let silent = found.len() - errors.len();
        Outcome::Broken(format!("ranks end in unlike ways, {silent} without an error:\n{}", all.join("\n")))
    }

    /// Returns the run on one device.
    fn alone(&self, setup: &Setup) -> ReferenceRuns {
        let key = format!("{setup} {:?}", setup.rounded);
        if let Some((_, known)) = self.alone.lock().iter().find(|(other, _)| *other == key) {
            return known.clone();
        }
        let one = |resumes: bool| {
            let (subject, at) = (self.subject.clone(), setup.clone());
            let made = self.ranks(setup, move |ctx| match resumes {
                true => resume(&subject, &at, None, ctx).map_err(RankFailure::from),
                false => train(&subject, &at, &PathBuf::new(), ctx).map_err(RankFailure::from),
            });
            match made {
                Outcome::Trained(mut made) => Ok(made.remove(0)),
                // candle lacks ops in 16 bits on some devices.
                Outcome::Refused(why) | Outcome::Failed(why) if setup.has_16_bits() => {
                    Err(Verdict::Refused(format!("one device: {why}")))
                }
                Outcome::Refused(why) | Outcome::Failed(why) | Outcome::Broken(why) => {
                    Err(Verdict::Wrong(format!("one device: {why}")))
                }
            }
        };
        let made = one(false).and_then(|first| Ok([first, one(true)?]));
        self.alone.lock().push((key, made.clone()));
        made
    }
}

/// Compares what the ranks found with one device.
fn judge(outcome: Outcome, alone: &Trajectory, exact: &Trajectory, setup: &Setup) -> Verdict {
    let found = match outcome {
        Outcome::Trained(found) => found,
        Outcome::Refused(why) => return Verdict::Refused(why),
        Outcome::Failed(why) | Outcome::Broken(why) => return Verdict::Wrong(why),
    };
    let dtype = setup.compute.unwrap_or(setup.dtype);
    for (rank, found) in found.iter().enumerate() {
        if let Some(difference) = found.difference(alone, exact, dtype) {
            return Verdict::Wrong(format!("rank {rank}: the {} {}", difference.name, difference.reason));
        }
    }
    // A rank may lack what other stages compute; together they have all.
    match alone.names().find(|name| !found.iter().any(|found| found.names().any(|other| other == *name))) {
        Some(name) => Verdict::Wrong(format!("the {name} is missing on all ranks")),
        None => Verdict::Right,
    }
}
