//! Tokens that are drawn by what ranks tell of their logits, against those that all logits give.

use std::sync::Arc;

use candle_core::DType;
use candle_dist::{RankContext, World};
use candle_lm::config::Config;
use candle_lm::engine::{Engine, ModelOptions, Purpose};
use candle_lm::files::Files;
use candle_lm::generate::{Task, generate};
use candle_lm::sample::{Sampler, Sampling};
use candle_lm::serve::{QueueLimits, ServeOptions, ServeRequest};
use candle_lm::step::DecodeStep;
use test_utils::on_ranks;

use super::{ROOM, options, random, read, served};
use crate::lm::config;

const PROMPT: [u32; 3] = [5, 600, 30];
const MOST: usize = 24;

/// Samplings that likely tokens decide always, mostly, and never.
fn samplings() -> Vec<Sampling> {
    let base = Sampling { temperature: 0.9, ..Sampling::default() };
    let kinds = [
        Sampling::default(),
        Sampling { top_k: 20, ..base },
        Sampling { top_k: 20, top_p: 0.7, min_p: 0.01, ..base },
        Sampling { top_p: 0.3, temperature: 0.5, ..base },
        Sampling { top_p: 0.95, ..base },
        Sampling { min_p: 0.4, ..base },
        base,
    ];
    kinds.into_iter().zip(1..).map(|(kind, seed)| Sampling { seed, ..kind }).collect()
}

fn task(sampling: Sampling) -> Task {
    let held = ModelOptions::of(DType::F32);
    Task { prompt: PROMPT.to_vec(), most: MOST, cache_tokens: None, sampling, held }
}

/// What all logits give.
fn by_all_logits(
    ctx: &RankContext,
    stages: usize,
    files: &Files,
    sampling: Sampling,
) -> anyhow::Result<Vec<u32>> {
    let purpose = Purpose::Write { slots: 1, room: ROOM, block: ROOM };
    let mut engine = Engine::new(ctx, stages, files, &ModelOptions::of(DType::F32), purpose)?;
    let (mut sampler, mut new, mut tokens) = (Sampler::new(sampling), PROMPT.to_vec(), Vec::new());
    for _ in 0..MOST {
        let mut step = DecodeStep::default();
        step.push(0, &new, tokens.is_empty());
        let token = sampler.next(&engine.step(&step)?.squeeze(0)?)?;
        tokens.push(token);
        new = vec![token];
    }
    Ok(tokens)
}

#[test]
fn tokens_are_those_that_all_logits_give_on_any_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = random(folder.path(), &Config { vocab_size: 700, ..config(4, 2) });
    files.ends.clear();
    let files = Arc::new(files);
    for (ranks, stages, dp) in [(1, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)] {
        let files = files.clone();
        on_ranks(ranks, "drawn", move |ctx| -> anyhow::Result<()> {
            let want = samplings().into_iter().map(|sampling| {
                let all_logits = |ctx: &RankContext| by_all_logits(ctx, stages, &files, sampling);
                // Each replica is one rank.
                if dp > 1 { Ok(World::threads(1).run(all_logits)?.remove(0)) } else { all_logits(ctx) }
            });
            let want = want.collect::<anyhow::Result<Vec<_>>>()?;
            if dp == 1 {
                for (sampling, want) in samplings().into_iter().zip(&want) {
                    let written = generate(ctx, stages, &files, &task(sampling), |_| Ok(true))?;
                    assert_eq!(written.tokens, *want, "{ranks} {stages} {sampling:?}");
                }
            }
            // All of them at once, and each kind with itself.
            for alike in [false, true] {
                let options = options(4, 64);
                let options = ServeOptions { held: ModelOptions { dp, ..options.held }, ..options };
                served(ctx, stages, &files, &options, QueueLimits::default(), |queue| {
                    let ask = |sampling: Sampling| {
                        let request = ServeRequest::new(PROMPT.to_vec(), MOST);
                        queue.submit(ServeRequest { sampling, ..request }).unwrap()
                    };
                    let all = samplings().into_iter().zip(&want);
                    let groups: Vec<Vec<_>> = match alike {
                        true => all.map(|pair| vec![pair; 2]).collect(),
                        false => vec![all.collect()],
                    };
                    for group in groups {
                        let streams: Vec<_> = group.iter().map(|(sampling, _)| ask(*sampling)).collect();
                        for (mut stream, (sampling, want)) in streams.into_iter().zip(group) {
                            assert_eq!(read(&mut stream).0, *want, "{ranks} {stages} {dp} {sampling:?}");
                        }
                    }
                })?;
            }
            Ok(())
        });
    }
}
