//! Calls: what is communicated and how, as data that ranks compare and errors print.
mod cut;
mod dtypes;
mod op;
mod reduce_op;

pub use cut::Cut;
pub(crate) use cut::total;
pub(crate) use dtypes::{CARRIED, carried};
pub use op::Op;
pub use reduce_op::{Factor, ReduceOp};

use candle_core::{DType, DeviceLocation, Tensor};
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;
use std::mem::discriminant;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

/// How a collective is made; all ranks make it in the same form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Form {
    /// Into new memory, and the caller waits.
    #[default]
    New,
    /// Over the input.
    InPlace,
    /// Into new memory, and the caller waits later.
    Started,
}

/// A short list of sizes.
pub type Dims = SmallVec<[usize; 6]>;

/// In [`Call::shape`], a dim whose size may differ from rank to rank.
pub const RAGGED: usize = usize::MAX;

/// One communication call as seen by one rank: what the ranks compare, and what errors and logs print.
#[derive(Debug, Clone)]
pub struct Call {
    /// What is done.
    pub op: Op,
    /// The dtype of the data, if there is any.
    pub dtype: Option<DType>,
    /// Where the data is.
    pub device: DeviceLocation,
    /// The shape that ranks must agree on; [`RAGGED`] where sizes may differ.
    pub shape: Dims,
    /// Dtypes and shapes of the further tensors of a coalesced call.
    pub rest: Vec<(DType, Dims)>,
    /// The reduction, for ops that reduce.
    pub reduce: Option<ReduceOp>,
    /// The root, or the other side of a point-to-point call, as a rank of the group.
    pub peer: Option<usize>,
    /// The dims that are cut or joined: one for each tensor, or for an all_to_all the split and the joined one; dim 0
    /// alone for one that is [routed](Self::is_routed).
    pub dims: SmallVec<[usize; 2]>,
    /// Sizes of the pieces, one a rank, for each dim in `dims`; for a routed all_to_all those that each rank sends.
    pub sizes: SmallVec<[Dims; 2]>,
    /// What tells apart messages between the same two ranks.
    pub tag: u32,
    /// How the call is made.
    pub form: Form,
    /// Something else that must be equal on all ranks, in words.
    pub note: Option<Arc<str>>,
    /// How long this rank may wait in the call; `None` for the timeout of its world. Ranks need not agree on it.
    pub timeout: Option<Duration>,
    /// Where the call was made.
    pub site: &'static Location<'static>,
}

impl Call {
    /// A call without data.
    #[track_caller]
    pub fn new(op: Op) -> Self {
        Self {
            op,
            dtype: None,
            device: DeviceLocation::Cpu,
            shape: Dims::new(),
            rest: Vec::new(),
            reduce: None,
            peer: None,
            tag: 0,
            dims: SmallVec::new(),
            sizes: SmallVec::new(),
            form: Form::default(),
            note: None,
            timeout: None,
            site: Location::caller(),
        }
    }

    /// A call on `tensor`, whose shape must be equal on all ranks but for the `ragged` dims.
    #[track_caller]
    pub fn on(op: Op, tensor: &Tensor, ragged: &[usize]) -> Self {
        let mut shape = Dims::from_slice(tensor.dims());
        for &dim in ragged {
            shape[dim] = RAGGED;
        }
        let device = tensor.device().location();
        Self { dtype: Some(tensor.dtype()), device, shape, ..Self::new(op) }
    }

    /// The call with further tensors beside the first.
    pub fn with_rest(mut self, rest: &[Tensor]) -> Self {
        self.rest = rest.iter().map(|tensor| (tensor.dtype(), Dims::from_slice(tensor.dims()))).collect();
        self
    }

    /// Whether this is an all_to_all of rows, as many as `sizes[sender][receiver]` from each rank to each.
    pub fn is_routed(&self) -> bool {
        self.op == Op::AllToAll && self.dims.len() == 1
    }

    /// Whether `rank` of the group gets no result.
    pub fn gives_nothing(&self, rank: usize) -> bool {
        match self.op {
            Op::Reduce | Op::Gather => self.peer != Some(rank),
            op => op == Op::Barrier,
        }
    }

    /// The shape of what `rank` gets for its `i`-th tensor of shape `mine`; for a scatter that is the root's.
    pub fn result_shape(&self, rank: usize, i: usize, mine: &[usize]) -> Dims {
        let mut shape = Dims::from_slice(mine);
        match self.op {
            Op::AllGather | Op::Gather => shape[self.dims[i]] = self.sizes[i].iter().sum(),
            Op::ReduceScatter | Op::Scatter => shape[self.dims[i]] = self.sizes[i][rank],
            Op::AllToAll if self.is_routed() => shape[0] = self.sizes.iter().map(|counts| counts[rank]).sum(),
            Op::AllToAll => {
                shape[self.dims[0]] = self.sizes[0][rank];
                shape[self.dims[1]] = self.sizes[1].iter().sum();
            }
            _ => {}
        }
        shape
    }

    /// The first thing in which two calls that belong together differ, if they do.
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        DIFFERENCES.iter().find(|(_, differs)| differs(self, other)).map(|(what, _)| *what)
    }
}

/// The name of something that calls have, and whether two differ in it.
type Difference = (&'static str, fn(&Call, &Call) -> bool);

/// What two calls that belong together may differ in, in the order in which it is named.
pub(crate) const DIFFERENCES: [Difference; 10] = [
    ("op", |a, b| a.op != b.op),
    ("dtype", |a, b| a.dtype != b.dtype),
    // Which GPU is each rank's own affair.
    ("device", |a, b| discriminant(&a.device) != discriminant(&b.device)),
    ("shape", |a, b| a.shape != b.shape || a.rest != b.rest),
    ("reduction", |a, b| a.reduce != b.reduce),
    ("root", |a, b| a.peer != b.peer),
    ("dim", |a, b| a.dims != b.dims),
    ("sizes", |a, b| a.sizes != b.sizes),
    ("form (into new memory, in place, or started)", |a, b| a.form != b.form),
    ("description", |a, b| a.note != b.note),
];

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.op.name())?;
        let mut parts: Vec<String> = Vec::new();
        if let Some(dtype) = self.dtype {
            let dims = self.shape.iter().map(|&d| if d == RAGGED { "?".to_string() } else { d.to_string() });
            parts.push(format!("{}[{}]", dtype.as_str(), dims.into_iter().join(", ")));
        }
        if self.device != DeviceLocation::Cpu {
            parts.push(format!("on {:?}", self.device));
        }
        if !self.rest.is_empty() {
            parts.push(format!("{} more", self.rest.len()));
        }
        parts.extend(self.reduce.map(|r| r.to_string()));
        parts.extend(self.peer.map(|p| match self.op {
            Op::Send => format!("to {p}"),
            Op::Recv => format!("from {p}"),
            _ => format!("root {p}"),
        }));
        if self.is_routed() {
            parts.push(format!("counts {:?}", self.sizes.as_slice()));
        }
        let cuts = self.dims.iter().zip(&self.sizes).filter(|_| !self.is_routed());
        parts.extend(cuts.map(|(d, s)| format!("dim {d} sizes {:?}", s.as_slice())));
        parts.extend(self.dims.iter().skip(self.sizes.len()).map(|d| format!("dim {d}")));
        if self.tag != 0 {
            parts.push(format!("tag {}", self.tag));
        }
        parts.extend(self.note.iter().map(|n| n.to_string()));
        if !parts.is_empty() {
            write!(f, "({})", parts.join(", "))?;
        }
        write!(f, " at {}:{}", self.site.file(), self.site.line())
    }
}
