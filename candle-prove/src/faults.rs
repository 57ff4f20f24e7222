//! Faults at the calls of a training run: every rank must end with the same one.
use super::compare::Comparison;
use super::ranks::Ranks;
use super::report::Verdict;
use super::setup::Setup;
use super::trainer::train;
use candle_dist::backend::{Backend, BackendWrapper, Call};
use candle_dist::{Error, Result, World};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The text of a fault.
const FAULT: &str = "a fault of the proof";

/// A backend that counts the calls of a rank and fails at one of them.
#[derive(Debug)]
struct FaultyBackend {
    inner: Arc<dyn Backend>,
    /// The calls of this rank on all groups so far.
    calls: Arc<AtomicUsize>,
    fails_at: Option<usize>,
}

impl BackendWrapper for FaultyBackend {
    fn inner(&self) -> &Arc<dyn Backend> {
        &self.inner
    }

    fn around(&self, subgroup: Arc<dyn Backend>) -> Arc<dyn Backend> {
        Arc::new(Self { inner: subgroup, calls: self.calls.clone(), fails_at: self.fails_at })
    }

    fn before(&self, call: &Call) -> Result<()> {
        match Some(self.calls.fetch_add(1, Ordering::Relaxed)) == self.fails_at {
            true => Err(Error::Unsupported(format!("{FAULT} at {}", call.op()))),
            false => Ok(()),
        }
    }
}

/// How a run with a fault ended: the error of each rank, and the number of calls of each.
struct FaultRun {
    errors: Vec<Option<String>>,
    calls: Vec<usize>,
    /// Why ranks did not end by themselves.
    hung: Option<String>,
}

/// Injects faults at up to `most` calls of each rank, evenly spaced. Returns the number of faults, and the first one that
/// did not end in one error on all ranks.
pub(super) fn inject(compared: &Comparison, setup: &Setup, most: usize) -> (usize, Option<Verdict>) {
    let clean = run(compared, setup, None);
    if let Some(why) = clean.hung {
        return (0, Some(Verdict::Wrong(why)));
    }
    let mut injected = 0;
    for rank in 0..setup.ranks() {
        let step = clean.calls[rank].div_ceil(most.max(1)).max(1);
        for call in (0..clean.calls[rank]).step_by(step) {
            injected += 1;
            let FaultRun { errors, hung, .. } = run(compared, setup, Some((rank, call)));
            let wrong = |why: String| {
                (injected, Some(Verdict::Wrong(format!("a fault at call {call} of rank {rank}: {why}"))))
            };
            if let Some(why) = hung {
                return wrong(why);
            }
            let told = |error: &Option<String>| error.as_ref().is_some_and(|error| error.contains(FAULT));
            if let Some(silent) = errors.iter().position(|error| !told(error)) {
                let said = errors[silent].as_deref().unwrap_or("no error");
                return wrong(format!("rank {silent} ends with {said:?}"));
            }
        }
    }
    (injected, None)
}

/// Trains in a set-up, with a fault at a call of a rank.
fn run(compared: &Comparison, setup: &Setup, fault: Option<(usize, usize)>) -> FaultRun {
    let ranks = setup.ranks();
    let calls: Vec<Arc<AtomicUsize>> = (0..ranks).map(|_| Arc::default()).collect();
    let counters = calls.clone();
    let world = World::threads(ranks).wrap_backend(move |inner| {
        let rank = inner.rank();
        let fails_at = fault.filter(|(at, _)| *at == rank).map(|(_, call)| call);
        Arc::new(FaultyBackend { inner, calls: counters[rank].clone(), fails_at })
    });
    let errors = Arc::new(Mutex::new(vec![None; ranks]));
    let (subject, at, said) = (compared.subject(), setup.clone(), errors.clone());
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => {
            return FaultRun {
                errors: Vec::new(),
                calls: Vec::new(),
                hung: Some(format!("no folder: {error}")),
            };
        }
    };
    let path = folder.path().join("saved");
    let made = Ranks::new(ranks, setup.to_string()).deadline(compared.deadline()).run_in(
        world,
        &Arc::new(move |ctx: &candle_dist::RankContext| {
            // All ranks wait for the end of the others, so that a fault in the last calls of one reaches them.
            let made = train(&subject, &at, &path, ctx).and_then(|_| Ok(ctx.group().barrier()?));
            said.lock()[ctx.rank()] = made.as_ref().err().map(ToString::to_string);
            made
        }),
    );
    let errors = errors.lock().clone();
    let hung = made.err().map(|error| error.to_string()).filter(|error| !error.contains(FAULT));
    FaultRun { errors, calls: calls.iter().map(|calls| calls.load(Ordering::Relaxed)).collect(), hung }
}
