//! The conformance suite on threads: every case on worlds of 1 to 5 ranks, every failure on worlds of 2 to 5; over NCCL,
//! on as many ranks as there are GPUs.
//!
//! `scripts/mpi-test.sh` runs the same cases on processes.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_dist::testing::{FAILURES, GROUPS, LACKS, lack};
use std::sync::{Arc, Mutex};
use test_utils::{Ranks, backend_name, on_ranks, skip, worlds};

/// Returns whether the backend cannot pass a case, which is then reported as skipped.
fn is_lacking(name: &str) -> bool {
    let why = lack(backend_name(), name);
    why.inspect(|why| skip(&format!("{name}: {why}"))).is_some()
}

fn check(group: &str) {
    let (_, cases) = GROUPS.iter().find(|(name, _)| *name == group).unwrap();
    for case in cases.iter().filter(|case| !is_lacking(case.name)) {
        for n in worlds(case.least..=5) {
            on_ranks(n, &format!("{} on {n}", case.name), case.run);
        }
    }
}

macro_rules! groups {
    ($($name:ident),*) => {
        $(#[test]
        fn $name() {
            check(stringify!($name));
        })*

        #[test]
        fn every_group_of_cases_is_run() {
            let names = [$(stringify!($name)),*];
            assert!(GROUPS.iter().map(|(name, _)| *name).eq(names));
        }
    };
}
groups!(
    reductions, pieces, exchanges, in_place, into, started, coalesced, messages, objects, groups, arguments
);

#[test]
fn failures_are_the_same_on_every_rank() {
    for failure in FAILURES.iter().filter(|failure| !is_lacking(failure.name)) {
        for n in worlds(2..=5) {
            let errors: Arc<Mutex<Vec<String>>> = Arc::default();
            let heard = errors.clone();
            let outcome = Ranks::new(n, failure.name).run(move |ctx| -> candle_dist::Result<()> {
                let error = (failure.run)(ctx).expect_err("something is wrong");
                // Every later call returns the same error at once.
                assert_eq!(ctx.group().barrier().unwrap_err().to_string(), error.to_string());
                heard.lock().unwrap().push(error.to_string());
                Err(error)
            });
            assert!(outcome.is_err());
            let errors = errors.lock().unwrap();
            assert_eq!(errors.len(), n - usize::from(failure.silent), "{}: {errors:?}", failure.name);
            for error in &*errors {
                assert!(error == &errors[0] && error.contains(failure.text), "{}: {error}", failure.name);
            }
        }
    }
}

/// The parts that cases leave out by themselves are counted as skipped here; whole cases are where they are skipped.
#[test]
fn what_the_backend_lacks_is_a_case_or_reported_as_a_part() {
    let cases = GROUPS.iter().flat_map(|(_, cases)| cases.iter().map(|case| case.name));
    let names: Vec<&str> = cases.chain(FAILURES.iter().map(|failure| failure.name)).collect();
    let of_backend = LACKS.iter().filter(|lack| lack.backend == backend_name());
    for part in of_backend.filter(|lack| !names.contains(&lack.what)) {
        skip(&format!("{}: {}", part.what, part.why));
    }
    let whole = LACKS.iter().filter(|lack| names.contains(&lack.what)).count();
    assert_eq!((whole, LACKS.len()), (2, 6), "a name in LACKS is none of a case or failure any more");
}
