//! Worlds of real processes: if one fails, all others get the same error.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
#![cfg(unix)]
mod hostile;
mod hosts;
mod job;
mod stalls;
mod store;
mod store_backend;

use candle_core::{Device, Tensor};
use candle_dist::control::Control;
use candle_dist::init::{InitOptions, init_process_group_with};
use candle_dist::switch::Switch;
use candle_dist::{Error, RankContext, ReduceOp, Result, World};
use job::{Outcome, assert_fine, finish, say, start, torchrun};
use std::process::Command;
use std::sync::Mutex;
use std::thread::sleep;
use std::time::Duration;
use store_backend::StoreBackend;

/// Longer than any test.
const FOREVER: Duration = Duration::from_secs(50);

/// How one rank fails while the others wait for it, with the options of all ranks and the cause that they get.
struct Scenario {
    name: &'static str,
    options: fn(InitOptions) -> InitOptions,
    wrong: fn(&RankContext) -> Result<()>,
    cause: &'static str,
}

fn signal(name: &str) {
    let done = Command::new("kill").args([name, &std::process::id().to_string()]).status().unwrap();
    assert!(done.success());
    sleep(FOREVER);
}

/// Stops this process for some seconds.
fn freeze(seconds: &str) {
    let script = format!("kill -STOP {0}; sleep {seconds}; kill -CONT {0}", std::process::id());
    let mut waker = Command::new("sh").args(["-c", &script]).spawn().unwrap();
    sleep(Duration::from_millis(300));
    waker.wait().unwrap();
}

/// The scenario in which a rank works alone after the others have returned, and is killed.
const DIES_ALONE: &str = "dies alone";
/// The scenario in which a rank waits for nobody after the others have returned.
const WAITS_ALONE: &str = "waits alone";
/// The scenario in which a rank is frozen until others count it as lost, and then wakes; with its seconds of sleep.
const WAKES: [&str; 2] = ["wakes after 1.4", "wakes after 4"];

/// The scenario in which a rank dies between its goodbye and its end.
const DIES_LATE: &str = "dies late";

/// The scenario in which ranks say which of the variables hold that change what they send.
const SWITCHES: &str = "switches";

