//! Which elements go where: a collective as packing, one transfer among the ranks, and unpacking.
//!
//! NCCL moves contiguous stretches of flat buffers. A piece of a dim other than the first is not one, so it is packed
//! before it is sent, and unpacked into its place after it came. Everything here follows from the call, on any device.
use crate::backend::storage::Held;
use crate::backend::{Call, Dims, Op};
use crate::{Error, Result};
use candle_core::Shape;
use candle_core::backend::BackendDevice;

/// What one rank does for one tensor of a collective.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Plan {
    /// From the input to what is sent; `None` if the input is sent as it is.
    pub(super) pack: Option<Moves>,
    /// What is sent and received.
    pub(super) transfer: Transfer,
    /// The number of elements received.
    pub(super) received: usize,
    /// From what is received to the result; `None` if that is the result.
    pub(super) unpack: Option<Moves>,
    /// The shape of the result; `None` on a rank that gets none.
    pub(super) shape: Option<Dims>,
}

/// A movement among the ranks of a group, on flat buffers; lengths count elements.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Transfer {
    /// The reduction of all sent buffers of `len`, for everybody.
    AllReduce { len: usize },
    /// The root's `len` elements, for everybody.
    Broadcast { root: usize, len: usize },
    /// The reduction of all sent buffers of `len`, for the root.
    Reduce { root: usize, len: usize },
    /// Every rank's `len` elements in rank order, for everybody.
    AllGather { len: usize },
    /// The `r`-th stretch of `len` elements of the reduction, for rank `r`.
    ReduceScatter { len: usize },
    /// The `r`-th stretch of the reduction, for rank `r`.
    Reduces(Vec<Span>),
    /// Stretches of what is sent to the ranks, and from them into stretches of what is received.
    Exchange { sends: Vec<Span>, receives: Vec<Span> },
}

/// A stretch of a flat buffer that belongs to a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Span {
    pub(super) peer: usize,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// Copies of equal runs at equal distances into a new buffer of `total` elements.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Moves {
    total: usize,
    strips: Vec<Strip>,
}

/// `rows` runs of `len` elements; the first one's place and the distance from one to the next, in both buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Strip {
    rows: usize,
    len: usize,
    from: (usize, usize),
    to: (usize, usize),
}

impl Moves {
    /// A new buffer with the strips of `source`, whose data begins at `offset`.
    pub(super) fn apply<S: Held>(&self, source: &S, offset: usize) -> Result<S> {
        let mut made = source.device().zeros_impl(&Shape::from(self.total), source.dtype())?;
        for Strip { rows, len, from, to } in &self.strips {
            source.copy2d(&mut made, *rows, *len, from.1, to.1, offset + from.0, to.0)?;
        }
        Ok(made)
    }
}

/// A contiguous tensor cut along a dim: as part of the tensor, and packed piece after piece.
struct Cut {
    outer: usize,
    inner: usize,
    sizes: Dims,
}

impl Cut {
    fn new(dims: &[usize], dim: usize, sizes: &Dims) -> Self {
        Self { outer: dims[..dim].iter().product(), inner: dims[dim + 1..].iter().product(), sizes: sizes.clone() }
    }

    /// The pieces, packed, that are not empty: all ranks know which those are.
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

    /// Where each piece is in the tensor, and packed.
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
    /// What rank `me` does for its `i`-th tensor, of shape `mine`; for a scatter that is the root's.
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
                    Transfer::Exchange { sends, receives: if gets { cut.spans() } else { Vec::new() } }
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
                Self { pack, ..plain(Transfer::Exchange { sends, receives }) }
            }
            Op::AllToAll if call.is_routed() => {
                let came: Dims = call.sizes.iter().map(|counts| counts[me]).collect();
                let sends = Cut::new(mine, 0, &call.sizes[me]).spans();
                plain(Transfer::Exchange { sends, receives: Cut::new(mine, 0, &came).spans() })
            }
            Op::AllToAll => {
                let made = call.result_shape(me, i, mine);
                let split = Cut::new(mine, call.dims[0], &call.sizes[0]);
                let joined = Cut::new(&made, call.dims[1], &call.sizes[1]);
                let transfer = Transfer::Exchange { sends: split.spans(), receives: joined.spans() };
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
