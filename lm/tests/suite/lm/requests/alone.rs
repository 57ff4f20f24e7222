//! Random requests of all kinds of models, against each of them alone.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use candle_lm::config::{Config, RopeScaling};
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Stop, Task};
use candle_lm::sample::Sampling;
use candle_lm::serve::{QueueLimits, RequestQueue, RequestStream, ServeOptions, ServeRequest, TokenEvent};
use candle_lm::session::Session;
use test_utils::{Dice, on_ranks};

use crate::lm::config;
use crate::lm::gguf::{convertible, write as write_gguf};

use super::{ROOM, family, options, random, read, served};

/// Requests of one kind of model, with what each of them is alone.
struct Case {
    name: String,
    files: Files,
    requests: Vec<(Vec<u32>, usize, Sampling)>,
    alone: Vec<(Vec<u32>, Stop)>,
    reuses: bool,
    /// Whether each prompt is computed whole, as it is alone.
    is_apart: bool,
}

/// What a client does with one request.
#[derive(Clone, Copy)]
struct Plan {
    request: usize,
    salt: u64,
    /// After how many tokens it goes away.
    leaves: Option<usize>,
    has_logprobs: bool,
}

impl Case {
    fn new(name: &str, mut files: Files, seed: u64, reuses: bool) -> Self {
        files.ends = [11].into();
        let mut dice = Dice::new(seed);
        let systems: Vec<Vec<u32>> =
            (0..3).map(|_| (0..4 + dice.below(14)).map(|_| dice.below(37) as u32).collect()).collect();
        let mut requests: Vec<(Vec<u32>, usize, Sampling)> = Vec::new();
        for i in 0..24 {
            // Prompts that begin alike, go on from each other, or are of their own.
            let mut prompt = match dice.below(4) {
                0 => Vec::new(),
                1 if i > 0 => requests[dice.below(i)].0.clone(),
                _ => systems[dice.below(3)].clone(),
            };
            prompt.extend((0..=dice.below(8)).map(|_| dice.below(37) as u32));
            prompt.truncate(ROOM - 14);
            let temperature = if dice.below(3) == 0 { 0.9 } else { 0.0 };
            let (top_k, top_p) = [(0, 1.0), (5, 1.0), (0, 0.8)][i % 3];
            let sampling = Sampling { temperature, top_k, top_p, seed: i as u64, ..Sampling::default() };
            requests.push((prompt, 1 + dice.below(12), sampling));
        }
        let made =
            Self { name: name.to_owned(), files, requests, alone: Vec::new(), reuses, is_apart: false };
        Self { alone: made.alone_on(1, 1), ..made }
    }

    /// What each request is alone on so many ranks in stages.
    fn alone_on(&self, ranks: usize, stages: usize) -> Vec<(Vec<u32>, Stop)> {
        let (files, requests) = (Arc::new(self.files.clone()), self.requests.clone());
        on_ranks(ranks, "alone", move |ctx| -> anyhow::Result<_> {
            let task = |(prompt, most, sampling): &(Vec<u32>, usize, Sampling)| Task {
                prompt: prompt.clone(),
                most: *most,
                cache_tokens: None,
                sampling: *sampling,
                held: ModelOptions::of(DType::F32),
            };
            let write = |request| {
                let task = task(request);
                let written = Session::open(ctx, stages, &files, &task, ROOM)?.write(&task, |_| Ok(true))?;
                Ok((written.tokens, written.stop))
            };
            requests.iter().map(write).collect()
        })
        .remove(0)
    }

    /// Sends random requests, some of which leave, and returns how many were sent, left, and were answered
    /// with other tokens than alone.
    fn client(&self, queue: &RequestQueue, seed: u64, count: usize) -> [usize; 3] {
        let mut dice = Dice::new(seed);
        let at_once = 1 + dice.below(16);
        let (mut live, mut sent, mut left, mut wrong) = (Vec::new(), 0, 0, 0);
        while sent < count || !live.is_empty() {
            while sent < count && live.len() < at_once && (live.is_empty() || dice.below(3) > 0) {
                let plan = Plan {
                    request: dice.below(self.requests.len()),
                    salt: if self.is_apart { sent as u64 } else { dice.below(2) as u64 },
                    leaves: (dice.below(5) == 0).then(|| dice.below(4)),
                    has_logprobs: dice.below(4) == 0,
                };
                let (prompt, most, sampling) = &self.requests[plan.request];
                let request = ServeRequest {
                    sampling: *sampling,
                    cache_salt: plan.salt,
                    logprobs: plan.has_logprobs.then_some(2),
                    ..ServeRequest::new(prompt.clone(), *most)
                };
                live.push((plan, queue.submit(request).unwrap(), Vec::new()));
                sent += 1;
            }
            let mut is_still = true;
            live.retain_mut(|(plan, stream, tokens): &mut (Plan, RequestStream, Vec<u32>)| {
                if plan.leaves.is_some_and(|leaves| tokens.len() >= leaves) {
                    left += 1;
                    return false;
                }
                let Some(event) = stream.next_event(Duration::ZERO) else { return true };
                is_still = false;
                let (want, stop) = &self.alone[plan.request];
                match event {
                    TokenEvent::Begun { cached, .. } => {
                        assert!(tokens.is_empty() && cached < self.requests[plan.request].0.len());
                    }
                    TokenEvent::Token { token, logprob, .. } => {
                        tokens.push(token);
                        assert_eq!(logprob.is_some(), plan.has_logprobs);
                        assert!(logprob.is_none_or(|told| told.top.len() == 2 && told.logprob <= 0.0));
                    }
                    TokenEvent::Embedded(_) => panic!("{}: an embedding", self.name),
                    TokenEvent::EndToken { token, .. } => {
                        assert!(plan.has_logprobs && self.files.ends.contains(&token));
                    }
                    TokenEvent::Ended(end) => {
                        if (&*tokens, end) != (want, *stop) {
                            wrong += 1;
                            eprintln!("{}: {tokens:?} {end:?} instead of {want:?} {stop:?}", self.name);
                        }
                        assert!(stream.is_ended());
                        return false;
                    }
                    TokenEvent::Failed(error) => panic!("{}: {error}", self.name),
                }
                true
            });
            if is_still {
                thread::sleep(Duration::from_micros(200));
            }
        }
        [sent, left, wrong]
    }
}

