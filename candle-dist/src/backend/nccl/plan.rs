//! Plans of collectives: packing, one transfer between the ranks, and unpacking.
//!
//! NCCL moves contiguous spans of flat buffers. A piece of a dim other than the first is not contiguous, so it is
//! packed before it is sent, and unpacked after it is received. A plan depends on the call only, not on the device.
use crate::backend::storage::DeviceStorage;
use crate::backend::{Call, Collective, Cut, Dims};
use crate::{Error, Result};
use candle_dist_base::{StripBuffer, StripCopy};

/// The plan of one rank for one tensor of a collective.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TransferPlan {
    /// Moves from the input to the send buffer; `None` if the input is sent directly.
    pub(super) pack: Option<StripCopies>,
    /// The transfer between the ranks.
    pub(super) transfer: FlatTransfer,
    /// The number of elements received.
    pub(super) received: usize,
    /// Moves from the receive buffer to the result; `None` if the buffer is the result.
    pub(super) unpack: Option<StripCopies>,
    /// The shape of the result; `None` on a rank without result.
    pub(super) shape: Option<Dims>,
}

/// A data transfer between the ranks of a group, on flat buffers. Lengths count elements.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum FlatTransfer {
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
    Reduces(Vec<BufferSpan>),
    /// Spans of the send buffer go to the ranks, and spans of the receive buffer come from them.
    SendReceive { sends: Vec<BufferSpan>, receives: Vec<BufferSpan> },
}

/// A span of a flat buffer that belongs to a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct BufferSpan {
    pub(super) peer: usize,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// Copies of runs of equal length at equal distances, into all of a new buffer of `total` elements.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StripCopies {
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

impl StripCopies {
    /// The strips of `source`, whose data begins at `offset`, in a new buffer, whose elements they all fill.
    pub(super) fn buffer<'a, S: DeviceStorage>(&self, source: &'a S, offset: usize) -> StripBuffer<'a, S> {
        let strips = self.strips.iter().map(|&Strip { rows, len, from, to }| StripCopy {
            source,
            rows,
            len,
            from: (offset + from.0, from.1),
            to,
        });
        StripBuffer { dtype: source.dtype(), total: self.total, strips: strips.collect() }
    }
}

/// A contiguous tensor cut along a dim, as part of the tensor and in packed form, piece after piece.
struct Strides {
    outer: usize,
    inner: usize,
    sizes: Dims,
}

impl Strides {
    fn new(dims: &[usize], cut: &Cut) -> Self {
        let (outer, inner) = (&dims[..cut.dim], &dims[cut.dim + 1..]);
        Self { outer: outer.iter().product(), inner: inner.iter().product(), sizes: cut.sizes.clone() }
    }

    /// Returns the number of pieces.
    fn count(&self) -> usize {
        self.sizes.len()
    }

    /// Returns the packed pieces that are not empty. All ranks know which pieces are empty.
    fn spans(&self) -> Vec<BufferSpan> {
        let each = self.outer * self.inner;
        let starts = self.sizes.iter().scan(0, |sum, &size| Some(std::mem::replace(sum, *sum + size)));
        let spans = starts.zip(&self.sizes).enumerate();
        let spans =
            spans.map(|(peer, (start, &size))| BufferSpan { peer, start: start * each, len: size * each });
        spans.filter(|span| span.len > 0).collect()
    }

    fn is_even(&self) -> bool {
        self.sizes.iter().all(|&size| size == self.sizes[0])
    }

    /// Returns the strips of each piece in the tensor and in packed form.
    fn strips(&self, packs: bool) -> Option<StripCopies> {
        if self.outer <= 1 {
            return None;
        }
        let row = self.sizes.iter().sum::<usize>() * self.inner;
        let strips = self.spans().into_iter().map(|BufferSpan { start, len, .. }| {
            let (rows, len) = (self.outer, len / self.outer);
            let (whole, packed) = ((start / self.outer, row), (start, len));
            let (from, to) = if packs { (whole, packed) } else { (packed, whole) };
            Strip { rows, len, from, to }
        });
        Some(StripCopies { total: row * self.outer, strips: strips.collect() })
    }

