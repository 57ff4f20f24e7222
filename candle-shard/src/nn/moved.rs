//! The tensors of an existing model, before they become parameters.
use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The tensors of a model by name. Each tensor is dropped when its parameter is built.
pub(super) struct StateDict(Mutex<RemainingTensors>);

struct RemainingTensors {
    tensors: BTreeMap<String, Tensor>,
    /// Tensors shared by several parameters, which stay until all are built.
    shared: BTreeSet<String>,
}

impl StateDict {
    pub(super) fn new(tensors: impl IntoIterator<Item = (impl Into<String>, Tensor)>) -> Self {
        let tensors = tensors.into_iter().map(|(name, tensor)| (name.into(), tensor.detach())).collect();
        Self(Mutex::new(RemainingTensors { tensors, shared: BTreeSet::new() }))
    }

    fn left(&self) -> MutexGuard<'_, RemainingTensors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.left().tensors.contains_key(name)
    }

    /// Returns the tensor `name`. It is removed, unless it `stays` because the parameter is only a part of it.
    ///
    /// # Errors
    /// If there is no such tensor, or it has another shape.
    pub(super) fn take(&self, name: &str, shape: &[usize], stays: bool) -> Result<Tensor> {
        let mut left = self.left();
        let found = left.tensors.get(name).cloned();
        let taken = found.ok_or_else(|| {
            Error::Plan(format!("the model has no tensor {name}; check the path of the layer"))
        })?;
        if taken.dims() != shape {
            let has = taken.dims();
            return Err(Error::Plan(format!(
                "the model's tensor {name} is {has:?}, the layer expects {shape:?}"
            )));
        }
        if stays {
            left.shared.insert(name.into());
        } else {
            left.tensors.remove(name);
        }
        Ok(taken)
    }

    /// Returns an error if there are tensors that no layer used.
    pub(super) fn finish(&self) -> Result<()> {
        let RemainingTensors { tensors, shared } = &mut *self.left();
        tensors.retain(|name, _| !shared.contains(name));
        if tensors.is_empty() {
            return Ok(());
        }
        let names = tensors.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        Err(Error::Plan(format!("no layer took {names} of the model; build their layers, or leave them out")))
    }
}
