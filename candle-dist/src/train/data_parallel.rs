//! Data parallelism: averages gradients over ranks that train on different data.
use super::host::read_results;
use super::sharded::{conflict, rows_of};
use super::sync::buckets;
use crate::backend::joined;
use crate::row_changes::{RowChanges, exchange, share};
use crate::{Collective, Cut, Error, Pending, ProcessGroup, ReduceOp, Result, SyncOptions, empty, rows};
use crate::{sum_dtype, sync_params, verify_parameter_shapes};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, TensorId, Var};
use itertools::Itertools;
use std::collections::HashMap;
use std::sync::Arc;

/// Options of a [`DataParallel`]: how it starts, and how it cuts gradients into buckets. Start from the
/// default, and set what differs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DataParallelOptions {
    /// The maximum size of a bucket in bytes, 25 MiB by default. A larger gradient is a bucket of its own.
    pub bucket_bytes: usize,
    /// How the parameters are made equal at the start.
    pub start: InitialSync,
    /// The dtype of the reduction. `None` means f32 for 16-bit float parameters, and the parameter's dtype otherwise.
    ///
    /// Gradients of 16-bit parameters are returned in this dtype, others in their parameter's dtype.
    /// `Some(DType::BF16)` halves the communication of bf16 parameters, and returns gradients that candle-nn's
    /// optimizers accept.
    pub reduce_dtype: Option<DType>,
}

/// How a [`DataParallel`] ensures that all ranks hold the same parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum InitialSync {
    /// Compares shapes, and copies the source's values to every rank as [`sync_params`] does.
    Sync(SyncOptions),
    /// Compares shapes with [`verify_parameter_shapes`]; values stay unchanged.
    Verify,
    /// Communicates nothing: the caller ensures that the parameters are equal.
    Trust,
}

impl InitialSync {
    /// Makes the parameters of the ranks equal, or compares them, as this says.
    ///
    /// # Errors
    /// The errors of [`sync_params`] or [`verify_parameter_shapes`]; and if ranks of the group hold different shards of a parameter.
    #[track_caller]
    pub(super) fn apply<N: AsRef<str>>(
        &self,
        op: &'static str,
        group: &ProcessGroup,
        params: &[(N, Var)],
    ) -> Result<()> {
        match self {
            Self::Sync(sync) => sync_params(group, params, sync)?,
            Self::Verify => {
                let tensors: Vec<_> = params.iter().map(|(name, var)| (name, var.as_tensor())).collect();
                verify_parameter_shapes(group, &tensors)?;
            }
            Self::Trust => {}
        }
        // Also those that the start left out.
        let shard =
            |(name, var): &(N, Var)| conflict(&format!("{:?}", name.as_ref()), &rows_of(var)?, group.ranks());
        params.iter().find_map(shard).map_or(Ok(()), |reason| Err(Error::Invalid { op, reason }))
    }
}

impl Default for DataParallelOptions {
    fn default() -> Self {
        Self { bucket_bytes: 25 << 20, start: InitialSync::Sync(SyncOptions::default()), reduce_dtype: None }
    }
}

impl DataParallelOptions {
    /// Sets the maximum size of a bucket in bytes.
    pub fn bucket_bytes(self, bucket_bytes: usize) -> Self {
        Self { bucket_bytes, ..self }
    }

    /// Sets how the parameters are made equal at the start.
    pub fn start(self, start: InitialSync) -> Self {
        Self { start, ..self }
    }

    /// Sets the dtype of the reduction.
    pub fn reduce_dtype(self, reduce_dtype: impl Into<Option<DType>>) -> Self {
        Self { reduce_dtype: reduce_dtype.into(), ..self }
    }
}

