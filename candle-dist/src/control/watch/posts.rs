//! The parts of messages that other processes have enqueued, so that this one enqueues and marks its own.
use super::super::message::HubRequest;
use super::Watch;
use crate::link::within;
use std::time::Duration;

impl Watch {
    /// Tells rank `peer`, at the other end of a channel, that this rank has enqueued its part of the message `number`.
    pub(in crate::control) fn post(&self, peer: usize, channel: u64, number: u64, sends: bool) {
        self.send(HubRequest::Post { peer, channel, number, sends }, &[]);
    }

    /// Returns whether the other end of a channel, which sends or receives, has enqueued its part of the message `number`. Waits for at
    /// most `limit`.
    pub(in crate::control) fn is_posted(
        &self,
        channel: u64,
        number: u64,
        sends: bool,
        limit: Duration,
    ) -> bool {
        let deadline = within(limit);
        let mut heard = self.heard.lock();
        loop {
            if heard.posted.get(&(channel, sends)).is_some_and(|&count| count > number) {
                return true;
            }
            if self.failure.get().is_some() || self.changed.wait_until(&mut heard, deadline).timed_out() {
                return false;
            }
        }
    }

    /// Forgets a channel of which this rank was an end.
    pub(in crate::control) fn forget_posts(&self, channel: u64) {
        let mut heard = self.heard.lock();
        for sends in [true, false] {
            heard.posted.remove(&(channel, sends));
        }
    }
}
