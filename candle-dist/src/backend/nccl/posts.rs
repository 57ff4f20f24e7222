//! The receives and messages that ranks have enqueued. A message is enqueued when its receive is, so that no kernel waits long for
//! another one, and nothing waits on the GPU for the receive before the message is enqueued.
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::time::Duration;

/// How many receives and messages were enqueued on each channel.
#[derive(Debug, Default)]
pub(crate) struct ReceivePosts {
    counts: Mutex<FxHashMap<(u64, ChannelEnd), u64>>,
    changed: Condvar,
}

/// An end of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ChannelEnd {
    Receiver,
    Sender,
}

impl ReceivePosts {
    /// Notes that an end of a channel has enqueued its part of the message `number`.
    pub(crate) fn note(&self, channel: u64, end: ChannelEnd, number: u64) {
        let mut counts = self.counts.lock();
        let count = counts.entry((channel, end)).or_default();
        *count = (*count).max(number + 1);
        self.changed.notify_all();
    }

    /// Returns whether an end of a channel has enqueued its part of the message `number`. Waits for at most `limit`.
    pub(crate) fn has(&self, channel: u64, end: ChannelEnd, number: u64, limit: Duration) -> bool {
        let is_there =
            |counts: &FxHashMap<_, u64>| counts.get(&(channel, end)).is_some_and(|&it| it > number);
        let mut counts = self.counts.lock();
        self.changed.wait_while_for(&mut counts, |counts| !is_there(counts), limit);
        is_there(&counts)
    }

    /// Forgets channels.
    pub(crate) fn forget(&self, channels: &[u64]) {
        let mut counts = self.counts.lock();
        for &channel in channels {
            for end in [ChannelEnd::Receiver, ChannelEnd::Sender] {
                counts.remove(&(channel, end));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_waits_for_its_own_receive() {
        let (posts, soon, long) =
            (ReceivePosts::default(), Duration::from_millis(5), Duration::from_secs(60));
        let (from, to) = (ChannelEnd::Sender, ChannelEnd::Receiver);
        posts.note(7, to, 0);
        assert!(posts.has(7, to, 0, soon) && !posts.has(7, to, 1, soon) && !posts.has(8, to, 0, soon));
        assert!(!posts.has(7, from, 0, soon), "it is not sent yet");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| posts.has(7, to, 2, long));
            posts.note(7, to, 2);
            assert!(waiting.join().expect("no panic"));
        });
        assert!(posts.has(7, to, 1, soon), "receives of a channel are enqueued in order");
        posts.note(7, from, 0);
        assert!(posts.has(7, from, 0, soon));
        posts.forget(&[7]);
        assert!(posts.counts.lock().is_empty());
    }
}
