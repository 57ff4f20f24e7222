//! Reshape. Shards of dims that split or merge stay in place where rows allow it.
use crate::layout::{Replicate, Shard, Sizes, Spec, chunk_sizes};
use crate::redistribute::Targets;
use crate::rules::{self, OpSpec};
use crate::{DTensor, Error, Result, kernels};
use candle_core::shape::ShapeWithOneHole;
use candle_dist::backend::Dims;
use smallvec::smallvec;
use std::ops::Range;

impl DTensor {
    /// Reshapes the elements, in row-major order, to another shape of the same size. One dim may be `()`, which is
    /// inferred.
    ///
    /// Dims that split or merge keep their shard where shards end on whole rows of the new shape. Otherwise the shards
    /// are resized, or gathered if no sizes fit.
    #[track_caller]
    pub fn reshape(&self, shape: impl ShapeWithOneHole) -> Result<Self> {
        let shape = match shape.into_shape(self.elem_count()) {
            Ok(shape) if shape.elem_count() == self.elem_count() => shape,
            Ok(shape) => {
                return self.no_reshape(format!("{:?} has another number of elements", shape.dims()));
            }
            Err(error) => return self.no_reshape(error.to_string()),
        };
        let mut made = rules::run_with(
            "reshape",
            shape.dims(),
            &[self],
            &|| {
                let ReshapeLayouts { targets, out } = ReshapeLayouts::new(self, shape.dims());
                OpSpec::laid(&[self], [targets], &out, &[(Dims::from_slice(shape.dims()), self.dtype())])
            },
            &|x, out| Ok(smallvec![kernels::reshape(x[0].to_local(), out[0].local_shape().as_slice())?]),
        )?;
        Ok(made.remove(0).aliasing(self))
    }

    #[track_caller]
    fn no_reshape(&self, reason: String) -> Result<Self> {
        Error::op(
            "reshape",
            format!("{}: {reason}; give a shape of {} elements", self.spec(), self.elem_count()),
        )
    }
}

/// The target of each axis before the local reshape, and its placement after it.
struct ReshapeLayouts {
    targets: Targets,
    out: Targets,
}

impl ReshapeLayouts {
    fn new(x: &DTensor, to: &[usize]) -> Self {
        let spec = x.spec();
        let mut layouts =
            Self { targets: x.targets(), out: spec.placements().iter().map(|&p| p.into()).collect() };
        for dim in 0..spec.dims().len() {
            let axes: Vec<usize> = x.sharded_axes(dim).collect();
            // Several axes stay on a dim that is unchanged or cut evenly; otherwise only the outermost may stay.
            let ways = [&axes[..], axes.get(..1).unwrap_or_default()];
            let carried = ways
                .iter()
                .filter(|way| !way.is_empty())
                .find_map(|way| carry(spec, to, dim, way).map(|carried| (way.len(), carried)));
            let kept = carried.as_ref().map_or(0, |(kept, _)| *kept);
            for &axis in &axes[kept..] {
                layouts.targets[axis] = Replicate.into();
                layouts.out[axis] = Replicate.into();
            }
            if let Some((_, (out_dim, in_sizes, out_sizes))) = carried {
                for &axis in &axes[..kept] {
                    layouts.out[axis] = Shard(out_dim).into();
                }
                layouts.targets[axes[0]].sizes = in_sizes;
                layouts.out[axes[0]].sizes = out_sizes;
            }
        }
        layouts
    }
}

/// Returns where the shard of `dim` on `axes` goes: the new dim, the sizes needed before, and the sizes after.
fn carry(
    spec: &Spec,
    to: &[usize],
    dim: usize,
    axes: &[usize],
) -> Option<(usize, Option<Sizes>, Option<Sizes>)> {
    let from = spec.dims();
    let (ins, outs) = group_of(from, to, dim)?;
    if from[ins.start..dim].iter().any(|&size| size != 1) {
        return None; // the group has a dim outside of the sharded one
    }
    let is_cut = |d: usize| d != dim && spec.placements().contains(&Shard(d));
    if from[dim] == 1 && ins.clone().any(is_cut) {
        return None; // two cuts of one dim would depend on the order of their axes
    }
    let out_dim = outs.clone().find(|&d| to[d] != 1).or_else(|| outs.clone().next())?;
    let total: usize = from[ins].iter().product();
    let (in_row, out_row) = (total / from[dim], total / to[out_dim]);
    let parts: usize = axes.iter().map(|&axis| spec.mesh().shape()[axis]).product();
    if let [axis] = *axes {
        let sizes =
            spec.sizes(axis).map_or_else(|| chunk_sizes(from[dim], parts).to_vec(), |sizes| sizes.to_vec());
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
    if in_row == out_row {
        let sizes = spec.sizes(axes[0]);
        return Some((out_dim, sizes.cloned(), sizes.cloned()));
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
    // Where the group of `dim` begins, if that has no new dims yet.
    let mut begun = None;
    while i < from.len() {
        let (i0, j0) = (begun.unwrap_or(i), j);
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
            if j > j0 {
                return Some((i0..i, j0..j));
            }
            // A dim of size 1 that vanishes goes with the next one: the rank that has it has all of that.
            begun = Some(i0);
        }
    }
    None
}
