//! The parts of the toy Transformer program that decide what its numbers mean.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use candle_dist::bits::digest_bytes;
use candle_pipe::schedule::{Costs, Edges};
use clap::Parser;
use examples::comm::CommStat;
use examples::toy_transformer::args::{Args, RunName};
use examples::toy_transformer::corpus::Corpus;
use examples::toy_transformer::outcome::RunOutcome;
use examples::toy_transformer::parity::{LOGIT_FACTOR, Parity};
use examples::toy_transformer::report::{self, Report};

const TOLERANCE: f64 = 1e-4;

fn args(flags: &[&str]) -> Args {
    Args::parse_from(std::iter::once(&"toy-transformer").chain(flags))
}

fn tensor(values: &[f32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).expect("a small tensor")
}

fn outcome(name: RunName, loss: f64, logit: f32, grad: f32) -> RunOutcome {
    RunOutcome {
        name,
        world: 1,
        losses: vec![4.0, loss],
        ms_per_step: 2.0,
        page_faults_per_step: Some(1.5),
        logits: tensor(&[1.0, logit]),
        first_grads: BTreeMap::from([("w".to_owned(), tensor(&[grad, 0.0]))]),
        params_per_rank: vec![1234, 1234],
        comm_per_step: Vec::new(),
        pictures: Vec::new(),
        pipeline: None,
    }
}

#[test]
fn parity_is_the_largest_difference_from_the_single_run() -> anyhow::Result<()> {
    let runs = [
        outcome(RunName::Tp, 2.0, 1.0, 0.5),
        outcome(RunName::Single, 2.00005, 1.0, 0.5),
        outcome(RunName::TpSp, 2.0, 1.0078125, 0.5 + 2f32.powi(-14)),
    ];
    let parity = Parity::of(&runs, TOLERANCE)?;
    assert!((parity.max_loss_diff - 0.00005 / 2.00005).abs() < 1e-12);
    assert_eq!((parity.max_logit_diff, parity.max_grad_diff), (2f64.powi(-7), 2f64.powi(-14)));
    assert!(parity.ok);
    assert!(!Parity::of(&runs, 2e-5)?.ok);
    assert!(Parity::of(&[], 0.0)?.ok);
    Ok(())
}

#[test]
fn each_of_loss_logits_and_gradients_can_fail_parity() -> anyhow::Result<()> {
    let reference = outcome(RunName::Single, 2.0, 1.0, 0.5);
    let logits_off = 1.0 + (1.1 * TOLERANCE * LOGIT_FACTOR) as f32;
    for wrong in [
        outcome(RunName::Tp, 2.001, 1.0, 0.5),
        outcome(RunName::Tp, 2.0, logits_off, 0.5),
        outcome(RunName::Tp, 2.0, 1.0, 0.501),
        outcome(RunName::Tp, f64::NAN, 1.0, 0.5),
        outcome(RunName::Tp, 2.0, f32::NAN, 0.5),
        outcome(RunName::Tp, 2.0, 1.0, f32::NAN),
    ] {
        assert!(!Parity::of(&[reference.clone(), wrong.clone()], TOLERANCE)?.ok, "{wrong:?}");
        assert!(Parity::of(&[reference.clone(), reference.clone()], TOLERANCE)?.ok);
    }
    Ok(())
}

#[test]
fn runs_that_cannot_be_compared_are_an_error() {
    let reference = outcome(RunName::Single, 2.0, 1.0, 0.5);
    let other = || outcome(RunName::Tp, 2.0, 1.0, 0.5);
    let fewer_steps = RunOutcome { losses: vec![4.0], ..other() };
    let other_shape = RunOutcome { logits: tensor(&[1.0]), ..other() };
    let no_grads = RunOutcome { first_grads: BTreeMap::new(), ..other() };
    for (wrong, mention) in [(fewer_steps, "tp made 1"), (other_shape, "logits"), (no_grads, "\"w\"")] {
        let error = Parity::of(&[reference.clone(), wrong], TOLERANCE).unwrap_err();
        assert!(format!("{error:#}").contains(mention), "{error:#}");
    }
}

#[test]
fn the_summary_shows_communication_where_there_is_some() -> anyhow::Result<()> {
    let args = args(&[]);
    let single = outcome(RunName::Single, 2.0, 1.0, 0.5);
    let comm = CommStat { op: "all_reduce".to_owned(), count: 9, bytes: 1_234_567 };
    let tp = RunOutcome { world: 2, comm_per_step: vec![comm], ..outcome(RunName::Tp, 2.0, 1.0, 0.5) };
    let summary = |runs: &[RunOutcome]| {
        Ok::<_, anyhow::Error>(report::summary(&args, &Report::new(runs, TOLERANCE)?, runs))
    };
    let both = summary(&[single.clone(), tp])?;
    for expected in ["all_reduce", "1,234,567", "1,234", "difference from one device", "The runs agree."] {
        assert!(both.contains(expected), "{expected} is missing:\n{both}");
    }
    assert!(!summary(&[single])?.contains("collective"));
    Ok(())
}

