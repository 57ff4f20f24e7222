//! Point-to-point messages.
use super::ProcessGroup;
use super::call::InputMemory;
use super::pending::{Pending, PendingState, PendingTensors};
use crate::Result;
use crate::backend::{Call, Envelope, Op, Tensors, bytes};
use crate::call::Collective;
use candle_core::{DType, Shape, Tensor};

/// One message of [`ProcessGroup::batch_send_recv`].
#[derive(Debug, Clone)]
pub enum P2pOp {
    /// A copy of `tensor` for rank `to`.
    Send {
        /// The tensor to send.
        tensor: Tensor,
        /// The receiver.
        to: usize,
        /// Distinguishes messages between one pair of ranks; tags may be received in any order.
        tag: u32,
    },
    /// The next tensor with this tag from rank `from`.
    Recv {
        /// The shape it must have.
        shape: Shape,
        /// The dtype it must have.
        dtype: DType,
        /// The sender.
        from: usize,
        /// The tag it was sent with.
        tag: u32,
    },
}

/// The former name of [`P2pOp`].
#[deprecated(since = "0.1.0", note = "renamed to P2pOp")]
pub type Message = P2pOp;

impl ProcessGroup {
    /// Sends a copy of `tensor` to rank `to`. It does not wait, except for the bound on unread messages (see
    /// [`World::mailbox_bytes`](crate::World::mailbox_bytes)).
    ///
    /// The memory of the tensor may change at once. [`Collective::Send`] has tags and the other forms: a send that never
    /// waits ([`start`](crate::CollectiveCall::start_all)), and one of the tensor [itself](crate::CollectiveCall::owned).
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::{Collective, World};
    ///
    /// World::threads(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let (group, other) = (ctx.group(), 1 - ctx.rank());
    ///     let receive = || group.call(Collective::Recv { from: Some(other), tag: 7 }).of(1, DType::F32).start(None);
    ///     let (first, second) = (receive()?, receive()?);
    ///     for x in [1f32, 2.0] {
    ///         let x = Tensor::new(&[x], &Device::Cpu)?;
    ///         group.call(Collective::Send { to: other, tag: 7 }).start_all(&[x])?.wait()?;
    ///     }
    ///     // The n-th started receive gets the n-th message, in any order of waits.
    ///     assert_eq!(second.wait()?.to_vec1::<f32>()?, [2.0]);
    ///     assert_eq!(first.wait()?.to_vec1::<f32>()?, [1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<()> {
        self.call(Collective::Send { to, tag: 0 }).run_all(std::slice::from_ref(tensor)).map(drop)
    }

    /// Receives the next tensor from rank `from`, which must have this shape and dtype.
    ///
    /// [`CollectiveCall::receive`](crate::CollectiveCall::receive) receives from any rank.
    #[track_caller]
    pub fn recv(&self, shape: impl Into<Shape>, dtype: DType, from: usize) -> Result<Tensor> {
        self.call(Collective::Recv { from: Some(from), tag: 0 }).of(shape, dtype).run(None)
    }

    /// Sends and receives several messages at once, and returns the received ones in the order of the list.
    ///
    /// No order of the list can deadlock: all sends are started before the first receive.
    ///
    /// ```
    /// use candle_core::{DType, Device, Shape, Tensor};
    /// use candle_dist::{P2pOp, World};
    ///
    /// let received = World::threads(2).run(|ctx| -> candle_dist::Result<f32> {
    ///     let (other, tensor) = (1 - ctx.rank(), Tensor::new(&[ctx.rank() as f32], &Device::Cpu)?);
    ///     let receive = P2pOp::Recv { shape: Shape::from(1), dtype: DType::F32, from: other, tag: 7 };
    ///     let got = ctx.group().batch_send_recv(&[receive, P2pOp::Send { tensor, to: other, tag: 7 }])?;
    ///     Ok(got[0].to_vec1::<f32>()?[0])
    /// })?;
    /// assert_eq!(received, [1.0, 0.0]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn batch_send_recv(&self, messages: &[P2pOp]) -> Result<Vec<Tensor>> {
        for message in messages {
            self.check_ranks(&message.collective())?;
        }
        let mut sent = Vec::new();
        for message in messages {
            if let P2pOp::Send { tensor, .. } = message {
                sent.push(self.call(message.collective()).start_all(std::slice::from_ref(tensor))?);
            }
        }
        let mut received = Vec::new();
        for message in messages {
            if let P2pOp::Recv { shape, dtype, .. } = message {
                received.extend(self.call(message.collective()).of(shape.clone(), *dtype).run_all(&[])?);
            }
        }
        Pending::wait_all(sent)?;
        Ok(received)
    }

    /// Sends a message, which waits only for the bound on unread messages.
    pub(super) fn send_now(&self, call: Call, tensor: &Tensor, memory: InputMemory) -> Result<()> {
        let tensor = self.for_sending(tensor, memory)?;
        self.engage(call, bytes(&tensor), |backend, call| backend.run(call, one(tensor), Tensors::new()))
            .map(drop)
    }

    /// Sends a message without waiting for the bound on unread messages.
    pub(super) fn start_send(
        &self,
        call: Call,
        tensor: &Tensor,
        memory: InputMemory,
    ) -> Result<PendingState> {
        let tensor = self.for_sending(tensor, memory)?;
        let size = bytes(&tensor);
        self.open(call, size, Tensors::new(), |backend, call| {
            backend.start(call, one(tensor), Tensors::new())
        })
    }

    /// Returns the tensor to send: a copy, unless the backend makes one or the sender gives it away.
    fn for_sending(&self, tensor: &Tensor, memory: InputMemory) -> Result<Tensor> {
        let memory = if self.backend.copies_sent(bytes(tensor)) { InputMemory::Owned } else { memory };
        Ok(memory.own(&tensor.detach())?.contiguous()?)
    }

    /// Receives a message now, behind those of the receives that were started.
    pub(super) fn receive(&self, call: Call, output: Option<Tensor>) -> Result<Tensor> {
        if self.posts.is_empty() {
            return self.engage(call, 0, |backend, call| Ok(backend.recv(call, output.as_ref())?.1));
        }
        let _entered = self.begin_call(&call)?;
        self.settle(&self.post(call, output)?, None)
    }

    /// Receives a message of any rank, and returns the sender too.
    pub(super) fn receive_any(&self, call: Call, output: Option<Tensor>) -> Result<(usize, Tensor)> {
        if self.size() == 1 {
            return Err(self.invalid(Op::Recv, "there is no other rank to receive from".to_string()));
        }
        let tag = call.collective.tag();
        if self.posts.has_tag(tag) {
            let reason = format!("receives with tag {tag} that were started come first; wait for them");
            return Err(self.invalid(Op::Recv, reason));
        }
        self.engage(call, 0, |backend, call| backend.recv(call, output.as_ref()))
    }

    /// Describes the message that a receive would get now.
    pub(super) fn probe(&self, receive: &Call) -> Result<Option<Envelope>> {
        loop {
            let found = self.backend().probe(receive)?;
            match &found {
                // It belongs to a started receive, or is behind such a message.
                Some(Envelope { from, .. }) if self.take_awaited((*from, receive.collective.tag()))? => {}
                _ => return Ok(found),
            }
        }
    }

    /// Starts a receive.
    pub(super) fn start_receive(&self, call: Call, output: Option<Tensor>) -> Result<PendingTensors> {
        drop(self.begin_call(&call)?);
        Ok(Pending::new(PendingState::Posted(self.post(call, output)?, self.clone()), Ok))
    }
}

fn one(tensor: Tensor) -> Tensors {
    [tensor].into_iter().collect()
}

impl P2pOp {
    fn collective(&self) -> Collective {
        match self {
            Self::Send { to, tag, .. } => Collective::Send { to: *to, tag: *tag },
            Self::Recv { from, tag, .. } => Collective::Recv { from: Some(*from), tag: *tag },
        }
    }
}
