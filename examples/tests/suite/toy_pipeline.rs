//! Every way to spread the toy Transformer over a mesh of pipeline, data and tensor-parallel ranks trains the model of one
//! device.

use anyhow::{Context, ensure};
use clap::Parser;
use examples::launch::{Patience, Ranks};
use examples::toy_transformer::args::{Args, RunName};
use examples::toy_transformer::corpus::Corpus;
use examples::toy_transformer::outcome::RunOutcome;
use examples::toy_transformer::parity::Parity;
use examples::toy_transformer::runs::run_one;

/// What f32 allows.
const TOLERANCE: f64 = 1e-5;

const TINY: &str = "--steps 4 --dim 16 --heads 4 --layers 2 --seq 8";

/// Trains with these flags on one device and as `name`, and compares the two.
fn trained(name: RunName, flags: &str) -> anyhow::Result<[RunOutcome; 2]> {
    let args =
        Args::parse_from(["toy-transformer"].into_iter().chain(TINY.split(' ')).chain(flags.split(' ')));
    let corpus = Corpus::new(Corpus::read(None)?, &args);
    let run =
        |name| run_one(name, &args, &corpus, &Ranks::Threads(Patience::default()))?.context("rank 0 is here");
    let runs = [run(RunName::Single)?, run(name)?];
    let parity = Parity::of(&runs, TOLERANCE)?;
    ensure!(parity.ok, "{name} {flags}: {parity:?}");
    Ok(runs)
}

#[test]
fn pipelines_of_one_to_four_ranks() -> anyhow::Result<()> {
    for pp in 1..=4 {
        let [_, run] = trained(RunName::Pp, &format!("--pp {pp} --microbatches 4 --batch 6"))?;
        let pipeline = run.pipeline.expect("a pipeline tells how busy it was");
        // 1F1B holds as many microbatches as there are ranks from here to the last.
        let peaks: Vec<f64> = (0..pp).map(|rank| (pp - rank) as f64).collect();
        assert_eq!(pipeline.peak_activations, peaks);
    }
    Ok(())
}

#[test]
fn replicas_of_pipelines_with_unlike_parts_of_the_batch() -> anyhow::Result<()> {
    for flags in ["--pp 1 --dp 3", "--pp 2 --dp 2", "--pp 2 --dp 3 --schedule gpipe"] {
        trained(RunName::Pp, &format!("{flags} --microbatches 2 --batch 7"))?;
    }
    Ok(())
}

#[test]
fn pipelines_of_tensor_parallel_stages() -> anyhow::Result<()> {
    for name in [RunName::Pp, RunName::PpSp] {
        for flags in ["--pp 1 --tp 2", "--pp 2 --tp 2", "--pp 3 --tp 2", "--pp 2 --tp 4", "--pp 1 --tp 3"] {
            trained(name, &format!("{flags} --microbatches 3 --batch 4"))?;
        }
    }
    Ok(())
}

#[test]
fn all_three_at_once_on_eight_ranks() -> anyhow::Result<()> {
    for name in [RunName::Pp, RunName::PpSp] {
        let [_, run] = trained(name, "--pp 2 --dp 2 --tp 2 --microbatches 4 --batch 9")?;
        assert_eq!((run.world, run.params_per_rank.len()), (8, 8));
    }
    Ok(())
}

#[test]
fn every_schedule_on_a_mesh_of_four_ranks() -> anyhow::Result<()> {
    for kind in candle_pipe::schedule::ScheduleKind::all() {
        trained(RunName::Pp, &format!("--pp 2 --tp 2 --schedule {kind} --microbatches 4 --batch 5"))?;
    }
    Ok(())
}

#[test]
fn gradients_are_clipped_by_their_norm_on_the_whole_mesh() -> anyhow::Result<()> {
    let flags = "--dp 2 --tp 2 --microbatches 2 --batch 5 --lr 0.01";
    let last = |run: &RunOutcome| run.losses.last().copied();
    for name in [RunName::Pp, RunName::PpSp] {
        for schedule in ["--pp 2", "--pp 2 --schedule zbv", "--pp 3"] {
            let [free, _] = trained(name, &format!("{flags} {schedule}"))?;
            let [clipped, _] = trained(name, &format!("{flags} {schedule} --clip-norm 0.001"))?;
            assert_ne!(last(&free), last(&clipped), "the bound has an effect");
        }
    }
    Ok(())
}
