//! What ends all requests when the engine of a server ends, whatever happens to its ranks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use candle_dist::{ProcessGroup, RankContext};

use super::queue::RequestQueue;
use super::request::RequestError;
use super::run::ServeReport;

/// What rank 0 must have.
pub(super) const NO_QUEUE: &str = "rank 0 gives the queue of requests";
/// How often rank 0 looks whether the world has failed.
const TICK: Duration = Duration::from_millis(10);

/// Runs the engine of a rank. Whatever happens to it, or to the world, ends all requests with the cause.
///
/// # Errors
/// Those of the engine.
pub(super) fn guarded(
    ctx: &RankContext,
    queue: Option<&RequestQueue>,
    engine: impl FnOnce(Option<&RequestQueue>, &mut ServeReport) -> Result<()>,
) -> Result<ServeReport> {
    let ends = ClosingQueue(queue.filter(|_| ctx.rank() == 0));
    let mut report = ServeReport::default();
    let is_over = AtomicBool::new(false);
    let served = thread::scope(|scope| {
        let _over = OverAtEnd(&is_over);
        if let Some(queue) = ends.0.filter(|_| ctx.world_size() > 1) {
            let group = ctx.group().clone();
            let is_over = &is_over;
            thread::Builder::new()
                .name("world watch".into())
                .spawn_scoped(scope, move || watch(&group, queue, is_over))?;
        }
        engine(ends.0, &mut report)
    });
    match &served {
        Ok(()) => ends.close(RequestError::Stopped),
        Err(error) => ends.close(RequestError::World(format!("{error:#}").into())),
    }
    served.map(|()| report)
}

/// Ends all requests as soon as the world has failed: rank 0 may be computing, and a launcher may end it soon.
fn watch(group: &ProcessGroup, queue: &RequestQueue, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Acquire) {
        if let Some(failure) = group.failure() {
            queue.close(RequestError::World(failure.to_string().into()));
            return;
        }
        thread::sleep(TICK);
    }
}

/// Ends the watch when it is dropped.
struct OverAtEnd<'a>(&'a AtomicBool);

impl Drop for OverAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The queue of rank 0, which is closed whatever happens to the rank.
struct ClosingQueue<'a>(Option<&'a RequestQueue>);

impl ClosingQueue<'_> {
    fn close(&self, error: RequestError) {
        if let Some(queue) = self.0 {
            queue.close(error);
        }
    }
}

impl Drop for ClosingQueue<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.close(RequestError::World("rank 0 panicked".into()));
        }
    }
}
