//! Layouts by the names of the axes.
use super::DTensor;
use crate::layout::{Placement, Placements, Replicate};
use crate::{Error, Result};
use candle_core::Tensor;
use candle_dist::DeviceMesh;

/// Methods of candle's `Tensor` that make distributed tensors of it.
pub trait TensorExt {
    /// Distributes a tensor that is equal on every rank, with the placements of the named axes, and `Replicate` on all others:
    /// [`DTensor::distribute`] by names.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::prelude::*;
    ///
    /// World::threads(4).run(|ctx| -> candle_shard::Result<()> {
    ///     let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
    ///     let x = Tensor::zeros((6, 3), DType::F32, &Device::Cpu)?;
    ///     assert_eq!(x.on(&mesh, [("dp", Shard(0))])?.placements(), [Shard(0), Replicate]);
    ///     assert_eq!(x.on(&mesh, [])?.placements(), [Replicate, Replicate]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If the mesh has no axis of a name, or a name occurs twice, and those of [`DTensor::distribute`].
    #[track_caller]
    fn on<const N: usize>(&self, mesh: &DeviceMesh, placements: [(&str, Placement); N]) -> Result<DTensor>;
}

impl TensorExt for Tensor {
    #[track_caller]
    fn on<const N: usize>(&self, mesh: &DeviceMesh, placements: [(&str, Placement); N]) -> Result<DTensor> {
        DTensor::distribute(self, mesh, &by_names(mesh, &placements)?)
    }
}

/// Returns a placement for each axis.
fn by_names(mesh: &DeviceMesh, named: &[(&str, Placement)]) -> Result<Placements> {
    let mut all = Placements::from_elem(Replicate, mesh.ndim());
    for (nth, &(name, placement)) in named.iter().enumerate() {
        if named[..nth].iter().any(|(other, _)| *other == name) {
            return Err(Error::Layout(format!("two placements for axis {name:?} of {mesh}; give one")));
        }
        all[mesh.axis_index(name)?] = placement;
    }
    Ok(all)
}
