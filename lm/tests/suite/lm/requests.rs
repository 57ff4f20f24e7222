//! Requests that come and go while others are written, against each of them alone.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use candle_dist::{RankContext, World};
use candle_lm::config::{Config, RopeScaling};
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Stop, Task};
use candle_lm::random_model;
use candle_lm::sample::Sampling;
use candle_lm::score::score;
use candle_lm::score::windows::windows;
use candle_lm::serve::{
    QueueLimits, RequestError, RequestQueue, RequestStream, ServeOptions, ServeReport, ServeRequest,
    SubmitError, TokenConstraint, TokenEvent, TokenMask, serve,
};
use candle_lm::session::Session;
use test_utils::{Dice, on_ranks};

use crate::lm::config;
use crate::lm::families::{families, write};
use crate::lm::gguf::{convertible, write as write_gguf};

const MOMENT: Duration = Duration::from_secs(60);
const ROOM: usize = 48;

/// Ends the server of a client that panics, so that the test does.
struct StoppedByPanic(RequestQueue);

impl Drop for StoppedByPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.stop();
        }
    }
}

/// Serves what a client of rank 0 asks for, until it returns. Returns what rank 0 did, and the client's
/// result.
pub(super) fn served<R: Send>(
    ctx: &RankContext,
    stages: usize,
    files: &Files,
    options: &ServeOptions,
    limits: QueueLimits,
    client: impl FnOnce(&RequestQueue) -> R + Send,
) -> anyhow::Result<(ServeReport, Option<R>)> {
    if ctx.rank() > 0 {
        return Ok((serve(ctx, stages, files, options, None)?, None));
    }
    let queue = RequestQueue::new(limits);
    thread::scope(|scope| {
        let front = queue.clone();
        let client = scope.spawn(move || {
            let front = StoppedByPanic(front);
            assert_eq!(front.0.wait_until_open(MOMENT), Ok(true));
            let made = client(&front.0);
            front.0.drain();
            made
        });
        let report = serve(ctx, stages, files, options, Some(&queue));
        let made = client.join().expect("the client panicked");
        let (report, status) = (report?, queue.status());
        assert_eq!((status.running, status.waiting), (0, 0), "all slots are free in the end");
        Ok((report, Some(made)))
    })
}

pub(super) fn options(slots: usize, chunk: usize) -> ServeOptions {
    ServeOptions { slots, chunk, room: Some(ROOM), ..ServeOptions::of(ModelOptions::of(DType::F32)) }
}

/// What a stream brings until it ends: tokens, the cached tokens of the prompt, and the end.
pub(super) fn read(stream: &mut RequestStream) -> (Vec<u32>, usize, TokenEvent) {
    let (mut tokens, mut begun) = (Vec::new(), None);
    loop {
        match stream.next_event(MOMENT).expect("an event within a minute") {
            TokenEvent::Begun { cached, .. } => assert_eq!(begun.replace(cached), None),
            TokenEvent::Token { token, .. } => tokens.push(token),
            end => {
                assert!(stream.is_ended() && stream.next_event(Duration::ZERO).is_none());
                return (tokens, begun.unwrap_or(0), end);
            }
        }
    }
}

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
            let sampling = Sampling { temperature, seed: i as u64, ..Sampling::default() };
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

/// The folder of a family of transformers' models.
fn family(folder: &Path, case: &str) -> Files {
    let all = families();
    let family = all.models.iter().find(|family| family.case == case).expect("a case of families.json");
    write(folder, &family.config);
    Files::open(folder).unwrap()
}

fn random(folder: &Path, config: &Config) -> Files {
    random_model::write(folder, config, 7, DType::F32).unwrap();
    Files::open(folder).unwrap()
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

/// What a client sees of a small model on so many ranks.
fn with_llama<R: Clone + Send + 'static>(
    ranks: usize,
    options: ServeOptions,
    limits: QueueLimits,
    client: impl Fn(&RequestQueue) -> R + Send + Sync + 'static,
) -> R {
    let folder = tempfile::tempdir().unwrap();
    let mut files = random(folder.path(), &config(4, 2));
    files.ends.clear();
    let made = on_ranks(ranks, "llama", move |ctx| served(ctx, 1, &files, &options, limits, &client));
    made.into_iter().next().unwrap().1.unwrap()
}

