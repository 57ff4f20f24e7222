//! Process groups.
//!
#![doc = include_str!("README.md")]

mod aliases;
mod call;
mod check;
mod compared;
mod failure;
mod gather_text;
mod object;
mod pending;
mod point_to_point;
mod posted;
mod subgroup;
mod under_way;

pub use aliases::ProcessGroupAliases;
pub use call::CollectiveCall;
pub use object::{MAX_OBJECT_BYTES, Objects};
pub use pending::{Pending, PendingTensors};
#[allow(deprecated)]
pub use point_to_point::Message;
pub use point_to_point::P2pOp;

use crate::backend::simulated::SimulatedBackend;
use crate::backend::{Backend, Call, Fresh, Op, ReduceOp, Results, Tensors, bytes};
use crate::call::{Collective, Cut};
use crate::switch::Switches;
use crate::{Cause, Error, Result, comm};
use candle_core::{DType, Device, Shape, Tensor};
use parking_lot::Mutex;
use posted::Posts;
use rustc_hash::FxHashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use under_way::{ActiveCalls, CallGuard, Site};

/// The most ranks of a simulated group, which lists them.
const MOST_SIMULATED: usize = 1 << 16;

/// A set of ranks that communicate. Cheap to clone, `Send + Sync`, never a global.
///
/// Every rank of the group must make the same calls, in the same form and order. Ranks are counted within the group.
/// Inputs may be any view. Results are contiguous new memory without gradient; see [`functional`](crate::functional)
/// for the differentiable forms. At size 1 the result *is* the input, with its memory and its gradient; that of a started
/// call is a copy with its gradient.
///
/// A rank may communicate from several threads, with one group each: [`subgroup`](Self::subgroup) of all ranks makes another
/// one. Threads may hand a group on. Two that call on one group at the same time stop the world with
/// [`Cause::Concurrent`](crate::Cause::Concurrent), because their order is a matter of luck. This is also so for two that
/// receive from one rank with one tag, or send to one. Messages with other ranks or tags, and new groups of other members, may
/// overlap. A thread that waits for a call that it has started is in that call; one may also wait for what another one has
/// started.
///
/// Calls that do not overlap are not noticed, such as those of threads that take turns under a mutex: their order must be the
/// same on all ranks.
///
/// A thread counts from its first call. Before that, a world whose other ranks all wait for it is mistaken for a deadlock, so
/// make a first call early.
#[derive(Clone, Debug)]
pub struct ProcessGroup {
    backend: Arc<dyn Backend>,
    /// The started receives of all handles on the group.
    posts: Arc<Posts>,
    /// The calls on all handles on the group that threads of this rank are in.
    under_way: Arc<ActiveCalls>,
    /// The timeout of this handle's calls, if it differs from the world's.
    timeout: Option<Duration>,
    /// What all calls of this handle are about.
    description: Option<Arc<str>>,
    /// The hashes of what the ranks have compared on all handles on the group.
    compared: Arc<Mutex<FxHashSet<u64>>>,
    /// Whether the calls of this handle are checks.
    is_check: bool,
    /// The variables that hold for all ranks of the world.
    pub(crate) switches: Switches,
}

