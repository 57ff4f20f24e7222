//! Sends the requests of a load, each at its time.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::client::{ApiClient, RequestOutcome};
use super::plan::PlannedRequest;

/// The stack of a request's thread. Only touched pages take memory.
const STACK_BYTES: usize = 512 << 10;

/// So many requests may be open.
struct OpenSlots {
    free: Mutex<usize>,
    changed: Condvar,
}

impl OpenSlots {
    fn acquire(&self) {
        let mut free = self.free.lock();
        self.changed.wait_while(&mut free, |free| *free == 0);
        *free -= 1;
    }

    fn release(&self) {
        *self.free.lock() += 1;
        self.changed.notify_one();
    }
}

/// Sends all requests, and returns what became of each, and the time from the first one to the last end.
///
/// # Errors
/// If the system has no threads for them.
pub(super) fn send_all(
    client: &ApiClient,
    url: &str,
    requests: &[PlannedRequest],
    most_open: usize,
    ended: impl Fn() + Sync,
) -> io::Result<(Vec<RequestOutcome>, Duration)> {
    let slots = OpenSlots { free: Mutex::new(most_open), changed: Condvar::new() };
    let outcomes = Mutex::new(vec![RequestOutcome::default(); requests.len()]);
    let began = Instant::now();
    thread::scope(|scope| {
        for (nth, request) in requests.iter().enumerate() {
            thread::sleep((began + request.at).saturating_duration_since(Instant::now()));
            let (slots, outcomes, ended) = (&slots, &outcomes, &ended);
            let send = move || {
                slots.acquire();
                let outcome = client.ask(url, &request.body);
                slots.release();
                if let Some(place) = outcomes.lock().get_mut(nth) {
                    *place = outcome;
                }
                ended();
            };
            thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, send)?;
        }
        io::Result::Ok(())
    })?;
    Ok((outcomes.into_inner(), began.elapsed()))
}