/// Averages the gradients of a list of variables over the ranks of a group.
///
/// Every rank holds the whole model (or, with tensor parallelism, the same shard of it) and trains on its own part of
/// the batch. If the loss is a mean over the rank's samples and all ranks have the same number of samples, the average
/// is the gradient of the mean over the whole batch. For different numbers of samples, use
/// [`reduce_weighted`](Self::reduce_weighted). To accumulate over several backward passes, sum them in a
/// [`GradAccumulator`](crate::GradAccumulator), which communicates nothing, and reduce once. Running statistics and other
/// buffers are each rank's own, unless [`with_buffers`](Self::with_buffers) has them.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_dist::{DataParallel, DataParallelOptions, Result, World};
///
/// let grads = World::threads(2).run(|ctx| -> Result<f32> {
///     let mesh = ctx.mesh(&[("dp", 2)])?;
///     let weight = Var::new(&[1f32], &Device::Cpu)?;
///     let dp = DataParallel::new(mesh.axis_group("dp")?, &[("weight", weight.clone())], &DataParallelOptions::default())?;
///     let x = Tensor::new(&[ctx.rank() as f32], &Device::Cpu)?; // each rank's part of the batch
///     let mut grads = (weight.as_tensor() * x)?.mean_all()?.backward()?;
///     dp.reduce(&mut grads)?;
///     Ok(grads.get(&weight).expect("a gradient").to_vec1::<f32>()?[0])
/// })?;
/// assert_eq!(grads, [0.5, 0.5]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone)]
pub struct DataParallel {
    group: ProcessGroup,
    buckets: Vec<Vec<(String, Var)>>,
    /// The tables whose gradients are kept by rows.
    tables: Vec<Var>,
    /// What lookups change in place.
    changes: Arc<HashMap<TensorId, Arc<RowChanges>>>,
    buffers: Vec<(String, Var)>,
    reduce_dtype: Option<DType>,
}

impl DataParallel {
    /// Creates one for these variables and the ranks of `group`, such as a mesh axis. All ranks use one order of names.
    ///
    /// [`named_vars`](crate::named_vars) lists the variables of a `VarMap`. The best order is that of the forward pass:
    /// buckets are filled from the end of the list, in the order in which the backward pass computes gradients. Integer
    /// variables have no gradients, so only the start includes them. A variable that is named twice is reduced once. The rows of a
    /// table whose gradient is kept by rows, the `RowVar::var` of candle-shard, are averaged where they are kept: each rank gets
    /// those of all ranks, in three collectives per table.
    ///
    /// Rows that lookups have changed in place, as `max_norm` does, are given to all ranks by each reduction, in two more
    /// collectives per table that has some.
    ///
    /// # Errors
    /// The errors of [`sync_params`] or [`verify_parameter_shapes`]; if the reduction dtype is not a float; and if ranks of
    /// the group hold different shards of a parameter ([`ShardedVar`](crate::ShardedVar)).
    #[track_caller]
    pub fn new<N: AsRef<str>>(
        group: &ProcessGroup,
        params: &[(N, Var)],
        options: &DataParallelOptions,
    ) -> Result<Self> {
        if let Some(dtype) = options.reduce_dtype.filter(|dtype| !dtype.is_float()) {
            let reason = format!("gradients reduced in {}: use a float such as f32", dtype.as_str());
            return Err(Error::Invalid { op: "DataParallel::new", reason });
        }
        options.start.apply("DataParallel::new", group, params)?;
        let differentiable = params.iter().filter(|(_, var)| var.dtype().is_float());
        let differentiable = differentiable.unique_by(|(_, var)| var.id());
        let (tables, mut reduced): (Vec<_>, Vec<_>) =
            differentiable.partition(|(_, var)| rows::of(var.id()).is_some());
        reduced.reverse();
        let tables: Vec<Var> = tables.into_iter().map(|(_, var)| var.clone()).collect();
        let possible = tables.iter().chain(reduced.iter().map(|(_, var)| var)).filter(|var| is_table(var));
        let changes = Arc::new(possible.map(|var| (var.id(), RowChanges::watch(var))).collect());
        let owned = |(name, var): &(N, Var)| (name.as_ref().to_string(), var.clone());
        let dtype_of = |(_, var): &&(N, Var)| options.reduce_dtype.unwrap_or_else(|| sum_dtype(var.dtype()));
        let bytes = |param: &&(N, Var)| param.1.elem_count() * dtype_of(param).size_in_bytes();
        let cut = buckets(reduced, |(_, var)| var.dtype(), bytes, options.bucket_bytes);
        let buckets = cut.into_iter().map(|bucket| bucket.into_iter().map(owned).collect()).collect();
        let reduce_dtype = options.reduce_dtype;
        Ok(Self { group: group.clone(), buckets, tables, changes, buffers: Vec::new(), reduce_dtype })
    }

