//! Threads of a rank that call at the same time, and threads that cannot start.
use candle_core::{DType, Device, Shape, Tensor};
use candle_dist::init::{InitOptions, LaunchInfo};
use candle_dist::{Cause, Collective, Error, P2pOp, ProcessGroup, RankContext, ReduceOp, Result, World};
use std::process::Command;
use std::sync::{Barrier, Mutex, mpsc};
use std::time::Duration;
use test_utils::Attacks;

type Calls = fn(&ProcessGroup, usize) -> Result<()>;

fn value(nth: usize) -> Result<Tensor> {
    Ok(Tensor::full(nth as f32, 3, &Device::Cpu)?)
}

/// Sums whose values tell the threads apart.
fn sums(group: &ProcessGroup, thread: usize) -> Result<()> {
    (0..1000).try_for_each(|_| group.all_reduce(&value(thread)?, ReduceOp::Sum).map(drop))
}

/// Runs `calls` on two threads of each of two ranks, and returns the outcome of the world with the errors of the threads.
fn two_threads(calls: Calls) -> (Result<(), String>, Vec<String>) {
    let errors = Mutex::new(Vec::new());
    let outcome = World::threads(2).timeout(Duration::from_secs(30)).run(|ctx| -> Result<()> {
        ctx.group().barrier()?;
        let both = &Barrier::new(2);
        let ended = std::thread::scope(|scope| {
            let threads = [1, 2].map(|nth| {
                scope.spawn(move || {
                    both.wait();
                    calls(ctx.group(), nth)
                })
            });
            threads.map(|thread| thread.join().expect("no panic"))
        });
        let failed = ended.iter().filter_map(|ended| ended.as_ref().err()).map(Error::to_string);
        errors.lock().unwrap().extend(failed);
        ended.into_iter().collect()
    });
    (outcome.map(drop).map_err(|error| error.to_string()), errors.into_inner().unwrap())
}

#[test]
fn threads_that_call_at_the_same_time_are_noticed() {
    let here = "tests/suite/hostile/threads.rs:";
    let kinds: [(&str, Calls); 6] = [
        ("all_reduce", sums),
        ("all_reduce, started", |g, nth| {
            (0..2000).try_for_each(|_| {
                let x = Tensor::full(nth as f32, 20_000, &Device::Cpu)?;
                g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?.wait().map(drop)
            })
        }),
        ("different calls", |g, nth| match nth {
            1 => (0..1000).try_for_each(|_| g.barrier()),
            _ => sums(g, nth),
        }),
        ("messages with one tag", |g, nth| {
            let other = 1 - g.rank();
            (0..2000).try_for_each(|_| {
                g.send(&value(nth)?, other)?;
                g.recv(3, DType::F32, other).map(drop)
            })
        }),
        ("handles with a description", |g, nth| sums(&g.with_description("x"), nth)),
        ("groups that are made", |g, _| (0..1000).try_for_each(|_| g.split(Some(0), 0).map(drop))),
    ];
    let mut attacks = Attacks::new("groups by threads that call at the same time");
    for (name, calls) in kinds {
        attacks.attack(name, || {
            // On a busy machine one thread may end before the other one begins, and then nothing is wrong.
            let tries = (0..10).map(|_| two_threads(calls));
            let noticed = tries.into_iter().find_map(|(outcome, errors)| Some((outcome.err()?, errors)));
            let (error, errors) = noticed.ok_or("not noticed")?;
            // Some threads may have ended before.
            let all_name_both = !errors.is_empty()
                && errors.iter().all(|e| {
                    // Unlike calls may meet before two of one rank do. The reports of the ranks then have both sites.
                    let says = ["made two calls on one group at the same time", "made different calls"];
                    says.iter().any(|says| e.contains(says)) && e.matches(here).count() >= 2
                });
            if all_name_both { Ok(()) } else { Err(format!("{error}; {errors:?}")) }
        });
    }
    attacks.assert();
}

/// Runs `f` in a world of three, with a thread beside each rank to which `f` hands its work.
fn handed_on(
    f: impl Fn(&RankContext, &dyn Fn(Box<dyn FnOnce() -> Result<()> + Send>) -> Result<()>) -> Result<()> + Sync,
) -> Result<(), String> {
    let ran = World::threads(3).timeout(Duration::from_secs(60)).run(|ctx| {
        std::thread::scope(|scope| {
            let (work, todo) = mpsc::channel::<Box<dyn FnOnce() -> Result<()> + Send>>();
            let (done, ended) = mpsc::channel();
            scope.spawn(move || todo.into_iter().try_for_each(|work| done.send(work())));
            f(ctx, &|job| {
                work.send(job).expect("it waits");
                ended.recv().expect("it answers")
            })
        })
    });
    ran.map(drop).map_err(|error| error.to_string())
}

