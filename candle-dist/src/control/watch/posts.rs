//! The receives that other processes have enqueued, so that this one enqueues their messages.
use super::super::message::HubRequest;
use super::Watch;
use crate::link::within;
use std::time::Duration;

#[cfg(feature = "nccl")]
impl Watch {
    /// Tells rank `from` that this rank has enqueued the receive `number` of a channel.
    pub(in crate::control) fn post(&self, from: usize, channel: u64, number: u64) {
        self.send(HubRequest::Post { from, channel, number }, &[]);
    }

    /// Returns whether the receiver of a channel has enqueued its receive `number`. Waits for at most `limit`.
    pub(in crate::control) fn is_posted(&self, channel: u64, number: u64, limit: Duration) -> bool {
        let deadline = within(limit);
        let mut heard = self.heard.lock();
        loop {
            if heard.posted.get(&channel).is_some_and(|&count| count > number) {
                return true;
            }
            if self.failure.get().is_some() || self.changed.wait_until(&mut heard, deadline).timed_out() {
                return false;
            }
        }
    }

    /// Forgets a channel on which this rank sends nothing more.
    pub(in crate::control) fn forget_posts(&self, channel: u64) {
        self.heard.lock().posted.remove(&channel);
    }
}
