//! The parts of the click-through program that decide what its numbers mean.

use candle_core::{Device, Tensor};
use candle_shard::kernels::BagMode;
use clap::Parser;
use examples::launch::{Patience, Ranks};
use examples::sharded_embedding::args::Args;
use examples::sharded_embedding::features::FEATURES;
use examples::sharded_embedding::log::{Batch, Log};
use examples::sharded_embedding::metrics::Quality;
use examples::sharded_embedding::outcome::{RunName, RunOutcome};
use examples::sharded_embedding::parity::Parity;
use examples::sharded_embedding::training::train;

fn outcome(name: RunName, loss: f64, element: f32) -> RunOutcome {
    RunOutcome {
        name,
        world: 1,
        losses: vec![0.7, loss],
        ms_per_step: 1.0,
        tables: vec![Tensor::new(&[[1.0, element]], &Device::Cpu).expect("a small tensor")],
        quality: Quality { log_loss: 0.5, auc: 0.75 },
        comm_per_step: Vec::new(),
    }
}

#[test]
fn each_of_losses_and_tables_can_fail_parity() -> anyhow::Result<()> {
    let reference = outcome(RunName::OneDevice, 0.5, 2.0);
    let parity =
        |other: &RunOutcome| Parity::of(&[reference.clone(), reference.clone(), other.clone()], 1e-3);
    let near = parity(&outcome(RunName::RowWise, 0.5 + 2f64.powi(-11), 2.0 - 2f32.powi(-12)))?;
    assert!(near.ok);
    assert_eq!(near.differences[1].run, "row-wise");
    assert_eq!(
        (near.differences[1].max_loss_diff, near.differences[1].max_table_diff),
        (2f64.powi(-11), 2f64.powi(-12))
    );
    for (loss, element) in [(0.502, 2.0), (0.5, 2.002), (f64::NAN, 2.0), (0.5, f32::NAN)] {
        assert!(!parity(&outcome(RunName::ColumnWise, loss, element))?.ok, "{loss} {element}");
    }
    Ok(())
}

#[test]
fn runs_that_cannot_be_compared_are_an_error() {
    let reference = outcome(RunName::OneDevice, 0.5, 2.0);
    let fewer_steps = RunOutcome { losses: vec![0.7], ..outcome(RunName::RowWise, 0.5, 2.0) };
    let fewer_tables = RunOutcome { tables: Vec::new(), ..outcome(RunName::RowWise, 0.5, 2.0) };
    for (wrong, mention) in [(fewer_steps, "1 steps"), (fewer_tables, "0 tables")] {
        let error = Parity::of(&[reference.clone(), wrong], 1.0).unwrap_err();
        assert!(format!("{error:#}").contains(mention), "{error:#}");
    }
}

/// Samples, each with its clicks, dense features and values with their weights, as text.
fn samples(batch: &Batch) -> anyhow::Result<Vec<String>> {
    let (dense, clicks) = (batch.dense.to_vec2::<f32>()?, batch.clicks.to_vec1::<f32>()?);
    let mut samples: Vec<String> =
        dense.iter().zip(clicks).map(|(dense, click)| format!("{dense:?} {click}")).collect();
    for values in &batch.features {
        let ids = values.ids.to_vec1::<u32>()?;
        let starts: Vec<usize> = match &values.offsets {
            Some(offsets) => offsets.to_vec1::<u32>()?.into_iter().map(|at| at as usize).collect(),
            None => (0..samples.len()).collect(),
        };
        let weights = values.weights.as_ref().map(Tensor::to_vec1::<f32>).transpose()?;
        for (i, sample) in samples.iter_mut().enumerate() {
            let range = starts[i]..starts.get(i + 1).copied().unwrap_or(ids.len());
            let weights = weights.as_ref().map(|weights| &weights[range.clone()]);
            *sample += &format!(" {:?} {weights:?}", &ids[range]);
        }
    }
    Ok(samples)
}

#[test]
fn the_parts_of_a_batch_make_the_batch() -> anyhow::Result<()> {
    let log = Log::new(3)?;
    let whole = samples(&log.batch(5, 50, 0..50)?)?;
    let parts = [0..1, 1..30, 30..30, 30..50].map(|part| log.batch(5, 50, part));
    let mut joined = Vec::new();
    for part in parts {
        joined.extend(samples(&part?)?);
    }
    assert_eq!(joined, whole);
    assert_ne!(samples(&log.batch(6, 50, 0..50)?)?, whole, "another step has other samples");
    assert_ne!(samples(&Log::new(4)?.batch(5, 50, 0..50)?)?, whole, "another seed has another log");
    Ok(())
}

#[test]
fn values_follow_zipfs_law_and_bags_are_ragged() -> anyhow::Result<()> {
    const SAMPLES: usize = 20_000;
    let batch = Log::new(0)?.batch(0, SAMPLES, 0..SAMPLES)?;
    for (feature, values) in FEATURES.iter().zip(&batch.features) {
        let mut counts = vec![0u32; feature.vocab];
        for id in values.ids.to_vec1::<u32>()? {
            counts[id as usize] += 1;
        }
        counts.sort_by(|a, b| b.cmp(a));
        // The most frequent value is about twice as frequent as the second, and ten times as the tenth.
        let [first, second, tenth] = [0, 1, 9].map(|rank| f64::from(counts[rank]));
        assert!(
            (1.5..2.0).contains(&(first / second)) && (6.0..11.0).contains(&(first / tenth)),
            "{}",
            feature.name
        );
        match (feature.bag, &values.offsets) {
            (None, None) => assert_eq!(values.ids.dims(), [SAMPLES]),
            (Some(bag), Some(offsets)) => {
                let offsets = offsets.to_vec1::<u32>()?;
                let mut lens: Vec<usize> =
                    offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect();
                lens.sort_unstable();
                lens.dedup();
                assert_eq!(lens, (0..=bag.most).collect::<Vec<_>>());
                assert_eq!(values.weights.is_some(), bag.weighted && bag.mode == BagMode::Sum);
            }
            other => panic!("{}: {other:?}", feature.name),
        }
    }
    Ok(())
}

/// Ranks have uneven parts of the batch, and columns that do not divide.
#[test]
fn training_agrees_when_nothing_divides() -> anyhow::Result<()> {
    let args = Args::parse_from([
        "sharded-embedding",
        "--ranks",
        "3",
        "--batch",
        "100",
        "--dim",
        "7",
        "--steps",
        "3",
    ]);
    let log = Log::new(args.seed)?;
    let mut outcomes = Vec::new();
    for name in RunName::ALL {
        outcomes.extend(train(name, &args, &log, &Ranks::Threads(Patience::default()))?);
    }
    let parity = Parity::of(&outcomes, args.tolerance)?;
    assert!(parity.ok, "{parity:?}");
    let still = Args { steps: 1, lr: Some(1e-30), ..args };
    let start = train(RunName::OneDevice, &still, &log, &Ranks::Threads(Patience::default()))?
        .expect("rank 0 is here")
        .tables;
    for ((feature, start), trained) in FEATURES.iter().zip(&start).zip(&outcomes[1].tables) {
        assert_eq!(trained.dims(), [feature.vocab, 7]);
        let moved = (trained - start)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(moved > 1e-3, "{} was not trained", feature.name);
    }
    Ok(())
}
