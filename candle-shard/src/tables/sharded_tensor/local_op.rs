//! User-defined ops on the local tensor of a sharded one.
use super::ShardedTensor;
use crate::tables::sharding_spec::ShardingSpec;
use crate::{Error, Result};
use candle_core::Tensor;
use std::fmt;

/// An op that every rank runs on its only shard, without communication.
///
/// By default the result has the shape of the shard and replaces it. An op that changes the layout or communicates uses
/// [`customized`](Self::customized).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::sharded_tensor::LocalOp;
/// use candle_shard::{ChunkShardingSpec, Error, Result, ShardedTensor};
///
/// let clamp = LocalOp::new("my_clamp", |x: &Tensor, most: &f64| Ok(x.minimum(*most)?))
///     .early_stop(|_, most| *most == f64::INFINITY)
///     .extra_check(|x, most| match most.is_nan() {
///         true => Err(Error::Op { op: "my_clamp", reason: format!("{x}: the bound is NaN") }),
///         false => Ok(()),
///     });
/// let largest = World::threads(2).run(|ctx| -> Result<f32> {
///     let x = Tensor::arange(0f32, 5., &Device::Cpu)?;
///     let x = ShardedTensor::distribute(&x, ChunkShardingSpec::on_ranks(0, [0, 1])?, ctx.group())?;
///     Ok(clamp.apply(&x, &2.5)?.local_tensor()?.max(0)?.to_scalar()?)
/// })?;
/// assert_eq!(largest, [2., 2.5]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub struct LocalOp<A: ?Sized> {
    name: &'static str,
    early_stop: Box<LocalFn<A, bool>>,
    extra_check: Box<LocalFn<A, Result<()>>>,
    make: Box<LocalFn<A, Result<LocalResult>>>,
}

/// A new local tensor, with the spec and the global shape of the result.
type LocalResult = (Tensor, ShardingSpec, Vec<usize>);

/// A function of a tensor and the op's arguments.
type LocalFn<A, R> = dyn Fn(&ShardedTensor, &A) -> R + Send + Sync;

impl<A: ?Sized> LocalOp<A> {
    /// Creates an op on the local tensor that keeps its shape; errors print `name`.
    pub fn new(
        name: &'static str,
        op: impl Fn(&Tensor, &A) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        let make = move |x: &ShardedTensor, args: &A| {
            let local = x.local_tensor()?;
            let made = op(local, args)?;
            if made.dims() != local.dims() {
                let (from, to) = (local.dims(), made.dims());
                let reason = format!("returns shape {to:?} for a local tensor of shape {from:?}");
                return Error::op(name, format!("{reason}; describe its layout with customized"));
            }
            Ok((made, x.sharding_spec().clone(), x.dims().to_vec()))
        };
        Self {
            name,
            early_stop: Box::new(|_, _| false),
            extra_check: Box::new(|_, _| Ok(())),
            make: Box::new(make),
        }
    }

    /// Returns the tensor unchanged where `stop` returns true.
    pub fn early_stop(mut self, stop: impl Fn(&ShardedTensor, &A) -> bool + Send + Sync + 'static) -> Self {
        self.early_stop = Box::new(stop);
        self
    }

    /// Adds a check that runs first. It must depend only on values that every rank knows, so that all ranks fail alike.
    pub fn extra_check(
        mut self,
        check: impl Fn(&ShardedTensor, &A) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.extra_check = Box::new(check);
        self
    }

    /// Replaces the op by `make`, which returns the new local tensor, the spec and the global shape of the result.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use candle_dist::World;
    /// # use candle_shard::sharded_tensor::LocalOp;
    /// # use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
    /// let transpose = LocalOp::new("transpose", |x: &Tensor, _: &()| Ok(x.t()?)).customized(|x, _| {
    ///     let spec = ChunkShardingSpec::on_ranks(1, [0, 1])?;
    ///     Ok((x.local_tensor()?.t()?, spec.into(), x.dims().iter().rev().copied().collect()))
    /// });
    /// let dims = World::threads(2).run(|ctx| -> Result<Vec<usize>> {
    ///     let x = Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((2, 3))?;
    ///     let x = ShardedTensor::distribute(&x, ChunkShardingSpec::on_ranks(0, [0, 1])?, ctx.group())?;
    ///     Ok(transpose.apply(&x, &())?.dims().to_vec())
    /// })?;
    /// assert_eq!(dims, [[3, 2], [3, 2]]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn customized(
        mut self,
        make: impl Fn(&ShardedTensor, &A) -> Result<(Tensor, ShardingSpec, Vec<usize>)> + Send + Sync + 'static,
    ) -> Self {
        self.make = Box::new(make);
        self
    }

    /// Runs the op on a tensor of which every rank holds exactly one shard.
    ///
    /// # Errors
    /// On every rank alike, if a rank holds no shard or several; any error of the op's functions; and if the result
    /// does not have the expected shape.
    pub fn apply(&self, x: &ShardedTensor, args: &A) -> Result<ShardedTensor> {
        (self.extra_check)(x, args)?;
        if (self.early_stop)(x, args) {
            return Ok(x.clone());
        }
        for rank in 0..x.group().size() {
            let n = x.layout.shards_of(rank).count();
            if n != 1 {
                let reason = format!("rank {rank} of the group holds {n} shards of {}", x.layout);
                return Error::op(self.name, format!("{reason}; reshard to one per rank"));
            }
        }
        let (local, spec, dims) = (self.make)(x, args)?;
        ShardedTensor::from_local_tensor(local, spec, dims, x.group())
    }
}

impl<A: ?Sized> fmt::Debug for LocalOp<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalOp({})", self.name)
    }
}