/// What ranks do after their goodbyes: one dies, and the others wait for the failure.
fn die_late(control: &Control) -> Result<()> {
    if std::env::var("SCENARIO").unwrap().ends_with(&format!("/{}", control.rank())) {
        // The others have said goodbye too.
        sleep(Duration::from_millis(500));
        signal("-KILL");
    }
    for _ in 0..3000 {
        if let Some(failure) = control.failure() {
            return Err(Error::Group(failure));
        }
        sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn sum(ctx: &RankContext, len: usize) -> Result<Vec<f32>> {
    let mine = Tensor::full(1f32 + ctx.rank() as f32, len, &Device::Cpu)?;
    Ok(ctx.group().all_reduce(&mine, ReduceOp::Sum)?.to_vec1()?)
}

/// Prints which switches are on in the world of processes, and in a world of threads beside it.
fn switches(ctx: &RankContext) -> Result<String> {
    let of = |on: &dyn Fn(Switch) -> bool| format!("{} {}", on(Switch::Debug), on(Switch::Strict));
    let mesh = ctx.mesh(&[("dp", ctx.world_size())])?;
    let together = of(&|switch| mesh.is_on(switch));
    let alone = World::threads(1).run(|own| {
        let mesh = own.mesh(&[("dp", 1)])?;
        Ok::<_, Error>(of(&|switch| mesh.is_on(switch)))
    });
    assert_eq!(of(&|switch| mesh.is_on(switch)), together, "also after another world of this process");
    Ok(format!("{together}, alone {}", alone.expect("a world of one rank").concat()))
}

/// In the texts, `{r}` is the rank that fails.
const SCENARIOS: [Scenario; 10] = [
    Scenario {
        name: "killed",
        options: |options| options,
        wrong: |_| {
            signal("-KILL");
            Ok(())
        },
        cause: "rank {r} was lost: its connection closed without a goodbye",
    },
    Scenario {
        name: "frozen",
        options: |options| options.lost_after(Duration::from_secs(1)),
        wrong: |_| {
            signal("-STOP");
            Ok(())
        },
        cause: "rank {r} was lost: no heartbeat for 1s",
    },
    Scenario {
        name: "exits",
        options: |options| options,
        wrong: |_| std::process::exit(3),
        cause: "rank {r} was lost: its connection closed without a goodbye",
    },
    Scenario {
        name: "panics",
        options: |options| options,
        wrong: |_| panic!("out of cheese"),
        cause: "rank {r} panicked: out of cheese",
    },
    Scenario {
        name: "fails",
        options: |options| options,
        wrong: |_| Err(candle_dist::Error::Unsupported("cheese".into())),
        cause: "rank {r} failed: unsupported: cheese",
    },
    Scenario {
        name: "says that it fails",
        options: |options| options,
        wrong: |ctx| {
            ctx.group().fail("no cheese");
            Ok(())
        },
        cause: "rank {r} failed: no cheese",
    },
    Scenario {
        name: "returns",
        options: |options| options,
        wrong: |_| Ok(()),
        cause: "rank {r} returned while other ranks wait for it",
    },
    Scenario {
        name: "hangs",
        options: |options| options.timeout(Duration::from_secs(1)),
        wrong: |ctx| {
            while ctx.group().failure().is_none() {
                sleep(Duration::from_millis(10));
            }
            Ok(())
        },
        cause: "waited longer than the timeout of 1s",
    },
    Scenario {
        name: "calls another",
        options: |options| options.debug(true),
        wrong: |ctx| ctx.group().barrier(),
        cause: "made different calls (op differs)",
    },
    Scenario {
        name: "has another mesh",
        options: |options| options.debug(true),
        wrong: |ctx| ctx.group().agree("another mesh"),
        cause: "made different calls (op differs)",
    },
];

/// Runs one rank of a scenario, or nothing unless this program was started as a rank.
#[test]
fn one_rank() {
    let Ok(scenario) = std::env::var("SCENARIO") else { return };
    let (name, culprit) = scenario.split_once('/').unwrap();
    let found = SCENARIOS.iter().find(|scenario| scenario.name == name);
    let patience = std::env::var("PATIENCE").map_or(30, |seconds| seconds.parse().unwrap());
    let patience = Duration::from_secs(patience);
    let options = InitOptions::new().timeout(Duration::from_secs(120)).init_timeout(patience);
    let options = match name {
        _ if name == stalls::WORKS || WAKES.contains(&name) => options.lost_after(Duration::from_secs(1)),
        WAITS_ALONE => options.timeout(Duration::from_secs(1)),
        hosts::TRAINS => options.lost_after(hosts::LOST_AFTER),
        SWITCHES => culprit.parse().map_or(options.clone(), |debug| options.debug(debug)),
        _ => found.map_or(options.clone(), |scenario| (scenario.options)(options)),
    };
    let started = init_process_group_with(options, |_, control| match name {
        "cannot start" if control.rank().to_string() == culprit => {
            Err(candle_dist::Error::Unsupported("no backend here".into()))
        }
        _ => Ok(StoreBackend::start(control, if name == DIES_LATE { die_late } else { |_| Ok(()) })),
    });
    let ctx = match started {
        Ok(ctx) => ctx,
        Err(error) => return say(&error.to_string()),
    };
    let blamed = Mutex::new(None);
    let program = |ctx: &RankContext| -> Result<String> {
        let total = (1..=ctx.world_size()).sum::<usize>() as f32;
        assert_eq!(sum(ctx, 3)?, [total; 3], "a good round first");
        match found {
            None if name == hosts::TRAINS => hosts::train(ctx)?,
            None if name == SWITCHES => return switches(ctx),
            None if name == stalls::WORKS => stalls::work(ctx)?,
            None if name == store::USES_STORE => store::exercise(ctx)?,
            None if name == store::FILLS_STORE => store::fill(ctx)?,
            Some(scenario) if ctx.rank().to_string() == culprit => (scenario.wrong)(ctx)?,
            Some(_) => drop(sum(ctx, 2)?),
            None if name == DIES_ALONE && ctx.rank().to_string() == culprit => {
                sleep(Duration::from_millis(1500));
                signal("-KILL");
            }
            None if name == WAITS_ALONE && ctx.rank().to_string() == culprit => {
                drop(ctx.store().get("never set")?);
            }
            None if [DIES_LATE, DIES_ALONE, WAITS_ALONE].contains(&name) => {}
            None if WAKES.contains(&name) => {
                if ctx.rank().to_string() == culprit {
                    freeze(name.rsplit_once(' ').unwrap().1);
                }
                drop(sum(ctx, 2)?);
            }
            None => drop(ctx.mesh(&[("dp", ctx.world_size())])?),
        }
        Ok("fine".to_string())
    };
    let result =
        ctx.run(program, |rank, message| *blamed.lock().unwrap() = Some((rank, message.to_string())));
    match (result, blamed.into_inner().unwrap()) {
        (Some(text), None) => say(&text),
        (None, Some((rank, message))) => {
            say(&format!("{rank}|{message}"));
            std::process::exit(1);
        }
        other => panic!("{other:?}"),
    }
}

/// Returns what all ranks must hear alike: everything, or the cause if rank 0, which gathers reports, is gone.
fn common(heard: &str) -> &str {
    let cause = heard.lines().next().unwrap_or_default();
    if cause.starts_with("rank 0 was lost") { cause } else { heard }
}

/// Runs a scenario and returns how its ranks ended. A stopped process is killed when the others have ended.
fn outcomes(name: &str, culprit: usize, size: usize) -> Vec<Outcome> {
    let mut ranks = start(&format!("{name}/{culprit}"), size, torchrun(size));
    if name != "frozen" {
        return finish(ranks);
    }
    let mut frozen = ranks.remove(culprit);
    let mut outcomes = finish(ranks);
    frozen.child.kill().unwrap();
    outcomes.insert(culprit, finish(vec![frozen]).remove(0));
    outcomes
}

#[test]
fn one_process_goes_wrong_and_all_others_hear_the_same() {
    for scenario in &SCENARIOS {
        for culprit in [0, 2] {
            let outcomes = outcomes(scenario.name, culprit, 3);
            let name = scenario.name;
            let others: Vec<_> = (0..3).filter(|&rank| rank != culprit).map(|rank| &outcomes[rank]).collect();
            let heard = |other: &Outcome| Some(other.said.as_deref()?.split_once('|')?.1.to_string());
            let text = heard(others[0]).unwrap_or_else(|| panic!("{name} {culprit}: {outcomes:#?}"));
            let is_same =
                |other: &&Outcome| heard(other).is_some_and(|heard| common(&heard) == common(&text));
            assert!(others.iter().all(is_same), "{name} {culprit}: {outcomes:#?}");
            assert!(others.iter().all(|other| !other.is_success), "{name} {culprit}");
            let cause = scenario.cause.replace("{r}", &culprit.to_string());
            assert!(text.contains(&cause), "{name} {culprit}: {text}");
            assert!(
                (0..3).all(|rank| text.contains(&format!("\n  rank {rank}: "))),
                "{name} {culprit}: {text}"
            );
            // If rank 0 dies, nobody gathers reports, and each rank knows what it did itself.
            let least = if culprit == 0 && text.contains("rank 0 was lost") { 1 } else { 2 };
            let sites = text.matches("tests/processes/main.rs:").count();
            assert!(sites >= least, "{name} {culprit}: what the others were in is told: {text}");
        }
    }
}

#[test]
fn a_process_that_dies_after_its_goodbye_is_missed() {
    for culprit in [0, 2] {
        let outcomes = outcomes(DIES_LATE, culprit, 3);
        let cause = format!("rank {culprit} was lost: its connection closed without a goodbye");
        for other in (0..3).filter(|&rank| rank != culprit).map(|rank| &outcomes[rank]) {
            assert!(!other.is_success, "{culprit}: {outcomes:#?}");
            assert!(
                other.said.as_ref().is_some_and(|said| said.contains(&cause)),
                "{culprit}: {outcomes:#?}"
            );
        }
    }
}

#[test]
fn processes_that_do_the_same_are_fine() {
    for size in [1, 2, 4] {
        let outcomes = outcomes("fine", 0, size);
        assert_fine(&outcomes);
    }
}

#[test]
fn the_variables_of_rank_0_hold_for_all_ranks() {
    for (set, said) in [(0, "true true"), (1, "false false")] {
        let vars = torchrun(3);
        let ranks = start(&format!("{SWITCHES}/none"), 3, |rank| {
            let own = ["CANDLE_DIST_DEBUG", "CANDLE_SHARD_STRICT"].into_iter().filter(|_| rank == set);
            vars(rank).into_iter().chain(own.map(|name| (name, "1".to_string()))).collect()
        });
        let outcomes = finish(ranks);
        for (rank, outcome) in outcomes.iter().enumerate() {
            let alone = if rank == set { "true true" } else { "false false" };
            assert_eq!(
                outcome.said.as_deref(),
                Some(&*format!("{said}, alone {alone}")),
                "{set}: {outcomes:#?}"
            );
        }
    }
}

#[test]
fn the_option_of_rank_0_has_precedence_over_its_variable() {
    for (option, variable, said) in
        [("true", "0", "true false, alone false"), ("false", "1", "false false, alone true")]
    {
        let vars = torchrun(2);
        let debug = ("CANDLE_DIST_DEBUG", variable.to_string());
        let outcomes = finish(start(&format!("{SWITCHES}/{option}"), 2, |rank| {
            [vars(rank), vec![debug.clone()]].concat()
        }));
        let want = format!("{said} false");
        assert!(
            outcomes.iter().all(|outcome| outcome.said.as_ref() == Some(&want)),
            "{option}: {outcomes:#?}"
        );
    }
}

#[test]
fn an_engine_that_does_not_start_on_one_rank_fails_on_all() {
    let outcomes = outcomes("cannot start", 1, 3);
    let said: Vec<_> = outcomes.iter().map(|o| o.said.clone().unwrap()).collect();
    assert!(said[1].starts_with("rank 1 failed: unsupported: no backend here"), "{said:?}");
    assert!([0, 2].iter().all(|&rank| said[rank].ends_with(&said[1])), "{said:#?}");
}
