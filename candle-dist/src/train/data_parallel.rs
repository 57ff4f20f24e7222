//! The gradients of one model trained on different data on every rank.
use super::sync::buckets;
use crate::{Error, Pending, ProcessGroup, ReduceOp, Result, SyncOptions};
use crate::{sum_dtype, sync_params, verify_parameter_shapes};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use itertools::Itertools;

/// How a [`DataParallel`] starts and how it cuts gradients into buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataParallelOptions {
    /// How many bytes of gradients go into one all_reduce, 25 MiB by default. A larger gradient goes by itself.
    pub bucket_bytes: usize,
    /// What is done to the parameters at the start.
    pub start: Start,
    /// What gradients are reduced in; `None` for f32 where parameters are 16-bit floats, and else for the parameters' dtype.
    ///
    /// Gradients of 16-bit parameters come out in it, others in their parameter's dtype. `Some(DType::BF16)` halves what
    /// bf16 parameters send, and gives gradients that candle-nn's optimizers take.
    pub reduce_dtype: Option<DType>,
}

/// How a [`DataParallel`] makes sure that all ranks hold the same parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// Shapes are compared and every rank takes the source's values, as [`sync_params`] does.
    Sync(SyncOptions),
    /// Shapes are compared by [`verify_parameter_shapes`]; values stay as they are.
    Verify,
    /// Nothing is communicated: the caller knows that the parameters are equal.
    Trust,
}

impl Default for DataParallelOptions {
    fn default() -> Self {
        Self { bucket_bytes: 25 << 20, start: Start::Sync(SyncOptions::default()), reduce_dtype: None }
    }
}

/// Averages the gradients of a list of variables over the ranks of a group.
///
/// Every rank holds the whole model (or, beside tensor parallelism, the same shard of it) and works on its own part of
/// the batch. With a loss that is a mean over the rank's samples, and as many samples on every rank, the average is
/// the gradient of the mean over the whole batch; [`reduce_weighted`](Self::reduce_weighted) serves uneven parts.
/// To accumulate over several backward passes, sum them in a [`GradAccumulator`](crate::GradAccumulator), which
/// communicates nothing, and reduce once.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_dist::{DataParallel, DataParallelOptions, Result, World};
///
/// let grads = World::local(2).run(|ctx| -> Result<f32> {
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
    reduce_dtype: Option<DType>,
}

impl DataParallel {
    /// The variables, which every rank names in one order, over the ranks of `group`, for example a mesh axis'.
    ///
    /// [`named_vars`](crate::named_vars) lists those of a `VarMap`. Best is the order in which the forward pass uses
    /// them: buckets are filled from the end of the list, as the backward pass makes gradients. Variables of whole
    /// numbers have no gradients and take part in the start alone; one that is named twice is reduced once.
    ///
    /// # Errors
    /// Those of [`sync_params`] or [`verify_parameter_shapes`], and if gradients are to be reduced in what is no float.
    #[track_caller]
    pub fn new<N: AsRef<str>>(
        group: &ProcessGroup,
        params: &[(N, Var)],
        options: &DataParallelOptions,
    ) -> Result<Self> {
        if let Some(dtype) = options.reduce_dtype.filter(|dtype| !dtype.is_float()) {
            let reason = format!("gradients reduced in {}: want a float such as f32", dtype.as_str());
            return Err(Error::Invalid { op: "DataParallel::new", reason });
        }
        match &options.start {
            Start::Sync(sync) => sync_params(group, params, sync)?,
            Start::Verify => {
                let tensors: Vec<_> = params.iter().map(|(name, var)| (name, var.as_tensor())).collect();
                verify_parameter_shapes(group, &tensors)?;
            }
            Start::Trust => {}
        }
        let differentiable = params.iter().filter(|(_, var)| var.dtype().is_float());
        let mut reduced: Vec<_> = differentiable.unique_by(|(_, var)| var.id()).collect();
        reduced.reverse();
        let owned = |(name, var): &(N, Var)| (name.as_ref().to_string(), var.clone());
        let dtype_of = |(_, var): &&(N, Var)| options.reduce_dtype.unwrap_or_else(|| sum_dtype(var.dtype()));
        let bytes = |param: &&(N, Var)| param.1.elem_count() * dtype_of(param).size_in_bytes();
        let cut = buckets(reduced, |(_, var)| var.dtype(), bytes, options.bucket_bytes);
        let buckets = cut.into_iter().map(|bucket| bucket.into_iter().map(owned).collect()).collect();
        Ok(Self { group: group.clone(), buckets, reduce_dtype: options.reduce_dtype })
    }

    /// The ranks over which gradients are averaged.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The number of buckets, which is the number of collectives of a [`reduce`](Self::reduce).
    pub fn bucket_count(&self) -> usize {
        self.buckets.len()
    }

