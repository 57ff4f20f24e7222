//! Requests that wait, are sent away, and take turns.

use super::{PassLoad, QueueLimits, RequestQueue, ServeStatus, SubmitError};
use crate::Sampling;
use crate::serve::{RequestError, RequestStream, ServeRequest, TokenEvent};
use std::time::{Duration, Instant};

fn opened(limits: QueueLimits) -> RequestQueue {
    let queue = RequestQueue::new(limits);
    queue.open(ServeStatus { room: Some(100), ..ServeStatus::default() }, 50);
    queue
}

fn of_client(client: u64, tokens: usize) -> ServeRequest {
    // A salt of its own for each request buys no turns.
    ServeRequest { client, cache_salt: tokens as u64, ..ServeRequest::new(vec![1; tokens], 4) }
}

#[test]
fn what_cannot_work_is_refused_with_a_reason() {
    let queue = opened(QueueLimits::default());
    let of = |change: fn(&mut ServeRequest)| {
        let mut request = of_client(0, 3);
        change(&mut request);
        queue.submit(request).err()
    };
    assert_eq!(of(|r| r.prompt = vec![1; 100]), Some(SubmitError::TooLong { tokens: 100, room: 100 }));
    assert_eq!(of(|r| (r.prompt, r.max_tokens) = (vec![1; 100], 0)), None);
    let refused: [fn(&mut ServeRequest); 9] = [
        |r| r.adapter = Some(0),
        |r| r.prompt.clear(),
        |r| r.prompt.push(50),
        |r| r.logit_bias = [(50, 1.0)].into(),
        |r| r.logit_bias = [(1, f32::NAN)].into(),
        |r| r.stop_tokens = [u32::MAX].into(),
        |r| r.logprobs = Some(51),
        |r| r.sampling = Sampling { temperature: f64::NAN, ..Sampling::default() },
        |r| r.sampling = Sampling { repetition_penalty: 0.0, ..Sampling::default() },
    ];
    for (i, change) in refused.into_iter().enumerate() {
        assert!(matches!(of(change), Some(SubmitError::Invalid(_))), "{i}");
    }
    queue.sweep(Instant::now());
    assert_eq!(queue.status().waiting, 0, "a dropped stream waits no more");
}

#[test]
fn a_full_queue_refuses_until_some_leave() {
    let queue = opened(QueueLimits { requests: 3, tokens: 20 });
    let first = queue.submit(of_client(0, 30)).unwrap();
    // One may wait whatever it has, but no token more.
    assert!(matches!(queue.submit(of_client(0, 1)), Err(SubmitError::Full { waiting: 1, .. })));
    drop(first);
    let kept: Vec<RequestStream> = (0..3).map(|_| queue.submit(of_client(0, 5)).unwrap()).collect();
    match queue.submit(of_client(1, 1)) {
        Err(SubmitError::Full { waiting: 3, retry_after }) => {
            assert!((1..=120).contains(&retry_after.as_secs()));
        }
        other => panic!("{other:?}"),
    }
    drop(kept);
    queue.submit(of_client(1, 1)).unwrap();
}

