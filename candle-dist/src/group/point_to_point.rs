//! Point-to-point messages.
use super::ProcessGroup;
use super::pending::{Open, Pending, State, single};
use super::start::Memory;
use crate::Result;
use crate::backend::{Call, Dims, Envelope, Op, bytes};
use candle_core::{DType, Shape, Tensor};

/// One message of [`ProcessGroup::batch_send_recv`].
#[derive(Debug, Clone)]
pub enum Message {
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

impl ProcessGroup {
    /// Sends a copy of `tensor` to rank `to`. It does not wait, except for the bound on unread messages (see
    /// [`World::mailbox_bytes`](crate::World::mailbox_bytes)).
    ///
    /// The memory of the tensor may change at once.
    #[track_caller]
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<()> {
        self.send_owned(self.for_sending(tensor)?, to)
    }

    /// Returns the tensor to send: a copy, unless the backend makes one.
    fn for_sending(&self, tensor: &Tensor) -> Result<Tensor> {
        let memory = if self.backend.copies_sent(bytes(tensor)) { Memory::Owned } else { Memory::Copied };
        Ok(memory.own(&tensor.detach())?.contiguous()?)
    }

    /// Sends `tensor` itself to rank `to`, in constant time if ranks share memory.
    ///
    /// It is for tensors that nobody writes to afterwards. A write may change what arrives, and over MPI it waits until the
    /// message has arrived. [`send`](Self::send) sends a copy.
    #[track_caller]
    pub fn send_owned(&self, tensor: Tensor, to: usize) -> Result<()> {
        self.send_message(tensor, to, 0)
    }

    /// Receives the next tensor from rank `from`, which must have this shape and dtype.
    #[track_caller]
    pub fn recv(&self, shape: impl Into<Shape>, dtype: DType, from: usize) -> Result<Tensor> {
        self.recv_message(&shape.into(), dtype, from, 0)
    }

    /// Starts to send a copy of `tensor` to rank `to`, and never waits. The wait returns once the bound on unread
    /// messages holds (see [`World::mailbox_bytes`](crate::World::mailbox_bytes)); meanwhile it receives messages for
    /// started receives.
    #[track_caller]
    pub fn send_start(&self, tensor: &Tensor, to: usize, tag: u32) -> Result<Pending<()>> {
        let state = self.start_message(tensor, to, tag)?;
        Ok(Pending::new(state, |_| Ok(())))
    }

    /// Like [`send_start`](Self::send_start), but sends `tensor` itself like [`send_owned`](Self::send_owned).
    ///
    /// It never waits, however much is unread: for programs that receive only when they need a message, and must not
    /// wait for a receiver before.
    #[track_caller]
    pub fn send_owned_start(&self, tensor: Tensor, to: usize, tag: u32) -> Result<Pending<()>> {
        let state = self.start_owned(tensor.detach().contiguous()?, to, tag)?;
        Ok(Pending::new(state, |_| Ok(())))
    }

    /// Starts a [`recv`](Self::recv). Among receives from one rank with one tag, the n-th started one gets the n-th
    /// message, in any order of waits.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    ///
    /// World::local(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let other = 1 - ctx.rank();
    ///     let first = ctx.group().recv_start(1, DType::F32, other, 0)?;
    ///     let second = ctx.group().recv_start(1, DType::F32, other, 0)?;
    ///     for x in [1f32, 2.0] {
    ///         ctx.group().send_start(&Tensor::new(&[x], &Device::Cpu)?, other, 0)?.wait()?;
    ///     }
    ///     assert_eq!(second.wait()?.to_vec1::<f32>()?, [2.0]);
    ///     assert_eq!(first.wait()?.to_vec1::<f32>()?, [1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn recv_start(&self, shape: impl Into<Shape>, dtype: DType, from: usize, tag: u32) -> Result<Pending> {
        let call = self.receiving(&shape.into(), dtype, from, tag)?;
        drop(self.begin_call(&call)?);
        Ok(Pending::new(State::Posted(self.post(call, None)?, self.clone()), single))
    }

