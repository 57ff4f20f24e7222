//! Messages from one rank to another.
use super::ProcessGroup;
use crate::Result;
use crate::backend::{Call, Dims, Op, bytes};
use candle_core::{DType, Shape, Tensor};

/// One message of [`ProcessGroup::batch_send_recv`].
#[derive(Debug, Clone)]
pub enum Message {
    /// A copy of `tensor` for rank `to`.
    Send {
        /// What is sent.
        tensor: Tensor,
        /// The receiver.
        to: usize,
        /// What tells apart messages of one pair of ranks; they may be received in any order of tags.
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
    /// Sends a copy of `tensor` to rank `to` without waiting for it.
    ///
    /// A `Var` may change at once. Another tensor must not be written to in place before it has been received: an engine
    /// between processes sends it from where it lies.
    #[track_caller]
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<()> {
        self.send_owned(self.for_sending(tensor)?, to)
    }

    /// What can be handed over in place of `tensor`: a copy, where the receiver would get the same memory or it may change.
    fn for_sending(&self, tensor: &Tensor) -> Result<Tensor> {
        let copies = tensor.is_variable() || self.backend.shares_memory();
        let tensor = tensor.detach();
        Ok(if copies { tensor.force_contiguous()? } else { tensor.contiguous()? })
    }

    /// Hands `tensor` itself to rank `to`, in constant time where ranks share memory.
    ///
    /// Nobody may write to its storage afterwards: send variables with [`send`](Self::send).
    #[track_caller]
    pub fn send_owned(&self, tensor: Tensor, to: usize) -> Result<()> {
        self.send_message(tensor, to, 0)
    }

    /// The next tensor that rank `from` sends here, which must be of this shape and dtype.
    #[track_caller]
    pub fn recv(&self, shape: impl Into<Shape>, dtype: DType, from: usize) -> Result<Tensor> {
        self.recv_message(&shape.into(), dtype, from, 0)
    }

    /// Sends and receives several messages at once and returns what was received, in the order of the list.
    ///
    /// No order of the list can make ranks wait for each other: all sends go out before the first receive.
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
        for message in messages {
            if let Message::Send { tensor, to, tag } = message {
                self.send_message(self.for_sending(tensor)?, *to, *tag)?;
            }
        }
        let mut received = Vec::new();
        for message in messages {
            if let Message::Recv { shape, dtype, from, tag } = message {
                received.push(self.recv_message(shape, *dtype, *from, *tag)?);
            }
        }
        Ok(received)
    }

    #[track_caller]
    fn send_message(&self, tensor: Tensor, to: usize, tag: u32) -> Result<()> {
        self.check_peer(Op::Send, to)?;
        let call = Call { peer: Some(to), tag, ..Call::on(Op::Send, &tensor, &[]) };
        let tensor = tensor.detach().contiguous()?;
        self.engage(call, bytes(&tensor), |engine, call| engine.send(call, tensor))
    }

    #[track_caller]
    fn recv_message(&self, shape: &Shape, dtype: DType, from: usize, tag: u32) -> Result<Tensor> {
        self.check_peer(Op::Recv, from)?;
        let shape = Dims::from_slice(shape.dims());
        let call = Call { dtype: Some(dtype), shape, peer: Some(from), tag, ..Call::new(Op::Recv) };
        self.engage(call, 0, |engine, call| engine.recv(call))
    }
}
