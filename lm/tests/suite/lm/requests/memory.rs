//! Texts that have less memory than they need together.

use std::thread;
use std::time::{Duration, Instant};

use candle_lm::generate::Stop;
use candle_lm::sample::Sampling;
use candle_lm::serve::{QueueLimits, RequestError, RequestStream, ServeOptions, ServeRequest, TokenEvent};

use super::{MOMENT, ROOM, options, read, slow, with_llama};

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