    /// Receives the next tensor from rank `from` with `tag` into `output`: a contiguous tensor of its shape and dtype
    /// that is not part of a graph.
    #[track_caller]
    pub fn recv_into(&self, output: &Tensor, from: usize, tag: u32) -> Result<()> {
        let call = self.receiving(output.shape(), output.dtype(), from, tag)?;
        self.check_memory(Op::Recv, output, output.dims(), output.dtype())?;
        let output = output.detach();
        if self.posts.is_empty() {
            return self.engage(call, 0, |backend, call| backend.recv_into(call, &output));
        }
        let _entered = self.begin_call(&call)?;
        self.settle(&self.post(call, Some(output))?, None).map(drop)
    }

    /// Starts a [`recv_into`](Self::recv_into); `output` has the elements after the wait.
    #[track_caller]
    pub fn recv_into_start(&self, output: &Tensor, from: usize, tag: u32) -> Result<Pending<()>> {
        let call = self.receiving(output.shape(), output.dtype(), from, tag)?;
        self.check_memory(Op::Recv, output, output.dims(), output.dtype())?;
        drop(self.begin_call(&call)?);
        Ok(Pending::new(State::Posted(self.post(call, Some(output.detach()))?, self.clone()), |_| Ok(())))
    }

    /// Receives the next tensor with `tag` from any rank, and returns the sender too. It must have this shape and
    /// dtype.
    ///
    /// Messages of one sender arrive in order; messages of different senders have no order. [`probe`](Self::probe)
    /// describes the next one.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    ///
    /// World::local(3).run(|ctx| -> candle_dist::Result<()> {
    ///     let g = ctx.group();
    ///     if ctx.rank() > 0 {
    ///         return g.send(&Tensor::new(&[ctx.rank() as u32], &Device::Cpu)?, 0);
    ///     }
    ///     for _ in 1..3 {
    ///         let (from, tensor) = g.recv_any(1, DType::U32, 0)?;
    ///         assert_eq!(tensor.to_vec1::<u32>()?, [from as u32]);
    ///     }
    ///     assert_eq!(g.probe(None, 0)?, None);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// Also if started receives with this tag have not been waited for, or the backend cannot receive from any rank.
    #[track_caller]
    pub fn recv_any(&self, shape: impl Into<Shape>, dtype: DType, tag: u32) -> Result<(usize, Tensor)> {
        if self.size() == 1 {
            return Err(self.invalid(Op::Recv, "there is no other rank to receive from".to_string()));
        }
        if self.posts.has_tag(tag) {
            let reason = format!("receives with tag {tag} that were started come first; wait for them");
            return Err(self.invalid(Op::Recv, reason));
        }
        let shape = Dims::from_slice(shape.into().dims());
        let call = Call { dtype: Some(dtype), shape, tag, ..Call::new(Op::Recv) };
        self.engage(call, 0, |backend, call| backend.recv_any(call))
    }

    /// Describes the oldest unreceived message with `tag` that has arrived from rank `from` or from any rank; `None` if
    /// there is none now. Started receives get their messages first.
    ///
    /// # Errors
    /// Also if the backend cannot probe.
    #[track_caller]
    pub fn probe(&self, from: Option<usize>, tag: u32) -> Result<Option<Envelope>> {
        from.map_or(Ok(()), |from| self.check_peer(Op::Recv, from))?;
        let call = Call { peer: from, tag, ..Call::new(Op::Recv) };
        loop {
            let found = self.backend().probe(&call)?;
            match &found {
                // It belongs to a started receive, or is behind such a message.
                Some(Envelope { from, .. }) if self.take_awaited((*from, tag))? => {}
                _ => return Ok(found),
            }
        }
    }

