//! If one rank fails, every rank gets the same error soon, and the group stays closed.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::functional::Step;
use candle_dist::init::InitOptions;
use candle_dist::{
    Cause, Collective, Cut, Error, Pending, ProcessGroup, RankContext, ReduceOp, Result, World,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};
use test_utils::{Ranks, over_nccl, skip};

fn x(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap()
}

/// Rank `culprit` of `world` runs `wrong` while the others all_reduce. Returns the error of each waiting rank.
fn provoke(world: usize, culprit: usize, wrong: fn(&ProcessGroup) -> Result<()>) -> Vec<(usize, Error)> {
    let (send, errors) = mpsc::channel();
    let began = Instant::now();
    let outcome =
        Ranks::new(world, "provoke").deadline(Duration::from_secs(20)).run(move |ctx| -> Result<()> {
            let g = ctx.group();
            let alone = g.subgroup(&[g.rank()])?;
            // A good round first, from which ranks with GPUs may return while others are in it.
            let next = |_: Tensor| match g.rank() == culprit {
                true => wrong(g),
                false => g.all_reduce(&x(&[4, 2]), ReduceOp::Sum).map(drop),
            };
            let Err(error) = g.all_reduce(&x(&[3]), ReduceOp::Sum).and_then(next) else { return Ok(()) };
            // The world is closed: every later call on any of its groups returns the same error at once.
            for again in [g.barrier(), alone.all_reduce(&x(&[3]), ReduceOp::Sum).map(drop)] {
                assert_eq!(again.expect_err("the group is closed").to_string(), error.to_string());
            }
            assert_eq!(g.failure().expect("a failure").to_string(), error.to_string());
            send.send((g.rank(), error)).expect("the test listens");
            Ok(())
        });
    // Worlds with GPUs take longer to open and to end.
    let most = Duration::from_secs(if over_nccl() { 12 } else { 2 });
    assert!(began.elapsed() < most, "it took {:?}", began.elapsed());
    drop(outcome);
    let mut errors: Vec<_> = errors.iter().collect();
    errors.sort_by_key(|(rank, _)| *rank);
    errors
}

/// Checks that the ranks `who` all got the same group failure, and returns it.
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

            let failure =
                common(&provoke(world, culprit, |_| panic!("out of cheese")), &others(world, culprit));
            assert!(
                matches!(&failure.cause, Cause::Panicked { rank, message } if *rank == culprit && message == "out of cheese")
            );
        }
    }
}

