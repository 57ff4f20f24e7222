//! The conformance suite on threads: every case on worlds of 1 to 5 ranks, every failure on worlds of 2 to 5.
//!
//! `scripts/mpi-test.sh` runs the same cases on processes.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod cases;

use cases::{Case, FAILURES};
use std::sync::{Arc, Mutex};
use test_utils::{Ranks, on_ranks, over_nccl, skip, worlds};

/// The cases that NCCL cannot pass, as the documentation of the backend says.
const NOT_OVER_NCCL: [(&str, &str); 5] = [
    ("sums in rank order, the same bits on all ranks", "the order of sums is NCCL's own"),
    ("16-bit sums accumulate in f32", "NCCL rounds each step"),
    ("values are multiplied before they are added", "refused"),
    ("min and max propagate NaN", "NaN may get lost"),
    ("messages go to given memory", "messages arrive on the GPU"),
];

fn check(list: &'static [Case]) {
    for case in list {
        if let Some((_, why)) = NOT_OVER_NCCL.iter().find(|(name, _)| over_nccl() && *name == case.name) {
            skip(&format!("{}: {why}", case.name));
            continue;
        }
        for n in worlds(case.least..=5) {
            on_ranks(n, &format!("{} on {n}", case.name), case.run);
        }
    }
}

macro_rules! groups {
    ($($name:ident),*) => {
        $(#[test]
        fn $name() {
            check(cases::$name::CASES);
        })*

        #[test]
        fn every_group_of_cases_is_run() {
            let names = [$(stringify!($name)),*];
            assert!(cases::GROUPS.iter().map(|(name, _)| *name).eq(names));
        }
    };
}
groups!(reductions, pieces, exchanges, in_place, into, started, coalesced, messages, objects, groups, arguments);

#[test]
fn failures_are_the_same_on_every_rank() {
    for failure in FAILURES {
        if over_nccl() && failure.name == "factor" {
            skip("NCCL refuses sums with factors");
            continue;
        }
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