impl ProcessGroup {
    /// Creates this rank's handle on the group that a backend serves.
    ///
    /// [`World::wrap_backend`](crate::World::wrap_backend) and [`init_process_group_with`](crate::init::init_process_group_with)
    /// make worlds of a backend; this is for a group without a world. No [`Switch`](crate::switch::Switch) is on in it, because nobody
    /// says which hold for all of its ranks.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::{ProcessGroup, ReduceOp, World};
    ///
    /// World::threads(2).run(|ctx| {
    ///     let group = ProcessGroup::new(ctx.group().backend().subgroup(&[0, 1])?);
    ///     assert_eq!(group.all_reduce(&Tensor::new(&[1f32], &Device::Cpu)?, ReduceOp::Sum)?.to_vec1::<f32>()?, [2.0]);
    ///     Ok::<_, candle_dist::Error>(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self {
            backend,
            posts: Arc::default(),
            under_way: Arc::default(),
            timeout: None,
            description: None,
            compared: Arc::default(),
            is_check: false,
            switches: Switches::default(),
        }
    }

    pub(crate) fn shared_backend(&self) -> Arc<dyn Backend> {
        self.backend.clone()
    }

    /// Returns this group with its own timeout for calls of the returned handle and of groups made from it.
    ///
    /// Calls on both handles meet, and ranks need not agree on their timeouts. The first rank whose timeout expires
    /// stops the world with [`Cause::TimedOut`](crate::Cause::TimedOut).
    ///
    /// ```
    /// use candle_dist::{Cause, Error, World};
    /// use std::time::Duration;
    ///
    /// let outcome = World::threads(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let patient = ctx.group();
    ///     if ctx.rank() == 1 {
    ///         std::thread::sleep(Duration::from_millis(300));
    ///         return patient.barrier(); // too late
    ///     }
    ///     let error = patient.with_timeout(Duration::from_millis(20))?.barrier().unwrap_err();
    ///     assert!(matches!(&error, Error::Group(failure) if matches!(failure.cause, Cause::TimedOut { rank: 0, .. })));
    ///     Err(error)
    /// });
    /// assert!(outcome.is_err());
    /// ```
    ///
    /// # Errors
    /// If the backend has only one timeout for the whole world.
    pub fn with_timeout(&self, timeout: Duration) -> Result<Self> {
        if !self.backend.has_call_timeouts() {
            let backend = self.backend.name();
            let reason = format!("the {backend} backend has one timeout for the whole world; set it there");
            return Err(Error::Unsupported(reason));
        }
        Ok(Self { timeout: Some(timeout), ..self.clone() })
    }

    /// Returns this group with a description of what the calls of the returned handle are about, such as the name of a
    /// parameter. It must be equal on all ranks.
    ///
    /// Calls of the same shapes match, whatever they are about. Descriptions make a mismatch of those that are about
    /// different things: an error on all ranks, at the point where the backend compares calls.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::{ReduceOp, World};
    ///
    /// let failed = World::threads(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let group = ctx.group().with_description(["query", "key"][ctx.rank()]);
    ///     group.all_reduce(&Tensor::ones(3, DType::F32, &Device::Cpu)?, ReduceOp::Sum).map(drop)
    /// });
    /// assert!(failed.unwrap_err().to_string().contains("description differs"));
    /// ```
    pub fn with_description(&self, description: impl Into<Arc<str>>) -> Self {
        Self { description: Some(description.into()), ..self.clone() }
    }

    /// Returns this group with calls that are [checks](crate::comm::Part::Check), which counts exclude.
    pub fn with_checks(&self) -> Self {
        Self { is_check: true, ..self.clone() }
    }

    /// Waits until `ready`, for a backend that cannot limit its waits; the world stops when the timeout expires.
    fn poll(&self, timeout: Duration, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
        let (began, mut pause) = (Instant::now(), Duration::from_micros(10));
        while !ready()? {
            if began.elapsed() >= timeout {
                return Err(self.stop(Cause::TimedOut { rank: self.ranks()[self.rank()], after: timeout }));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Stops the world and returns its failure.
    fn stop(&self, cause: Cause) -> Error {
        let text = cause.to_string();
        self.backend.stop(cause);
        self.failure().map_or(Error::Unsupported(text), Error::Group)
    }

    /// Creates rank `rank` of a simulated group of `size` ranks: for shapes and counts of worlds of any size.
    ///
    /// Every call returns at once. Results have the correct shapes, but arbitrary values: gathers join copies of this
    /// rank's tensor if its size fits, reductions return it unchanged, other results are zeros.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::{DeviceMesh, ProcessGroup};
    ///
    /// let group = ProcessGroup::simulated(200, 256)?;
    /// let mesh = DeviceMesh::new(&group, &[("dp", 32), ("tp", 8)])?;
    /// let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    /// assert_eq!(mesh.axis_group("dp")?.all_gather(&x, 0)?.dims(), [64, 3]);
    /// # Ok::<(), candle_dist::Error>(())
    /// ```
    pub fn simulated(rank: usize, size: usize) -> Result<Self> {
        if rank >= size || size > MOST_SIMULATED {
            let fix = format!("use a smaller rank, and at most {MOST_SIMULATED} ranks");
            return Err(Error::Unsupported(format!("rank {rank} of a simulated world of {size}; {fix}")));
        }
        Ok(Self::new(Arc::new(SimulatedBackend::new(rank, (0..size).collect()))))
    }

    /// Returns this rank's number in the group.
    pub fn rank(&self) -> usize {
        self.backend.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.backend.ranks().len()
    }

    /// Returns the members as ranks of the world, in group order.
    pub fn ranks(&self) -> &[usize] {
        self.backend.ranks()
    }

    /// Returns whether this is the same group, not just one of the same ranks: calls on one meet calls on the other.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.backend, &other.backend)
    }

    /// Returns the device of this rank: the host, unless the world has set another.
    pub fn device(&self) -> &Device {
        self.backend.device()
    }

    /// Returns the backend, which checks nothing and also runs at size 1: for tests of backends.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Reduces all ranks' tensors elementwise, on every rank. Shapes must be equal.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::{ReduceOp, World};
    ///
    /// World::threads(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let x = Tensor::new(&[40_000f32], &Device::Cpu)?.to_dtype(DType::F16)?; // twice this is no f16
    ///     let half = ctx.group().all_reduce(&x, ReduceOp::pre_mul_sum(0.5))?;
    ///     assert_eq!(half.to_dtype(DType::F32)?.to_vec1::<f32>()?, [40_000.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.collect(Call::on(Collective::AllReduce(op), tensor), tensor)
    }

    /// Joins all ranks' tensors along `dim` in rank order, on every rank. Shapes must be equal.
    ///
    /// [`Collective::all_gather`] joins pieces of other sizes.
    #[track_caller]
    pub fn all_gather(&self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        let cut = Cut::even(dim, self.dim_size(Op::AllGather, tensor, dim)?, self.size());
        self.collect(self.fitting(Collective::all_gather(cut), tensor)?, tensor)
    }

    /// Reduces all ranks' tensors and returns this rank's piece, cut along `dim` into equal pieces in rank order.
    ///
    /// [`Collective::reduce_scatter`] returns pieces of other sizes.
    #[track_caller]
    pub fn reduce_scatter(&self, tensor: &Tensor, dim: usize, op: ReduceOp) -> Result<Tensor> {
        let cut = self.even_cut(Op::ReduceScatter, tensor, dim)?;
        self.collect(Call::on(Collective::reduce_scatter(cut, op), tensor), tensor)
    }

    /// Sends equal pieces of `split_dim` to the ranks and joins the received ones along `concat_dim`.
    ///
    /// A tensor sharded on `concat_dim` becomes one sharded on `split_dim`. [`Collective::AllToAll`] has other sizes.
    #[track_caller]
    pub fn all_to_all(&self, tensor: &Tensor, split_dim: usize, concat_dim: usize) -> Result<Tensor> {
        let split = self.even_cut(Op::AllToAll, tensor, split_dim)?;
        let concat = Cut::even(concat_dim, self.dim_size(Op::AllToAll, tensor, concat_dim)?, self.size());
        self.collect(self.fitting(Collective::AllToAll { split, concat }, tensor)?, tensor)
    }

    /// Sends rows of dim 0 to the ranks and joins the received ones in rank order: `counts[s][r]` rows go from `s` to
    /// `r`.
    ///
    /// Every rank gives the whole table of counts, in which some may be zero; the other dims are equal on all ranks.
    /// The rows for rank 0 come first in `tensor`.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::{Result, World};
    ///
    /// let received = World::threads(2).run(|ctx| -> Result<Vec<u32>> {
    ///     let mine = [[1u32, 2, 3], [4, 5, 6]][ctx.rank()];
    ///     let counts = [[3, 0], [1, 2]]; // rank 0 keeps all, rank 1 sends its first row to rank 0
    ///     Ok(ctx.group().all_to_all_single(&Tensor::new(&mine, &Device::Cpu)?, &counts)?.to_vec1()?)
    /// })?;
    /// assert_eq!(received, [vec![1, 2, 3, 4], vec![5, 6]]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn all_to_all_single<C: AsRef<[usize]>>(&self, tensor: &Tensor, counts: &[C]) -> Result<Tensor> {
        self.collect(self.fitting(Collective::all_to_all_single(counts), tensor)?, tensor)
    }

    /// Copies the root's tensor to every rank. All ranks give a tensor of the same shape and dtype.
    #[track_caller]
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Tensor> {
        self.collect(self.fitting(Collective::Broadcast { root }, tensor)?, tensor)
    }

    /// Reduces all ranks' tensors on the root; returns `None` elsewhere.
    #[track_caller]
    pub fn reduce(&self, tensor: &Tensor, root: usize, op: ReduceOp) -> Result<Option<Tensor>> {
        Ok(self.call(Collective::Reduce { op, root }).run_all(std::slice::from_ref(tensor))?.pop())
    }

    /// Joins all ranks' tensors along `dim` on the root; returns `None` elsewhere. `sizes[r]` is rank `r`'s part of
    /// `dim`.
    #[track_caller]
    pub fn gather(
        &self,
        tensor: &Tensor,
        dim: usize,
        sizes: &[usize],
        root: usize,
    ) -> Result<Option<Tensor>> {
        let cut = Cut::new(dim, sizes);
        Ok(self.call(Collective::Gather { cut, root }).run_all(std::slice::from_ref(tensor))?.pop())
    }

    /// Returns this rank's piece of the root's tensor, cut along `dim` into `sizes`.
    ///
    /// The root gives a tensor of `shape` and `dtype`, which every rank names; other ranks may give `None`.
    #[track_caller]
    pub fn scatter(
        &self,
        tensor: Option<&Tensor>,
        (shape, dtype): (impl Into<Shape>, DType),
        dim: usize,
        sizes: &[usize],
        root: usize,
    ) -> Result<Tensor> {
        self.call(Collective::Scatter { cut: Cut::new(dim, sizes), root }).of(shape, dtype).run(tensor)
    }

    /// Waits until every rank has called it.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.meet(Call::new(Collective::Barrier))
    }

    /// Runs a barrier that fails on every rank unless all pass the same description.
    ///
    /// For values that must be equal on all ranks before they continue: a mesh, a plan, a configuration.
    #[track_caller]
    pub fn agree(&self, description: &str) -> Result<()> {
        self.meet(Call { note: Some(description.into()), ..Call::new(Collective::Barrier) })
    }

    fn meet(&self, call: Call) -> Result<()> {
        self.exchange(call, &[], Tensors::new()).map(drop)
    }

    /// Runs a collective with a result on every rank; at size 1 the input is the result.
    fn collect(&self, call: Call, tensor: &Tensor) -> Result<Tensor> {
        let made = self.exchange(call, std::slice::from_ref(tensor), Tensors::new())?;
        Ok(made.and_then(|mut made| made.pop()).map_or_else(|| tensor.clone(), Fresh::into_tensor))
    }

    /// Runs a collective on valid tensors; `None` means that these are the results.
    pub(crate) fn exchange(
        &self,
        call: Call,
        tensors: &[Tensor],
        outputs: Tensors,
    ) -> Result<Option<Results>> {
        if self.is_alone(&call)? {
            return Ok(None);
        }
        let dense =
            tensors.iter().map(|t| t.detach().contiguous()).collect::<candle_core::Result<Tensors>>()?;
        let size = dense.iter().map(bytes).sum();
        self.engage(call, size, |backend, call| backend.run(call, dense, outputs)).map(Some)
    }

    /// Returns whether the group has one rank, which needs no backend. The call is checked as in a larger group.
    fn is_alone(&self, call: &Call) -> Result<bool> {
        // The values of a single rank are multiplied too.
        if self.size() > 1 || matches!(call.collective.reduction(), Some(ReduceOp::PreMulSum(_))) {
            return Ok(false);
        }
        self.check_dtypes(call)?;
        self.failure().map_or(Ok(true), |failure| Err(Error::Group(failure)))
    }

    /// Describes a collective on a tensor, which it must fit.
    #[track_caller]
    fn fitting(&self, collective: Collective, tensor: &Tensor) -> Result<Call> {
        self.check_ranks(&collective)?;
        self.check_fit(&collective, 0, tensor)?;
        Ok(Call::on(collective, tensor))
    }

    /// Passes a call to the backend, unless another thread is in a call that it must not overlap.
    ///
    /// `bytes` is the size of this rank's input.
    pub(crate) fn engage<R>(
        &self,
        call: Call,
        bytes: usize,
        run: impl FnOnce(&dyn Backend, Call) -> Result<R>,
    ) -> Result<R> {
        self.check_dtypes(&call)?;
        let _entered = self.begin_call(&call)?;
        self.pass(call, bytes, run)
    }

    /// Says that a thread is in a call until the result is dropped.
    fn begin_call(&self, call: &Call) -> Result<CallGuard<'_>> {
        self.under_way.enter(call).map_err(|other| self.overlap(other, call.site))
    }

    /// Passes a call to the backend: the only place where communication is recorded and timed.
    fn pass<R>(
        &self,
        call: Call,
        bytes: usize,
        run: impl FnOnce(&dyn Backend, Call) -> Result<R>,
    ) -> Result<R> {
        let note = call.note.or_else(|| self.description.clone());
        let call = Call { note, timeout: call.timeout.or(self.timeout), ..call };
        let _watched = comm::watch(&call, bytes, self.ranks(), self.is_check);
        run(&*self.backend, call)
    }

    /// Stops the world because two threads of this rank call at the same time.
    #[cold]
    fn overlap(&self, first: Site, second: Site) -> Error {
        let [first, second] = [first, second].map(|site| format!("{}:{}", site.file(), site.line()));
        self.stop(Cause::Concurrent { rank: self.ranks()[self.rank()], sites: [first, second] })
    }
}
