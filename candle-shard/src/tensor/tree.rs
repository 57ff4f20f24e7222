//! A distributed tensor as a tree of tensors: its shard, which can be replaced.
use crate::DTensor;
use candle_core::Tensor;
use candle_dist::{Error, TensorTree};

/// The tree holds this rank's shard. A map may cast it, detach it or move it, and gets a tensor of the same layout and
/// gradient state; a shard of another shape is an error.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::{TensorTree, World};
/// use candle_shard::{DTensor, Result, Shard};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let x = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?;
///     let x = DTensor::distribute(&x, &ctx.mesh(&[("tp", 2)])?, &[Shard(0)])?;
///     let (half, step) = (x, 7).cast_floats(DType::F16)?;
///     assert_eq!((half.dims(), half.dtype(), half.placements(), step), (&[3, 2][..], DType::F16, &[Shard(0)][..], 7));
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
impl TensorTree for DTensor {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        f(self.to_local());
    }

    fn rebuild<E: From<Error>>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        let local = f(self.to_local())?;
        self.with_local(local).map_err(|error| {
            let reason =
                format!("{error}; give a shard of the same shape, or make a new one by from_local_with_spec");
            Error::Invalid { op: "DTensor::rebuild", reason }.into()
        })
    }
}
