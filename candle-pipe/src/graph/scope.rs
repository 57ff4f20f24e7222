//! Sources of parameters.
use crate::Result;
use candle_core::{DType, Device, Shape, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use itertools::Itertools;
use std::sync::{Arc, Mutex, PoisonError};

/// Parameters: their full names, and the tensors as the model uses them.
pub type NamedTensors = Vec<(String, Tensor)>;

/// The former name of [`NamedTensors`].
#[deprecated(since = "0.1.0", note = "renamed to NamedTensors")]
pub type Named = NamedTensors;

/// The source of a model's parameters. A module gets it with the module's own name as prefix.
///
/// Implemented for candle's `VarBuilder`, for `()` (models that have their own parameters), and with the feature `shard`
/// for the `MeshVarBuilder` of tensor-parallel models.
pub trait Scope: Clone + 'static {
    /// Returns the scope of the child module `name`, one part of a path.
    fn child(&self, name: &str) -> Self;

    /// Returns this scope with parameters on `device`.
    ///
    /// # Errors
    /// If it is bound to another device.
    fn on(&self, device: &Device) -> Result<Self>;

    /// Returns the dtype of the parameters.
    fn dtype(&self) -> DType;

    /// Returns the mesh of sharded tensors between nodes, if the model has them.
    fn mesh(&self) -> Option<DeviceMesh> {
        None
    }

    /// Returns the parameters that were built on the mesh of [`mesh`](Self::mesh), if the model has them.
    #[cfg(feature = "shard")]
    fn parameters(&self) -> Option<candle_shard::nn::Parameters> {
        None
    }

    /// Refuses a plain tensor that nodes would take for a whole parameter, and that is one of a mesh of ranks in parts.
    ///
    /// # Errors
    /// If the parameter is sharded, or its gradient is left partial.
    fn check_plain(&self, _: &Tensor) -> Result<()> {
        Ok(())
    }

    /// Checks what the ranks of `group` have built of one model together, each its stages. Every rank of it calls this.
    ///
    /// # Errors
    /// On all ranks alike, if the model is not as it was planned.
    fn check_stages(&self, _: &ProcessGroup) -> Result<()> {
        Ok(())
    }

    /// Runs `build` with this scope. Returns its result and the parameters that it requested.
    fn watch<T>(&self, build: impl FnOnce(&Self) -> Result<T>) -> Result<(T, NamedTensors)>;

    /// Returns the scope of the module with this dotted path.
    fn at(&self, path: &str) -> Self {
        path.split('.').filter(|part| !part.is_empty()).fold(self.clone(), |scope, part| scope.child(part))
    }
}

impl Scope for () {
    fn child(&self, _: &str) -> Self {}

    fn on(&self, _: &Device) -> Result<Self> {
        Ok(())
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn watch<T>(&self, build: impl FnOnce(&Self) -> Result<T>) -> Result<(T, NamedTensors)> {
        Ok((build(self)?, Vec::new()))
    }
}

impl Scope for VarBuilder<'static> {
    fn child(&self, name: &str) -> Self {
        self.pp(name)
    }

    fn on(&self, device: &Device) -> Result<Self> {
        Ok(self.clone().set_device(device.clone()))
    }

    fn dtype(&self) -> DType {
        VarBuilder::dtype(self)
    }

    fn watch<T>(&self, build: impl FnOnce(&Self) -> Result<T>) -> Result<(T, NamedTensors)> {
        let seen = Arc::<Mutex<NamedTensors>>::default();
        let watched = ParameterRecorder { source: self.root(), seen: seen.clone() };
        let root = VarBuilder::from_backend(Box::new(watched), self.dtype(), self.device().clone());
        let prefix = self.prefix();
        let built = build(&if prefix.is_empty() { root } else { root.pp(prefix) })?;
        let named = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
        Ok((built, named))
    }
}

/// A source of parameters that records requested ones.
struct ParameterRecorder {
    source: VarBuilder<'static>,
    seen: Arc<Mutex<NamedTensors>>,
}

impl ParameterRecorder {
    fn remember(&self, name: &str, tensor: Tensor) -> Tensor {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.iter().all(|(known, _)| known != name) {
            seen.push((name.to_owned(), tensor.clone()));
        }
        tensor
    }
}

impl SimpleBackend for ParameterRecorder {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let source = self.source.clone().set_device(device.clone());
        Ok(self.remember(name, source.get_with_hints_dtype(shape, name, init, dtype)?))
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let source = self.source.clone().set_device(device.clone());
        Ok(self.remember(name, source.get_unchecked_dtype(name, dtype)?))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.source.contains_tensor(name)
    }
}

/// Returns a source of parameters with shapes and without memory, to [measure](crate::PipeBuilder::measure) a model
/// with.
///
/// ```
/// use candle_core::DType;
///
/// let huge = candle_pipe::shapes_only(DType::F32).get((1 << 20, 1 << 20), "weight")?;
/// assert_eq!(huge.elem_count(), 1 << 40);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn shapes_only(dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(ShapesOnly), dtype, Device::Cpu)
}

struct ShapesOnly;

impl SimpleBackend for ShapesOnly {
    fn get(
        &self,
        shape: Shape,
        _: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        Tensor::zeros((), dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("parameter {name} is requested without its shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

/// Returns the variables that a tensor is made of, each once; itself, if it is one.
pub(crate) fn variables(tensor: &Tensor) -> impl Iterator<Item = &Tensor> {
    tensor.sorted_nodes().into_iter().filter(|node| node.is_variable()).unique_by(|variable| variable.id())
}