#[test]
fn options_of_pipelines_choose_the_runs_and_the_mesh() {
    use RunName::{Cp, Pp, PpSp, Single, Tp, TpSp};
    let shape = |flags: &[&str]| {
        let args = args(flags);
        let pipeline = args.pipeline();
        (args.runs(), [pipeline.pp, pipeline.dp, pipeline.tp, pipeline.microbatches])
    };
    assert_eq!(shape(&[]), (vec![Single, Tp, TpSp], [2, 1, 1, 4]));
    assert_eq!(shape(&["--tp", "3"]).0, [Single, Tp, TpSp]);
    assert_eq!((shape(&["--cp", "3"]).0, args(&["--cp", "3"]).context_parallel()), (vec![Single, Cp], 3));
    assert_eq!(args(&["--tp", "3", "--runs", "single,tp"]).tensor_parallel(), 3);
    assert_eq!(shape(&["--cp", "2", "--ep", "3"]), (vec![Single, Pp], [1, 1, 1, 4]));
    assert_eq!(
        (args(&["--cp", "2", "--ep", "3"]).pipeline_ranks(), args(&["--ep", "3"]).mixture()),
        (Some(6), (8, 2))
    );
    assert_eq!(shape(&["--dp", "3"]), (vec![Single, Pp], [1, 3, 1, 4]));
    assert_eq!(shape(&["--pp", "3", "--tp", "2", "--microbatches", "5"]), (vec![Single, Pp], [3, 1, 2, 5]));
    assert_eq!(shape(&["--runs", "pp_sp", "--schedule", "zbv"]), (vec![PpSp], [2, 1, 1, 4]));
}

/// A step that went just as its schedule says is predicted, and has the bubble of the closed form.
#[test]
fn a_prediction_is_the_schedule_at_the_measured_costs() -> anyhow::Result<()> {
    let (p, m) = (3, 5);
    let args = args(&["--pp", "3", "--microbatches", "5"]);
    let pipeline = args.pipeline();
    let schedule = pipeline.schedule()?;
    let costs = Costs::per_rank(schedule.stage_ranks(), 1.0, 2.0, 0.0);
    let timeline = schedule.simulate(&Edges::chain(p), &costs)?;
    let ranks: Vec<_> = timeline.ranks.into_iter().map(|spans| (vec![spans.clone(), spans], 2)).collect();
    let stat = examples::pipeline::stat(&pipeline, &ranks)?;
    let bubble = (p - 1) as f64 / (m + p - 1) as f64;
    assert!(
        (stat.bubble_predicted - bubble).abs() < 1e-12 && (stat.bubble_measured - bubble).abs() < 1e-12,
        "{stat:?}"
    );
    assert_eq!((stat.schedule, stat.peak_activations), ("1f1b", vec![2.0; 3]));
    Ok(())
}

#[test]
fn batches_are_windows_of_the_text_and_leave_the_held_out_tail_alone() -> anyhow::Result<()> {
    // Every byte of this text tells its place.
    let text: Vec<u8> = (0..=255).collect();
    let corpus = Corpus::new(text, &args(&["--seq", "7", "--batch", "64"]));
    let mut seen = [false; 256];
    for step in 0..20 {
        let batch = corpus.batch(step, &Device::Cpu)?;
        let (tokens, targets) = (batch.tokens.to_vec2::<u32>()?, batch.targets.to_vec2::<u32>()?);
        assert_eq!((tokens.len(), tokens[0].len()), (64, 7));
        for (tokens, targets) in tokens.iter().zip(&targets) {
            assert!((0..7).all(|i| tokens[i] == tokens[0] + i as u32 && targets[i] == tokens[i] + 1));
            targets.iter().chain(tokens).for_each(|&byte| seen[byte as usize] = true);
        }
    }
    assert!(seen[..240].iter().all(|&seen| seen), "the first fifteen sixteenths are all learned from");
    assert!(!seen[240..].iter().any(|&seen| seen), "the last sixteenth is not");
    let held_out = corpus.held_out(&Device::Cpu)?.tokens.to_vec2::<u32>()?;
    assert!(held_out.iter().flatten().all(|&byte| byte >= 240));
    Ok(())
}

#[test]
fn a_step_has_its_own_batch_and_the_seed_another() -> anyhow::Result<()> {
    let batch = |seed: &str, step| {
        let args = args(&["--seed", seed]);
        Corpus::new(Corpus::read(None)?, &args)
            .batch(step, &Device::Cpu)?
            .tokens
            .to_vec2::<u32>()
            .map_err(anyhow::Error::from)
    };
    assert_eq!(batch("0", 3)?, batch("0", 3)?);
    assert_ne!(batch("0", 3)?, batch("0", 4)?);
    assert_ne!(batch("0", 3)?, batch("1", 3)?);
    Ok(())
}

/// The losses that the README prints are of this text: a change to it changes them.
#[test]
fn the_built_in_text_is_the_same_whatever_else_changes() -> anyhow::Result<()> {
    let text = String::from_utf8(Corpus::read(None)?)?;
    assert_eq!((text.len(), digest_bytes(text.as_bytes())), (200_048, 2_776_211_686_273_484_365));
    assert!(!text.contains(['{', '}']), "all words are filled in");
    Ok(())
}
