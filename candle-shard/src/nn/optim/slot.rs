//! The state that an optimizer keeps for one parameter.
use super::params::Params;
use crate::layout::{Replicate, Spec};
use crate::nn::Parameter;
use crate::{DTensor, Error, Result, checkpoint, kernels};
use candle_core::{Device, Tensor, Var};
use candle_dist::{DeviceMesh, empty};

/// A parameter with its optimizer state.
#[derive(Debug)]
pub struct Slot {
    pub(super) of: Parameter,
    /// The 32-bit copy that is updated instead of a 16-bit parameter.
    pub(super) master: Option<Var>,
    /// In the order of [`Params::states`].
    pub(super) states: Vec<Var>,
    /// The number of steps of the parameter.
    pub(super) steps: u32,
}

impl Slot {
    pub(super) fn new<P: Params>(of: &Parameter, params: &P, master_weights: bool) -> Result<Self> {
        let master = if master_weights { kernels::master_of(&of.var)? } else { None };
        let dtype = P::state_dtype(master.as_ref().unwrap_or(&of.var).dtype());
        let state = |_| Var::from_tensor(&empty::full(params.start(), of.var.shape(), dtype, of.var.device())?);
        let states = params.states().iter().map(state).collect::<candle_core::Result<_>>()?;
        Ok(Self { of: of.clone(), master, states, steps: 0 })
    }

    /// Returns the state by name: the state tensors, the master weight if there is one, and the number of steps.
    pub(super) fn state<P: Params>(&self, params: &P) -> Result<Vec<(String, DTensor)>> {
        let named = params.states().iter().copied().zip(&self.states);
        let named = named.chain(self.master.as_ref().map(|master| ("master_weight", master)));
        let name = |which: &str| format!("{}.{which}.{}", P::PREFIX, self.of.name);
        let tensor = |(which, var): (&str, &Var)| {
            let spec = self.of.tensor.spec().clone().with_dtype(var.dtype());
            Ok((name(which), DTensor::from_local_with_spec(var.as_detached_tensor(), spec)?))
        };
        let mut state = named.map(tensor).collect::<Result<Vec<_>>>()?;
        if params.counts_steps() {
            let steps = Tensor::new(self.steps, self.of.var.device())?;
            let (mesh, dtype) = (self.of.tensor.mesh(), steps.dtype());
            let spec = Spec::new(mesh, &vec![Replicate; mesh.ndim()], (), dtype)?;
            state.push((name("step"), DTensor::from_local_with_spec(steps, spec)?));
        }
        Ok(state)
    }

    /// Loads values in the order of [`state`](Self::state).
    pub(super) fn set<P: Params>(&mut self, params: &P, values: &mut impl Iterator<Item = DTensor>) -> Result<()> {
        for var in self.states.iter().chain(&self.master) {
            values.next().map_or(Ok(()), |value| checkpoint::set(var, &value))?;
        }
        if params.counts_steps()
            && let Some(steps) = values.next()
        {
            self.steps = steps.to_local().to_scalar()?;
        }
        Ok(())
    }
}

/// Returns the mesh and device of an optimizer's slots; `None` without slots.
pub(super) fn place<'a>(
    op: &'static str,
    mut slots: impl Iterator<Item = &'a Slot>,
) -> Result<Option<(&'a DeviceMesh, &'a Device)>> {
    let Some(first) = slots.next() else { return Ok(None) };
    let mesh = first.of.tensor.mesh();
    match slots.find(|slot| slot.of.tensor.mesh() != mesh) {
        None => Ok(Some((mesh, first.of.var.device()))),
        Some(other) => {
            let (one, on, other_on) = (&first.of.name, &other.of.name, other.of.tensor.mesh());
            Error::op(op, format!("{one} lies on {mesh}, {on} on {other_on}; make an optimizer for each mesh"))
        }
    }
}
