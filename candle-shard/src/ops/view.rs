//! Ops that only rename or rearrange dims: shards and partial sums move along.
use crate::placement::{Placement, Placements, Replicate, Shard};
use crate::redistribute::{Target, Targets};
use crate::rules::{self, Lay, Plan, Row, Rows, Signature};
use crate::spec::{Sizes, Spec, chunk_sizes};
use crate::{DTensor, Error, Result};
use candle_core::shape::{Dim, Dims as DimList};
use candle_core::{Shape, Tensor};
use candle_dist::backend::Dims;
use smallvec::smallvec;
use std::ops::Range;

const SUM: Placement = Placement::PARTIAL_SUM;

impl DTensor {
    /// The dims in another order: dim `i` of the result is dim `dims[i]`.
    pub fn permute(&self, dims: impl DimList) -> Result<Self> {
        let dims = dims.to_indexes(&Shape::from(self.dims()), "permute")?;
        if dims.len() != self.rank() {
            return Error::op("permute", format!("dims {dims:?} for {}: name each dim once", self.spec()));
        }
        let signature = || {
            let shape: Dims = dims.iter().map(|&d| self.dims()[d]).collect();
            (dims.iter().enumerate().map(|(to, &from)| Row::new(Shard(to), &[Shard(from)])).collect(), shape)
        };
        self.linear_view("permute", &dims, signature, |x| x.permute(&dims[..]))
    }

    /// Two dims swapped.
    pub fn transpose(&self, a: impl Dim, b: impl Dim) -> Result<Self> {
        let shape = Shape::from(self.dims());
        let (a, b) = (a.to_index(&shape, "transpose")?, b.to_index(&shape, "transpose")?);
        let mut dims: Vec<usize> = (0..self.rank()).collect();
        dims.swap(a, b);
        self.permute(dims)
    }

    /// The last two dims swapped.
    pub fn t(&self) -> Result<Self> {
        if self.rank() < 2 {
            return Error::op("t", format!("{} has fewer than 2 dims", self.spec()));
        }
        self.transpose(self.rank() - 2, self.rank() - 1)
    }

    /// The part `start..start + len` of a dim, which must not be sharded or is gathered.
    pub fn narrow(&self, dim: impl Dim, start: usize, len: usize) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "narrow")?;
        let end = start.saturating_add(len);
        if end > self.dims()[dim] {
            return Error::op("narrow", format!("{start}..{end} is outside of dim {dim} of {}", self.spec()));
        }
        let signature = || {
            let mut shape = Dims::from_slice(self.dims());
            shape[dim] = len;
            ((0..self.rank()).filter(|&d| d != dim).map(|d| Row::new(Shard(d), &[Shard(d)])).collect(), shape)
        };
        self.linear_view("narrow", &[dim, start, len], signature, |x| x.narrow(dim, start, len))
    }

    /// The elements in row-major order in another shape of the same size.
    ///
    /// Dims that split or merge keep their shard where the pieces end on whole rows of the new shape; otherwise the
    /// pieces are resized, or gathered where no sizes fit.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let mut made = rules::run_planned(
            "reshape",
            shape.dims(),
            &[self],
            || self.reshape_plan(shape.dims()),
            |x, out| Ok(smallvec![x[0].to_local().reshape(out[0].local_shape().as_slice())?]),
        )?;
        Ok(made.remove(0).aliasing(self))
    }

    fn reshape_plan(&self, to: &[usize]) -> Result<Plan> {
        let from = self.dims();
        if self.elem_count() != to.iter().product::<usize>() {
            return Error::op("reshape", format!("{from:?} and {to:?} do not have the same number of elements"));
        }
        let plan = ReshapePlan::new(self.spec(), to);
        let mut spec = Spec::new(self.mesh(), &plan.out, to, self.dtype())?;
        for (axis, sizes) in plan.out_sizes.into_iter().enumerate() {
            spec = spec.with_sizes(axis, sizes)?;
        }
        let ready = self.lies_as(&plan.targets, 0);
        Ok(Plan {
            inputs: smallvec![Lay { targets: plan.targets, ready }],
            vary: 0,
            outs: smallvec![spec.shared()],
            varying: self.varying(),
            nothing: false,
        })
    }

    fn linear_view(
        &self,
        op: &'static str,
        attributes: &[usize],
        rows_and_shape: impl FnOnce() -> (Rows, Dims),
        local: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let signature = || {
            let (mut rows, shape) = rows_and_shape();
            rows.push(Row::new(SUM, &[SUM]));
            Ok(Signature::new(rows, &shape, self.dtype()))
        };
        let view = rules::run(op, attributes, &[self], signature, |x, _| Ok(local(x[0].to_local())?))?;
        Ok(view.aliasing(self))
    }
}

