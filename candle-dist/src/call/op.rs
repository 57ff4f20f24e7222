//! The communication operations.
use serde::{Deserialize, Serialize};
use std::fmt;

/// A communication operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Op {
    /// Every rank gets the reduction of all inputs.
    AllReduce,
    /// Every rank gets all inputs, joined along a dim.
    AllGather,
    /// Every rank gets its piece of the reduction.
    ReduceScatter,
    /// Every rank sends a piece to each rank and joins what it receives.
    AllToAll,
    /// Every rank gets the root's tensor.
    Broadcast,
    /// The root gets the reduction.
    Reduce,
    /// Every rank gets its piece of the root's tensor.
    Scatter,
    /// The root gets all inputs, joined along a dim.
    Gather,
    /// The sending side of a point-to-point message.
    Send,
    /// The receiving side of a point-to-point message.
    Recv,
    /// No rank returns before every rank has made the call.
    Barrier,
}

impl Op {
    /// Returns the name of the operation as in the API, e.g. `"all_reduce"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Scatter => "scatter",
            Self::Gather => "gather",
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Barrier => "barrier",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