/// Models with all tokens in their caches, windows, latents, states and experts.
fn cases() -> Vec<Case> {
    let folder = tempfile::tempdir().unwrap();
    let longrope = RopeScaling::Longrope {
        short_factor: vec![1.0, 1.1, 1.2, 1.3],
        long_factor: vec![1.5, 2.0, 4.0, 6.0],
        attention_factor: 1.1,
        original_max_position_embeddings: 20,
    };
    let dynamic = RopeScaling::Dynamic { factor: 4.0, learned: 20 };
    let small = config(6, 3);
    let with = |scaling: RopeScaling, longest| Config {
        rope_scaling: Some(scaling),
        max_position_embeddings: longest,
        ..small.clone()
    };
    let at = |name: &str| folder.path().join(name);
    let mut made = vec![
        Case::new("llama", random(&at("llama"), &small), 1, true),
        Case::new("longrope", random(&at("longrope"), &with(longrope, 64)), 2, true),
        Case::new("dynamic", random(&at("dynamic"), &with(dynamic, 20)), 3, true),
    ];
    let families = ["mistral", "gemma2", "deepseek v3", "lfm2", "qwen3.5", "granite hybrid", "mixtral"];
    for (seed, name) in (4..).zip(families) {
        let reuses = ["deepseek v3", "mixtral"].contains(&name);
        std::fs::create_dir_all(at(name)).unwrap();
        made.push(Case::new(name, family(&at(name), name), seed, reuses));
    }
    // Files that are open stay, whatever happens to their names.
    made
}

#[test]
fn random_requests_get_what_they_get_alone_on_every_mesh() {
    let began = Instant::now();
    let (mut all, mut passes, mut reused, mut preempted) = ([0; 3], 0, 0, 0);
    for case in cases() {
        let (case, before) = (Arc::new(case), reused);
        // Ranks, replicas, stages, and ranks of tokens and of experts; slots, and the tokens of a chunk.
        // Every second one has memory for fewer texts than slots.
        let meshes = [
            ([1, 1, 1, 1, 1], 1, 5),
            ([2, 1, 1, 1, 1], 4, 3),
            ([3, 1, 1, 1, 1], 3, 64),
            ([2, 1, 2, 1, 1], 2, 7),
            ([2, 1, 1, 2, 1], 4, 4),
            ([2, 1, 1, 1, 2], 6, 1),
            ([2, 2, 1, 1, 1], 2, 6),
            ([4, 2, 2, 1, 1], 3, 4),
            ([4, 2, 1, 1, 2], 2, 9),
            ([6, 3, 1, 1, 1], 1, 3),
        ];
        for (seed, ([ranks, dp, stages, cp, ep], slots, chunk)) in (0..).zip(meshes) {
            let has_state = case.files.config.is_recurrent();
            let is_small = ranks > 3 && !["llama", "mistral", "qwen3.5", "mixtral"].contains(&&*case.name);
            if (cp > 1 && has_state) || (ep > 1 && case.name != "mixtral") || is_small {
                continue;
            }
            let ran = case.clone();
            let made = on_ranks(ranks, &case.name, move |ctx| -> anyhow::Result<_> {
                let held = ModelOptions { cp, ep, dp, ..ModelOptions::of(DType::F32) };
                let options = ServeOptions { held, ..options(slots, chunk) };
                let whole = options.cache_bytes(&ran.files.config, ranks, stages)?;
                // That of all ranks of tokens and of experts.
                let memory = (seed % 2 == 1).then_some((whole / slots + whole / slots / 2) * cp * ep);
                let options = ServeOptions { memory, block: 1 + seed as usize, ..options };
                let made = served(ctx, stages, &ran.files, &options, QueueLimits::default(), |queue| {
                    let made = ran.client(queue, seed, 30);
                    (made, queue.status())
                })?;
                let computed = ctx.group().objects().all_gather(&(made.0.passes, made.0.tokens))?;
                assert!(
                    computed.iter().all(|of_rank| *of_rank == computed[0]),
                    "ranks compute the same passes"
                );
                Ok(made)
            });
            let (report, Some((counts, status))) = &made[0] else { panic!("rank 0 has a client") };
            all.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
            passes += report.passes;
            reused += status.reused_tokens;
            preempted += status.preemptions;
            assert!(status.used_bytes <= status.cache_bytes);
        }
        assert!(reused > before || !case.reuses, "{}: nothing was reused", case.name);
    }
    let [sent, left, wrong] = all;
    println!(
        "{sent} requests, {left} cancelled, {wrong} wrong, {passes} passes, {reused} tokens reused, \
         {preempted} preemptions, {:.1} s",
        began.elapsed().as_secs_f64()
    );
    assert_eq!(wrong, 0);
    assert!(preempted > 0, "no text has lost its memory");
}