/// What each axis must become before a local reshape, and what it is afterwards.
struct ReshapePlan {
    targets: Targets,
    out: Placements,
    out_sizes: Vec<Option<Sizes>>,
}

impl ReshapePlan {
    fn new(spec: &Spec, to: &[usize]) -> Self {
        let n = spec.placements().len();
        let keep = |axis: usize| Target { placement: spec.placements()[axis], sizes: spec.sizes(axis).cloned() };
        let mut plan = Self {
            targets: (0..n).map(keep).collect(),
            out: Placements::from_slice(spec.placements()),
            out_sizes: vec![None; n],
        };
        for dim in 0..spec.dims().len() {
            let axes: Vec<usize> = (0..n).filter(|&axis| spec.placements()[axis] == Shard(dim)).collect();
            // Several axes on a dim stay only if all pieces are equal; the outermost may stay by itself.
            let ways = [&axes[..], axes.get(..1).unwrap_or_default()];
            let carried = ways
                .iter()
                .filter(|way| !way.is_empty())
                .find_map(|way| carry(spec, to, dim, way).map(|carried| (way.len(), carried)));
            let kept = carried.as_ref().map_or(0, |(kept, _)| *kept);
            for &axis in &axes[kept..] {
                plan.targets[axis] = Replicate.into();
                plan.out[axis] = Replicate;
            }
            if let Some((_, (out_dim, in_sizes, out_sizes))) = carried {
                for &axis in &axes[..kept] {
                    plan.out[axis] = Shard(out_dim);
                }
                plan.targets[axes[0]].sizes = in_sizes;
                plan.out_sizes[axes[0]] = out_sizes;
            }
        }
        plan
    }
}

/// Where the shard of `dim` on `axes` goes: the new dim, the sizes it needs before, and those it has afterwards.
fn carry(spec: &Spec, to: &[usize], dim: usize, axes: &[usize]) -> Option<(usize, Option<Sizes>, Option<Sizes>)> {
    let from = spec.dims();
    let (ins, outs) = group_of(from, to, dim)?;
    if from[ins.start..dim].iter().any(|&size| size != 1) {
        return None; // an outer dim of the group varies slower than the shard
    }
    let out_dim = outs.clone().find(|&d| to[d] != 1).or_else(|| outs.clone().next())?;
    let total: usize = from[ins].iter().product();
    let (in_row, out_row) = (total / from[dim], total / to[out_dim]);
    let parts: usize = axes.iter().map(|&axis| spec.mesh().shape()[axis]).product();
    if let [axis] = *axes {
        let sizes = spec.sizes(axis).map_or_else(|| chunk_sizes(from[dim], parts).to_vec(), |sizes| sizes.to_vec());
        if sizes.iter().all(|s| s * in_row % out_row == 0) {
            let after = sizes.iter().map(|s| s * in_row / out_row).collect();
            return Some((out_dim, spec.sizes(axis).cloned(), Some(after)));
        }
        let after = chunk_sizes(to[out_dim], parts);
        let fits = after.iter().all(|s| s * out_row % in_row == 0);
        return fits.then(|| {
            let before: Sizes = after.iter().map(|s| s * out_row / in_row).collect();
            let before = (before[..] != chunk_sizes(from[dim], parts)[..]).then_some(before);
            (out_dim, before, None)
        });
    }
    let default = axes.iter().all(|&axis| spec.sizes(axis).is_none());
    let even = from[dim].is_multiple_of(parts) && (from[dim] / parts * in_row).is_multiple_of(out_row);
    (default && even).then_some((out_dim, None, None))
}

/// The smallest ranges of old and new dims around old dim `dim` that hold the same elements.
fn group_of(from: &[usize], to: &[usize], dim: usize) -> Option<(Range<usize>, Range<usize>)> {
    if from.contains(&0) {
        return None;
    }
    let (mut i, mut j) = (0, 0);
    while i < from.len() {
        let (i0, j0) = (i, j);
        let (mut a, mut b) = (from[i], 1);
        i += 1;
        if a != 1 {
            while a != b {
                if a > b {
                    b *= to.get(j)?;
                    j += 1;
                } else {
                    a *= from.get(i)?;
                    i += 1;
                }
            }
        } else if to.get(j) == Some(&1) {
            j += 1;
        }
        if (i0..i).contains(&dim) {
            return Some((i0..i, j0..j));
        }
    }
    None
}
