//! Layouts as serializable data.
use super::placement::Placement;
use super::spec::Spec;
use crate::{Error, Result};
use candle_core::DType;
use candle_dist::DeviceMesh;
use itertools::Itertools;
use serde::{Deserialize, Serialize};

/// A serializable [`Spec`], with the names and sizes of the mesh's axes instead of its ranks.
///
/// ```
/// use candle_core::DType;
/// use candle_dist::World;
/// use candle_shard::{Replicate, Result, Shard, Spec, SpecDescription};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let spec = Spec::new(&mesh, &[Shard(0)], (5, 4), DType::F32)?;
///     let description = SpecDescription::from(&spec);
///     assert_eq!((&description.shape[..], &description.dtype[..]), (&[5, 4][..], "f32"));
///     assert!(description.on(&mesh)? == spec);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecDescription {
    /// Name and size of each axis, outermost first.
    pub axes: Vec<(String, usize)>,
    /// The placement on each axis.
    pub placements: Vec<Placement>,
    /// The explicit piece sizes on each axis, `None` for the default ones.
    pub sizes: Vec<Option<Vec<usize>>>,
    /// The global shape.
    pub shape: Vec<usize>,
    /// The dtype by candle's name, such as `f32`.
    pub dtype: String,
}

impl From<&Spec> for SpecDescription {
    fn from(spec: &Spec) -> Self {
        let mesh = spec.mesh();
        Self {
            axes: axes_of(mesh),
            placements: spec.placements().to_vec(),
            sizes: (0..mesh.ndim()).map(|axis| spec.sizes(axis).map(|sizes| sizes.to_vec())).collect(),
            shape: spec.dims().to_vec(),
            dtype: spec.dtype().as_str().into(),
        }
    }
}

impl SpecDescription {
    /// Returns the layout on a mesh that has these axes.
    ///
    /// # Errors
    /// If the mesh has other axes, if candle has no such dtype, or if the rest is not a layout of the shape.
    pub fn on(&self, mesh: &DeviceMesh) -> Result<Spec> {
        if self.axes != axes_of(mesh) {
            let axes = self.axes.iter().map(|(name, size)| format!("{name}={size}")).join(", ");
            return Err(Error::Layout(format!(
                "a layout on ({axes}) for {mesh}; choose new placements for it"
            )));
        }
        let no_dtype =
            |_| Error::Layout(format!("{:?} is not a dtype; use a name of candle, such as f32", self.dtype));
        let dtype: DType = self.dtype.parse().map_err(no_dtype)?;
        let spec = Spec::new(mesh, &self.placements, &self.shape[..], dtype)?;
        if self.sizes.len() != mesh.ndim() {
            let n = self.sizes.len();
            return Err(Error::Layout(format!("{n} entries of sizes for {mesh}; give one for each axis")));
        }
        let sized = self.sizes.iter().enumerate().filter_map(|(axis, sizes)| Some((axis, sizes.as_deref()?)));
        sized.into_iter().try_fold(spec, |spec, (axis, sizes)| spec.with_sizes(axis, Some(sizes.into())))
    }
}

fn axes_of(mesh: &DeviceMesh) -> Vec<(String, usize)> {
    mesh.names().iter().cloned().zip(mesh.shape().iter().copied()).collect()
}
