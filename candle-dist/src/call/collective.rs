//! What a call moves or reduces.
use super::{Cut, Dims, Op, ReduceOp, total};
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

/// The cuts of the tensors of a call, one per tensor.
pub type Cuts = SmallVec<[Cut; 1]>;

/// What one call moves or reduces, and to whom: a collective, or one side of a message.
///
/// It is the same value on all ranks, except for the two sides of a message, which name each other. It has no data:
/// [`ProcessGroup::call`](crate::ProcessGroup::call) runs it on tensors in any form. Ranks are those of the group.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::{Collective, Cut, World};
///
/// World::threads(2).run(|ctx| -> candle_dist::Result<()> {
///     let mine = Tensor::ones((2 - ctx.rank(), 4), DType::F32, &Device::Cpu)?; // 2 rows and 1 row
///     let gather = Collective::all_gather(Cut::new(0, &[2, 1]));
///     assert_eq!(ctx.group().call(gather).run(&mine)?.dims(), [3, 4]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Collective {
    /// No rank returns before every rank has made the call.
    Barrier,
    /// Every rank gets the reduction of all tensors.
    AllReduce(ReduceOp),
    /// The root gets the reduction of all tensors.
    Reduce {
        /// The reduction.
        op: ReduceOp,
        /// The rank that gets the result.
        root: usize,
    },
    /// Every rank gets the root's tensor.
    Broadcast {
        /// The rank whose tensor counts.
        root: usize,
    },
    /// Every rank gets all pieces, joined.
    AllGather(Cuts),
    /// The root gets all pieces, joined.
    Gather {
        /// The pieces of the ranks.
        cut: Cut,
        /// The rank that gets the result.
        root: usize,
    },
    /// Every rank gets its piece of the root's tensor.
    Scatter {
        /// The pieces of the ranks.
        cut: Cut,
        /// The rank whose tensor counts.
        root: usize,
    },
    /// Every rank gets its piece of the reduction.
    ReduceScatter(Cuts, ReduceOp),
    /// Every rank sends its pieces of one dim to the ranks, and joins what it receives along another dim.
    AllToAll {
        /// The pieces that are sent: rank `r` gets the `r`-th one.
        split: Cut,
        /// The pieces that are joined: the `r`-th one is of rank `r`.
        concat: Cut,
    },
    /// Rank `s` sends `counts[s][r]` rows of dim 0 to rank `r`, which joins what it receives in rank order.
    AllToAllSingle(Vec<Dims>),
    /// The sending side of a message.
    Send {
        /// The receiver.
        to: usize,
        /// Separates messages between the same two ranks.
        tag: u32,
    },
    /// The receiving side of a message.
    Recv {
        /// The sender; `None` for any rank.
        from: Option<usize>,
        /// The tag that the message was sent with.
        tag: u32,
    },
}

impl Collective {
    /// Creates the gather of one tensor.
    pub fn all_gather(cut: Cut) -> Self {
        Self::AllGather(smallvec![cut])
    }

    /// Creates the reduce_scatter of one tensor.
    pub fn reduce_scatter(cut: Cut, op: ReduceOp) -> Self {
        Self::ReduceScatter(smallvec![cut], op)
    }

    /// Creates the exchange of `counts[s][r]` rows from each rank `s` to each rank `r`.
    pub fn all_to_all_single<C: AsRef<[usize]>>(counts: &[C]) -> Self {
        Self::AllToAllSingle(counts.iter().map(|row| Dims::from_slice(row.as_ref())).collect())
    }

    /// Returns the operation.
    pub const fn op(&self) -> Op {
        match self {
            Self::Barrier => Op::Barrier,
            Self::AllReduce(_) => Op::AllReduce,
            Self::Reduce { .. } => Op::Reduce,
            Self::Broadcast { .. } => Op::Broadcast,
            Self::AllGather(_) => Op::AllGather,
            Self::Gather { .. } => Op::Gather,
            Self::Scatter { .. } => Op::Scatter,
            Self::ReduceScatter(..) => Op::ReduceScatter,
            Self::AllToAll { .. } | Self::AllToAllSingle(_) => Op::AllToAll,
            Self::Send { .. } => Op::Send,
            Self::Recv { .. } => Op::Recv,
        }
    }

