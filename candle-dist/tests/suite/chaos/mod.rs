//! Chaos: random programs of communication calls in which at most one rank fails.
//!
//! Every rank must get correct results until the program stops, and then the same error within the deadline. The world
//! must stay closed. `model` computes the possible errors. Over MPI the ranks are processes (`scripts/mpi-suites.sh`), and over NCCL they have
//! simulated GPUs (`scripts/nccl-sim.sh`).
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod model;
mod program;
mod step;

use candle_core::{DType, Device, Tensor};
use candle_dist::backend::{Backend, BackendWrapper, Call};
use candle_dist::{Cause, Error, GroupFailure, ProcessGroup, RankContext, Result, World, WorldError};
use itertools::Itertools;
use model::Model;
use program::{Act, Case, Fault};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngSeed, TestRunner};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, mpsc};
use std::time::Duration;
use step::Step;
use test_utils::{Ranks, over_mpi, over_nccl};

/// Whether ranks may be further than a round of threads lets them be: processes are, and calls to a GPU return before they are done.
fn is_loose() -> bool {
    over_mpi() || over_nccl()
}

/// The time limit of a program, including its failure.
const DEADLINE: Duration = Duration::from_secs(2);

/// The observations of one rank.
struct Seen {
    rank: usize,
    results: Vec<Option<Tensor>>,
    failure: Option<Arc<GroupFailure>>,
}

/// Makes the calls of the script until one fails. Returns the error that the script itself asks for.
fn follow(ctx: &RankContext, script: &[Act], seen: &mut Seen) -> Result<()> {
    let mut groups: HashMap<usize, ProcessGroup> = HashMap::from([(0, ctx.group().clone())]);
    for act in script {
        let (step, makes) = match act {
            Act::Call(step, makes) => (step, makes),
            Act::Pause => {
                std::thread::sleep(Duration::from_millis(3));
                continue;
            }
            Act::Return => break,
            Act::Panic => panic!("chaos"),
            Act::Fail => return Err(Error::Unsupported("chaos".to_string())),
        };
        let Some(group) = groups.get(&step.slot) else { continue };
        let mut made = None;
        match step.perform(group, &mut made) {
            Ok(result) => seen.results.push(result),
            Err(Error::Group(failure)) => {
                assert_closed(&groups, &failure);
                seen.failure = Some(failure);
                break;
            }
            Err(other) => panic!("not the failure of a group: {other}"),
        }
        if let (Some(slot), Some(group)) = (makes, made) {
            groups.insert(*slot, group);
        }
    }
    Ok(())
}

/// Checks that every later call on any group of the world returns the same failure. (A group of one rank asks nobody.)
fn assert_closed(groups: &HashMap<usize, ProcessGroup>, failure: &GroupFailure) {
    let want = failure.to_string();
    for group in groups.values().filter(|g| g.size() > 1) {
        assert_eq!(group.barrier().unwrap_err().to_string(), want);
        let next = (group.rank() + 1) % group.size();
        assert_eq!(group.recv(1, DType::F32, next).unwrap_err().to_string(), want);
        assert_eq!(group.subgroup(&[group.rank()]).unwrap_err().to_string(), want);
        assert_eq!(group.failure().unwrap().to_string(), want);
    }
}

fn values(t: &Tensor) -> (Vec<usize>, DType, Vec<f64>) {
    // candle casts no tensor without elements on a GPU.
    let flat = t
        .to_device(&Device::Cpu)
        .unwrap()
        .to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap();
    (t.dims().to_vec(), t.dtype(), flat)
}