/// Allows some tokens, and waits a little for each.
struct Slow(Duration, Vec<u32>);

impl TokenConstraint for Slow {
    fn mask(&mut self, allowed: &mut TokenMask) -> anyhow::Result<()> {
        thread::sleep(self.0);
        self.1.iter().for_each(|&token| allowed.allow(token));
        Ok(())
    }

    fn accept(&mut self, token: u32) -> anyhow::Result<()> {
        anyhow::ensure!(token != 36, "36 is not in the grammar");
        Ok(())
    }
}

fn slow(prompt: &[u32], most: usize) -> ServeRequest {
    let constraint = Slow(Duration::from_millis(5), (0..36).collect());
    ServeRequest { constraint: Some(Box::new(constraint)), ..ServeRequest::new(prompt.to_vec(), most) }
}

#[test]
fn a_full_queue_refuses_and_deadlines_end_requests() {
    let limits = QueueLimits { requests: 2, tokens: 100 };
    with_llama(1, options(1, 8), limits, |queue| {
        let mut running = queue.submit(slow(&[1, 2, 3], 40)).unwrap();
        // Its prompt is read: it has the slot.
        assert!(matches!(running.next_event(MOMENT), Some(TokenEvent::Begun { .. })));
        let late = ServeRequest { deadline: Some(Instant::now()), ..ServeRequest::new(vec![4], 3) };
        let mut late = queue.submit(late).unwrap();
        let mut last = queue.submit(ServeRequest::new(vec![5], 3)).unwrap();
        match queue.submit(ServeRequest::new(vec![6], 3)) {
            // One of those that wait may be late already.
            Err(SubmitError::Full { waiting: 2, .. }) | Ok(_) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(read(&mut late), (vec![], 0, TokenEvent::Failed(RequestError::Deadline)));
        let status = queue.status();
        assert_eq!((status.running, status.slots, status.room), (1, 1, Some(ROOM)));
        assert_eq!(read(&mut running).2, TokenEvent::Ended(Stop::Length));
        assert_eq!(read(&mut last).0.len(), 3);
        // A text that is late ends where it is.
        let deadline = Some(Instant::now() + Duration::from_millis(60));
        let (tokens, _, end) = read(&mut queue.submit(ServeRequest { deadline, ..slow(&[7], 40) }).unwrap());
        assert!(end == TokenEvent::Ended(Stop::Length) && tokens.len() < 40, "{}", tokens.len());
        // The context is full.
        let (tokens, _, end) = read(&mut queue.submit(ServeRequest::new(vec![7; ROOM - 2], 40)).unwrap());
        assert_eq!((tokens.len(), end), (3, TokenEvent::Ended(Stop::Context)));
    });
}

#[test]
fn a_text_whose_prompt_is_not_read_at_its_deadline_fails() {
    with_llama(1, options(2, 1), QueueLimits::default(), |queue| {
        // Passes of 50 ms, with one token of a prompt each.
        let constraint = Some(Box::new(Slow(Duration::from_millis(50), vec![5])) as Box<dyn TokenConstraint>);
        let beside = ServeRequest { constraint, ..ServeRequest::new(vec![1, 2], 40) };
        let mut beside = queue.submit(beside).unwrap();
        assert!(matches!(beside.next_event(MOMENT), Some(TokenEvent::Begun { .. })));
        let deadline = Some(Instant::now() + Duration::from_millis(400));
        let mut late = queue.submit(ServeRequest { deadline, ..ServeRequest::new(vec![7; 40], 3) }).unwrap();
        while queue.status().running < 2 {
            assert!(!late.is_ended(), "it has a slot within 400 ms");
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(read(&mut late), (vec![], 0, TokenEvent::Failed(RequestError::Deadline)));
    });
}

#[test]
fn streams_that_are_dropped_free_their_slots() {
    with_llama(2, options(2, 8), QueueLimits::default(), |queue| {
        let streams: Vec<RequestStream> = (0..6).map(|i| queue.submit(slow(&[i], 40)).unwrap()).collect();
        drop(streams);
        let began = Instant::now();
        while queue.status().running + queue.status().waiting > 0 {
            assert!(began.elapsed() < MOMENT);
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(queue.status().ended, 6);
        assert!(queue.status().passes < 40, "{}", queue.status().passes);
    });
}

#[test]
fn a_stop_ends_all_requests_and_the_server() {
    with_llama(2, options(1, 8), QueueLimits::default(), |queue| {
        let mut streams: Vec<RequestStream> = (0..3).map(|i| queue.submit(slow(&[i], 40)).unwrap()).collect();
        assert!(matches!(streams[0].next_event(MOMENT), Some(TokenEvent::Begun { .. })));
        queue.stop();
        for stream in &mut streams {
            let end = std::iter::from_fn(|| stream.next_event(MOMENT)).last();
            assert_eq!(end, Some(TokenEvent::Failed(RequestError::Stopped)));
        }
        assert_eq!(queue.submit(ServeRequest::new(vec![1], 1)).err(), Some(SubmitError::Draining));
    });
}

#[test]
fn a_server_that_drains_ends_what_it_has() {
    with_llama(1, options(1, 8), QueueLimits::default(), |queue| {
        let mut streams: Vec<RequestStream> = (0..3).map(|i| queue.submit(slow(&[i], 5)).unwrap()).collect();
        queue.drain();
        assert_eq!(queue.submit(ServeRequest::new(vec![1], 1)).err(), Some(SubmitError::Draining));
        for stream in &mut streams {
            let (tokens, _, end) = read(stream);
            assert_eq!((tokens.len(), end), (5, TokenEvent::Ended(Stop::Length)));
        }
    });
}

#[test]
fn grammars_biases_and_ends_are_those_of_the_request() {
    with_llama(2, options(3, 8), QueueLimits::default(), |queue| {
        let ask = |change: &dyn Fn(&mut ServeRequest)| {
            let mut request = ServeRequest::new(vec![1, 2, 3], 6);
            change(&mut request);
            let (tokens, _, end) = read(&mut queue.submit(request).unwrap());
            (tokens, end)
        };
        let of = |allowed: &[u32]| {
            Some(Box::new(Slow(Duration::ZERO, allowed.to_vec())) as Box<dyn TokenConstraint>)
        };
        let free = ask(&|_| ());
        let length = TokenEvent::Ended(Stop::Length);
        assert_eq!((free.0.len(), &free.1), (6, &length));
        assert_eq!(ask(&|r| r.logit_bias = [(5, 1e9)].into()), (vec![5; 6], length.clone()));
        assert_eq!(ask(&|r| r.constraint = of(&[9])), (vec![9; 6], length.clone()));
        let allowed = ask(&|r| r.constraint = of(&[7, 8])).0;
        assert!(allowed.iter().all(|token| [7, 8].contains(token)));
        // Nothing may follow.
        assert_eq!(ask(&|r| r.constraint = of(&[])), (vec![], TokenEvent::Ended(Stop::End)));
        assert_eq!(ask(&|r| r.stop_tokens = [free.0[2]].into()).1, TokenEvent::Ended(Stop::End));
        assert_eq!(ask(&|r| r.max_tokens = 0), (vec![], length.clone()));
        // Errors and panics of one grammar leave others alone.
        let failed = ask(&|r| r.constraint = of(&[36]));
        let TokenEvent::Failed(RequestError::Constraint(said)) = failed.1 else { panic!("{failed:?}") };
        assert!(said.contains("36 is not in the grammar"), "{said}");
        struct Broken;
        impl TokenConstraint for Broken {
            fn mask(&mut self, _: &mut TokenMask) -> anyhow::Result<()> {
                panic!("a bug of a grammar")
            }
            fn accept(&mut self, _: u32) -> anyhow::Result<()> {
                Ok(())
            }
        }
        let failed = ask(&|r| r.constraint = Some(Box::new(Broken)));
        assert!(matches!(failed.1, TokenEvent::Failed(RequestError::Constraint(_))), "{failed:?}");
        assert_eq!(ask(&|_| ()), free);
        // Every token that was written loses.
        let penalized = ask(&|r| r.sampling.presence_penalty = 100.0).0;
        let unlike: std::collections::BTreeSet<u32> = penalized.iter().copied().collect();
        assert_eq!(unlike.len(), 6, "{penalized:?}");
    });
}

#[test]
fn log_probabilities_are_those_of_the_model_in_chunks_of_any_length() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = random(folder.path(), &config(4, 2));
    files.ends.clear();
    for (ranks, stages, chunk) in [(1, 1, 100), (1, 1, 1), (2, 1, 3), (2, 2, 4)] {
        let files = files.clone();
        on_ranks(ranks, "logprobs", move |ctx| -> anyhow::Result<()> {
            let asked = served(ctx, stages, &files, &options(2, chunk), QueueLimits::default(), |queue| {
                let events = |request| {
                    let mut stream = queue.submit(request).unwrap();
                    std::iter::from_fn(|| stream.next_event(MOMENT)).collect::<Vec<_>>()
                };
                let prompt = vec![3, 1, 4, 1, 5, 9, 2, 6];
                let request = ServeRequest { logprobs: Some(3), ..ServeRequest::new(prompt.clone(), 5) };
                let (mut text, mut told) = (prompt.clone(), Vec::new());
                for event in events(request) {
                    if let TokenEvent::Token { token, logprob, .. } = event {
                        let logprob = logprob.unwrap();
                        // The likeliest token was taken.
                        assert_eq!(logprob.top[0], (token, logprob.logprob));
                        assert!(logprob.top.is_sorted_by(|(_, a), (_, b)| a >= b) && logprob.top.len() == 3);
                        text.push(token);
                        told.push(logprob.logprob);
                    }
                }
                // The same text, as a prompt. It is computed whole, whatever is cached.
                let request = ServeRequest { prompt_logprobs: true, ..ServeRequest::new(text.clone(), 0) };
                let made = events(request);
                let [TokenEvent::Begun { cached: 0, prompt_logprobs, .. }, TokenEvent::Ended(Stop::Length)] =
                    &made[..]
                else {
                    panic!("{made:?}")
                };
                assert_eq!(prompt_logprobs.len(), text.len() - 1);
                for (read, wrote) in prompt_logprobs[prompt.len() - 1..].iter().zip(&told) {
                    assert!((read.logprob - wrote).abs() < 1e-4, "{} and {wrote}", read.logprob);
                }
                let sum: f64 = prompt_logprobs.iter().map(|told| f64::from(told.logprob)).sum();
                (text, sum)
            })?;
            if let (1, Some((text, sum))) = (ctx.world_size(), asked.1) {
                let all = windows(text.len(), text.len(), text.len());
                let nll = score(ctx, 1, &files, &ModelOptions::of(DType::F32), (&text, &all), || ())?.nll;
                assert!((nll + sum).abs() < 1e-3, "{nll} and {sum}");
            }
            Ok(())
        });
    }
}

#[test]
fn texts_that_lose_their_memory_are_those_of_texts_that_do_not() {
    // One long text has room, and five run.
    let of_text = 2 * 2 * 8 * 2 * 4 * ROOM;
    let tight = ServeOptions { memory: Some(of_text), block: 4, ..options(5, 8) };
    let whole = ServeOptions { memory: None, ..tight.clone() };
    for ranks in [1, 2] {
        let texts = |options: &ServeOptions| {
            with_llama(ranks, options.clone(), QueueLimits::default(), |queue| {
                let request = |seed: u64| ServeRequest {
                    sampling: Sampling {
                        temperature: [0.0, 1.2][seed as usize % 2],
                        presence_penalty: 0.4,
                        seed,
                        ..Sampling::default()
                    },
                    logprobs: Some(0),
                    ..ServeRequest::new(vec![seed as u32; 3], 40)
                };
                let mut streams = queue.submit_all((0..5).map(request).collect()).unwrap();
                let texts: Vec<_> = streams.iter_mut().map(read).collect();
                (texts, queue.status().preemptions)
            })
        };
        let ((want, none), (got, preemptions)) = (texts(&whole), texts(&tight));
        assert_eq!(none, 0);
        assert!(preemptions > 0, "no text has lost its memory");
        for ((got, _, end), (want, ..)) in got.iter().zip(&want) {
            assert_eq!((got, end), (want, &TokenEvent::Ended(Stop::Length)));
        }
    }
}

#[test]
fn texts_that_wait_for_memory_have_deadlines_and_can_be_cancelled() {
    let of_text = 2 * 2 * 8 * 2 * 4 * ROOM;
    let tight = ServeOptions { memory: Some(of_text), block: 1, ..options(3, 8) };
    with_llama(1, tight, QueueLimits::default(), |queue| {
        // A token takes 5 ms at least, so the second text has fewer at its deadline.
        let deadline = Some(Instant::now() + Duration::from_millis(150));
        let [mut late, ends, leaves] = [2, 1, 3].map(|token| slow(&[token; 4], 44));
        late.deadline = deadline;
        let streams = queue.submit_all(vec![ends, late, leaves]).unwrap();
        let Ok([mut first, mut late, last]) = <[RequestStream; 3]>::try_from(streams) else {
            panic!("a stream for each")
        };
        let began = Instant::now();
        while queue.status().preemptions == 0 {
            assert!(began.elapsed() < MOMENT);
            thread::sleep(Duration::from_millis(1));
        }
        drop(last);
        assert_eq!(read(&mut first).0.len(), 44);
        match read(&mut late) {
            (tokens, _, TokenEvent::Ended(Stop::Length)) => assert!((1..44).contains(&tokens.len())),
            (tokens, _, TokenEvent::Failed(RequestError::Deadline)) => assert!(tokens.is_empty()),
            other => panic!("{other:?}"),
        }
        let began = Instant::now();
        while queue.status().running + queue.status().waiting > 0 {
            assert!(began.elapsed() < MOMENT, "{:?}", queue.status());
            thread::sleep(Duration::from_millis(1));
        }
    });
}

#[test]
fn logits_that_are_no_numbers_end_one_request_alone() {
    let folder = tempfile::tempdir().unwrap();
    random_model::write(folder.path(), &config(4, 2), 7, DType::F32).unwrap();
    let path = folder.path().join("model.safetensors");
    let mut tensors: HashMap<String, Tensor> = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let table = &tensors["model.embed_tokens.weight"];
    let mut rows = table.to_vec2::<f32>().unwrap();
    rows[13].fill(f32::NAN);
    tensors.insert("model.embed_tokens.weight".into(), Tensor::new(rows, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let mut files = Files::open(folder.path()).unwrap();
    files.ends.clear();
    for (ranks, stages) in [(1, 1), (2, 1), (2, 2)] {
        let files = files.clone();
        on_ranks(ranks, "no numbers", move |ctx| {
            served(ctx, stages, &files, &options(3, 4), QueueLimits::default(), |queue| {
                // The token without numbers is never written.
                let request = |prompt: &[u32]| ServeRequest {
                    logit_bias: [(13, -1e9)].into(),
                    ..ServeRequest::new(prompt.to_vec(), 9)
                };
                let mut alone = queue.submit(request(&[1, 2, 3, 4, 5])).unwrap();
                let alone = read(&mut alone).0;
                let prompts: [&[u32]; 4] = [&[1, 2, 3, 4, 5], &[1, 2, 13, 4, 5], &[1, 2, 3, 4, 5], &[13]];
                let mut streams = prompts.map(|prompt| queue.submit(request(prompt)).unwrap());
                for (prompt, stream) in prompts.iter().zip(&mut streams) {
                    match (prompt.contains(&13), read(stream)) {
                        (true, (tokens, _, TokenEvent::Failed(RequestError::Logits(said)))) => {
                            assert!(
                                tokens.is_empty() && said.contains("NaN") && said.contains("position"),
                                "{said}"
                            );
                        }
                        (false, (tokens, _, TokenEvent::Ended(Stop::Length))) => assert_eq!(tokens, alone),
                        other => panic!("{other:?}"),
                    }
                }
                // What the failed ones left is not used.
                let (tokens, cached, _) = read(&mut queue.submit(request(&[1, 2, 3, 4, 5])).unwrap());
                assert_eq!((tokens, cached), (alone, 4));
            })
        });
    }
}

#[test]
fn a_rank_that_fails_ends_all_requests_with_its_cause() {
    test_utils::skip_among_processes("a rank fails on purpose");
    let folder = tempfile::tempdir().unwrap();
    let mut files = random(folder.path(), &config(4, 2));
    files.ends.clear();
    for (ranks, stages, is_idle) in [(2, 1, false), (2, 2, false), (2, 1, true)] {
        let (queue, files) = (RequestQueue::new(QueueLimits::default()), files.clone());
        let front = queue.clone();
        let client = thread::spawn(move || {
            assert_eq!(front.wait_until_open(MOMENT), Ok(true));
            let mut streams: Vec<RequestStream> = match is_idle {
                true => Vec::new(),
                false => (0..4).map(|i| front.submit(slow(&[i], 40)).unwrap()).collect(),
            };
            let ends: Vec<TokenEvent> = streams.iter_mut().map(|stream| read(stream).2).collect();
            let began = Instant::now();
            while front.status().failure.is_none() {
                assert!(began.elapsed() < MOMENT);
                thread::sleep(Duration::from_millis(1));
            }
            (ends, front.submit(ServeRequest::new(vec![1], 1)).err())
        });
        let options = ServeOptions { heartbeat: Duration::from_millis(50), ..options(2, 8) };
        let ran = World::threads(ranks).run(|ctx| {
            thread::scope(|scope| {
                if ctx.rank() == 1 {
                    let group = ctx.group().clone();
                    scope.spawn(move || {
                        thread::sleep(Duration::from_millis(300));
                        group.fail("rank 1 has lost its disk");
                    });
                }
                serve(ctx, stages, &files, &options, (ctx.rank() == 0).then_some(&queue))
            })
        });
        let said = ran.unwrap_err().to_string();
        assert!(said.contains("rank 1 has lost its disk"), "{said}");
        let (ends, refused) = client.join().unwrap();
        for end in &ends {
            let TokenEvent::Failed(RequestError::World(cause)) = end else { panic!("{end:?}") };
            assert!(cause.contains("rank 1 has lost its disk"), "{cause}");
        }
        assert!(matches!(refused, Some(SubmitError::Failed(cause)) if cause.contains("lost its disk")));
        assert_eq!(queue.status().running, 0);
    }
}

#[test]
fn a_rank_that_fails_ends_requests_while_rank_0_computes() {
    test_utils::skip_among_processes("a rank fails on purpose");
    /// Takes as long as a long pass: until clients have their errors.
    struct Busy(mpsc::Sender<()>, mpsc::Receiver<()>);

    impl TokenConstraint for Busy {
        fn mask(&mut self, allowed: &mut TokenMask) -> anyhow::Result<()> {
            allowed.allow(1);
            self.0.send(()).ok();
            self.1.recv_timeout(MOMENT).map_err(|_| anyhow::anyhow!("clients have waited for the pass"))
        }
        fn accept(&mut self, _: u32) -> anyhow::Result<()> {
            Ok(())
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let files = random(folder.path(), &config(4, 2));
    let queue = RequestQueue::new(QueueLimits::default());
    let (busy, is_busy) = mpsc::channel();
    let (told, are_told) = mpsc::channel();
    let front = queue.clone();
    let client = thread::spawn(move || {
        assert_eq!(front.wait_until_open(MOMENT), Ok(true));
        let request = ServeRequest { constraint: Some(Box::new(Busy(busy, are_told))), ..slow(&[1], 40) };
        // Two have a slot, and one waits.
        let mut streams = [request, slow(&[2], 40), slow(&[3], 40)].map(|one| front.submit(one).unwrap());
        let ends: Vec<TokenEvent> = streams.iter_mut().map(|stream| read(stream).2).collect();
        told.send(()).unwrap();
        ends
    });
    let is_busy = Mutex::new(is_busy);
    let ran = World::threads(2).run(|ctx| {
        thread::scope(|scope| {
            if ctx.rank() == 1 {
                let (group, is_busy) = (ctx.group().clone(), &is_busy);
                scope.spawn(move || {
                    is_busy.lock().unwrap().recv_timeout(MOMENT).unwrap();
                    group.fail("rank 1 has lost its disk");
                });
            }
            serve(ctx, 1, &files, &options(2, 8), (ctx.rank() == 0).then_some(&queue))
        })
    });
    assert!(ran.unwrap_err().to_string().contains("rank 1 has lost its disk"));
    for end in client.join().unwrap() {
        let TokenEvent::Failed(RequestError::World(cause)) = end else { panic!("{end:?}") };
        assert!(cause.contains("rank 1 has lost its disk"), "{cause}");
    }
    assert_eq!(queue.status().running, 0);
}

#[test]
fn a_server_without_a_queue_or_memory_is_one_error_on_all_ranks() {
    test_utils::skip_among_processes("ranks fail on purpose");
    let folder = tempfile::tempdir().unwrap();
    let files = random(folder.path(), &config(4, 2));
    let of_text = 2 * 2 * 8 * 2 * 4 * ROOM; // layers, heads, dim, keys and values, bytes
    let fitting = ServeOptions { memory: Some(3 * of_text + 1), ..options(16, 8) };
    assert_eq!(fitting.cache_bytes(&files.config, 2, 1).unwrap(), 3 * of_text + 1);
    assert_eq!(options(16, 8).cache_bytes(&files.config, 2, 1).unwrap(), 16 * of_text);
    let queue = RequestQueue::new(QueueLimits::default());
    let small = ServeOptions { memory: Some(of_text - 1), ..options(16, 8) };
    for (options, given, want) in
        [(small, Some(&queue), "a text of 48 tokens takes"), (options(1, 1), None, "gives the queue")]
    {
        let ran = World::threads(2)
            .run(|ctx| serve(ctx, 1, &files, &options, given.filter(|_| ctx.rank() == 0)).map(drop));
        let said = ran.unwrap_err().to_string();
        assert!(said.contains(want), "{said}");
    }
    assert!(queue.status().failure.is_some_and(|cause| cause.contains("a text of 48 tokens takes")));
}

/// The seconds that this process has computed.
fn computed() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<f64> =
        stat.rsplit(')').next().unwrap().split_whitespace().filter_map(|field| field.parse().ok()).collect();
    // User and system time, in hundredths of a second; the state has no number.
    (fields[10] + fields[11]) / 100.0
}

#[test]
fn an_idle_server_outlives_the_timeout_of_calls_and_leaves_the_cores_alone() {
    test_utils::skip_among_processes("the timeout is that of threads");
    let folder = tempfile::tempdir().unwrap();
    let mut files = random(folder.path(), &config(4, 2));
    files.ends.clear();
    for (ranks, stages) in [(2, 1), (2, 2)] {
        let options = ServeOptions { heartbeat: Duration::from_millis(200), ..options(2, 8) };
        let world = World::threads(ranks).timeout(Duration::from_secs(1));
        let made = world.run(|ctx| {
            served(ctx, stages, &files, &options, QueueLimits::default(), |queue| {
                let ask = || read(&mut queue.submit(ServeRequest::new(vec![1, 2, 3], 5)).unwrap()).0;
                let before = ask();
                let (began, used) = (Instant::now(), computed());
                thread::sleep(Duration::from_millis(2500));
                let share = (computed() - used) / began.elapsed().as_secs_f64();
                (before, ask(), share)
            })
        });
        let (before, after, share) = made.unwrap().remove(0).1.unwrap();
        println!("idle on {ranks} ranks in {stages} stages: {:.1} % of a core", 100.0 * share);
        assert_eq!(before, after);
        assert!(share < 0.5, "{share}");
    }
}
