//! Ends communicators whose calls cannot end, on threads of their own.
//!
//! `ncclCommAbort` joins the thread that enqueues a group of calls (`group.cc`), which may be inside of a call of the driver that waits
//! for the GPU. So it may take long, or never return. Nobody holds a lock meanwhile, and who must wait for it waits for a bounded time:
//! if an abort takes longer, the process ends with a message, because nothing else frees a stream that waits for a lost rank.
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The aborts of a rank that are under way.
#[derive(Default)]
pub(super) struct AbortSet {
    under_way: Mutex<usize>,
    changed: Condvar,
}

impl AbortSet {
    /// Runs `abort` on a thread of its own. Calls `last_resort` if it takes longer than `limit`.
    pub(super) fn start(
        self: &Arc<Self>,
        limit: Duration,
        abort: impl FnOnce() + Send + 'static,
        last_resort: impl FnOnce() + Send + 'static,
    ) {
        *self.under_way.lock() += 1;
        let (all, ended) = (self.clone(), Arc::new(AbortEnd::default()));
        let (waited, set) = (ended.clone(), self.clone());
        let run = move || {
            abort();
            ended.set();
            *set.under_way.lock() -= 1;
            set.changed.notify_all();
        };
        let threads = [
            std::thread::Builder::new().name("nccl abort".to_string()).spawn(run).map(drop),
            std::thread::Builder::new()
                .name("nccl last resort".to_string())
                .spawn(move || {
                    if !waited.wait(limit) {
                        last_resort();
                    }
                })
                .map(drop),
        ];
        if threads[0].is_err() {
            // Without a thread, the communicator stays as it is until the process ends.
            *all.under_way.lock() -= 1;
            all.changed.notify_all();
        }
    }

    /// Waits until no abort is under way, for at most `limit`. Returns whether that is so.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now().checked_add(limit);
        let mut under_way = self.under_way.lock();
        while *under_way > 0 {
            let is_late = match deadline {
                Some(deadline) => self.changed.wait_until(&mut under_way, deadline).timed_out(),
                None => {
                    self.changed.wait(&mut under_way);
                    false
                }
            };
            if is_late {
                break;
            }
        }
        *under_way == 0
    }
}

/// Whether an abort has returned.
#[derive(Default)]
struct AbortEnd {
    has_come: Mutex<bool>,
    changed: Condvar,
}

impl AbortEnd {
    fn set(&self) {
        *self.has_come.lock() = true;
        self.changed.notify_all();
    }

    /// Waits for the end, for at most `limit`. Returns whether it has come.
    fn wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now().checked_add(limit);
        let mut has_come = self.has_come.lock();
        while !*has_come {
            match deadline {
                Some(deadline) if self.changed.wait_until(&mut has_come, deadline).timed_out() => break,
                Some(_) => {}
                None => self.changed.wait(&mut has_come),
            }
        }
        *has_come
    }
}

/// Returns what a process says that ends because an abort does not return.
pub(super) fn last_words(rank: usize, gpu: usize, call: &str, limit: Duration, why: &str) -> String {
    format!(
        "candle-dist: rank {rank} ends its process: NCCL has not aborted {call} on GPU {gpu} within {limit:?}, after the world stopped \
         ({why}). A kernel or a call of the driver hangs there. Start the job again; if the GPU hangs again, run with NCCL_DEBUG=WARN and \
         see dmesg for Xid errors. World::abort_timeout and InitOptions::abort_timeout set this time"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn an_abort_runs_beside_its_caller_who_may_wait_for_it() {
        let (all, (go, come), (tell, told)) = (Arc::new(AbortSet::default()), channel(), channel());
        all.start(LONG, move || _ = come.recv(), move || _ = tell.send(()));
        assert!(!all.wait(Duration::from_millis(20)), "it is under way");
        go.send(()).expect("it waits");
        assert!(all.wait(LONG) && told.recv().is_err(), "without the last resort");
    }

    #[test]
    fn an_abort_that_does_not_return_comes_to_the_last_resort_and_waits_have_an_end() {
        let (all, (go, come), (tell, told)) = (Arc::new(AbortSet::default()), channel::<()>(), channel());
        all.start(Duration::from_millis(30), move || _ = come.recv(), move || _ = tell.send(7));
        assert_eq!(told.recv(), Ok(7));
        assert!(!all.wait(Duration::from_millis(10)));
        // Others are not held up.
        all.start(LONG, || (), || ());
        drop(go);
        assert!(all.wait(LONG));
    }

    #[test]
    fn the_last_words_say_who_where_and_what_to_do() {
        let words = last_words(3, 1, "all_reduce", Duration::from_secs(60), "rank 0 returned");
        let parts = [
            "rank 3",
            "GPU 1",
            "all_reduce",
            "60s",
            "rank 0 returned",
            "Start the job again",
            "abort_timeout",
        ];
        for part in parts {
            assert!(words.contains(part), "{part}: {words}");
        }
    }
}
