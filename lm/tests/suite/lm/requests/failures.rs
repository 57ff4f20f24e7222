//! Requests, ranks and servers that fail.

use std::collections::HashMap;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candle_dist::World;
use candle_lm::files::Files;
use candle_lm::generate::Stop;
use candle_lm::random_model;
use candle_lm::serve::{
    QueueLimits, RequestError, RequestQueue, RequestStream, ServeOptions, ServeRequest, SubmitError,
    TokenConstraint, TokenEvent, TokenMask, serve,
};
use test_utils::on_ranks;

use crate::lm::config;

use super::{MOMENT, ROOM, options, random, read, served, slow};

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