    fn packing(&self) -> Option<StripCopies> {
        self.strips(true)
    }

    fn unpacking(&self) -> Option<StripCopies> {
        self.strips(false)
    }
}

impl TransferPlan {
    /// Plans the part of rank `me` for its `i`-th tensor. `mine` is its shape, or that of the root for a scatter.
    pub(super) fn new(call: &Call, i: usize, me: usize, mine: &[usize]) -> Result<Self> {
        let len: usize = mine.iter().product();
        let collective = &call.collective;
        let gets = collective.has_result(me);
        let shape = gets.then(|| collective.output(i, mine, me));
        let received = shape.as_ref().map_or(0, |shape| shape.iter().product());
        let plain = |transfer| Self { pack: None, transfer, received, unpack: None, shape: shape.clone() };
        let whole_of = |cut: &Cut| Strides::new(&collective.output(i, mine, me), cut);
        Ok(match collective {
            Collective::AllReduce(_) => plain(FlatTransfer::AllReduce { len }),
            Collective::Broadcast { root } => plain(FlatTransfer::Broadcast { root: *root, len }),
            Collective::Reduce { root, .. } => plain(FlatTransfer::Reduce { root: *root, len }),
            Collective::AllGather(cuts) => {
                let whole = whole_of(&cuts[i]);
                let transfer = match whole.is_even() {
                    true => FlatTransfer::AllGather { len },
                    false => FlatTransfer::SendReceive {
                        sends: copies(0..whole.count(), len),
                        receives: whole.spans(),
                    },
                };
                Self { unpack: whole.unpacking(), ..plain(transfer) }
            }
            Collective::Gather { cut, root } => {
                let whole = whole_of(cut);
                let receives = if gets { whole.spans() } else { Vec::new() };
                let transfer = FlatTransfer::SendReceive { sends: copies(*root..root + 1, len), receives };
                Self { unpack: whole.unpacking().filter(|_| gets), ..plain(transfer) }
            }
            Collective::ReduceScatter(cuts, _) => {
                let pieces = Strides::new(mine, &cuts[i]);
                let transfer = match pieces.is_even() {
                    true => FlatTransfer::ReduceScatter { len: received },
                    false => FlatTransfer::Reduces(pieces.spans()),
                };
                Self { pack: pieces.packing(), ..plain(transfer) }
            }
            Collective::Scatter { cut, root } => {
                let (pieces, gives) = (Strides::new(mine, cut), me == *root);
                let sends = if gives { pieces.spans() } else { Vec::new() };
                let transfer =
                    FlatTransfer::SendReceive { sends, receives: copies(*root..root + 1, received) };
                Self { pack: pieces.packing().filter(|_| gives), ..plain(transfer) }
            }
            Collective::AllToAllSingle(counts) => {
                let came = Cut { dim: 0, sizes: counts.iter().map(|counts| counts[me]).collect() };
                let sent = Cut { dim: 0, sizes: counts[me].clone() };
                let spans = |cut: &Cut| Strides::new(mine, cut).spans();
                plain(FlatTransfer::SendReceive { sends: spans(&sent), receives: spans(&came) })
            }
            Collective::AllToAll { split, concat } => {
                let (split, joined) = (Strides::new(mine, split), whole_of(concat));
                let transfer = FlatTransfer::SendReceive { sends: split.spans(), receives: joined.spans() };
                Self { pack: split.packing(), unpack: joined.unpacking(), ..plain(transfer) }
            }
            Collective::Send { .. } | Collective::Recv { .. } | Collective::Barrier => {
                return Err(Error::Unsupported(format!("{} as a collective", call.op())));
            }
        })
    }
}

/// Returns the same elements for or from each of these ranks.
fn copies(peers: std::ops::Range<usize>, len: usize) -> Vec<BufferSpan> {
    peers.filter(|_| len > 0).map(|peer| BufferSpan { peer, start: 0, len }).collect()
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
