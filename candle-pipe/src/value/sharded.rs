//! Sharded tensors as values.
use super::Value;
use crate::{Error, Result};
use candle_dist::DeviceMesh;
use candle_shard::DTensor;

impl Value {
    /// Returns the sharded tensor, or an [`Error::Value`] that names the actual kind.
    pub fn dtensor(&self) -> Result<&DTensor> {
        match self {
            Self::DTensor(t) => Ok(t),
            _ => Err(self.other_than("a sharded tensor")),
        }
    }

    /// Returns the sharded tensor, or a plain one as a tensor that is equal on every rank of `mesh`. Tensor-parallel
    /// nodes call it on their inputs.
    ///
    /// # Errors
    /// [`Error::Value`] if this is neither, or is sharded over another mesh.
    pub fn on(&self, mesh: &DeviceMesh) -> Result<DTensor> {
        match self {
            Self::DTensor(t) if t.mesh() == mesh => Ok(t.clone()),
            Self::DTensor(t) => Err(Error::Value(format!("{t} is on {}, expected on {mesh}", t.mesh()))),
            Self::Tensor(t) => Ok(DTensor::replicated(t, mesh)?),
            _ => Err(self.other_than("a tensor")),
        }
    }
}

impl From<DTensor> for Value {
    fn from(tensor: DTensor) -> Self {
        Self::DTensor(tensor)
    }
}

impl From<&DTensor> for Value {
    fn from(tensor: &DTensor) -> Self {
        Self::DTensor(tensor.clone())
    }
}
