//! One rank goes wrong: every rank gets the same error, soon, and the group stays closed.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::functional::Exchange;
use candle_dist::{Cause, Error, ProcessGroup, ReduceOp, Result};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use test_utils::Ranks;

fn x(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap()
}

/// Rank `culprit` of `world` does `wrong` while the others all_reduce; returns each waiting rank's error.
fn provoke(world: usize, culprit: usize, wrong: fn(&ProcessGroup) -> Result<()>) -> Vec<(usize, Error)> {
    let (send, errors) = mpsc::channel();
    let began = Instant::now();
    let outcome = Ranks::new(world, "provoke").deadline(Duration::from_secs(20)).run(move |ctx| -> Result<()> {
        let g = ctx.group();
        let alone = g.subgroup(&[g.rank()])?;
        g.all_reduce(&x(&[3]), ReduceOp::Sum)?; // a good round first
        let error = if g.rank() == culprit { wrong(g) } else { g.all_reduce(&x(&[4, 2]), ReduceOp::Sum).map(drop) };
        let Err(error) = error else { return Ok(()) };
        // Poisoned: every later call on any group of the world says the same at once.
        for again in [g.barrier(), alone.all_reduce(&x(&[3]), ReduceOp::Sum).map(drop)] {
            assert_eq!(again.expect_err("the group is closed").to_string(), error.to_string());
        }
        assert_eq!(g.failure().expect("a failure").to_string(), error.to_string());
        send.send((g.rank(), error)).expect("the test listens");
        Ok(())
    });
    assert!(began.elapsed() < Duration::from_secs(2), "it took {:?}", began.elapsed());
    drop(outcome);
    let mut errors: Vec<_> = errors.iter().collect();
    errors.sort_by_key(|(rank, _)| *rank);
    errors
}

/// Checks that the ranks `who` all got one and the same group failure, and returns it.
fn common(errors: &[(usize, Error)], who: &[usize]) -> std::sync::Arc<candle_dist::GroupFailure> {
    assert_eq!(errors.iter().map(|(r, _)| *r).collect::<Vec<_>>(), who);
    let failures: Vec<_> = errors
        .iter()
        .map(|(_, e)| match e {
            Error::Group(failure) => failure.clone(),
            other => panic!("not a group failure: {other}"),
        })
        .collect();
    assert!(failures.iter().all(|f| f.to_string() == failures[0].to_string()), "{failures:#?}");
    failures[0].clone()
}

fn others(world: usize, culprit: usize) -> Vec<usize> {
    (0..world).filter(|&r| r != culprit).collect()
}

#[test]
fn another_op_shape_dtype_root_or_reduction_is_a_mismatch_on_every_rank() {
    type Wrong = fn(&ProcessGroup) -> Result<()>;
    let cases: [(&str, Wrong); 5] = [
        ("op", |g| g.all_gather(&x(&[4, 2]), 0).map(drop)),
        ("shape", |g| g.all_reduce(&x(&[2, 4]), ReduceOp::Sum).map(drop)),
        ("dtype", |g| g.all_reduce(&x(&[4, 2]).to_dtype(DType::F64)?, ReduceOp::Sum).map(drop)),
        ("reduction", |g| g.all_reduce(&x(&[4, 2]), ReduceOp::Max).map(drop)),
        ("op", |g| g.barrier()),
    ];
    for world in 2..=5 {
        for culprit in [0, world - 1] {
            for (field, wrong) in cases {
                let failure = common(&provoke(world, culprit, wrong), &(0..world).collect::<Vec<_>>());
                assert!(matches!(failure.cause, Cause::Mismatch { what, .. } if what == field), "{failure}");
                let text = failure.to_string();
                assert!(text.contains("failure.rs:"), "call sites are named: {text}");
                assert!((0..world).all(|r| text.contains(&format!("rank {r}: in "))), "{text}");
            }
        }
    }
}

#[test]
fn a_rank_that_returns_panics_or_fails_wakes_the_others() {
    for world in 2..=5 {
        for culprit in [0, world - 1] {
            let failure = common(&provoke(world, culprit, |_| Ok(())), &others(world, culprit));
            assert_eq!(failure.cause, Cause::Returned { rank: culprit });

            let failure = common(&provoke(world, culprit, |_| panic!("out of cheese")), &others(world, culprit));
            assert!(
                matches!(&failure.cause, Cause::Panicked { rank, message } if *rank == culprit && message == "out of cheese")
            );
        }
    }
}

#[test]
fn point_to_point_against_a_collective_is_a_deadlock_found_within_a_second() {
    let errors = provoke(3, 1, |g| g.recv(1, DType::F32, 0).map(drop));
    let failure = common(&errors, &[0, 1, 2]);
    assert_eq!(failure.cause, Cause::Deadlock);
    assert!(failure.to_string().contains("rank 1: in recv(f32[1], from 0)"), "{failure}");
}

