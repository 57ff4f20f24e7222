//! The contract between a [`ProcessGroup`](crate::ProcessGroup) and the engine that moves its bytes.
mod collective;
mod device;
mod guards;
pub mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(any(feature = "nccl", test))]
pub mod nccl;
mod outputs;
pub(crate) mod overwrite;
mod ready;
mod reduce;
mod regions;
pub(crate) mod simulated;
mod sink;
mod wrapping;

pub use collective::compute;
pub use outputs::Envelope;
pub use ready::Ready;
pub use wrapping::Wrapping;

use crate::{Cause, Result};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, DType, Device, DeviceLocation, Layout, Shape, Storage, Tensor};
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;
use std::mem::discriminant;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

/// The elementwise reduction of a collective.
///
/// Sums run in rank order, so results are bit-identical on all ranks and from run to run; 16-bit floats accumulate in
/// f32. `Min` and `Max` propagate NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks; floats only.
    Avg,
    /// The smallest value.
    Min,
    /// The largest value.
    Max,
    /// The product.
    Product,
    /// The bits that all ranks have; whole numbers only.
    And,
    /// The bits that any rank has; whole numbers only.
    Or,
    /// The bits that an odd number of ranks has; whole numbers only.
    Xor,
    /// The sum of the values times a factor, which is multiplied before the values are added; floats only. See
    /// [`ReduceOp::pre_mul_sum`].
    PreMulSum(Factor),
}

/// The factor of a [`ReduceOp::PreMulSum`]; two are equal if their bits are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Factor(u64);

impl Factor {
    /// The number.
    pub const fn value(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl fmt::Debug for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value().fmt(f)
    }
}

impl ReduceOp {
    /// The sum of all values times `factor`, the same on all ranks. Each value is multiplied before it is added, in f32
    /// for 16-bit and 8-bit floats, so that a factor below 1 keeps sums in range.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::{ReduceOp, World};
    ///
    /// World::local(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let x = Tensor::new(&[40_000f32], &Device::Cpu)?.to_dtype(DType::F16)?; // twice this is no f16
    ///     let half = ctx.group().all_reduce(&x, ReduceOp::pre_mul_sum(0.5))?;
    ///     assert_eq!(half.to_dtype(DType::F32)?.to_vec1::<f32>()?, [40_000.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub const fn pre_mul_sum(factor: f64) -> Self {
        Self::PreMulSum(Factor(factor.to_bits()))
    }

    /// Whether it combines bits, which floats do not have for this purpose.
    pub const fn is_bitwise(self) -> bool {
        matches!(self, Self::And | Self::Or | Self::Xor)
    }

    /// Whether its results are fractions, which whole numbers cannot hold.
    pub const fn is_fractional(self) -> bool {
        matches!(self, Self::Avg | Self::PreMulSum(_))
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
            Self::And => "and",
            Self::Or => "or",
            Self::Xor => "xor",
            Self::PreMulSum(factor) => return write!(f, "sum times {}", factor.value()),
        })
    }
}

/// The kinds of communication.
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
    /// The root's pieces go to the ranks.
    Scatter,
    /// The root gets all inputs, joined along a dim.
    Gather,
    /// Point to point, the sending side.
    Send,
    /// Point to point, the receiving side.
    Recv,
    /// Nobody leaves before everybody came.
    Barrier,
}

impl Op {
    /// The name as users write it, e.g. `"all_reduce"`.
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

/// Freshly made data that a backend returns: owned, contiguous, aliasing nothing.
#[derive(Debug)]
pub struct Fresh {
    /// The elements, on the host or a device.
    pub storage: Storage,
    /// Their shape.
    pub shape: Shape,
}

impl Fresh {
    /// Data on the host.
    pub fn host(storage: CpuStorage, shape: impl Into<Shape>) -> Self {
        Self { storage: Storage::Cpu(storage), shape: shape.into() }
    }

    /// A contiguous copy of any view of a tensor, on its device.
    pub fn copy_of(tensor: &Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let storage = match &*storage {
            Storage::Cpu(source) => Storage::Cpu(dense(source, layout)?),
            Storage::Cuda(source) => Storage::Cuda(dense(source, layout)?),
            Storage::Metal(source) => Storage::Metal(dense(source, layout)?),
        };
        Ok(Self { storage, shape: layout.shape().clone() })
    }

    /// The data as what an op on host tensors returns.
    pub fn into_cpu(self) -> candle_core::Result<(CpuStorage, Shape)> {
        match self.storage {
            Storage::Cpu(storage) => Ok((storage, self.shape)),
            other => candle_core::bail!("an op on host tensors made one on {:?}", other.device().location()),
        }
    }

    /// The data as what an op on CUDA tensors returns.
    pub fn into_cuda(self) -> candle_core::Result<(CudaStorage, Shape)> {
        match self.storage {
            Storage::Cuda(storage) => Ok((storage, self.shape)),
            other => candle_core::bail!("an op on CUDA tensors made one on {:?}", other.device().location()),
        }
    }

