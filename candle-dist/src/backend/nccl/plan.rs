//! Plans of collectives: packing, one transfer between the ranks, and unpacking.
//!
//! NCCL moves contiguous spans of flat buffers. A piece of a dim other than the first is not contiguous, so it is
//! packed before it is sent, and unpacked after it is received. A plan depends on the call only, not on the device.
use crate::backend::storage::Held;
use crate::backend::{Call, Dims, Op};
use crate::{Error, Result};
use candle_core::Shape;
use candle_core::backend::BackendDevice;

/// The plan of one rank for one tensor of a collective.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Plan {
    /// Moves from the input to the send buffer; `None` if the input is sent directly.
    pub(super) pack: Option<Moves>,
    /// The transfer between the ranks.
    pub(super) transfer: Transfer,
    /// The number of elements received.
    pub(super) received: usize,
    /// Moves from the receive buffer to the result; `None` if the buffer is the result.
    pub(super) unpack: Option<Moves>,
    /// The shape of the result; `None` on a rank without result.
    pub(super) shape: Option<Dims>,
}

/// A data transfer between the ranks of a group, on flat buffers. Lengths count elements.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Transfer {
    /// Every rank receives the reduction of all send buffers of `len`.
    AllReduce { len: usize },
    /// Every rank receives the root's `len` elements.
    Broadcast { root: usize, len: usize },
    /// The root receives the reduction of all send buffers of `len`.
    Reduce { root: usize, len: usize },
    /// Every rank receives the `len` elements of all ranks in rank order.
    AllGather { len: usize },
    /// Rank `r` receives the `r`-th span of `len` elements of the reduction.
    ReduceScatter { len: usize },
    /// Rank `r` receives the `r`-th span of the reduction.
    Reduces(Vec<Span>),
    /// Spans of the send buffer go to the ranks, and spans of the receive buffer come from them.
    SendReceive { sends: Vec<Span>, receives: Vec<Span> },
}

/// A span of a flat buffer that belongs to a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Span {
    pub(super) peer: usize,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// Copies of runs of equal length at equal distances, into a new buffer of `total` elements.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Moves {
    total: usize,
    strips: Vec<Strip>,
}

/// `rows` runs of `len` elements, with the start of the first run and the stride of the runs in both buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Strip {
    rows: usize,
    len: usize,
    from: (usize, usize),
    to: (usize, usize),
}

impl Moves {
    /// Copies the strips of `source`, whose data begins at `offset`, to a new buffer.
    pub(super) fn apply<S: Held>(&self, source: &S, offset: usize) -> Result<S> {
        let mut made = source.device().zeros_impl(&Shape::from(self.total), source.dtype())?;
        for Strip { rows, len, from, to } in &self.strips {
            source.copy2d(&mut made, *rows, *len, from.1, to.1, offset + from.0, to.0)?;
        }
        Ok(made)
    }
}

/// A contiguous tensor cut along a dim, as part of the tensor and in packed form, piece after piece.
struct Cut {
    outer: usize,
    inner: usize,
    sizes: Dims,
}

impl Cut {
    fn new(dims: &[usize], dim: usize, sizes: &Dims) -> Self {
        Self { outer: dims[..dim].iter().product(), inner: dims[dim + 1..].iter().product(), sizes: sizes.clone() }
    }

    /// Returns the packed pieces that are not empty. All ranks know which pieces are empty.
    fn spans(&self) -> Vec<Span> {
        let each = self.outer * self.inner;
        let starts = self.sizes.iter().scan(0, |sum, &size| Some(std::mem::replace(sum, *sum + size)));
        let spans = starts.zip(&self.sizes).enumerate();
        let spans = spans.map(|(peer, (start, &size))| Span { peer, start: start * each, len: size * each });
        spans.filter(|span| span.len > 0).collect()
    }

    fn is_even(&self) -> bool {
        self.sizes.iter().all(|&size| size == self.sizes[0])
    }

