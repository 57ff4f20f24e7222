//! The receives that ranks have enqueued. A message is enqueued when its receive is, so that no kernel waits long for another one.
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::time::Duration;

/// How many receives were enqueued on each channel.
#[derive(Debug, Default)]
pub(crate) struct ReceivePosts {
    counts: Mutex<FxHashMap<u64, u64>>,
    changed: Condvar,
}

impl ReceivePosts {
    /// Notes the receive `number` of a channel.
    pub(crate) fn note(&self, channel: u64, number: u64) {
        let mut counts = self.counts.lock();
        let count = counts.entry(channel).or_default();
        *count = (*count).max(number + 1);
        self.changed.notify_all();
    }

    /// Returns whether the receive `number` of a channel is enqueued. Waits for at most `limit`.
    pub(crate) fn has(&self, channel: u64, number: u64, limit: Duration) -> bool {
        let is_there =
            |counts: &FxHashMap<u64, u64>| counts.get(&channel).is_some_and(|&count| count > number);
        let mut counts = self.counts.lock();
        self.changed.wait_while_for(&mut counts, |counts| !is_there(counts), limit);
        is_there(&counts)
    }

    /// Forgets channels.
    pub(crate) fn forget(&self, channels: &[u64]) {
        let mut counts = self.counts.lock();
        channels.iter().for_each(|channel| _ = counts.remove(channel));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_waits_for_its_own_receive() {
        let (posts, soon, long) =
            (ReceivePosts::default(), Duration::from_millis(5), Duration::from_secs(60));
        posts.note(7, 0);
        assert!(posts.has(7, 0, soon) && !posts.has(7, 1, soon) && !posts.has(8, 0, soon));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| posts.has(7, 2, long));
            posts.note(7, 2);
            assert!(waiting.join().expect("no panic"));
        });
        assert!(posts.has(7, 1, soon), "receives of a channel are enqueued in order");
        posts.forget(&[7]);
        assert!(posts.counts.lock().is_empty());
    }
}
