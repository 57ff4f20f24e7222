//! Neighboring elements of a sharded dim: each rank gets those that it lacks, and no others.
use super::{neutral, neutral_of};
use crate::layout::{Partial, Replicate, Spec, axes_of};
use crate::rules::{self, OpSpec};
use crate::{DTensor, Result};
use candle_core::shape::Dim;
use candle_core::{Shape, Tensor};
use candle_dist::functional::Step;
use candle_dist::{Cut, ProcessGroup, ReduceOp};
use smallvec::smallvec;
use std::ops::Range;

/// The ranks that have the pieces of a sharded dim.
pub(super) struct Halo {
    group: ProcessGroup,
    axes: Vec<usize>,
    cut: Cut,
}

impl Halo {
    /// Returns `None` if no axis of several ranks shards the dim.
    pub(super) fn of(x: &DTensor, dim: usize) -> Result<Option<Self>> {
        let axes: Vec<usize> = x.sharded_axes(dim).filter(|&axis| x.mesh().shape()[axis] > 1).collect();
        if axes.is_empty() {
            return Ok(None);
        }
        let cut = x.spec().joint_cut(&axes, dim);
        let group = x.described(x.group_of(&axes)?, axes_of(&axes));
        Ok(Some(Self { group, axes, cut }))
    }

    /// Returns the elements that this rank's piece of the result needs: `window` says which ones a piece needs. Elements
    /// outside of the dim are zeros.
    pub(super) fn window(
        &self,
        local: &Tensor,
        result: &Spec,
        window: impl Fn(Range<isize>) -> Range<isize>,
    ) -> Result<Tensor> {
        let others = || local.dims().iter().enumerate().filter(|(dim, _)| *dim != self.cut.dim);
        if others().any(|(_, &size)| size == 0) {
            // No rank of the group has elements.
            return neutral_of(&[local], local.dims(), local.dtype());
        }
        let pieces = result.joint_cut(&self.axes, self.cut.dim);
        let mut end = 0;
        let windows = pieces.sizes.iter().map(|&size| {
            end += size as isize;
            // Without elements, a rank needs none.
            if size == 0 { 0..0 } else { window(end - size as isize..end) }
        });
        Ok(Step::Windows { cut: self.cut.clone(), windows: windows.collect() }.apply(local, &self.group)?)
    }
}

impl DTensor {
    /// Moves the elements of a dim by `by` places: element `i` of the result is element `i - by`, or zero where there is
    /// none.
    ///
    /// A sharded dim stays sharded, in shards of any sizes: each rank gets the `by` elements before its own, from as many
    /// ranks as have them, in one all_to_all in each pass. With `by = 1` this is the token shift of RWKV.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("cp", 2)])?;
    ///     let x = DTensor::distribute(&Tensor::new(&[1f32, 2., 3., 4., 5.], &Device::Cpu)?, &mesh, &[Shard(0)])?;
    ///     assert_eq!(x.shift(0, 1)?.to_vec1::<f32>()?, [0., 1., 2., 3., 4.]);
    ///     assert_eq!(x.shift(0, -2)?.to_vec1::<f32>()?, [3., 4., 5., 0., 0.]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn shift(&self, dim: impl Dim, by: isize) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "shift")?;
        let len = self.dims()[dim] as isize;
        let by = by.clamp(-len, len);
        if by == 0 {
            return Ok(self.clone());
        }
        let linear = |p| if matches!(p, Partial(op) if op != ReduceOp::Sum) { Replicate } else { p };
        let x = rules::lay_out("shift", self, linear)?;
        let halo = Halo::of(&x, dim)?;
        let op_spec = || {
            let mut made = OpSpec::in_place(&[&x], smallvec![x.shared_spec().clone()]);
            // A rank without elements of the result may have some for others.
            made.nothing &= halo.is_none();
            Ok(made)
        };
        let mut made = rules::run_with("shift", &[dim, by as usize], &[&x], &op_spec, &|x, outs| {
            let local = x[0].to_local();
            let (distance, kept) = (by.unsigned_abs(), (len - by.abs()) as usize);
            Ok(smallvec![match &halo {
                Some(halo) => halo.window(local, &outs[0], |piece| piece.start - by..piece.end - by)?,
                None if kept == 0 => neutral(x, &outs[0].local_shape(), x[0].dtype())?,
                None if by > 0 => local.narrow(dim, 0, kept)?.pad_with_zeros(dim, distance, 0)?,
                None => local.narrow(dim, distance, kept)?.pad_with_zeros(dim, 0, distance)?,
            }])
        })?;
        Ok(made.remove(0))
    }
}