#[test]
fn requests_over_quantized_weights_get_what_they_get_alone_on_as_many_ranks() {
    // Inputs of products are rounded to 8 bits, so the last bits of sums matter: prompts are computed whole
    // here, as they are alone.
    let count = std::env::var("LM_SERVE_REQUESTS").map_or(80, |count| count.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let (_, models) = convertible();
    let qwen = models.iter().find(|family| family.case == "qwen3").expect("a dense model");
    write_gguf(&file, &qwen.config, GgmlDType::Q8_0);
    let mut all = [0; 3];
    let meshes = [[1, 1, 1], [2, 1, 1], [2, 1, 2], [2, 2, 1]];
    for (seed, [ranks, dp, stages]) in (0..).zip(meshes) {
        let case = Case::new("quantized", Files::open(&file).unwrap(), seed, false);
        let case = Arc::new(Case { alone: case.alone_on(ranks / dp, stages), is_apart: true, ..case });
        let ran = case.clone();
        let made = on_ranks(ranks, "quantized", move |ctx| -> anyhow::Result<_> {
            let held = ModelOptions { dp, ..ModelOptions::of(DType::F32) };
            let options = ServeOptions { held, block: 7, ..options(6, 6 * ROOM) };
            let client = |queue: &RequestQueue| ran.client(queue, seed, count / meshes.len());
            Ok(served(ctx, stages, &ran.files, &options, QueueLimits::default(), client)?.1)
        });
        let Some(counts) = &made[0] else { panic!("rank 0 has a client") };
        all.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
    }
    let [sent, left, wrong] = all;
    println!("{sent} requests over quantized weights, {left} cancelled, {wrong} wrong");
    assert_eq!(wrong, 0);
}

#[test]
fn passes_in_microbatches_give_what_passes_in_one_give() {
    // Passes have up to 400 tokens, which stages of 2 to 4 ranks compute in as many parts.
    let folder = tempfile::tempdir().unwrap();
    let long = Config { max_position_embeddings: 512, num_hidden_layers: 4, ..config(4, 2) };
    let mut files = random(folder.path(), &long);
    files.ends.clear();
    let ask = |ranks: usize, stages: usize, memory: Option<usize>| {
        let files = files.clone();
        let made = on_ranks(ranks, "microbatches", move |ctx| {
            let options = ServeOptions { room: Some(300), memory, block: 16, ..options(5, 400) };
            served(ctx, stages, &files, &options, QueueLimits::default(), |queue| {
                let prompt = |nth: u32, tokens: u32| (0..tokens).map(move |at| (at * at + at / 9 * nth) % 37);
                let sizes = [(0, 200), (0, 230), (1, 150), (2, 131), (1, 170), (3, 1), (4, 260)];
                let requests = sizes.map(|(nth, tokens)| ServeRequest {
                    prompt_logprobs: tokens == 131,
                    logprobs: Some(0),
                    ..ServeRequest::new(prompt(nth, tokens).collect(), 30)
                });
                let mut streams = queue.submit_all(requests.into()).unwrap();
                let texts: Vec<_> = streams.iter_mut().map(|stream| read(stream).0).collect();
                (texts, queue.status().preemptions)
            })
        });
        let Some(made) = made.into_iter().next().unwrap().1 else { panic!("rank 0 has a client") };
        made
    };
    let (want, _) = ask(1, 1, None);
    assert!(want.iter().all(|text| text.len() == 30));
    // Two and a half texts of 300 tokens.
    let tight = Some(4 * 2 * 8 * 2 * 4 * 750);
    let mut preempted = 0;
    for (ranks, stages, memory) in [(2, 2, None), (3, 3, tight), (4, 4, None), (4, 2, tight)] {
        let (got, preemptions) = ask(ranks, stages, memory);
        assert_eq!(got, want, "{ranks} ranks in {stages} stages");
        preempted += preemptions;
    }
    println!("{preempted} preemptions");
}