    /// Returns the reduction, if there is one.
    pub const fn reduction(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op) | Self::Reduce { op, .. } | Self::ReduceScatter(_, op) => Some(*op),
            _ => None,
        }
    }

    /// Returns the root of a collective that has one, or the other side of a message.
    pub const fn peer(&self) -> Option<usize> {
        match self {
            Self::Reduce { root, .. } | Self::Broadcast { root } => Some(*root),
            Self::Gather { root, .. } | Self::Scatter { root, .. } => Some(*root),
            Self::Send { to, .. } => Some(*to),
            Self::Recv { from, .. } => *from,
            _ => None,
        }
    }

    /// Returns the tag of a message; 0 for collectives.
    pub const fn tag(&self) -> u32 {
        match self {
            Self::Send { tag, .. } | Self::Recv { tag, .. } => *tag,
            _ => 0,
        }
    }

    /// Returns whether this is a side of a message.
    pub const fn is_message(&self) -> bool {
        matches!(self, Self::Send { .. } | Self::Recv { .. })
    }

    /// Returns whether `rank` gets a result.
    pub fn has_result(&self, rank: usize) -> bool {
        match self {
            Self::Reduce { root, .. } | Self::Gather { root, .. } => *root == rank,
            _ => self.all_have_results(),
        }
    }

    /// Returns whether every rank gets a result.
    pub(crate) fn all_have_results(&self) -> bool {
        !matches!(self, Self::Reduce { .. } | Self::Gather { .. } | Self::Barrier | Self::Send { .. })
    }

    /// Returns whether `rank` gives a tensor.
    pub fn has_input(&self, rank: usize) -> bool {
        match self {
            Self::Scatter { root, .. } => *root == rank,
            Self::Barrier | Self::Recv { .. } => false,
            _ => true,
        }
    }

    /// Returns whether a call may have several tensors.
    pub(crate) const fn takes_several(&self) -> bool {
        matches!(self.op(), Op::AllReduce | Op::Reduce | Op::Broadcast | Op::AllGather | Op::ReduceScatter)
    }

    /// Returns the dim of the `nth` tensor whose size may differ between ranks.
    pub(crate) fn ragged_dim(&self, nth: usize) -> Option<usize> {
        match self {
            Self::AllGather(cuts) => cuts.get(nth).map(|cut| cut.dim),
            Self::Gather { cut, .. } => Some(cut.dim),
            Self::AllToAll { concat, .. } => Some(concat.dim),
            Self::AllToAllSingle(_) => Some(0),
            _ => None,
        }
    }

    /// Returns the cuts, in the order in which errors name their dims.
    pub(crate) fn cuts(&self) -> SmallVec<[&Cut; 2]> {
        match self {
            Self::AllGather(cuts) | Self::ReduceScatter(cuts, _) => cuts.iter().collect(),
            Self::Gather { cut, .. } | Self::Scatter { cut, .. } => smallvec![cut],
            Self::AllToAll { split, concat } => smallvec![split, concat],
            _ => SmallVec::new(),
        }
    }

    /// Returns the counts of rows of an [`AllToAllSingle`](Self::AllToAllSingle), by sender and receiver.
    pub(crate) fn counts(&self) -> Option<&[Dims]> {
        match self {
            Self::AllToAllSingle(counts) => Some(counts),
            _ => None,
        }
    }

    /// Returns the shape of the `nth` result of `rank`. `input` is the shape of its tensor, or of the root's for a scatter.
    pub fn output(&self, nth: usize, input: &[usize], rank: usize) -> Dims {
        let mut shape = Dims::from_slice(input);
        match self {
            Self::AllGather(cuts) => shape[cuts[nth].dim] = cuts[nth].len(),
            Self::Gather { cut, .. } => shape[cut.dim] = cut.len(),
            Self::ReduceScatter(cuts, _) => shape[cuts[nth].dim] = cuts[nth].sizes[rank],
            Self::Scatter { cut, .. } => shape[cut.dim] = cut.sizes[rank],
            Self::AllToAll { split, concat } => {
                shape[split.dim] = split.sizes[rank];
                shape[concat.dim] = concat.len();
            }
            Self::AllToAllSingle(counts) => shape[0] = counts.iter().map(|row| row[rank]).sum(),
            _ => {}
        }
        shape
    }

    /// Checks the ranks that this names, on a group of `size`, and that a message has another rank as its other side.
    ///
    /// # Errors
    /// The reason, with the fix.
    pub(crate) fn check_ranks(&self, rank: usize, size: usize) -> Result<(), String> {
        match self.peer() {
            Some(peer) if peer >= size => {
                Err(format!("rank {peer} is outside the group; its ranks are 0 to {}", size - 1))
            }
            Some(peer) if self.is_message() && peer == rank => {
                Err(format!("rank {peer} is this rank; name another one"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the cuts fit the `nth` tensor of `rank`, which has this shape, on a group of `size`.
    ///
    /// # Errors
    /// The reason, with the fix.
    pub(crate) fn check(&self, nth: usize, shape: &[usize], rank: usize, size: usize) -> Result<(), String> {
        let missing = || format!("no cut for tensor {nth} of the call; give one for each tensor");
        match self {
            Self::AllGather(cuts) => cuts.get(nth).ok_or_else(missing)?.check_piece(shape, rank, size),
            Self::ReduceScatter(cuts, _) => cuts.get(nth).ok_or_else(missing)?.check_whole(shape, size),
            Self::Gather { cut, .. } => cut.check_piece(shape, rank, size),
            Self::Scatter { cut, .. } => cut.check_whole(shape, size),
            Self::AllToAll { split, concat } => {
                split.check_whole(shape, size)?;
                concat.check_piece(shape, rank, size)?;
                if split.dim == concat.dim {
                    return Err("split and concat dims are equal; name two different dims".to_string());
                }
                Ok(())
            }
            Self::AllToAllSingle(counts) => check_counts(counts, shape, rank, size),
            _ => Ok(()),
        }
    }
}

/// Refuses counts that are not a table of all ranks, or that do not cut the tensor's rows.
fn check_counts(counts: &[Dims], shape: &[usize], rank: usize, size: usize) -> Result<(), String> {
    let is_table = counts.len() == size && counts.iter().all(|row| row.len() == size);
    let countable = |r: usize| counts.iter().try_fold(0usize, |sum, row| sum.checked_add(row[r])).is_some();
    let rows = shape.first().filter(|_| is_table && (0..size).all(countable));
    let Some(&rows) = rows else {
        return Err(format!(
            "counts {counts:?} of rows of {shape:?}: expected {size} counts for each of {size} ranks"
        ));
    };
    match total(&counts[rank]) == Some(rows) {
        true => Ok(()),
        false => Err(format!("counts {:?} do not cut dim 0 of shape {shape:?}", counts[rank])),
    }
}
