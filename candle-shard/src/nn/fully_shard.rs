//! Units of fully sharded parameters, built from a builder.
use crate::Result;
use crate::fsdp::FullyShard;
use crate::nn::ShardedVarBuilder;

impl<M> FullyShard<M> {
    /// Creates a unit of all parameters that `build` creates with the builder passed to it.
    ///
    /// Units may be nested: a parameter belongs to the innermost one. Parameters built outside of all units stay whole
    /// on the axis.
    ///
    /// # Errors
    /// Those of `build`.
    pub fn new(vb: &ShardedVarBuilder, build: impl FnOnce(&ShardedVarBuilder) -> Result<M>) -> Result<Self> {
        let (vb, unit) = vb.unit();
        Ok(Self::of(build(&vb)?, unit))
    }
}
