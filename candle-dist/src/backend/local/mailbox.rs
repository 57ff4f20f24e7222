//! Point-to-point messages: the sender leaves a tensor, the receiver takes it.
use super::rendezvous::{Address, GroupState, check_device};
use super::state::On;
use crate::backend::Call;
use crate::{Cause, Result};
use candle_core::Tensor;
use std::collections::hash_map::Entry;
use std::sync::Arc;

impl GroupState {
    pub(super) fn has_mail(&self, address: &Address) -> bool {
        self.mail.lock().contains_key(address)
    }

    /// The oldest message at `address`; its queue goes with the last, for tags may never come again.
    fn take(&self, address: Address) -> Option<(Arc<Call>, Tensor)> {
        let mut mail = self.mail.lock();
        let Entry::Occupied(mut queue) = mail.entry(address) else { return None };
        let message = queue.get_mut().pop_front();
        if queue.get().is_empty() {
            queue.remove();
        }
        message
    }

    /// Leaves `tensor` for `call.peer`; never waits.
    pub(super) fn send(self: &Arc<Self>, me: usize, call: Call, tensor: Tensor) -> Result<()> {
        self.world().check()?;
        check_device(&call, std::iter::once(&tensor))?;
        let to = call.peer.unwrap_or(me);
        let call = Arc::new(call);
        self.world().begin(self.ranks()[me], call.clone());
        let tag = call.tag;
        self.mail.lock().entry((me, to, tag)).or_default().push_back((call, tensor));
        self.notify();
        self.world().complete(self.ranks()[me]);
        Ok(())
    }

    /// Takes the oldest tensor that `call.peer` left for this member.
    pub(super) fn recv(self: &Arc<Self>, me: usize, call: Call) -> Result<Tensor> {
        self.world().check()?;
        let from = call.peer.unwrap_or(me);
        let call = Arc::new(call);
        self.world().begin(self.ranks()[me], call.clone());
        let address = (from, me, call.tag);
        self.wait(me, || self.has_mail(&address), || On::Message { from, to: me, tag: call.tag })?;
        let Some((sent, tensor)) = self.take(address) else {
            return Err(self.world().fail(Cause::Deadlock));
        };
        let mismatch = |what| {
            let (rank, reference) = (self.ranks()[me], self.ranks()[from]);
            Err(self.world().fail(Cause::Mismatch { rank, reference, what }))
        };
        if sent.dtype != call.dtype {
            return mismatch("dtype");
        }
        if sent.shape != call.shape {
            return mismatch("shape");
        }
        self.world().complete(self.ranks()[me]);
        Ok(tensor)
    }
}
