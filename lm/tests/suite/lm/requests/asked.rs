//! What a request asks for: deadlines, grammars, biases and log-probabilities; and how a server ends.

use std::thread;
use std::time::{Duration, Instant};

use candle_core::DType;
use candle_lm::engine::ModelOptions;
use candle_lm::generate::Stop;
use candle_lm::score::score;
use candle_lm::score::windows::windows;
use candle_lm::serve::{
    QueueLimits, RequestError, RequestStream, ServeRequest, SubmitError, TokenConstraint, TokenEvent,
    TokenMask,
};
use test_utils::on_ranks;

use crate::lm::config;

use super::{MOMENT, ROOM, Slow, options, random, read, served, slow, with_llama};

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