    /// The data as an untracked tensor, without a copy.
    pub fn into_tensor(self) -> Tensor {
        Tensor::from_storage(self.storage, self.shape, candle_core::op::BackpropOp::none(), false)
    }
}

/// A contiguous copy of what `layout` shows of `source`.
fn dense<S>(source: &S, layout: &Layout) -> Result<S>
where
    S: BackendStorage<Device: BackendDevice<Storage = S>>,
{
    let mut made = source.device().zeros_impl(layout.shape(), source.dtype())?;
    source.copy_strided_src(&mut made, 0, layout)?;
    Ok(made)
}

/// The tensors that one rank gives to a collective: one, unless the call is coalesced.
pub type Tensors = SmallVec<[Tensor; 1]>;

/// What one rank gets out of a collective.
pub type Results = SmallVec<[Fresh; 1]>;

/// The size of a tensor's elements in bytes.
pub(crate) fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// A collective or a message that was started; dropping it gives the result up, and lets the other ranks go on.
pub trait Unfinished: Send {
    /// Whether [`finish`](Self::finish) would return without waiting for another rank.
    fn is_ready(&self) -> Result<bool>;
    /// Waits for the other ranks and returns the results.
    fn finish(self: Box<Self>) -> Result<Results>;
    /// Sets how long [`finish`](Self::finish) may wait. Returns `false` where the engine cannot bound one wait; the
    /// caller then asks [`is_ready`](Self::is_ready) until the time is over.
    fn set_timeout(&mut self, _: Duration) -> bool {
        false
    }
}

/// An engine that moves tensors among the ranks of one group.
///
/// Ranks are counted within the group. Tensors come in contiguous, detached and validated against `call`, which names
/// the dims and the piece sizes; every result is fresh memory. Implementations turn each failure into the same
/// [`Error::Group`](crate::Error::Group) on every rank.
///
/// Methods with a default work on every engine, or return the same `unsupported` error on all ranks. [`compute`] makes
/// the results of a collective from the tensors of all ranks. An engine around another one implements [`Wrapping`]
/// instead.
pub trait Backend: Send + Sync + fmt::Debug {
    /// The engine's name, e.g. `"local"`.
    fn name(&self) -> &'static str;
    /// This rank within the group.
    fn rank(&self) -> usize;
    /// The members as ranks of the world, in group order.
    fn ranks(&self) -> &[usize];
    /// The device that this rank computes on, unless its program chooses another.
    fn device(&self) -> &Device {
        static HOST: Device = Device::Cpu;
        &HOST
    }
    /// Makes the collective that `call` describes with this rank's `tensors`, and returns when they may change again.
    ///
    /// One result for each tensor; none on ranks that get none.
    fn run(&self, call: Call, tensors: Tensors) -> Result<Results>;
    /// Makes an all_reduce or a broadcast whose result takes the place of `tensor`, which must be contiguous.
    fn run_in_place(&self, call: Call, tensor: &Tensor) -> Result<()>;
    /// Like [`run`](Self::run), with the results written to `outputs`, one for each result.
    ///
    /// Outputs are contiguous and have the shape, dtype and device of the results. Other ranks may make the same call
    /// with [`run`](Self::run).
    fn run_into(&self, call: Call, tensors: Tensors, outputs: &[Tensor]) -> Result<()> {
        outputs::fill(outputs, self.run(call, tensors)?)
    }
    /// Starts the collective without waiting; the tensors must not change before every rank has finished it.
    fn start(&self, call: Call, tensors: Tensors) -> Result<Box<dyn Unfinished>>;
    /// Whether what a rank sends arrives as the same memory.
    fn shares_memory(&self) -> bool {
        true
    }
    /// Like [`start`](Self::start), with the results written to `outputs` when the call is finished.
    fn start_into(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Box<dyn Unfinished>> {
        Ok(outputs::filling(self.start(call, tensors)?, outputs))
    }
    /// Sends to `call.peer` without waiting for it, unless there is a bound on unread messages and it is reached.
    fn send(&self, call: Call, tensor: Tensor) -> Result<()>;
    /// Like [`send`](Self::send) without waiting at all, however much is unread; what is returned is finished once the bound
    /// is kept.
    ///
    /// Programs that receive when they need a message, not when it is sent, rely on it. Pipelines do: they are proved to end
    /// for sends that do not wait.
    fn start_send(&self, call: Call, tensor: Tensor) -> Result<Box<dyn Unfinished>> {
        self.send(call, tensor)?;
        Ok(outputs::done())
    }
    /// Receives the next tensor from `call.peer`.
    fn recv(&self, call: Call) -> Result<Tensor>;
    /// Like [`recv`](Self::recv), with the tensor's elements written to `output`.
    fn recv_into(&self, call: Call, output: &Tensor) -> Result<()> {
        outputs::receive(output, &self.recv(call)?)
    }
    /// Receives the next tensor with `call.tag` from any rank, and returns the sender.
    fn recv_any(&self, _: Call) -> Result<(usize, Tensor)> {
        Err(outputs::unsupported(self.name(), "receive from any rank"))
    }
    /// The oldest message with `call.tag` that is here and not received yet, from `call.peer` or, if it is `None`, from
    /// any rank; never waits.
    fn probe(&self, _: &Call) -> Result<Option<Envelope>> {
        Err(outputs::unsupported(self.name(), "probe for messages"))
    }
    /// Whether rank `peer` is known to have returned: what it has not sent before never comes.
    fn has_returned(&self, _peer: usize) -> bool {
        false
    }
    /// Whether calls keep their own [`Call::timeout`].
    fn has_call_timeouts(&self) -> bool {
        false
    }
    /// This engine's own barrier that stops the world with [`Cause::Missing`] after `timeout`, if it has one; otherwise the
    /// group makes one of messages.
    fn monitored_barrier(&self, _: &Call, _: Duration) -> Option<Result<()>> {
        None
    }
    /// A group of some members, given as ranks of this group in the new order; only they call this.
    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>>;
    /// Stops this group's world, unless it has stopped: every rank's failure is that of this one.
    fn fail(&self, message: &str);
    /// Like [`fail`](Self::fail) for a cause that is more than a message.
    fn stop(&self, cause: Cause) {
        self.fail(&cause.to_string());
    }
    /// The failure that stopped this group's world, if one did.
    fn failure(&self) -> Option<Arc<crate::GroupFailure>>;
}