    /// Replaces every gradient by its average over the ranks.
    ///
    /// A variable that took no part on this rank counts as zeros; one that took part on no rank keeps no gradient.
    /// That costs no collective of its own: a bucket ends in one number for each of its gradients that tells whether
    /// there was one. So a reduction is one all_reduce for each bucket, the same on every rank whatever took part.
    /// The results are views of the buckets and hold no graph.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a gradient is not of its variable's shape, or neither of its dtype nor of the one in
    /// which such gradients are [summed](sum_dtype).
    #[track_caller]
    pub fn reduce(&self, grads: &mut GradStore) -> Result<()> {
        self.add_up(grads, 1.0, ReduceOp::Avg)
    }

    /// Like [`reduce`](Self::reduce) with each rank counting as `weight`, for example its number of samples.
    ///
    /// Nothing comes from a rank of weight 0. One small all_gather more than [`reduce`](Self::reduce).
    ///
    /// # Errors
    /// On every rank alike if a weight is negative or not finite, or if all are 0.
    #[track_caller]
    pub fn reduce_weighted(&self, grads: &mut GradStore, weight: f64) -> Result<()> {
        let weights = self.group.all_gather(&Tensor::new(&[weight], &Device::Cpu)?, 0)?.to_vec1::<f64>()?;
        let total: f64 = weights.iter().sum();
        if !(total.is_finite() && total > 0.0 && weights.iter().all(|&w| w >= 0.0)) {
            let reason = format!("weights {weights:?}: want finite numbers from 0, not all of them 0");
            return Err(Error::Invalid { op: "reduce_weighted", reason });
        }
        // Shares of one and then a sum: no number on the way is larger than the gradients.
        self.add_up(grads, weight / total, ReduceOp::Sum)
    }

    /// Starts a [`reduce`](Self::reduce), whose gradients [`PendingGrads::wait`] brings.
    ///
    /// Other gradients may be computed meanwhile. They may not be of these variables: their gradients leave `grads`.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use candle_dist::{DataParallel, DataParallelOptions, Result, World};
    ///
    /// let grads = World::local(2).run(|ctx| -> Result<f32> {
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
    /// Those of [`reduce`](Self::reduce).
    #[track_caller]
    pub fn reduce_start(&self, grads: &mut GradStore) -> Result<PendingGrads> {
        let mut started = Vec::new();
        for bucket in &self.buckets {
            if let Some(flat) = self.flatten(bucket, grads, 1.0)? {
                started.push((bucket.clone(), self.group.all_reduce_start(&flat, ReduceOp::Avg)?));
            }
        }
        Ok(PendingGrads { started })
    }

    #[track_caller]
    fn add_up(&self, grads: &mut GradStore, scale: f64, op: ReduceOp) -> Result<()> {
        for bucket in &self.buckets {
            if let Some(flat) = self.flatten(bucket, grads, scale)? {
                spread(bucket, &self.group.all_reduce(&flat, op)?, grads)?;
            }
        }
        Ok(())
    }

    /// The gradients of a bucket, scaled, end to end, and behind them which there are; nothing if this rank is alone.
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
            let grad = grad.detach().to_dtype(dtype)?;
            if alone {
                grads.insert(var, given(&grad, var)?);
                continue;
            }
            let grad = grad.flatten_all()?;
            flat.push(if scale == 1.0 { grad } else { grad.affine(scale, 0.0)? });
        }
        if alone {
            return Ok(None);
        }
        flat.push(Tensor::new(&present[..], device)?.to_dtype(dtype)?);
        Ok(Some(Tensor::cat(&flat, 0)?))
    }

    /// What gradients of a variable are reduced in.
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

/// Gradients on their way to all ranks.
#[must_use = "the gradients come with `wait`"]
#[derive(Debug)]
pub struct PendingGrads {
    started: Vec<(Vec<(String, Var)>, Pending)>,
}

impl PendingGrads {
    /// Puts the averages into `grads`.
    ///
    /// # Errors
    /// Those of communication.
    pub fn wait(self, grads: &mut GradStore) -> Result<()> {
        self.started.into_iter().try_for_each(|(bucket, pending)| spread(&bucket, &pending.wait()?, grads))
    }
}

/// A reduced gradient as it is given: a 16-bit variable's as it is, which may be wider.
fn given(grad: &Tensor, var: &Var) -> Result<Tensor> {
    match sum_dtype(var.dtype()) == var.dtype() {
        true => Ok(grad.to_dtype(var.dtype())?),
        false => Ok(grad.clone()),
    }
}

/// Puts the parts of a bucket that some rank had into `grads`.
fn spread(bucket: &[(String, Var)], flat: &Tensor, grads: &mut GradStore) -> Result<()> {
    let ends: usize = bucket.iter().map(|(_, var)| var.elem_count()).sum();
    let present = flat.narrow(0, ends, bucket.len())?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    let mut start = 0;
    for ((_, var), present) in bucket.iter().zip(present) {
        if present > 0.0 {
            grads.insert(var, given(&flat.narrow(0, start, var.elem_count())?.reshape(var.shape())?, var)?);
        }
        start += var.elem_count();
    }
    Ok(())
}