#[test]
fn a_message_of_another_shape_or_dtype_fails_both_sides() {
    for (shape, dtype, field) in [(2, DType::F32, "shape"), (1, DType::I64, "dtype")] {
        let outcome = Ranks::new(2, "message").run(move |ctx| -> Result<()> {
            let g = ctx.group();
            if g.rank() == 0 {
                g.send(&x(&[1]), 1)?;
            } else {
                g.recv(shape, dtype, 0)?;
            }
            g.barrier()
        });
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains(&format!("{field} differs")), "{text}");
    }
}

#[test]
fn a_rank_that_stalls_times_the_others_out() {
    let (release, wait) = mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let world = candle_dist::World::local(3).timeout(Duration::from_millis(300));
    let began = Instant::now();
    let outcome = world.run(|ctx| -> Result<()> {
        if ctx.rank() == 2 {
            wait.lock().unwrap().recv().ok();
            return Ok(());
        }
        let error = ctx.group().barrier().expect_err("rank 2 stalls");
        assert!(matches!(&error, Error::Group(f) if matches!(f.cause, Cause::TimedOut { .. })), "{error}");
        assert!(error.to_string().contains("rank 2: running, no call yet"), "{error}");
        release.send(()).ok();
        Ok(())
    });
    assert!(outcome.is_ok(), "{outcome:?}");
    assert!(began.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_failure_in_one_subgroup_stops_ranks_that_wait_in_another() {
    let outcome = Ranks::new(4, "subgroups").deadline(Duration::from_secs(10)).run(|ctx| -> Result<()> {
        let g = ctx.group();
        let pair = g.split(Some((g.rank() / 2) as u32), 0)?.expect("a color");
        if g.rank() == 3 {
            panic!("gone");
        }
        pair.barrier()?;
        g.barrier()
    });
    let error = outcome.unwrap_err();
    assert_eq!((error.rank, error.message.as_str()), (3, "[subgroups] panicked: gone"));
}

#[test]
fn the_run_reports_the_first_rank_that_went_wrong() {
    for culprit in 0..3 {
        let error = candle_dist::World::local(3)
            .run(|ctx| -> Result<()> {
                if ctx.rank() == culprit {
                    return Err(Error::Unsupported("this".to_string()));
                }
                ctx.group().barrier()
            })
            .unwrap_err();
        assert_eq!(error.to_string(), format!("rank {culprit}: unsupported: this"));
    }
}

#[test]
fn a_hang_outside_of_calls_fails_at_the_deadline_and_names_the_ranks() {
    let error = Ranks::new(2, "sleepy")
        .deadline(Duration::from_millis(200))
        .run(|ctx| -> Result<()> {
            if ctx.rank() == 1 {
                std::thread::sleep(Duration::from_secs(2));
            }
            Ok(())
        })
        .unwrap_err();
    assert!(error.to_string().contains("[sleepy] ranks [1] still run"), "{error}");
}

#[test]
fn a_failure_inside_a_backward_pass_is_the_typed_one() {
    let (send, errors) = mpsc::channel();
    let outcome = Ranks::new(2, "backward").run(move |ctx| -> Result<()> {
        let v = Var::from_tensor(&x(&[2]))?;
        let loss = Exchange::to_varying().apply(&v, ctx.group())?.sum_all()?;
        if ctx.rank() == 1 {
            return Ok(()); // the other one's backward pass waits for this one's
        }
        let error = loss.backward().map(drop).unwrap_err();
        send.send(Error::from(error.context("while training"))).unwrap();
        Ok(())
    });
    assert!(outcome.is_ok());
    let Error::Group(failure) = errors.recv().unwrap() else { panic!("not the failure of a group") };
    assert_eq!(failure.cause, Cause::Returned { rank: 1 });
}

#[test]
fn a_rank_with_an_open_call_is_told_from_one_that_waits_for_it() {
    for waits in [false, true] {
        let (send, errors) = mpsc::channel();
        let _ = Ranks::new(2, "open").run(move |ctx| -> Result<()> {
            if ctx.rank() == 1 {
                return ctx.group().recv(1, DType::F32, 0).map(drop); // which never comes
            }
            let pending = ctx.group().all_reduce_start(&x(&[1]), ReduceOp::Sum)?;
            let error = if waits { pending.wait().map(drop) } else { ctx.group().recv(1, DType::F32, 1).map(drop) };
            send.send(error.unwrap_err()).unwrap();
            Ok(())
        });
        let Error::Group(failure) = errors.recv().unwrap() else { panic!("not the failure of a group") };
        let text = failure.ranks[0].to_string();
        assert!(text.starts_with(if waits { "rank 0: in all_reduce" } else { "rank 0: in recv" }), "{text}");
    }
}
