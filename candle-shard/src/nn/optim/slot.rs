//! The state that an optimizer keeps for one parameter.
use super::params::Params;
use crate::layout::{Replicate, Spec};
use crate::nn::Parameter;
use crate::{DTensor, Error, Result, checkpoint, kernels};
use candle_core::{Device, Tensor, Var};
use candle_dist::{DeviceMesh, empty};

/// The name of the options in the state of a parameter.
pub(super) const OPTIONS: &str = "options";

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
        let state =
            |_| Var::from_tensor(&empty::full(params.start(), of.var.shape(), dtype, of.var.device())?);
        let states = params.states().iter().map(state).collect::<candle_core::Result<_>>()?;
        Ok(Self { of: of.clone(), master, states, steps: 0 })
    }

    /// Returns the name of a part of the state.
    pub(super) fn name<P: Params>(&self, which: &str) -> String {
        format!("{}.{which}.{}", P::PREFIX, self.of.name)
    }

    /// Returns the options of the parameter by name.
    pub(super) fn options<P: Params>(&self, params: &P) -> Result<(String, DTensor)> {
        let options = params.options();
        let options = Tensor::from_vec(options, P::OPTIONS.len(), self.of.var.device())?;
        Ok((self.name::<P>(OPTIONS), self.everywhere(options)?))
    }

    /// Returns a value that is the same on every rank.
    fn everywhere(&self, value: Tensor) -> Result<DTensor> {
        let mesh = self.of.tensor.mesh();
        let spec = Spec::new(mesh, &vec![Replicate; mesh.ndim()], value.shape(), value.dtype())?;
        DTensor::from_local_with_spec(value, spec)
    }

    /// Returns the state by name: the state tensors, the master weight if there is one, and the number of steps.
    pub(super) fn state<P: Params>(&self, params: &P) -> Result<Vec<(String, DTensor)>> {
        let named = params.states().iter().copied().zip(&self.states);
        let named = named.chain(self.master.as_ref().map(|master| ("master_weight", master)));
        let tensor = |(which, var): (&str, &Var)| {
            let spec = self.of.tensor.spec().clone().with_dtype(var.dtype());
            Ok((self.name::<P>(which), DTensor::from_local_with_spec(var.as_detached_tensor(), spec)?))
        };
        let mut state = named.map(tensor).collect::<Result<Vec<_>>>()?;
        if params.counts_steps() {
            let steps = Tensor::new(self.steps, self.of.var.device())?;
            state.push((self.name::<P>("step"), self.everywhere(steps)?));
        }
        Ok(state)
    }

    /// Loads values in the order of [`state`](Self::state).
    pub(super) fn set<P: Params>(
        &mut self,
        params: &P,
        values: &mut impl Iterator<Item = DTensor>,
    ) -> Result<()> {
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

/// Returns the mesh and device of an optimizer's parameters; `None` without any.
pub(super) fn place<'a>(
    op: &'static str,
    mut parameters: impl Iterator<Item = &'a Parameter>,
) -> Result<Option<(&'a DeviceMesh, &'a Device)>> {
    let Some(first) = parameters.next() else { return Ok(None) };
    let mesh = first.tensor.mesh();
    match parameters.find(|of| of.tensor.mesh() != mesh) {
        None => Ok(Some((mesh, first.var.device()))),
        Some(other) => {
            let (one, on, other_on) = (&first.name, &other.name, other.tensor.mesh());
            Error::op(
                op,
                format!("{one} lies on {mesh}, {on} on {other_on}; make an optimizer for each mesh"),
            )
        }
    }
}
