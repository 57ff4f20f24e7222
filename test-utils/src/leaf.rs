//! Leaves in any layout, and the errors of their values and gradients compared with one device.
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{DeviceMesh, RankContext, ReduceOp};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{DTensor, Partial, Placement, Replicate, Result, Shard, Spec};
use itertools::Itertools;
use std::fmt;

/// The layout of a leaf on one axis: a placement, or replicated with a gradient that stays a partial sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lay {
    /// This placement.
    At(Placement),
    /// Replicated, with a gradient that is a partial sum on each rank.
    Varying,
    /// Partial sums that are computed from a varying leaf.
    VaryingPartial,
}

impl Lay {
    /// Returns the placement of the leaf itself, which is never partial.
    fn of_leaf(self) -> Placement {
        match self {
            Self::At(Partial(_)) | Self::Varying | Self::VaryingPartial => Replicate,
            Self::At(placement) => placement,
        }
    }

    /// Returns the placement of the tensor that is computed from the leaf.
    pub fn placement(self) -> Placement {
        match self {
            Self::At(placement) => placement,
            Self::Varying => Replicate,
            Self::VaryingPartial => Placement::PARTIAL_SUM,
        }
    }

    fn varies(self) -> bool {
        matches!(self, Self::Varying | Self::VaryingPartial)
    }
}

impl fmt::Display for Lay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(placement) => write!(f, "{placement}"),
            Self::Varying => f.write_str("V"),
            Self::VaryingPartial => f.write_str("VP"),
        }
    }
}

/// Returns all layouts of a float tensor with `rank` dims on one axis, except [`Lay::VaryingPartial`].
pub fn lays(rank: usize) -> Vec<Lay> {
    let fixed = [Lay::At(Replicate), Lay::Varying, Lay::At(Placement::PARTIAL_SUM)];
    (0..rank).map(|d| Lay::At(Shard(d))).chain(fixed).collect()
}

/// Returns all lists with one of `choices` per axis.
pub fn on_axes<T: Clone>(choices: &[T], axes: usize) -> Vec<Vec<T>> {
    (0..axes).map(|_| choices.iter().cloned()).multi_cartesian_product().collect()
}

/// Creates a mesh with axes `a`, `b`, `c` and so on of these sizes; up to six sizes.
///
/// # Errors
/// If the sizes do not fit the world.
pub fn mesh(ctx: &RankContext, shape: &[usize]) -> candle_dist::Result<DeviceMesh> {
    let axes: Vec<(&str, usize)> =
        ["a", "b", "c", "d", "e", "f"].into_iter().zip(shape.iter().copied()).collect();
    ctx.mesh(&axes)
}

/// Returns numbers in ±1.5 that depend only on the seed and the position.
///
/// # Panics
/// If `dtype` is not a float type that candle can sample.
pub fn values(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    let even = Distribution::Uniform { lo: -1.5, up: 1.5 };
    sample_full(Stream::new(seed, "values"), even, shape, dtype, &Device::Cpu)
        .unwrap_or_else(|e| panic!("{e}"))
}

/// Returns the device of this rank in a mesh.
///
/// # Panics
/// If the mesh has no axes.
pub fn device_of(mesh: &DeviceMesh) -> Device {
    mesh.axis_group(0).unwrap_or_else(|e| panic!("{e}")).device().clone()
}