    /// Returns the strips of each piece in the tensor and in packed form.
    fn strips(&self, packs: bool) -> Option<Moves> {
        if self.outer <= 1 {
            return None;
        }
        let row = self.sizes.iter().sum::<usize>() * self.inner;
        let strips = self.spans().into_iter().map(|Span { start, len, .. }| {
            let (rows, len) = (self.outer, len / self.outer);
            let (whole, packed) = ((start / self.outer, row), (start, len));
            let (from, to) = if packs { (whole, packed) } else { (packed, whole) };
            Strip { rows, len, from, to }
        });
        Some(Moves { total: row * self.outer, strips: strips.collect() })
    }

    fn packing(&self) -> Option<Moves> {
        self.strips(true)
    }

    fn unpacking(&self) -> Option<Moves> {
        self.strips(false)
    }
}

impl Plan {
    /// Plans the part of rank `me` for its `i`-th tensor. `mine` is its shape, or that of the root for a scatter.
    pub(super) fn new(call: &Call, i: usize, me: usize, mine: &[usize]) -> Result<Self> {
        let len: usize = mine.iter().product();
        let root = call.peer.unwrap_or(0);
        let gets = !call.gives_nothing(me);
        let shape = gets.then(|| call.result_shape(me, i, mine));
        let received = shape.as_ref().map_or(0, |shape| shape.iter().product());
        let plain = |transfer| Self { pack: None, transfer, received, unpack: None, shape: shape.clone() };
        Ok(match call.op {
            Op::AllReduce => plain(Transfer::AllReduce { len }),
            Op::Broadcast => plain(Transfer::Broadcast { root, len }),
            Op::Reduce => plain(Transfer::Reduce { root, len }),
            Op::AllGather | Op::Gather => {
                let mut whole = Dims::from_slice(mine);
                whole[call.dims[i]] = call.sizes[i].iter().sum();
                let cut = Cut::new(&whole, call.dims[i], &call.sizes[i]);
                let receivers = if call.op == Op::Gather { root..root + 1 } else { 0..call.sizes[i].len() };
                let transfer = if call.op == Op::AllGather && cut.is_even() {
                    Transfer::AllGather { len }
                } else {
                    let sends = receivers.filter(|_| len > 0).map(|peer| Span { peer, start: 0, len }).collect();
                    Transfer::SendReceive { sends, receives: if gets { cut.spans() } else { Vec::new() } }
                };
                Self { unpack: cut.unpacking().filter(|_| gets), ..plain(transfer) }
            }
            Op::ReduceScatter => {
                let cut = Cut::new(mine, call.dims[i], &call.sizes[i]);
                let transfer = match cut.is_even() {
                    true => Transfer::ReduceScatter { len: received },
                    false => Transfer::Reduces(cut.spans()),
                };
                Self { pack: cut.packing(), ..plain(transfer) }
            }
            Op::Scatter => {
                let cut = Cut::new(mine, call.dims[i], &call.sizes[i]);
                let receives =
                    if received > 0 { vec![Span { peer: root, start: 0, len: received }] } else { Vec::new() };
                let sends = if me == root { cut.spans() } else { Vec::new() };
                let pack = cut.packing().filter(|_| me == root);
                Self { pack, ..plain(Transfer::SendReceive { sends, receives }) }
            }
            Op::AllToAll if call.is_routed() => {
                let came: Dims = call.sizes.iter().map(|counts| counts[me]).collect();
                let sends = Cut::new(mine, 0, &call.sizes[me]).spans();
                plain(Transfer::SendReceive { sends, receives: Cut::new(mine, 0, &came).spans() })
            }
            Op::AllToAll => {
                let made = call.result_shape(me, i, mine);
                let split = Cut::new(mine, call.dims[0], &call.sizes[0]);
                let joined = Cut::new(&made, call.dims[1], &call.sizes[1]);
                let transfer = Transfer::SendReceive { sends: split.spans(), receives: joined.spans() };
                Self { pack: split.packing(), unpack: joined.unpacking(), ..plain(transfer) }
            }
            op @ (Op::Send | Op::Recv | Op::Barrier) => {
                return Err(Error::Unsupported(format!("{op} as a collective")));
            }
        })
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