/// After what time a full queue sends requests away, behind these passes.
fn retry_after(waiting: usize, passes: &[PassLoad]) -> u64 {
    let queue = opened(QueueLimits { requests: 1, tokens: 1 << 20 });
    let _kept = queue.submit(of_client(0, waiting)).unwrap();
    passes.iter().for_each(|&pass| queue.tell(|_| (), Some(pass)));
    match queue.submit(of_client(1, 1)) {
        Err(SubmitError::Full { retry_after, .. }) => retry_after.as_secs(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_waits_is_read_at_the_speed_of_all_passes_together() {
    let pass = |prompt, seconds| PassLoad { prompt, seconds, unread: 0 };
    // Rank 0 waits for the other replicas only where it needs logits of them: a pass with 30 tokens of
    // another replica's prompt is over at once, and the next one lasts as long as both.
    let replicas = [pass(30, 1e-4), pass(1, 10.0)].repeat(40);
    assert!((20..=25).contains(&retry_after(62, &replicas)), "31 tokens in 10 s");
    // One that writes texts while requests wait reads nothing, and they wait as long.
    let writing = [&[pass(50, 1.0)][..], &[pass(0, 1.0); 9]].concat().repeat(40);
    assert!((16..=24).contains(&retry_after(90, &writing)), "50 tokens in 10 s");
}

#[test]
fn what_waits_is_read_behind_the_prompts_that_have_slots() {
    let pass = |unread| PassLoad { prompt: 10, seconds: 1.0, unread };
    assert_eq!(retry_after(35, &[pass(0)]), 4);
    assert_eq!(retry_after(35, &[pass(500), pass(300)]), 34);
}

#[test]
fn requests_that_come_together_wait_together_or_not_at_all() {
    let queue = opened(QueueLimits { requests: 4, tokens: 20 });
    let of = |count: usize, tokens: usize| (0..count).map(|_| of_client(0, tokens)).collect::<Vec<_>>();
    assert_eq!(queue.submit_all(Vec::new()).unwrap().len(), 0);
    let two = queue.submit_all(of(2, 4)).unwrap();
    // Too many, too long together, and one that cannot work.
    for refused in [of(3, 1), of(2, 7)] {
        assert!(matches!(queue.submit_all(refused), Err(SubmitError::Full { waiting: 2, .. })));
    }
    let wrong = vec![of_client(0, 1), of_client(0, 100)];
    assert!(matches!(queue.submit_all(wrong), Err(SubmitError::TooLong { tokens: 100, room: 100 })));
    assert_eq!(queue.status().waiting, 2, "none of those that were refused waits");
    assert_eq!(queue.submit_all(of(2, 6)).unwrap().len(), 2);
    drop(two);
    assert!(matches!(queue.submit_all(of(5, 1)), Err(SubmitError::Invalid(_))), "there will be no room");
}

#[test]
fn clients_take_turns_and_each_is_served_in_order() {
    let queue = opened(QueueLimits::default());
    let order = [(7, 1), (7, 2), (7, 3), (8, 4), (9, 5), (8, 6)];
    let _streams: Vec<RequestStream> =
        order.iter().map(|&(client, tokens)| queue.submit(of_client(client, tokens)).unwrap()).collect();
    let taken: Vec<usize> =
        std::iter::from_fn(|| queue.take(Instant::now())).map(|w| w.request.prompt.len()).collect();
    assert_eq!(taken, [1, 4, 5, 2, 6, 3]);
}

#[test]
fn a_pass_is_awaited_from_the_end_of_a_pause_on() {
    let queue = opened(QueueLimits::default());
    queue.tell(|_| (), None);
    assert_eq!(queue.status().since_pass, None);
    let long = Duration::from_millis(60);
    // The very first pass, and then one behind a pause.
    for pass in [None, Some(PassLoad { prompt: 1, seconds: 0.1, unread: 0 })] {
        queue.tell(|status| status.running = 0, pass);
        std::thread::sleep(long);
        queue.tell(|status| status.running = 1, None);
        assert!(queue.status().since_pass.unwrap() < long);
        std::thread::sleep(long);
        queue.tell(|status| status.running = 2, None);
        assert!(queue.status().since_pass.unwrap() >= long, "another request is no pass");
    }
}

#[test]
fn late_requests_fail_and_all_fail_with_the_world() {
    let queue = opened(QueueLimits::default());
    let mut late = ServeRequest::new(vec![1], 1);
    late.deadline = Some(Instant::now());
    let mut late = queue.submit(late).unwrap();
    let mut other = queue.submit(of_client(0, 1)).unwrap();
    queue.sweep(Instant::now());
    assert_eq!(late.next_event(Duration::ZERO), Some(TokenEvent::Failed(RequestError::Deadline)));
    queue.close(RequestError::World("rank 1 failed".into()));
    let failed = TokenEvent::Failed(RequestError::World("rank 1 failed".into()));
    assert_eq!(other.next_event(Duration::ZERO), Some(failed));
    assert_eq!(queue.submit(of_client(0, 1)).err(), Some(SubmitError::Failed("rank 1 failed".into())));
    assert_eq!(queue.wait_until_open(Duration::ZERO), Err(SubmitError::Failed("rank 1 failed".into())));
    assert_eq!(queue.status().ended, 2);
}
