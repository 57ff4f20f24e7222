//! Leaves in any layout, and what one device says about their values and gradients.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses its part; a panic is how a test fails
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{DeviceMesh, RankContext, ReduceOp};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{DTensor, Partial, Placement, Replicate, Result, Shard, Spec};
use itertools::Itertools;
use std::fmt;

pub(crate) const SUM: Placement = Placement::PARTIAL_SUM;

/// How a leaf lies on one axis: a placement, or replicated with a gradient that stays a partial sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lay {
    At(Placement),
    Varying,
    /// Partial sums made of a varying leaf.
    VaryingPartial,
}

impl Lay {
    /// The placement of the leaf itself, which is never partial.
    fn of_leaf(self) -> Placement {
        match self {
            Self::At(Partial(_)) | Self::Varying | Self::VaryingPartial => Replicate,
            Self::At(placement) => placement,
        }
    }

    /// The placement of the tensor that is made of the leaf.
    pub(crate) fn placement(self) -> Placement {
        match self {
            Self::At(placement) => placement,
            Self::Varying => Replicate,
            Self::VaryingPartial => SUM,
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

/// Every way in which a float tensor with `rank` dims can lie on one axis.
pub(crate) fn lays(rank: usize) -> Vec<Lay> {
    let fixed = [Lay::At(Replicate), Lay::Varying, Lay::At(SUM)];
    (0..rank).map(|d| Lay::At(Shard(d))).chain(fixed).collect()
}

/// All lists of one choice for each of `axes` axes.
pub(crate) fn on_axes<T: Clone>(choices: &[T], axes: usize) -> Vec<Vec<T>> {
    (0..axes).map(|_| choices.iter().cloned()).multi_cartesian_product().collect()
}

/// Shapes that divide by few ranks, by none, that leave ranks without elements, and that have none.
pub(crate) const SHAPES: [[usize; 2]; 5] = [[4, 6], [5, 3], [1, 7], [2, 1], [0, 3]];

/// A mesh with axes `a`, `b`, .. of these sizes.
pub(crate) fn mesh(ctx: &RankContext, shape: &[usize]) -> candle_dist::Result<DeviceMesh> {
    let axes: Vec<(&str, usize)> = ["a", "b", "c"].into_iter().zip(shape.iter().copied()).collect();
    ctx.mesh(&axes)
}

/// Numbers in ±1.5 that depend on the seed and the place only.
pub(crate) fn values(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    let even = Distribution::Uniform { lo: -1.5, up: 1.5 };
    sample_full(Stream::new(seed, "values"), even, shape, dtype, &Device::Cpu).unwrap()
}

/// A distributed tensor made of a variable whose layout has no partial sums.
pub(crate) struct Leaf {
    pub(crate) tensor: DTensor,
    pub(crate) var: Var,
    spec: Spec,
    lays: Vec<Lay>,
}

impl Leaf {
    pub(crate) fn new(whole: &Tensor, mesh: &DeviceMesh, lays: &[Lay]) -> Result<Self> {
        let at: Vec<_> = lays.iter().map(|lay| lay.of_leaf()).collect();
        Self::with_spec(whole, Spec::new(mesh, &at, whole.shape(), whole.dtype())?, lays)
    }

    /// A leaf in a layout of its own, with explicit sizes for example.
    pub(crate) fn with_spec(whole: &Tensor, spec: Spec, lays: &[Lay]) -> Result<Self> {
        let local = block(whole, &spec)?.force_contiguous()?;
        let (mut tensor, var) = DTensor::from_local_with_spec(local, spec.clone())?.to_var()?;
        for axis in (0..lays.len()).filter(|&axis| lays[axis].varies()) {
            tensor = tensor.varying_on(axis)?;
        }
        if lays.iter().any(|lay| lay.placement().is_partial()) {
            tensor = tensor.redistribute(&lays.iter().map(|lay| lay.placement()).collect_vec())?;
        }
        Ok(Self { tensor, var, spec, lays: lays.to_vec() })
    }

    /// How far this rank's gradient is from its part of the whole one; a missing gradient counts as zero.
    pub(crate) fn gradient_error(&self, grads: &GradStore, whole: &Tensor) -> Result<f64> {
        let mut local = grads.get(&self.var).map_or_else(|| self.var.zeros_like(), |grad| Ok(grad.clone()))?;
        for axis in (0..self.lays.len()).filter(|&axis| self.lays[axis].varies()) {
            local = self.spec.mesh().axis_group(axis)?.all_reduce(&local, ReduceOp::Sum)?;
        }
        Ok(distance(&local, &block(whole, &self.spec)?))
    }
}

/// This rank's part of a whole tensor in a layout without partial sums.
pub(crate) fn block(whole: &Tensor, spec: &Spec) -> candle_core::Result<Tensor> {
    let ranges = spec.local_block();
    ranges.iter().enumerate().try_fold(whole.clone(), |part, (dim, range)| part.narrow(dim, range.start, range.len()))
}

/// How far this rank's shard is from its part of the whole tensor; partial sums are added up first.
pub(crate) fn value_error(tensor: &DTensor, whole: &Tensor) -> Result<f64> {
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

/// The largest difference of two tensors relative to 1 and to the size of the second; infinite if shapes differ.
pub(crate) fn distance(got: &Tensor, want: &Tensor) -> f64 {
    if got.dims() != want.dims() || got.dtype() != want.dtype() {
        return f64::INFINITY;
    }
    if got.elem_count() == 0 {
        return 0.0;
    }
    let list = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let error = |(a, b): (f64, f64)| {
        let error = (a - b).abs() / b.abs().max(1.0);
        if error.is_nan() && !(a.is_nan() && b.is_nan()) { f64::INFINITY } else { error }
    };
    list(got).into_iter().zip(list(want)).map(error).fold(0.0, f64::max)
}

/// What rounding may change in a dtype.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F64 { 1e-11 } else { 1e-5 }
}
