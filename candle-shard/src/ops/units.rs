//! Dims split into units, such as heads, and merged again. The shard of such a dim stays with the units.
//!
//! [`DTensor::reshape`] cannot know that: where one rank has all of a dim that becomes `[1, n]`, a shard of either dim is
//! right for it, but only one of them meets the other operands of attention.
use crate::layout::{Replicate, Shard, chunk_sizes};
use crate::redistribute::{Target, Targets};
use crate::rules::{self, OpSpec};
use crate::{DTensor, Error, Result, kernels};
use candle_dist::backend::Dims;
use smallvec::smallvec;

impl DTensor {
    /// Splits `dim` of `n · unit` elements to `[n, unit]`. Its shards become shards of the units; those that cut a unit are
    /// resized.
    ///
    /// # Errors
    /// If there is no such dim, or it has no whole units.
    #[track_caller]
    pub fn split_units(&self, dim: usize, unit: usize) -> Result<Self> {
        let Some(units) = self
            .dims()
            .get(dim)
            .and_then(|size| size.checked_div(unit))
            .filter(|n| n * unit == self.dims()[dim])
        else {
            return Error::op("split_units", format!("{} has no dim {dim} in units of {unit}", self.spec()));
        };
        let mut shape = Dims::from_slice(self.dims());
        shape[dim] = units;
        shape.insert(dim + 1, unit);
        self.in_units("split_units", (dim, unit), shape, |d| if d > dim { d + 1 } else { d })
    }

    /// Merges `dim` and the next one, which is a unit: the shards of `dim` stay, and those of units are gathered.
    #[track_caller]
    pub(crate) fn merge_units(&self, dim: usize) -> Result<Self> {
        let Some(&unit) = self.dims().get(dim + 1) else {
            return Error::op("merge_units", format!("{} has no dim after {dim}", self.spec()));
        };
        let mut shape = Dims::from_slice(self.dims());
        shape.remove(dim + 1);
        shape[dim] *= unit;
        self.in_units("merge_units", (dim, unit), shape, |d| if d > dim + 1 { d - 1 } else { d })
    }

    #[track_caller]
    fn in_units(
        &self,
        op: &'static str,
        (dim, unit): (usize, usize),
        shape: Dims,
        moved: impl Fn(usize) -> usize,
    ) -> Result<Self> {
        let splits = shape.len() > self.rank();
        let op_spec = || {
            let (spec, mut targets) = (self.spec(), self.targets());
            let mut out: Targets = spec.placements().iter().map(|&placement| placement.into()).collect();
            for (axis, &placement) in spec.placements().iter().enumerate() {
                match placement.shard_dim() {
                    Some(d) if !splits && d == dim + 1 => {
                        targets[axis] = Replicate.into();
                        out[axis] = Replicate.into();
                    }
                    Some(d) if d != dim => {
                        out[axis] = Target { placement: Shard(moved(d)), sizes: spec.sizes(axis).cloned() };
                    }
                    _ => {}
                }
            }
            let axes: Vec<usize> = self.sharded_axes(dim).collect();
            let units = if splits { shape[dim] } else { self.dims()[dim] };
            let parts: usize = axes.iter().map(|&axis| spec.mesh().shape()[axis]).product();
            let is_even = units.is_multiple_of(parts) && axes.iter().all(|&axis| spec.sizes(axis).is_none());
            if let ([axis, inner @ ..], true) = (&axes[..], axes.len() == 1 || !is_even) {
                let sizes = spec.cut(*axis, dim).sizes;
                let of_units = match splits {
                    false => sizes.iter().copied().collect(),
                    true if sizes.iter().all(|size| size.is_multiple_of(unit)) => {
                        sizes.iter().map(|size| size / unit).collect()
                    }
                    true => chunk_sizes(units, spec.mesh().shape()[*axis]),
                };
                let of_elements: Dims = of_units.iter().map(|size| size * unit).collect();
                let [before, after] =
                    if splits { [&of_elements, &of_units] } else { [&of_units, &of_elements] };
                (targets[*axis], out[*axis]) = (Target::shard(dim, before), Target::shard(dim, after));
                for &axis in inner {
                    (targets[axis], out[axis]) = (Replicate.into(), Replicate.into());
                }
            }
            OpSpec::laid(&[self], [targets], &out, &[(shape.clone(), self.dtype())])
        };
        let mut made = rules::run_with(op, &[dim, unit], &[self], &op_spec, &|x, out| {
            Ok(smallvec![kernels::reshape(x[0].to_local(), out[0].local_shape().as_slice())?])
        })?;
        Ok(made.remove(0).aliasing(self))
    }
}