    /// Lets each reduction also copy these variables of the first rank to all ranks, as PyTorch's `broadcast_buffers` does.
    ///
    /// This is for variables that change without a gradient, such as the running statistics of a batch norm. Without it they are
    /// each rank's own, and drift apart. It costs one broadcast for each dtype and two small collectives.
    ///
    /// ```
    /// use candle_core::backprop::GradStore;
    /// use candle_core::{Device, Var};
    /// use candle_dist::{DataParallel, DataParallelOptions, Result, World};
    ///
    /// let means = World::threads(2).run(|ctx| -> Result<f32> {
    ///     let running_mean = Var::new(0f32, &Device::Cpu)?;
    ///     let none: [(&str, Var); 0] = [];
    ///     let dp = DataParallel::new(ctx.group(), &none, &DataParallelOptions::default())?
    ///         .with_buffers(&[("running_mean", running_mean.clone())]);
    ///     running_mean.set(&candle_core::Tensor::new(1.0 + ctx.rank() as f32, &Device::Cpu)?)?; // a forward pass
    ///     dp.reduce(&mut GradStore::default())?;
    ///     Ok(running_mean.to_scalar()?)
    /// })?;
    /// assert_eq!(means, [1.0, 1.0]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn with_buffers<N: AsRef<str>>(self, buffers: &[(N, Var)]) -> Self {
        let buffers = buffers.iter().map(|(name, var)| (name.as_ref().to_owned(), var.clone())).collect();
        Self { buffers, ..self }
    }

    /// Returns the group over which gradients are averaged.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the number of buckets, which is the number of collectives of a [`reduce`](Self::reduce) without tables by rows.
    pub fn bucket_count(&self) -> usize {
        self.buckets.len()
    }

    /// Replaces every gradient by its average over the ranks.
    ///
    /// A variable without a gradient on this rank counts as zeros. If no rank has a gradient, it keeps none. This needs
    /// no extra collective: each bucket ends with one number per gradient that says whether this rank has it, and one that says
    /// whether this rank has changed rows in place. A
    /// reduction is thus one all_reduce per bucket on every rank, whatever gradients there are. The results are views
    /// of the buckets and hold no graph.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a gradient has another shape than its variable, or a dtype that is neither the
    /// variable's nor the one in which its gradients are [summed](sum_dtype).
    #[track_caller]
    pub fn reduce(&self, grads: &mut GradStore) -> Result<()> {
        self.add_up(grads, 1.0, ReduceOp::Avg)
    }

    /// Like [`reduce`](Self::reduce), but averages with a `weight` per rank, such as its number of samples.
    ///
    /// A rank of weight 0 contributes nothing. Needs one small all_gather more than [`reduce`](Self::reduce).
    ///
    /// # Errors
    /// The same on every rank: if a weight is negative or not finite, or if all are 0.
    #[track_caller]
    pub fn reduce_weighted(&self, grads: &mut GradStore, weight: f64) -> Result<()> {
        let weights = self.group.all_gather(&Tensor::new(&[weight], &Device::Cpu)?, 0)?.to_vec1::<f64>()?;
        let total: f64 = weights.iter().sum();
        if !(total.is_finite() && total > 0.0 && weights.iter().all(|&w| w >= 0.0)) {
            let reason = format!("weights {weights:?}: must be finite and at least 0, and not all 0");
            return Err(Error::Invalid { op: "reduce_weighted", reason });
        }
        // Scale before the sum, so that no intermediate value is larger than the gradients.
        self.add_up(grads, weight / total, ReduceOp::Sum)
    }

    /// Starts a [`reduce`](Self::reduce). [`PendingGrads::wait`] returns the averages.
    ///
    /// You may compute other gradients in the meantime, but not of these variables, because their gradients leave
    /// `grads`.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use candle_dist::{DataParallel, DataParallelOptions, Result, World};
    ///
    /// let grads = World::threads(2).run(|ctx| -> Result<f32> {
    ///     let weight = Var::new(&[1f32], &Device::Cpu)?;
    ///     let dp = DataParallel::new(ctx.group(), &[("weight", weight.clone())], &DataParallelOptions::default())?;
    ///     let x = Tensor::new(&[ctx.rank() as f32], &Device::Cpu)?;
    ///     let mut grads = (weight.as_tensor() * x)?.backward()?;
    ///     let pending = dp.reduce_start(&mut grads)?;
    ///     pending.wait(&mut grads)?;
    ///     Ok(grads.get(&weight).expect("a gradient").to_vec1::<f32>()?[0])
    /// })?;
    /// assert_eq!(grads, [0.5, 0.5]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`reduce`](Self::reduce).
    #[track_caller]
    pub fn reduce_start(&self, grads: &mut GradStore) -> Result<PendingGrads> {
        let mut started = Vec::new();
        for bucket in &self.buckets {
            if let Some(flat) = self.flatten(bucket, grads, 1.0)? {
                started.push((
                    bucket.clone(),
                    self.group.call(Collective::AllReduce(ReduceOp::Avg)).owned().start(&flat)?,
                ));
            }
        }
        let average = 1.0 / self.group.size() as f64;
        self.tables.iter().try_for_each(|table| self.sum_rows(table, average))?;
        let (changes, buffers) = (self.changes.clone(), self.buffers.clone());
        Ok(PendingGrads { group: self.group.clone(), started, changes, buffers })
    }

    /// Gives the rows that lookups have changed in place since the last reduction to all ranks, as each reduction does. Call it
    /// before a checkpoint whose last lookups were those of an evaluation. Every rank calls it.
    ///
    /// # Errors
    /// If the communication fails.
    #[track_caller]
    pub fn share_changed_rows(&self) -> Result<()> {
        let tables = self.tables.iter().chain(self.buckets.iter().flatten().map(|(_, var)| var));
        let tables: Vec<_> = tables.filter_map(|var| Some((var, &**self.changes.get(&var.id())?))).collect();
        match tables.is_empty() || self.group.size() == 1 {
            true => Ok(()),
            false => share(&tables, &self.group),
        }
    }

    /// Replaces the gradient that a table keeps by rows by the sum of those of all ranks, each multiplied by `scale`.
    #[track_caller]
    fn sum_rows(&self, table: &Var, scale: f64) -> Result<()> {
        let Some(gradient) = rows::of(table.id()).filter(|_| self.group.size() > 1) else { return Ok(()) };
        let none = || {
            Ok::<_, Error>((Vec::new(), Tensor::zeros((0, table.dim(1)?), table.dtype(), table.device())?))
        };
        let (mine, values) = gradient.rows()?.filter(|_| scale > 0.0).map_or_else(none, Ok)?;
        let values = empty::compute(&values, |values| values.affine(scale, 0.0))?;
        // One gather tells of both, so that tables without changes in place cost nothing.
        let changes = self.changes.get(&table.id());
        let changed = changes.map(|changes| changes.take()).unwrap_or_default();
        let counts = Tensor::new(&[[mine.len() as i64, changed.len() as i64]], &Device::Cpu)?;
        let counts = self.group.all_gather(&counts, 0)?.to_vec2::<i64>()?;
        let counts_at = |at: usize| counts.iter().map(|of_rank| of_rank[at] as usize).collect::<Vec<_>>();
        if let Some(changes) = changes {
            exchange(table, changes, changed, &counts_at(1), &self.group)?;
        }
        let counts = counts_at(0);
        if counts.iter().all(|&count| count == 0) {
            return Ok(());
        }
        let mine = Tensor::from_vec(mine, counts[self.group.rank()], &Device::Cpu)?;
        let all = self.group.call(Collective::all_gather(Cut::new(0, &counts))).run(&mine)?.to_vec1()?;
        Ok(gradient
            .replace(all, self.group.call(Collective::all_gather(Cut::new(0, &counts))).run(&values)?)?)
    }

    #[track_caller]
    fn add_up(&self, grads: &mut GradStore, scale: f64, op: ReduceOp) -> Result<()> {
        let mut reduced = Vec::with_capacity(self.buckets.len());
        for bucket in &self.buckets {
            if let Some(flat) = self.flatten(bucket, grads, scale)? {
                reduced.push((bucket, self.group.all_reduce(&flat, op)?));
            }
        }
        spread(&self.group, &reduced, &self.changes, grads)?;
        let scale = if op == ReduceOp::Avg { 1.0 / self.group.size() as f64 } else { scale };
        self.tables.iter().try_for_each(|table| self.sum_rows(table, scale))?;
        sync_buffers(&self.group, &self.buffers)
    }

    /// Concatenates the scaled gradients of a bucket, a flag per gradient, and one for changes in place. `None` if this rank is
    /// alone.
    fn flatten(&self, bucket: &[(String, Var)], grads: &mut GradStore, scale: f64) -> Result<Option<Tensor>> {
        let alone = self.group.size() == 1;
        let (dtype, device) = (self.dtype_of(&bucket[0].1), bucket[0].1.device());
        let mut flat = Vec::with_capacity(bucket.len() + 1);
        let mut present = Vec::with_capacity(bucket.len());
        for (name, var) in bucket {
            let grad = grads.remove(var).filter(|_| scale > 0.0);
            present.push(f32::from(u8::from(grad.is_some())));
            let Some(grad) = grad else {
                flat.push(Tensor::zeros(var.elem_count(), dtype, var.device())?);
                continue;
            };
            self.check(name, var, &grad)?;
            let grad = grad.detach();
            let converted = || empty::compute(&grad, |grad| grad.to_dtype(dtype));
            if alone {
                grads.insert(var, given(&converted()?, var)?);
                continue;
            }
            flat.push(match scale {
                1.0 => grad,
                _ => empty::compute(&converted()?, |grad| grad.affine(scale, 0.0))?,
            });
        }
        if alone {
            return Ok(None);
        }
        let has_changed =
            |(_, var): &(String, Var)| self.changes.get(&var.id()).is_some_and(|rows| !rows.is_empty());
        present.push(f32::from(u8::from(bucket.iter().any(has_changed))));
        flat.push(Tensor::new(&present[..], device)?.to_dtype(dtype)?);
        joined(&flat, dtype).map(Some)
    }

    /// Returns the dtype in which gradients of a variable are reduced.
    fn dtype_of(&self, var: &Var) -> DType {
        self.reduce_dtype.unwrap_or_else(|| sum_dtype(var.dtype()))
    }

    fn check(&self, name: &str, var: &Var, grad: &Tensor) -> Result<()> {
        if grad.dims() == var.dims()
            && [var.dtype(), sum_dtype(var.dtype()), self.dtype_of(var)].contains(&grad.dtype())
        {
            return Ok(());
        }
        let show = |t: &Tensor| format!("{}{:?}", t.dtype().as_str(), t.dims());
        let reason = format!("{name:?} is {} and its gradient {}", show(var), show(grad));
        Err(Error::InvalidArgument { rank: self.group.ranks()[self.group.rank()], op: "reduce", reason })
    }
}

