//! Programs whose ranks are processes: every rank calls all of it, and rank 0 has the results.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fmt::Display;
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use candle_dist::init::host_name;
use candle_dist::{RankContext, World, WorldError};
use clap::Parser;
use examples::cli::UsageError;
use examples::launch::{Patience, Ranks, gather};
use examples::toy_transformer::args::Args;
use examples::toy_transformer::corpus::Corpus;
use examples::toy_transformer::parity::Parity;
use examples::toy_transformer::runs::run_one;

/// What each rank makes of it. The ranks are threads here, which have what processes have: a context each.
fn on<T: Send, E: Display + Send>(
    size: usize,
    f: impl Fn(&RankContext, &Ranks<'_>) -> Result<T, E> + Sync,
) -> Vec<T> {
    within(Duration::from_secs(600), size, f).expect("no rank fails")
}

#[test]
fn every_run_agrees_with_one_device_and_its_outcome_is_on_rank_0() {
    for (ranks, flags) in [(2, "--runs single,tp,tp_sp,pp"), (4, "--runs single,pp,pp_sp --pp 2 --tp 2")] {
        let tiny = "--steps 3 --dim 16 --heads 2 --layers 2 --seq 8 --batch 4 --microbatches 2";
        let args =
            Args::parse_from(["toy-transformer"].into_iter().chain(tiny.split(' ')).chain(flags.split(' ')));
        let made = on(ranks, |_, ranks| -> anyhow::Result<usize> {
            let corpus = Corpus::new(Corpus::read(None)?, &args);
            let mut outcomes = Vec::new();
            for name in args.runs() {
                outcomes.extend(run_one(name, &args, &corpus, ranks)?);
            }
            let parity = Parity::of(&outcomes, 1e-5)?;
            ensure!(parity.ok, "{parity:?}");
            Ok(outcomes.len())
        });
        assert_eq!(made[0], args.runs().len());
        assert!(made[1..].iter().all(|&outcomes| outcomes == 0), "{made:?}");
    }
}

/// The same, where a rank waits no longer than this in one call.
fn within<T: Send, E: Display + Send>(
    timeout: Duration,
    size: usize,
    f: impl Fn(&RankContext, &Ranks<'_>) -> Result<T, E> + Sync,
) -> Result<Vec<T>, WorldError> {
    let world = World::threads(size).threads_per_rank(1).timeout(timeout);
    world.run(|ctx| f(ctx, &Ranks::Process(ctx, Patience::default())))
}

#[test]
fn what_rank_0_does_alone_may_take_longer_than_a_call() {
    let timeout = Duration::from_millis(600);
    let waited = within(timeout, 3, |_, ranks| {
        ranks.on_first(|| {
            thread::sleep(3 * timeout);
            Ok(7)
        })
    });
    assert_eq!(waited.unwrap(), [Some(7), None, None]);
    let failed = within(timeout, 2, |_, ranks| -> anyhow::Result<()> {
        let alone: anyhow::Result<Option<()>> = ranks.on_first(|| anyhow::bail!("no text"));
        ranks.agree(alone.map(drop))
    });
    assert!(failed.unwrap_err().message.ends_with("no text"));
    let panicked =
        within(timeout, 2, |_, ranks| ranks.on_first(|| -> anyhow::Result<()> { panic!("out of cheese") }));
    assert!(panicked.unwrap_err().to_string().contains("out of cheese"));
}

#[test]
fn ranks_that_are_threads_wait_as_long_as_the_command_line_says() {
    let ranks = Ranks::Threads(Patience::seconds(1));
    let late = ranks.run(2, |ctx| {
        if ctx.rank() == 1 {
            thread::sleep(Duration::from_secs(3));
        }
        ctx.group().barrier()
    });
    let said = late.unwrap_err().to_string();
    assert!(said.contains("timeout of 1s"), "{said}");
}

#[test]
fn a_run_of_one_rank_is_made_by_rank_0_alone() {
    let sizes = on(3, |_, ranks| ranks.run(1, |ctx| Ok::<_, UsageError>(ctx.world_size())));
    assert_eq!(sizes, [Some(1), None, None]);
}

#[test]
fn what_one_rank_lacks_all_refuse_with_the_first_ones_words() {
    let words = on(3, |ctx, ranks| {
        let mine = match ctx.rank() {
            0 => Ok(()),
            rank => Err(anyhow::anyhow!("no file on rank {rank}")),
        };
        Ok::<_, UsageError>(ranks.agree(mine).map_err(|error| error.to_string()))
    });
    let said = format!("rank 1 on {}: no file on rank 1", host_name());
    assert_eq!(words, vec![Err(said); 3]);
    let words = on(3, |_, ranks| {
        let mine: anyhow::Result<()> = Err(anyhow::anyhow!("no such flag"));
        Ok::<_, UsageError>(ranks.agree(mine).map_err(|error| error.to_string()))
    });
    assert_eq!(words, vec![Err("no such flag".to_owned()); 3], "what all know is of no rank");
    let ranks = on(3, |ctx, ranks| ranks.agree(Ok::<_, UsageError>(ctx.rank())));
    assert_eq!(ranks, [0, 1, 2]);
}

#[test]
fn rank_0_gets_what_each_has_and_gives_all_its_text() {
    let gathered = on(3, |ctx, _| gather(ctx.group(), vec![ctx.rank(); ctx.rank()]));
    assert_eq!(gathered, [Some(vec![vec![], vec![1], vec![2, 2]]), None, None]);
    let texts = on(3, |ctx, ranks| ranks.of_first(&format!("rank {}", ctx.rank())));
    assert_eq!(texts, ["rank 0"; 3]);
}
