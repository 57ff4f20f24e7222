//! Requests that come and go while others are written: a server of all ranks, and a client of rank 0.

mod alone;
mod asked;
mod drawn;
mod failures;
mod memory;

use std::path::Path;
use std::thread;
use std::time::Duration;

use candle_core::DType;
use candle_dist::RankContext;
use candle_lm::config::Config;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::random_model;
use candle_lm::serve::{
    QueueLimits, RequestQueue, RequestStream, ServeOptions, ServeReport, ServeRequest, TokenConstraint,
    TokenEvent, TokenMask, serve,
};
use test_utils::on_ranks;

use crate::lm::config;
use crate::lm::families::{families, write};

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