/// Gradients that are being averaged.
#[must_use = "`wait` returns the gradients"]
#[derive(Debug)]
pub struct PendingGrads {
    group: ProcessGroup,
    started: Vec<(Vec<(String, Var)>, Pending)>,
    changes: Arc<HashMap<TensorId, Arc<RowChanges>>>,
    buffers: Vec<(String, Var)>,
}

impl PendingGrads {
    /// Puts the averages into `grads`.
    ///
    /// # Errors
    /// If the communication fails.
    pub fn wait(self, grads: &mut GradStore) -> Result<()> {
        let reduced = self.started.into_iter().map(|(bucket, pending)| Ok((bucket, pending.wait()?)));
        spread(&self.group, &reduced.collect::<Result<Vec<_>>>()?, &self.changes, grads)?;
        sync_buffers(&self.group, &self.buffers)
    }
}

fn sync_buffers(group: &ProcessGroup, buffers: &[(String, Var)]) -> Result<()> {
    match buffers {
        [] => Ok(()),
        buffers => sync_params(group, buffers, &SyncOptions::default()),
    }
}

/// Converts a reduced gradient for the store. That of a 16-bit variable keeps its dtype, which may be wider.
fn given(grad: &Tensor, var: &Var) -> Result<Tensor> {
    match sum_dtype(var.dtype()) == var.dtype() {
        true => Ok(empty::compute(grad, |grad| grad.to_dtype(var.dtype()))?),
        false => Ok(grad.clone()),
    }
}

