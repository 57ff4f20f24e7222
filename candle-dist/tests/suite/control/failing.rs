//! A world stops for one reason, and all ranks get the same error text.
use super::*;
use candle_dist::backend::Call;
use candle_dist::{Cause, Collective, Error, RankStatus};
use std::sync::Barrier;
use std::time::Instant;

#[test]
fn the_first_cause_is_everybodys_whoever_else_fails_too() {
    for size in [1, 2, 4] {
        let texts = world(size, |control| {
            let rank = control.rank();
            let error = control.fail(Cause::Failed { rank, message: format!("of {rank}") });
            assert_eq!(control.failure().unwrap().to_string(), error.to_string());
            for again in [control.get("key").map(drop), control.set("key", &[])] {
                assert_eq!(again.unwrap_err().to_string(), error.to_string(), "it stays stopped");
            }
            let entered = control.enter(0, &[0], 0, &Call::new(Collective::Barrier));
            assert_eq!(entered.unwrap_err().to_string(), error.to_string());
            error.to_string()
        });
        assert_eq!(common(&texts).lines().count(), 1 + size, "a line for each rank");
    }
}

#[test]
fn every_cause_arrives_as_it_was() {
    let causes = [
        Cause::Mismatch { rank: 1, reference: 0, what: "sizes" },
        Cause::Returned { rank: 1 },
        Cause::Failed { rank: 1, message: "no such file\nor so".into() },
        Cause::Panicked { rank: 1, message: "out of cheese".into() },
        Cause::Lost { rank: 1, how: "gone".into() },
        Cause::Deadlock,
        Cause::TimedOut { rank: 1, after: Duration::from_millis(1500) },
        Cause::Missing { ranks: vec![1, 0], after: Duration::from_millis(1500) },
        Cause::Concurrent { rank: 1, sites: ["src/a.rs:1".into(), "src/b.rs:2".into()] },
    ];
    for cause in causes {
        let heard = world(2, |control| match control.rank() {
            1 => control.fail(cause.clone()).to_string(),
            _ => {
                heard(&control);
                assert_eq!(control.failure().unwrap().cause, cause);
                control.failure().unwrap().to_string()
            }
        });
        assert!(common(&heard).starts_with(&cause.to_string()));
    }
}

#[test]
fn a_long_message_is_cut_not_lost() {
    let texts = world(2, |control| match control.rank() {
        1 => control.fail(Cause::Failed { rank: 1, message: "ä".repeat(6 << 20) }).to_string(),
        _ => heard(&control),
    });
    let text = common(&texts);
    assert!(
        text.starts_with("rank 1 failed: ä") && text.contains('…') && text.len() < 20_000,
        "{}",
        text.len()
    );
}

#[test]
fn a_wait_that_is_too_long_is_a_report_of_all_ranks() {
    let ready = Barrier::new(2);
    let texts = world_with(
        3,
        |options| options.timeout(Duration::from_millis(400)),
        |control| match control.rank() {
            1 => {
                ready.wait();
                control.get("what nobody sets").unwrap_err().to_string()
            }
            2 => {
                let entered = control.enter(4, &[0, 2], 0, &Call::new(Collective::Barrier)).unwrap();
                ready.wait();
                let text = heard(&control);
                drop(entered);
                text
            }
            _ => heard(&control),
        },
    );
    let text = common(&texts);
    assert!(text.starts_with("rank 1 waited longer than the timeout of 400ms"), "{text}");
    assert!(text.contains("rank 1: waiting for the value of \"what nobody sets\" for "), "{text}");
    assert!(
        text.contains("rank 2: in barrier at ") && text.contains("rank 0: running, no call yet"),
        "{text}"
    );
}

#[test]
fn calls_that_are_compared_time_out_too() {
    let ready = Barrier::new(2);
    let texts = world_with(
        3,
        |options| options.debug(true).timeout(Duration::from_millis(400)),
        |control| match control.rank() {
            2 => heard(&control),
            _ => {
                ready.wait();
                let error =
                    control.enter(4, &[0, 1, 2], 0, &Call::new(Collective::Barrier)).map(drop).unwrap_err();
                assert!(matches!(&error, Error::Group(f) if matches!(f.cause, Cause::TimedOut { .. })));
                error.to_string()
            }
        },
    );
    let text = common(&texts);
    assert!(text.contains("rank 0: in barrier") && text.contains("rank 1: in barrier"), "{text}");
    assert!(text.contains("rank 2: running, no call yet"), "{text}");
}

#[test]
fn rank_0_returns_early_and_a_world_that_computes_longer_than_the_timeout_is_well() {
    let timeout = Duration::from_millis(100);
    let began = Instant::now();
    let ended = world_with(
        4,
        |options| options.timeout(timeout),
        |control| {
            let rank = control.rank();
            if rank > 0 {
                std::thread::sleep(timeout * 6);
                assert!(control.failure().is_none(), "{:?}", control.failure());
                control.set(&format!("of {rank}"), &[]).unwrap();
                assert!(
                    control.get(&format!("of {}", 1 + rank % 3)).unwrap().is_empty(),
                    "values still pass rank 0"
                );
            }
            drop(control);
            began.elapsed()
        },
    );
    assert!(ended[0] >= timeout * 6, "rank 0 has stayed");
}

#[test]
fn the_timeout_still_bounds_a_call_when_rank_0_has_returned() {
    let texts = world_with(
        3,
        |options| options.timeout(Duration::from_millis(300)),
        |control| (control.rank() == 1).then(|| control.get("what nobody sets").unwrap_err().to_string()),
    );
    let text = texts[1].clone().unwrap();
    assert!(text.starts_with("rank 1 waited longer than the timeout of 300ms"), "{text}");
    assert!(text.contains("rank 0: returned"), "{text}");
}

#[test]
fn reports_are_values_too() {
    world(2, |control| {
        if control.rank() == 1 {
            return;
        }
        let entered = control.enter(0, &[0, 1], 0, &Call::new(Collective::Barrier));
        heard(&control);
        drop(entered);
        let failure = control.failure().unwrap();
        assert!(
            matches!(&failure.ranks[0].doing, RankStatus::Says(text) if text.starts_with("in barrier at "))
        );
        assert!(matches!(failure.ranks[1].doing, RankStatus::Returned));
    });
}