/// Runs the case and compares it with the model. Returns the failure, if there was one.
fn check(case: &Case) -> Option<Arc<GroupFailure>> {
    let model = Model::of(case);
    let (send, seen) = mpsc::channel();
    let scripts: Vec<_> = (0..case.world).map(|rank| case.script(rank)).collect();
    // Simulated GPUs take their time.
    let deadline = if over_nccl() { DEADLINE * 10 } else { DEADLINE };
    let ranks = Ranks::new(case.world, "program").deadline(deadline);
    // Processes do not see that all of them wait: a deadlock ends with the timeout of a call.
    let ranks = if is_loose() { ranks.timeout(DEADLINE * 2) } else { ranks };
    let outcome = ranks.run(move |ctx| {
        let mut seen = Seen { rank: ctx.rank(), results: Vec::new(), failure: None };
        let ended = follow(ctx, &scripts[ctx.rank()], &mut seen);
        let text = seen.failure.as_ref().map(|failure| failure.to_string()).unwrap_or_default();
        send.send(seen).expect("the test listens");
        ended.map(|()| text)
    });
    let culprit = match &case.fault {
        Some((rank, _, Fault::Panic | Fault::Fail)) => Some(*rank),
        _ => None,
    };
    match &outcome {
        // A process that has returned gets the failure that others met later.
        Err(error) if is_loose() && culprit.is_none() => {
            let is_failure =
                !["still run after", "panicked"].iter().any(|other| error.message.contains(other));
            assert!(is_failure && !model.causes.is_empty(), "{error}");
        }
        // Neither a hang of a rank nor an assertion on another rank.
        Err(error) => assert!(Some(error.rank) == culprit && error.message.contains("chaos"), "{error}"),
        Ok(texts) => {
            assert_eq!(culprit, None);
            // Of all ranks, also of those in other processes.
            assert!(texts.iter().filter(|text| !text.is_empty()).all_equal(), "ranks disagree: {texts:#?}");
        }
    }
    let seen: Vec<Seen> = seen.iter().collect();
    for Seen { rank, results, failure } in &seen {
        let fate = &model.ranks[*rank];
        // A result that a GPU computes from an aborted call is garbage, which the failure tells.
        let compared = if over_nccl() && !model.causes.is_empty() { &[] } else { &fate.results[..] };
        for (i, (got, (step, want))) in results.iter().zip(compared).enumerate() {
            let want = want.as_ref().map(|want| values(&step.as_tensor(want).unwrap()));
            assert_eq!(got.as_ref().map(values), want, "rank {rank}, call {i}: {step:?}");
        }
        // Over MPI a rank may leave a call that others have not entered, if it needs nothing of them.
        assert!(is_loose() || results.len() <= fate.results.len(), "rank {rank} got past where it cannot");
        match failure {
            None if is_loose() && !model.causes.is_empty() => {}
            None if Some(*rank) != culprit => {
                assert!(
                    fate.finishes() && results.len() == fate.results.len(),
                    "rank {rank} stopped without a reason"
                );
            }
            None => {}
            Some(failure) => {
                let is_known = model.causes.iter().any(|known| is_same(known, &failure.cause));
                assert!(is_known, "{failure}\nbut the model says {:?}", model.causes);
            }
        }
    }
    let texts: Vec<String> = seen.iter().filter_map(|s| s.failure.as_ref()).map(|f| f.to_string()).collect();
    assert!(texts.windows(2).all(|pair| pair[0] == pair[1]), "ranks disagree: {texts:#?}");
    seen.into_iter().find_map(|s| s.failure)
}

/// Returns whether the world may stop for this cause where the model says that one.
fn is_same(model: &Cause, cause: &Cause) -> bool {
    match (model, cause) {
        // A process does not see that all of them wait. It compares its call with one other rank, which may be before all have
        // come to the round.
        (Cause::Deadlock, Cause::TimedOut { .. }) if is_loose() => true,
        (Cause::Deadlock | Cause::Returned { .. }, Cause::Mismatch { .. }) if is_loose() => true,
        (Cause::Mismatch { what: a, .. }, Cause::Mismatch { what: b, .. }) if is_loose() => a == b,
        _ => model == cause,
    }
}

/// Returns the kind of a failure, for the counts.
fn kind(failure: Option<&GroupFailure>) -> &'static str {
    match failure.map(|f| &f.cause) {
        None => "none",
        Some(Cause::Mismatch { what, .. }) => what,
        Some(Cause::Returned { .. }) => "returned",
        Some(Cause::Failed { .. }) => "failed",
        Some(Cause::Panicked { .. }) => "panicked",
        Some(Cause::Deadlock) => "deadlock",
        Some(Cause::TimedOut { .. }) if is_loose() => "deadlock",
        Some(_) => "other",
    }
}

/// Suppresses the output of panics that the test asks for.
fn hush() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if info.payload().downcast_ref() != Some(&"chaos") {
                print(info);
            }
        }));
    });
}

fn runner(cases: u32, seed: u64) -> TestRunner {
    let config = Config {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Config::default()
    };
    TestRunner::new(config)
}

#[test]
fn one_rank_goes_wrong_and_all_ranks_hear_the_same() {
    hush();
    let tally = RefCell::new(BTreeMap::<_, usize>::new());
    runner(320, 1)
        .run(&program::cases(), |case| {
            let failure = check(&case);
            *tally.borrow_mut().entry(kind(failure.as_deref())).or_default() += 1;
            Ok(())
        })
        .unwrap();
    let tally = tally.into_inner();
    // A process sees its own rank only, which is not in each world.
    for reached in ["none", "op", "dtype", "shape", step::FORM, "returned", "failed", "panicked", "deadlock"]
    {
        assert!(is_loose() || tally.contains_key(reached), "no case ended with {reached}: {tally:?}");
    }
    assert!(!tally.contains_key("other"), "{tally:?}");
}