/// Puts the gradients of reduced buckets that some rank had into `grads`.
///
/// The host reads the flags of all buckets together, so it waits for a device once in a reduction.
fn spread<B: AsRef<[(String, Var)]>>(
    group: &ProcessGroup,
    reduced: &[(B, Tensor)],
    changes: &HashMap<TensorId, Arc<RowChanges>>,
    grads: &mut GradStore,
) -> Result<()> {
    let mut flags = Vec::with_capacity(reduced.len());
    for (bucket, flat) in reduced {
        let bucket = bucket.as_ref();
        flags.push(flat.narrow(0, elem_count(bucket), bucket.len() + 1)?.to_dtype(DType::F32)?);
    }
    let mut present = read_results::<f32>(group, &flags)?.into_iter();
    for (bucket, flat) in reduced {
        let mut start = 0;
        let bucket = bucket.as_ref();
        for ((_, var), present) in bucket.iter().zip(&mut present) {
            if present > 0.0 {
                grads.insert(
                    var,
                    given(&flat.narrow(0, start, var.elem_count())?.reshape(var.shape())?, var)?,
                );
            }
            start += var.elem_count();
        }
        if present.next().is_some_and(|has_changed| has_changed > 0.0) {
            let tables = bucket.iter().filter_map(|(_, var)| Some((var, &**changes.get(&var.id())?)));
            share(&tables.collect::<Vec<_>>(), group)?;
        }
    }
    Ok(())
}

/// Returns whether lookups may change rows of a variable in place.
fn is_table(var: &Var) -> bool {
    var.rank() == 2
}

/// Returns the number of elements of the variables of a bucket.
fn elem_count(bucket: &[(String, Var)]) -> usize {
    bucket.iter().map(|(_, var)| var.elem_count()).sum()
}