#[test]
fn threads_that_take_turns_are_fine() {
    let mut attacks = Attacks::new("groups by threads that take turns");
    attacks.attack("calls in turn", || {
        handed_on(|ctx, beside| {
            for round in 0..500 {
                let group = ctx.group().clone();
                // Each rank hands on in rounds of its own.
                let call = move || {
                    let sum = group.all_reduce(&value(round)?, ReduceOp::Sum)?.to_vec1::<f32>()?;
                    assert_eq!(sum, [3.0 * round as f32; 3]);
                    Ok(())
                };
                if round % (ctx.rank() + 1) == 0 { beside(Box::new(call))? } else { call()? }
            }
            Ok(())
        })
    });
    attacks.attack(
        "a call that one thread starts and another one waits for, while the first one goes on",
        || {
            let ran = World::threads(2).timeout(Duration::from_secs(60)).run(|ctx| {
                let (start, wait) = mpsc::channel();
                std::thread::scope(|scope| {
                    let waits = scope.spawn(move || {
                        wait.into_iter().try_for_each(|(nth, pending): (usize, candle_dist::Pending)| {
                            assert_eq!(pending.wait()?.to_vec1::<f32>()?, [2.0 * nth as f32; 3]);
                            Ok::<_, Error>(())
                        })
                    });
                    for nth in 0..500 {
                        start
                            .send((
                                nth,
                                ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&value(nth)?)?,
                            ))
                            .expect("it waits");
                    }
                    drop(start);
                    waits.join().expect("no panic")
                })
            });
            ran.map(drop).map_err(|error| error.to_string())
        },
    );
    attacks.attack("threads with tags of their own", || {
        let ran = World::threads(2).timeout(Duration::from_secs(60)).run(|ctx| {
            std::thread::scope(|scope| {
                let threads = [1u32, 2, 3].map(|tag| {
                    scope.spawn(move || {
                        (0..500).try_for_each(|nth| {
                            let (g, other) = (ctx.group(), 1 - ctx.rank());
                            let receive =
                                P2pOp::Recv { shape: Shape::from(3), dtype: DType::F32, from: other, tag };
                            let sent = g
                                .call(Collective::Send { to: other, tag })
                                .start_all(std::slice::from_ref(&value(nth)?))?;
                            let got = g.batch_send_recv(&[receive])?.remove(0);
                            assert_eq!(got.to_vec1::<f32>()?, [nth as f32; 3]);
                            sent.wait().map(drop)
                        })
                    })
                });
                threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
            })
        });
        ran.map(drop).map_err(|error| error.to_string())
    });
    attacks.attack("a group for each thread", || {
        let ran = World::threads(2).timeout(Duration::from_secs(60)).run(|ctx| {
            let groups = [ctx.group().subgroup(&[0, 1])?, ctx.group().subgroup(&[0, 1])?];
            std::thread::scope(|scope| {
                let threads = [0, 1].map(|nth| {
                    let group = &groups[nth];
                    scope.spawn(move || {
                        (0..500).try_for_each(|_| {
                            let sum = group.all_reduce(&value(nth)?, ReduceOp::Sum)?.to_vec1::<f32>()?;
                            assert_eq!(sum, [2.0 * nth as f32; 3]);
                            Ok::<_, Error>(())
                        })
                    })
                });
                threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
            })
        });
        ran.map(drop).map_err(|error| error.to_string())
    });
    attacks.assert();
}

#[test]
fn a_receive_beside_a_wait_for_a_started_one_is_noticed() {
    let ran = World::threads(2).timeout(Duration::from_secs(30)).run(|ctx| -> Result<()> {
        let (group, other) = (ctx.group(), 1 - ctx.rank());
        group.barrier()?;
        std::thread::scope(|scope| {
            let (started, has_started) = mpsc::channel();
            let waits = scope.spawn(move || -> Result<()> {
                let pending = group
                    .call(Collective::Recv { from: Some(other), tag: 0 })
                    .of(3, DType::F32)
                    .start(None)?;
                // Nobody listens if the other rank has stopped the world.
                let _ = started.send(());
                pending.wait().map(drop)
            });
            let _ = has_started.recv();
            let received = group.recv(3, DType::F32, other).map(drop);
            waits.join().expect("no panic").and(received)
        })
    });
    let error = ran.unwrap_err().to_string();
    assert!(error.contains("made two calls on one group at the same time"), "{error}");
}

#[test]
fn the_cause_of_concurrent_calls_has_its_rank() {
    let failed = Mutex::new(None);
    let _ = World::threads(2).run(|ctx| -> Result<()> {
        let calls = std::thread::scope(|scope| {
            let threads = [1, 2].map(|nth| scope.spawn(move || sums(ctx.group(), nth)));
            threads.map(|thread| thread.join().expect("no panic"))
        });
        *failed.lock().unwrap() = ctx.group().failure();
        calls.into_iter().collect()
    });
    let failure = failed.into_inner().unwrap().expect("a failure");
    assert!(
        matches!(&failure.cause, Cause::Concurrent { rank: 0 | 1, sites } if sites.iter().all(|site| site.contains("threads.rs:")))
    );
}