#[test]
fn every_rank_may_end_at_every_call() {
    hush();
    for world in 2..=5 {
        let mut runner = runner(1, world as u64);
        let steps: Vec<Step> = program::programs(10..=10).new_tree(&mut runner).unwrap().current();
        for culprit in 0..world {
            for at in 0..steps.len() {
                for fault in [Fault::Return, Fault::Panic, Fault::Fail] {
                    check(&Case { world, steps: steps.clone(), fault: Some((culprit, at, fault)) });
                }
            }
        }
    }
}

/// Counts and delays the calls of a rank on all of its groups, and fails one of them.
#[derive(Debug)]
struct Faulty {
    inner: Arc<dyn Backend>,
    fault: Arc<RankFault>,
}

/// The fault of one rank.
#[derive(Debug, Default)]
struct RankFault {
    calls: AtomicUsize,
    fails_at: Option<usize>,
    delay: Duration,
}

impl BackendWrapper for Faulty {
    fn inner(&self) -> &Arc<dyn Backend> {
        &self.inner
    }

    fn around(&self, subgroup: Arc<dyn Backend>) -> Arc<dyn Backend> {
        Arc::new(Self { inner: subgroup, fault: self.fault.clone() })
    }

    fn before(&self, _: &Call) -> Result<()> {
        std::thread::sleep(self.fault.delay);
        match Some(self.fault.calls.fetch_add(1, Ordering::SeqCst)) == self.fault.fails_at {
            true => Err(Error::Unsupported("chaos".to_string())),
            false => Ok(()),
        }
    }
}

/// Runs the steps on 3 ranks with these faults. Returns the number of calls per rank, and the error.
fn run_faulty(steps: &[Step], faults: [RankFault; 3]) -> (Vec<usize>, Option<WorldError>) {
    let faults = faults.map(Arc::new);
    let given = faults.clone();
    let wrap = move |inner: Arc<dyn Backend>| {
        let fault = given[inner.rank()].clone();
        Arc::new(Faulty { inner, fault }) as Arc<dyn Backend>
    };
    let case = Case { world: 3, steps: steps.to_vec(), fault: None };
    let heard = Mutex::new(Vec::new());
    let outcome = World::threads(3).timeout(DEADLINE).wrap_backend(wrap).run(|ctx| -> Result<()> {
        let mut groups: HashMap<usize, ProcessGroup> = HashMap::from([(0, ctx.group().clone())]);
        for act in case.script(ctx.rank()) {
            let Act::Call(step, makes) = act else { continue };
            let Some(group) = groups.get(&step.slot) else { continue };
            let mut made = None;
            match step.perform(group, &mut made) {
                Ok(_) => {}
                Err(error) => {
                    if let Error::Group(failure) = &error {
                        heard.lock().unwrap().push(failure.to_string());
                    }
                    return Err(error);
                }
            }
            if let (Some(slot), Some(group)) = (makes, made) {
                groups.insert(slot, group);
            }
        }
        Ok(())
    });
    let heard = heard.into_inner().unwrap();
    assert!(heard.windows(2).all(|pair| pair[0] == pair[1]), "ranks disagree: {heard:#?}");
    assert_eq!(heard.is_empty(), outcome.is_ok());
    (faults.iter().map(|fault| fault.calls.load(Ordering::SeqCst)).collect(), outcome.err())
}

#[test]
fn a_backend_around_the_backend_may_fail_at_every_call() {
    hush();
    let mut runner = runner(1, 7);
    let steps: Vec<Step> = program::programs(12..=12).new_tree(&mut runner).unwrap().current();
    let (calls, error) = run_faulty(&steps, Default::default());
    assert!(error.is_none() && calls.iter().all(|&calls| calls >= 8), "{calls:?}");
    for culprit in 0..3 {
        for at in 0..calls[culprit] {
            let mut faults: [RankFault; 3] = Default::default();
            faults[culprit].fails_at = Some(at);
            faults[(culprit + at) % 3].delay = Duration::from_micros(200);
            let (made, error) = run_faulty(&steps, faults);
            let error = error.expect("a call has failed");
            assert!(error.rank == culprit && error.message.contains("chaos"), "{error}");
            assert_eq!(made[culprit], at + 1);
        }
    }
}