#[test]
fn point_to_point_against_a_collective_is_a_deadlock_found_within_a_second() {
    if over_nccl() {
        return skip("over NCCL, ranks that wait for each other are found at the timeout");
    }
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
    let world = candle_dist::World::threads(3).timeout(Duration::from_millis(300));
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
        let error = candle_dist::World::threads(3)
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
        let loss = Step::ToVarying.apply(&v, ctx.group())?.sum_all()?;
        if ctx.rank() == 1 {
            return Ok(()); // the other one's backward pass waits for this one's
        }
        let error = loss.backward().map(drop).unwrap_err();
        send.send(Error::from(error.context("while training"))).unwrap();
        Ok(())
    });
    let Error::Group(failure) = errors.recv().unwrap() else { panic!("not the failure of a group") };
    assert_eq!(failure.cause, Cause::Returned { rank: 1 });
    match outcome {
        Ok(_) => {}
        // A world with an aborted call does not end well, though the error was handled.
        Err(error) if over_nccl() => assert!(error.message.contains("rank 1 returned"), "{error}"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_rank_with_an_open_call_is_told_from_one_that_waits_for_it() {
    if over_nccl() {
        return skip("over NCCL, a group's first call waits for all members, and is not open without them");
    }
    for waits in [false, true] {
        let (send, errors) = mpsc::channel();
        let _ = Ranks::new(2, "open").run(move |ctx| -> Result<()> {
            if ctx.rank() == 1 {
                return ctx.group().recv(1, DType::F32, 0).map(drop); // which never comes
            }
            let pending = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x(&[1]))?;
            let error =
                if waits { pending.wait().map(drop) } else { ctx.group().recv(1, DType::F32, 1).map(drop) };
            send.send(error.unwrap_err()).unwrap();
            Ok(())
        });
        let Error::Group(failure) = errors.recv().unwrap() else { panic!("not the failure of a group") };
        let text = failure.ranks[0].to_string();
        assert!(text.starts_with(if waits { "rank 0: in all_reduce" } else { "rank 0: in recv" }), "{text}");
    }
}

/// Runs two ranks with at most 4000 unread bytes; a message here has 4000.
fn small_mailboxes(
    f: impl Fn(&RankContext, &Tensor) -> Result<()> + Sync,
) -> Result<Vec<()>, candle_dist::WorldError> {
    let x = Tensor::zeros(1000, DType::F32, &Device::Cpu).unwrap();
    World::threads(2).timeout(Duration::from_secs(20)).mailbox_bytes(4000).run(|ctx| f(ctx, &x))
}

#[test]
fn a_fast_sender_waits_for_its_receiver() {
    let ahead = AtomicUsize::new(0);
    let done = small_mailboxes(|ctx, x| {
        for _ in 0..50 {
            if ctx.rank() == 0 {
                ctx.group().send(x, 1)?;
                assert!(ahead.fetch_add(1, Ordering::SeqCst) < 2, "one is unread, one may just be taken");
            } else {
                std::thread::sleep(Duration::from_micros(200));
                while ahead.load(Ordering::SeqCst) == 0 {
                    std::thread::yield_now();
                }
                ahead.fetch_sub(1, Ordering::SeqCst);
                ctx.group().recv(1000, DType::F32, 0)?;
            }
        }
        Ok(())
    });
    done.unwrap();
}

#[test]
fn full_mailboxes_on_both_sides_are_a_deadlock() {
    let began = Instant::now();
    let error = small_mailboxes(|ctx, x| {
        let other = 1 - ctx.rank();
        ctx.group().send(x, other)?;
        ctx.group().send(x, other)?;
        ctx.group().recv(1000, DType::F32, other).map(drop)
    });
    let text = error.unwrap_err().message;
    assert!(text.contains("every running rank waits") && text.contains("in send("), "{text}");
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn started_sends_pass_full_mailboxes_and_one_message_of_any_size_fits() {
    small_mailboxes(|ctx, x| {
        let (g, other) = (ctx.group(), 1 - ctx.rank());
        let large = Tensor::zeros(100_000, DType::F32, &Device::Cpu)?;
        g.send(&large, other)?;
        let first = g.call(Collective::Send { to: other, tag: 0 }).start_all(std::slice::from_ref(x))?;
        let second = g.call(Collective::Send { to: other, tag: 0 }).start_all(std::slice::from_ref(x))?;
        g.barrier()?;
        assert!(!second.is_ready()?);
        g.barrier()?;
        g.recv(100_000, DType::F32, other)?;
        g.recv(1000, DType::F32, other)?;
        g.barrier()?;
        assert!(first.is_ready()? && second.is_ready()?);
        g.recv(1000, DType::F32, other)?;
        candle_dist::Pending::wait_all([second, first]).map(drop)
    })
    .unwrap();
}

#[test]
fn sends_may_be_waited_for_before_the_receives_that_were_started() {
    small_mailboxes(|ctx, x| {
        let (g, other) = (ctx.group(), 1 - ctx.rank());
        for late in [2, 0, 1] {
            let sends = (0..3)
                .map(|tag| g.call(Collective::Send { to: other, tag }).start_all(std::slice::from_ref(x)))
                .collect::<Result<Vec<_>>>()?;
            let output = Tensor::ones(1000, DType::F32, &Device::Cpu)?;
            let into = g.call(Collective::Recv { from: Some(other), tag: 0 }).into(&output).start(None)?;
            if late == ctx.rank() {
                // Longer than the search for a deadlock takes.
                std::thread::sleep(Duration::from_millis(700));
            }
            let receives = (1..3)
                .map(|tag| {
                    g.call(Collective::Recv { from: Some(other), tag }).of(1000, DType::F32).start(None)
                })
                .collect::<Result<Vec<_>>>()?;
            Pending::wait_all(sends)?;
            let received = Pending::wait_all(receives)?;
            into.wait()?;
            for received in received.iter().chain([&output]) {
                assert_eq!(received.sum_all()?.to_scalar::<f32>()?, 0.0);
            }
            g.barrier()?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_sender_to_a_full_mailbox_hears_that_its_receiver_has_returned() {
    let error = small_mailboxes(|ctx, x| match ctx.rank() {
        0 => (0..3).try_for_each(|_| ctx.group().send(x, 1)),
        _ => Ok(()),
    });
    assert!(error.unwrap_err().message.contains("rank 1 returned"));
}

#[test]
fn a_receiver_from_any_rank_hears_that_all_have_returned() {
    let outcome = World::threads(3).timeout(Duration::from_secs(20)).run(|ctx| -> Result<()> {
        let (g, x) = (ctx.group(), Tensor::new(&[1f32], &Device::Cpu)?);
        match ctx.rank() {
            0 => {
                let receive = || g.call(Collective::Recv { from: None, tag: 0 }).of(1, DType::F32).receive();
                receive()?;
                receive().map(drop)
            }
            1 => Ok(()), // while rank 2 may still send
            _ => {
                std::thread::sleep(Duration::from_millis(200));
                g.send(&x, 0)
            }
        }
    });
    let error = outcome.unwrap_err();
    assert!(error.message.contains("returned while other ranks wait"), "{error}");
}

#[test]
fn outputs_in_memory_of_another_rank_are_one_error() {
    let shared = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
    for started in [false, true] {
        // Rank 0's input is the memory of rank 1's result, or all have the result in the same memory.
        for alias in [0, 1] {
            let texts = World::threads(2).timeout(Duration::from_secs(20)).run(|ctx| -> Result<String> {
                let own = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
                let (input, output) = match (alias, ctx.rank()) {
                    (0, 0) => (shared.narrow(0, 0, 2)?, own),
                    _ => (own.narrow(0, 0, 2)?, shared.clone()),
                };
                let made = match started {
                    false => ctx
                        .group()
                        .call(Collective::all_gather(Cut::even(0, input.dims()[0], ctx.group().size())))
                        .into(&output)
                        .run(&input)
                        .map(drop),
                    true => ctx
                        .group()
                        .call(Collective::all_gather(Cut::even(0, input.dims()[0], ctx.group().size())))
                        .into(&output)
                        .start(&input)?
                        .wait()
                        .map(drop),
                };
                Ok(made.map_or_else(|error| error.to_string(), |()| "fine".to_string()))
            });
            let texts = texts.unwrap();
            assert_eq!(texts[0], texts[1]);
            if started && alias == 0 {
                assert_eq!(texts[0], "fine", "a started call reads a copy");
                continue;
            }
            assert!(texts[0].contains("lies in the memory of an"), "{texts:?}");
        }
    }
}

#[test]
fn a_group_and_a_call_have_timeouts_of_their_own() {
    let began = Instant::now();
    let causes = Mutex::new(Vec::new());
    let outcome = World::threads(3).run(|ctx| -> Result<()> {
        let pair = match ctx.rank() {
            0 | 1 => ctx.group().with_timeout(Duration::from_millis(50))?.subgroup(&[0, 1])?,
            _ => return ctx.group().barrier(), // without a timeout, and yet it hears of it
        };
        pair.barrier()?;
        let again = ctx.group().with_timeout(Duration::from_secs(100))?;
        assert!(again.is_same(ctx.group()));
        if ctx.rank() == 1 {
            std::thread::sleep(Duration::from_millis(600));
        }
        let error = pair.all_gather(&Tensor::new(&[1f32], &Device::Cpu)?, 0).unwrap_err();
        let Error::Group(failure) = &error else { panic!("{error}") };
        causes.lock().unwrap().push(failure.cause.clone());
        Err(error)
    });
    assert!(outcome.is_err() && began.elapsed() < Duration::from_secs(20));
    let want = Cause::TimedOut { rank: 0, after: Duration::from_millis(50) };
    assert_eq!(*causes.lock().unwrap(), [want.clone(), want]);
}

#[test]
fn a_monitored_barrier_lets_all_pass_or_names_all_who_are_missing() {
    World::threads(4)
        .run(|ctx| {
            (0..5).try_for_each(|_| {
                ctx.group()
                    .call(Collective::Barrier)
                    .monitored(Duration::from_secs(20))
                    .run_all(&[])
                    .map(drop)
            })
        })
        .unwrap();
    for missing in [vec![0], vec![3], vec![1, 2], vec![1, 2, 3]] {
        let texts = Mutex::new(Vec::new());
        let outcome = World::threads(4).timeout(Duration::from_secs(20)).run(|ctx| -> Result<()> {
            ctx.group().barrier()?;
            if missing.contains(&ctx.rank()) {
                std::thread::sleep(Duration::from_millis(700));
            }
            let error = ctx
                .group()
                .call(Collective::Barrier)
                .monitored(Duration::from_millis(100))
                .run_all(&[])
                .map(drop)
                .unwrap_err();
            texts.lock().unwrap().push(error.to_string());
            Err(error)
        });
        assert!(outcome.is_err());
        let texts = texts.into_inner().unwrap();
        let names: Vec<String> = missing.iter().map(usize::to_string).collect();
        let want = format!("{} did not come to the barrier within 100ms", names.join(", "));
        assert!(texts.len() == 4 && texts.iter().all(|text| *text == texts[0]), "{texts:#?}");
        assert!(texts[0].contains(&want), "{} without {want}", texts[0]);
    }
}

#[test]
fn monitored_barriers_of_two_groups_on_two_threads_do_not_meet_each_other() {
    // Two groups of the same members; the ranks come to them in opposite orders.
    let late = AtomicUsize::new(0);
    World::threads(2)
        .run(|ctx| -> Result<()> {
            let groups = [ctx.group().subgroup(&[0, 1])?, ctx.group().subgroup(&[0, 1])?];
            ctx.group().barrier()?;
            let (late, rank) = (&late, ctx.rank());
            std::thread::scope(|scope| {
                let come = |nth: usize| {
                    let group = &groups[nth];
                    move || -> Result<()> {
                        if nth != rank {
                            std::thread::sleep(Duration::from_millis(300));
                            late.fetch_add(1 << (8 * nth), Ordering::SeqCst);
                        }
                        group
                            .call(Collective::Barrier)
                            .monitored(Duration::from_secs(20))
                            .run_all(&[])
                            .map(drop)?;
                        assert!(
                            late.load(Ordering::SeqCst) >> (8 * nth) & 0xff > 0,
                            "before the other rank came"
                        );
                        Ok(())
                    }
                };
                let threads = [0, 1].map(|nth| scope.spawn(come(nth)));
                threads.into_iter().try_for_each(|thread| thread.join().unwrap())
            })
        })
        .unwrap();
}

#[test]
fn a_monitored_barrier_waits_as_long_as_it_says_whatever_the_timeouts_of_calls() {
    World::threads(3)
        .timeout(Duration::from_millis(100))
        .run(|ctx| -> Result<()> {
            if ctx.rank() == 2 {
                std::thread::sleep(Duration::from_millis(500));
            }
            let hasty = ctx.group().with_timeout(Duration::from_millis(50))?;
            ctx.group()
                .call(Collective::Barrier)
                .monitored(Duration::from_secs(20))
                .run_all(&[])
                .map(drop)?;
            if ctx.rank() == 0 {
                std::thread::sleep(Duration::from_millis(500));
            }
            hasty.call(Collective::Barrier).monitored(Duration::from_secs(20)).run_all(&[]).map(drop)
        })
        .unwrap();
}

/// Rank 0 polls its started call while rank 1 returns. The wait then fails at once.
fn ask_of_a_deserter<T: std::fmt::Debug>(start: fn(&ProcessGroup) -> Result<Pending<T>>) {
    let ran = World::threads(2).timeout(Duration::from_secs(60)).mailbox_bytes(12).run(|ctx| -> Result<()> {
        if ctx.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
            return Ok(());
        }
        let (pending, began) = (start(ctx.group())?, Instant::now());
        assert!(!pending.is_ready()?, "rank 1 is still there");
        while !pending.is_ready()? {
            assert!(began.elapsed() < Duration::from_secs(10), "rank 1 has returned, and nothing is ready");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = pending.wait().unwrap_err();
        assert!(
            matches!(&error, Error::Group(failure) if failure.cause == Cause::Returned { rank: 1 }),
            "{error}"
        );
        assert!(began.elapsed() < Duration::from_secs(20), "the wait took {:?}", began.elapsed());
        Ok(())
    });
    ran.unwrap();
}

#[test]
fn what_waits_for_a_rank_that_has_returned_is_ready_to_fail() {
    ask_of_a_deserter(|group| {
        group.call(Collective::Recv { from: Some(1), tag: 0 }).of(3, DType::F32).start(None)
    });
    ask_of_a_deserter(|group| group.call(Collective::AllReduce(ReduceOp::Sum)).start(&x(&[3])));
    ask_of_a_deserter(|group| {
        drop(group.call(Collective::Send { to: 1, tag: 0 }).start_all(std::slice::from_ref(&x(&[3])))?);
        group.call(Collective::Send { to: 1, tag: 0 }).start_all(std::slice::from_ref(&x(&[3])))
    });
}

#[test]
fn a_bound_on_mailboxes_between_processes_is_refused() {
    let world =
        World::processes(candle_dist::init::BackendKind::Auto, InitOptions::explicit("127.0.0.1:1", 0, 1));
    let text = world.mailbox_bytes(1).into_ranks().unwrap_err().to_string();
    assert!(text.contains("unsupported") && text.contains("mailbox_bytes"), "{text}");
}
