//! Units of fully sharded parameters, built from a builder.
use crate::fsdp::{FullyShard, FullyShardOptions, Sharder, Unit};
use crate::nn::MeshVarBuilder;
use crate::{DTensor, Error, Result};
use candle_core::DType;
use std::sync::Arc;

impl<M> FullyShard<M> {
    /// Creates a unit of all parameters that `build` creates with the builder passed to it.
    ///
    /// Units may be nested: a parameter belongs to the innermost one. Parameters built outside of all units stay whole
    /// on the axis.
    ///
    /// # Errors
    /// Those of `build`.
    pub fn new(vb: &MeshVarBuilder, build: impl FnOnce(&MeshVarBuilder) -> Result<M>) -> Result<Self> {
        let (vb, unit) = vb.unit();
        Ok(Self::of(build(&vb)?, unit))
    }
}

impl MeshVarBuilder {
    /// Returns a builder that also shards the parameters of [`FullyShard`](crate::fsdp::FullyShard) units over the mesh
    /// axis `axis`: each along its first dim that no inner axis shards.
    ///
    /// Called again for another axis, it shards over the ranks of both, such as those of data and context parallelism.
    ///
    /// Other parameters stay whole on the axis: those outside of units, and those without such a dim, like a bias that
    /// is sharded by columns where `axis` comes first. [`Parameters::reduce`](crate::nn::Parameters::reduce) sums their gradients. Inputs of the model
    /// are sharded on the axis, by rows or along the sequence. Further axes, except the plan's, replicate the units.
    ///
    /// # Errors
    /// If the mesh has no such axis, it is the plan's axis, parameters are already sharded over it or by other options,
    /// a unit is being built, or the dtypes of the options are not floats.
    pub fn fully_shard(&self, axis: &str, options: FullyShardOptions) -> Result<Self> {
        let mesh = self.mesh();
        let at = mesh.axis_index(axis)?;
        if self.unit.is_some() {
            let path = self.path.join(".");
            return Err(Error::Plan(format!(
                "fully_shard over {axis:?} within the unit of {path:?}; call it on the builder before units are built"
            )));
        }
        let mut axes = vec![at];
        if let Some(sharder) = &self.sharder {
            if sharder.axes().contains(&at) {
                return Err(Error::Plan(format!("fully_shard over {axis:?} twice; name each axis once")));
            }
            if sharder.options() != options {
                let (first, second) = (sharder.options(), options);
                return Err(Error::Plan(format!(
                    "fully_shard over {axis:?} with {second:?}, and before with {first:?}; a unit gathers over all of its \
                     axes in one call, so give the same options"
                )));
            }
            axes.extend(sharder.axes());
            axes.sort_unstable();
        }
        if self.plan().axis_index(mesh)? == Some(at) {
            let of = format!("axis {axis:?} of {mesh} is the plan's");
            return Err(Error::Plan(format!(
                "{of}; shard fully over another, or cut no layers with Plan::none()"
            )));
        }
        if let Some(dtype) =
            [options.param_dtype, options.reduce_dtype].into_iter().flatten().find(|d| !d.is_float())
        {
            let name = dtype.as_str();
            return Err(Error::Plan(format!(
                "fully_shard computes in {name}, which is no float; use bf16, f16 or f32"
            )));
        }
        let names: Vec<&str> = axes.iter().map(|&axis| mesh.names()[axis].as_str()).collect();
        let group = match axes[..] {
            [axis] => mesh.axis_group(axis)?.clone(),
            _ => mesh.axes(&names)?.group()?.clone(),
        };
        let sharder = Arc::new(Sharder::new(axes, &group, options));
        Ok(self.within(Some(sharder), None))
    }

    /// Returns the dtype in which the parameters of this builder compute: in a unit
    /// [`param_dtype`](FullyShardOptions::param_dtype), if it is set, and otherwise that in which they are stored.
    ///
    /// Cast the inputs of a unit to it.
    pub fn compute_dtype(&self) -> DType {
        let sharder = self.sharder.as_ref().filter(|_| self.unit.is_some());
        sharder.and_then(|sharder| sharder.options().param_dtype).unwrap_or(self.dtype())
    }

    /// Returns a builder for the parameters of a new unit, if the unit has anything to do.
    pub(crate) fn unit(&self) -> (Self, Option<Arc<Unit>>) {
        let has_to = |sharder: &&Arc<Sharder>| {
            sharder.size() > 1 || sharder.options().param_dtype.is_some_and(|d| d != self.dtype())
        };
        let unit = self.sharder.as_ref().filter(has_to).map(|sharder| sharder.unit(&self.path.join(".")));
        (self.within(self.sharder.clone(), unit.clone()), unit)
    }

    /// Checks that a weight of another layer is available when this one runs.
    pub(super) fn check_shared(&self, weight: &DTensor) -> Result<()> {
        let owner = self.sharder.as_ref().and_then(|sharder| sharder.owner(weight));
        match (owner, &self.unit) {
            (None, _) => Ok(()),
            (Some(owner), Some(unit)) if Arc::ptr_eq(&owner, unit) => Ok(()),
            _ => Err(Error::Plan(format!(
                "{} shares a weight of another fully sharded unit; build both in one, or the weight outside of all",
                self.path.join(".")
            ))),
        }
    }

    /// Returns whether parameters become part of a fully sharded unit.
    pub(super) fn is_in_unit(&self) -> bool {
        self.unit.is_some()
    }
}
