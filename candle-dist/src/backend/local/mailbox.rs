//! Point-to-point messages: the sender leaves a tensor, the receiver takes it.
use super::rendezvous::GroupState;
use super::state::On;
use crate::backend::Call;
use crate::{Cause, Result};
use candle_core::Tensor;
use std::sync::Arc;

impl GroupState {
    /// Leaves `tensor` for `call.peer`; never waits.
    pub(super) fn send(self: &Arc<Self>, me: usize, call: Call, tensor: Tensor) -> Result<()> {
        self.world().check()?;
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
        self.wait(me, &On::Message { from, to: me, tag: call.tag })?;
        let message = self.mail.lock().get_mut(&(from, me, call.tag)).and_then(|queue| queue.pop_front());
        let Some((sent, tensor)) = message else {
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