    /// Sends and receives several messages at once, and returns the received ones in the order of the list.
    ///
    /// No order of the list can deadlock: all sends are started before the first receive.
    ///
    /// ```
    /// use candle_core::{DType, Device, Shape, Tensor};
    /// use candle_dist::{Message, World};
    ///
    /// let received = World::local(2).run(|ctx| -> candle_dist::Result<f32> {
    ///     let (other, tensor) = (1 - ctx.rank(), Tensor::new(&[ctx.rank() as f32], &Device::Cpu)?);
    ///     let receive = Message::Recv { shape: Shape::from(1), dtype: DType::F32, from: other, tag: 7 };
    ///     let got = ctx.group().batch_send_recv(&[receive, Message::Send { tensor, to: other, tag: 7 }])?;
    ///     Ok(got[0].to_vec1::<f32>()?[0])
    /// })?;
    /// assert_eq!(received, [1.0, 0.0]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn batch_send_recv(&self, messages: &[Message]) -> Result<Vec<Tensor>> {
        for message in messages {
            match message {
                Message::Send { to, .. } => self.check_peer(Op::Send, *to)?,
                Message::Recv { from, .. } => self.check_peer(Op::Recv, *from)?,
            }
        }
        let mut sent = Vec::new();
        for message in messages {
            if let Message::Send { tensor, to, tag } = message {
                sent.push(self.send_start(tensor, *to, *tag)?);
            }
        }
        let mut received = Vec::new();
        for message in messages {
            if let Message::Recv { shape, dtype, from, tag } = message {
                received.push(self.recv_message(shape, *dtype, *from, *tag)?);
            }
        }
        Pending::wait_all(sent)?;
        Ok(received)
    }

    #[track_caller]
    fn send_message(&self, tensor: Tensor, to: usize, tag: u32) -> Result<()> {
        self.check_peer(Op::Send, to)?;
        let call = Call { peer: Some(to), tag, ..Call::on(Op::Send, &tensor, &[]) };
        let tensor = tensor.detach().contiguous()?;
        self.engage(call, bytes(&tensor), |backend, call| backend.send(call, tensor))
    }

    /// Sends a copy without waiting for room.
    #[track_caller]
    fn start_message(&self, tensor: &Tensor, to: usize, tag: u32) -> Result<State> {
        self.check_peer(Op::Send, to)?;
        self.start_owned(self.for_sending(tensor)?, to, tag)
    }

    /// Sends a contiguous tensor itself without waiting for room.
    #[track_caller]
    fn start_owned(&self, tensor: Tensor, to: usize, tag: u32) -> Result<State> {
        self.check_peer(Op::Send, to)?;
        let call = Call { peer: Some(to), tag, ..Call::on(Op::Send, &tensor, &[]) };
        let (size, given) = (bytes(&tensor), call.clone());
        let started = self.engage(call, size, |backend, call| backend.start_send(call, tensor))?;
        Ok(State::Open(Box::new(Open {
            started,
            call: given,
            group: self.clone(),
            thread: std::thread::current().id(),
        })))
    }

    #[track_caller]
    fn recv_message(&self, shape: &Shape, dtype: DType, from: usize, tag: u32) -> Result<Tensor> {
        let call = self.receiving(shape, dtype, from, tag)?;
        if self.posts.is_empty() {
            return self.engage(call, 0, |backend, call| backend.recv(call));
        }
        let _entered = self.begin_call(&call)?;
        self.settle(&self.post(call, None)?, None)
    }

    /// Makes the call of a receive.
    #[track_caller]
    fn receiving(&self, shape: &Shape, dtype: DType, from: usize, tag: u32) -> Result<Call> {
        self.check_peer(Op::Recv, from)?;
        let shape = Dims::from_slice(shape.dims());
        Ok(Call { dtype: Some(dtype), shape, peer: Some(from), tag, ..Call::new(Op::Recv) })
    }
}