/// Distributes a whole tensor over a mesh, on this rank's device. It is cut before it is moved.
///
/// # Errors
/// If the placements do not fit the tensor.
pub fn distribute(whole: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<DTensor> {
    on_device(&DTensor::distribute(whole, mesh, placements)?)
}

/// Returns a leaf with the same shards on this rank's device.
///
/// # Errors
/// If the device has no memory for it.
pub fn on_device(x: &DTensor) -> Result<DTensor> {
    let device = device_of(x.mesh());
    if x.device().same_device(&device) {
        return Ok(x.clone());
    }
    DTensor::from_local_with_spec(x.to_local().to_device(&device)?, x.spec().clone())
}

/// A distributed tensor computed from a variable whose layout has no partial sums.
#[derive(Debug)]
pub struct Leaf {
    /// The tensor, in the requested layout.
    pub tensor: DTensor,
    /// This rank's variable.
    pub var: Var,
    spec: Spec,
    lays: Vec<Lay>,
}

impl Leaf {
    /// Creates a leaf with the values of `whole`, in the default sizes.
    ///
    /// # Errors
    /// If the layout does not fit the tensor or the mesh.
    pub fn new(whole: &Tensor, mesh: &DeviceMesh, lays: &[Lay]) -> Result<Self> {
        let at: Vec<_> = lays.iter().map(|lay| lay.of_leaf()).collect();
        Self::with_spec(whole, Spec::new(mesh, &at, whole.shape(), whole.dtype())?, lays)
    }

    /// Creates a leaf in a given layout, for example with explicit sizes, on this rank's device.
    ///
    /// # Errors
    /// If the layout does not fit the tensor.
    pub fn with_spec(whole: &Tensor, spec: Spec, lays: &[Lay]) -> Result<Self> {
        let local = block(whole, &spec)?.force_contiguous()?.to_device(&device_of(spec.mesh()))?;
        let (mut tensor, var) = DTensor::from_local_with_spec(local, spec.clone())?.to_var()?;
        for axis in (0..lays.len()).filter(|&axis| lays[axis].varies()) {
            tensor = tensor.varying_on(axis)?;
        }
        if lays.iter().any(|lay| lay.placement().is_partial()) {
            tensor = tensor.redistribute(&lays.iter().map(|lay| lay.placement()).collect_vec())?;
        }
        Ok(Self { tensor, var, spec, lays: lays.to_vec() })
    }

    /// Returns the error of this rank's gradient compared with `whole`. A missing gradient counts as zero.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// If the communication fails.
    pub fn gradient_error(&self, grads: &GradStore, whole: &Tensor) -> Result<f64> {
        let mut local =
            grads.get(&self.var).map_or_else(|| self.var.zeros_like(), |grad| Ok(grad.clone()))?;
        for axis in (0..self.lays.len()).filter(|&axis| self.lays[axis].varies()) {
            local = self.spec.mesh().axis_group(axis)?.all_reduce(&local, ReduceOp::Sum)?;
        }
        Ok(distance(&local, &block(whole, &self.spec)?))
    }
}

/// Returns the same tensor in other memory: every second element of a transposed one.
///
/// # Errors
/// If candle fails.
pub fn strided(x: &DTensor) -> Result<DTensor> {
    let local = x.to_local();
    let (rank, last) = (local.rank(), local.rank().saturating_sub(1));
    let swap = |x: &Tensor| if rank > 1 { x.transpose(0, last) } else { Ok(x.clone()) };
    let view = if local.elem_count() == 0 {
        local.unsqueeze(0)?.squeeze(0)? // an empty tensor has no memory
    } else {
        let turned = swap(local)?;
        swap(&Tensor::stack(&[&turned.detach(), &turned], rank)?.narrow(rank, 1, 1)?.squeeze(rank)?)?
    };
    let view = DTensor::from_local_with_spec(view, x.spec().clone())?;
    (0..x.mesh().ndim()).filter(|&axis| x.is_varying(axis)).try_fold(view, |view, axis| view.varying_on(axis))
}

/// Returns this rank's shard of a whole tensor in a layout without partial sums.
///
/// # Errors
/// If the layout has another shape.
pub fn block(whole: &Tensor, spec: &Spec) -> candle_core::Result<Tensor> {
    let ranges = spec.local_block();
    ranges
        .iter()
        .enumerate()
        .try_fold(whole.clone(), |part, (dim, range)| part.narrow(dim, range.start, range.len()))
}

/// Returns the error of this rank's shard compared with the whole tensor. Partial results are reduced first.
///
/// Every rank must call it.
///
/// # Errors
/// If the communication fails.
pub fn value_error(tensor: &DTensor, whole: &Tensor) -> Result<f64> {
    let resolved = tensor.placements().iter().map(|p| if p.is_partial() { Replicate } else { *p });
    if tensor.dims() != whole.dims() {
        return Ok(f64::INFINITY);
    }
    let tensor = if tensor.placements().iter().any(|p| p.is_partial()) {
        tensor.redistribute(&resolved.collect_vec())?
    } else {
        tensor.clone()
    };
    Ok(distance(tensor.to_local(), &block(whole, tensor.spec())?))
}

/// Returns the largest difference of two tensors, relative to 1 and to the second; infinite if the shapes differ.
///
/// # Panics
/// If candle cannot convert the dtype to `f64`.
pub fn distance(got: &Tensor, want: &Tensor) -> f64 {
    if got.dims() != want.dims() || got.dtype() != want.dtype() {
        return f64::INFINITY;
    }
    if got.elem_count() == 0 {
        return 0.0;
    }
    let list =
        |t: &Tensor| -> candle_core::Result<Vec<f64>> { t.to_dtype(DType::F64)?.flatten_all()?.to_vec1() };
    let list = |t: &Tensor| list(t).unwrap_or_else(|e| panic!("{e}"));
    let error = |(a, b): (f64, f64)| {
        let error = (a - b).abs() / b.abs().max(1.0);
        if error.is_nan() && !(a.is_nan() && b.is_nan()) { f64::INFINITY } else { error }
    };
    list(got).into_iter().zip(list(want)).map(error).fold(0.0, f64::max)
}

/// Returns the difference that rounding may cause in a dtype.
pub fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F64 { 1e-11 } else { 1e-5 }
}