/// What a process under limits does, by its name.
const LIMITED: &str = "CANDLE_DIST_LIMITED";

/// Runs a world under limits; see `threads_that_cannot_start`.
#[test]
fn as_limited() {
    let Ok(ranks) = std::env::var(LIMITED) else { return };
    let ran = World::threads(ranks.parse().unwrap())
        .timeout(Duration::from_secs(30))
        .run(|ctx| ctx.group().barrier());
    println!("SAYS {}", ran.map_or_else(|error| error.to_string(), |_| "fine".into()));
}

/// Returns what a world of this many ranks says in a process with these variables and under this limit of the shell.
fn says(ranks: usize, limit: &str, variables: &[(&str, &str)]) -> Result<String, String> {
    let program = std::env::current_exe().unwrap();
    let test = concat!(module_path!(), "::as_limited");
    let test = test.split_once("::").unwrap().1;
    let run = format!("{limit}; exec \"$0\" \"$@\"");
    let mut child = Command::new("sh");
    child.args(["-c", &run]).arg(program).args([test, "--exact", "--nocapture", "--test-threads", "1"]);
    let output = child.env(LIMITED, ranks.to_string()).envs(variables.iter().copied()).output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = out.lines().find_map(|line| Some(line.split_once("SAYS ")?.1.to_string()));
    said.ok_or_else(|| format!("{}: {out}{}", output.status, String::from_utf8_lossy(&output.stderr)))
}

#[test]
#[cfg(target_os = "linux")]
fn threads_that_cannot_start() {
    let mut attacks = Attacks::new("threads and numbers of ranks");
    let expect = |got: Result<String, String>, text: &str| match got {
        Ok(said) if said.contains(text) => Ok(()),
        Ok(said) | Err(said) => Err(said),
    };
    attacks.attack("enough memory for all stacks", || expect(says(4, "true", &[]), "fine"));
    // Each stack reserves 256 MiB of addresses.
    attacks.attack("too little memory for some stacks", || {
        let said = says(60, "ulimit -v 6000000", &[]);
        expect(said.clone(), "does not start: ")?;
        expect(said.clone(), "Resource temporarily unavailable")
            .or_else(|_| expect(said.clone(), "memory"))?;
        expect(said, "ulimit -u")
    });
    attacks.attack("a world of very many threads", || expect(says(usize::MAX, "true", &[]), "use 1 to 4096"));
    for name in ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"] {
        for number in ["4294967295", "18446744073709551615", "99999999999999999999"] {
            attacks.attack(format!("{name}={number}"), || {
                expect(says(2, "true", &[(name, number)]), &format!("{name} is {number}"))
            });
        }
    }
    attacks.attack("threads_per_rank", || {
        let error = World::threads(2).threads_per_rank(usize::MAX).run(|_| Ok::<_, Error>(())).unwrap_err();
        expect(Ok(error.to_string()), "threads_per_rank is")
    });
    attacks.attack("a simulated world of very many ranks", || {
        expect(
            ProcessGroup::simulated(0, usize::MAX)
                .map(|_| String::new())
                .map_err(|_| "fine".into())
                .or_else(Ok),
            "fine",
        )
    });
    for (name, number) in [
        ("WORLD_SIZE", "4294967295"),
        ("WORLD_SIZE", "18446744073709551615"),
        ("WORLD_SIZE", "99999999999999999999"),
        ("WORLD_SIZE", "-1"),
        ("RANK", "4294967295"),
        ("LOCAL_RANK", "4294967295"),
        ("LOCAL_WORLD_SIZE", "4294967295"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "0"),
    ] {
        attacks.attack(format!("{name}={number}"), || {
            let good = [
                ("RANK", "0"),
                ("WORLD_SIZE", "2"),
                ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "2"),
                ("MASTER_ADDR", "127.0.0.1"),
            ];
            let lookup = |asked: &str| match asked == name {
                true => Some(number.to_string()),
                false => good.iter().find(|(name, _)| *name == asked).map(|(_, value)| (*value).to_string()),
            };
            match LaunchInfo::resolve(&InitOptions::new(), lookup) {
                Err(Error::Init(text)) if text.contains(number) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }
    attacks.attack("an explicit world of very many ranks", || {
        match LaunchInfo::resolve(&InitOptions::explicit("127.0.0.1:29500", 0, usize::MAX), |_| None) {
            Err(Error::Init(text)) if text.contains("at most 65536") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    attacks.assert();
}
