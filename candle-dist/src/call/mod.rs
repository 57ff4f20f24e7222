//! Descriptions of communication calls. Ranks compare them, and errors and logs print them.
mod cut;
mod dtypes;
mod op;
mod reduce_op;
mod site;

pub use cut::Cut;
pub(crate) use cut::total;
pub(crate) use dtypes::{CARRIED, carried};
pub use op::Op;
pub use reduce_op::{Factor, ReduceOp};
pub use site::{called_from, line_of};

use candle_core::{DType, DeviceLocation, Tensor};
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;
use std::mem::discriminant;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

/// The form of a collective. All ranks must use the same form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Form {
    /// The result is new memory, and the call blocks.
    #[default]
    New,
    /// The result overwrites the input.
    InPlace,
    /// The result is new memory, and the caller waits for it later.
    Started,
}

/// A short list of sizes.
pub type Dims = SmallVec<[usize; 6]>;

/// Marks a dim of [`Call::shape`] whose size may differ between ranks.
pub const RAGGED: usize = usize::MAX;

/// One communication call of one rank. Ranks compare it, and errors and logs print it.
#[derive(Debug, Clone)]
pub struct Call {
    /// The operation.
    pub op: Op,
    /// The dtype of the data, if there is any.
    pub dtype: Option<DType>,
    /// The device of the data.
    pub device: DeviceLocation,
    /// The shape, which must be equal on all ranks; dims of size [`RAGGED`] may differ.
    pub shape: Dims,
    /// The dtypes and shapes of the second and later tensors of a coalesced call.
    pub rest: Vec<(DType, Dims)>,
    /// The reduction, for ops that reduce.
    pub reduce: Option<ReduceOp>,
    /// The root, or the other rank of a point-to-point call, as a rank of the group.
    pub peer: Option<usize>,
    /// The dims that are cut or joined: one per tensor. An all_to_all has two, the split dim and the joined dim; a
    /// [routed](Self::is_routed) all_to_all has only dim 0.
    pub dims: SmallVec<[usize; 2]>,
    /// For each dim in `dims`, the sizes of the pieces per rank. A routed all_to_all has a list of counts per sender.
    pub sizes: SmallVec<[Dims; 2]>,
    /// The tag that separates messages between the same two ranks.
    pub tag: u32,
    /// The form of the call.
    pub form: Form,
    /// A text that must be equal on all ranks as well.
    pub note: Option<Arc<str>>,
    /// How long this rank may wait in the call; `None` means the timeout of the world. It may differ between ranks.
    pub timeout: Option<Duration>,
    /// The source location of the call.
    pub site: &'static Location<'static>,
}

impl Call {
    /// Creates a call without data.
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
            site: line_of(Location::caller()),
        }
    }

    /// Creates a call on `tensor`. Its shape must be equal on all ranks, except in the `ragged` dims.
    #[track_caller]
    pub fn on(op: Op, tensor: &Tensor, ragged: &[usize]) -> Self {
        let mut shape = Dims::from_slice(tensor.dims());
        for &dim in ragged {
            shape[dim] = RAGGED;
        }
        let device = tensor.device().location();
        Self { dtype: Some(tensor.dtype()), device, shape, ..Self::new(op) }
    }

    /// Adds the second and later tensors of a coalesced call.
    pub(crate) fn with_rest(mut self, rest: &[Tensor]) -> Self {
        self.rest = rest.iter().map(|tensor| (tensor.dtype(), Dims::from_slice(tensor.dims()))).collect();
        self
    }

    /// Returns whether this is an all_to_all of rows, where rank `s` sends `sizes[s][r]` rows to rank `r`.
    pub fn is_routed(&self) -> bool {
        self.op == Op::AllToAll && self.dims.len() == 1
    }

    /// Returns whether `rank` of the group gets no result.
    pub fn gives_nothing(&self, rank: usize) -> bool {
        match self.op {
            Op::Reduce | Op::Gather => self.peer != Some(rank),
            op => op == Op::Barrier,
        }
    }

    /// Returns the shape of the `i`-th result of `rank`. `mine` is its input's shape, or the root's for a scatter.
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

    /// Returns whether two calls without a [difference](Self::difference) are also printed alike, and wait as long.
    pub(crate) fn prints_as(&self, other: &Self) -> bool {
        // All fields are named here, so that a new one is not forgotten. `difference` compares those without a name.
        let Self {
            op: _,
            dtype: _,
            device,
            shape: _,
            rest: _,
            reduce: _,
            peer: _,
            dims: _,
            sizes: _,
            tag,
            form: _,
            ..
        } = self;
        let Self { note: _, timeout, site, .. } = self;
        std::ptr::eq(*site, other.site) && (tag, timeout, device) == (&other.tag, &other.timeout, &other.device)
    }

    /// Returns the name of the first property in which two calls of the same round differ, or `None`.
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        DIFFERENCES.iter().find(|(_, differs)| differs(self, other)).map(|(what, _)| *what)
    }
}

/// The name of a property of calls, and a function that returns whether two calls differ in it.
type Difference = (&'static str, fn(&Call, &Call) -> bool);

/// The properties that must be equal, in the order in which a mismatch is reported.
pub(crate) const DIFFERENCES: [Difference; 10] = [
    ("op", |a, b| a.op != b.op),
    ("dtype", |a, b| a.dtype != b.dtype),
    // Each rank has its own GPU, so only the kind of device counts.
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
