//! All stages of a model in one process.
mod backward;
mod compare;
mod forward;
mod profile;

pub use profile::NodeProfile;

use crate::Result;
use crate::graph::{PipeInfo, Scope, Signature};
use crate::pipe::Pipe;
use crate::tape::{StageModule, named_vars};
use candle_core::{Device, Tensor, Var};
use std::collections::BTreeMap;

/// A cut model that runs in one process, stage after stage, each with its own graph. It is the reference for a pipeline
/// on many ranks, and a way to try a cut on one device.
///
/// Gradients cross stages as they do between ranks: the gradients from all users of a value are summed in the users'
/// order.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
/// use candle_pipe::microbatch::Microbatches;
/// use candle_pipe::{EqualCount, In, LocalPipe, PipeBuilder, Reduction, StepOptions, nn};
///
/// let mut g = PipeBuilder::<VarBuilder<'static>>::new();
/// let (x, target) = (g.input("x", In::Arg), g.input("target", In::Arg));
/// let h = g.module("up", |vb| Ok(nn::linear(1, 4, vb.clone())?), [x]);
/// let y = g.module("down", |vb| Ok(nn::linear(4, 1, vb.clone())?), [h]);
/// g.loss_fn(|xs, _| Ok(candle_nn::loss::mse(xs[0].tensor()?, xs[1].tensor()?)?), [y, target], Reduction::Mean);
/// let pipe = g.finish(EqualCount(3))?;
///
/// let parameters = VarMap::new();
/// let vb = VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
/// let local = LocalPipe::new(&pipe, &vb, &Device::Cpu)?;
/// let mut optimizer = SGD::new(parameters.all_vars(), 1e-4)?;
///
/// let x = Tensor::new(&[[1f32], [2.], [3.], [4.], [5.]], &Device::Cpu)?;
/// let batch = Microbatches::cut(2, [&x, &x])?;
/// let mut losses = Vec::new();
/// for step in 0..2 {
///     let result = local.forward_backward(&batch, &StepOptions::default().step(step))?;
///     losses.push(result.loss()?.to_scalar::<f32>()?);
///     optimizer.step(&result.grads)?;
/// }
/// assert!(losses[1] < losses[0]);
/// # Ok::<(), candle_pipe::Error>(())
/// ```
pub struct LocalPipe {
    info: PipeInfo,
    signature: Signature,
    stages: Vec<StageModule>,
}

impl LocalPipe {
    /// Builds all stages on one device. They share one copy of each replicated parameter.
    ///
    /// # Errors
    /// Those of the constructors.
    pub fn new<B: Scope>(pipe: &Pipe<B>, scope: &B, device: &Device) -> Result<Self> {
        let stages = pipe.build_stages(0..pipe.num_stages(), scope, device)?;
        Ok(Self { info: pipe.info().clone(), signature: pipe.signature().clone(), stages })
    }

    /// Returns the model and its stages as plain data.
    pub fn info(&self) -> &PipeInfo {
        &self.info
    }

    /// Returns the stages.
    pub fn stages(&self) -> &[StageModule] {
        &self.stages
    }

    /// Returns the parameters of all stages by full name, as the model uses them.
    pub fn parameters(&self) -> BTreeMap<&str, &Tensor> {
        let all = self.stages.iter().flat_map(StageModule::parameters);
        all.map(|(name, tensor)| (name.as_str(), tensor)).collect()
    }

    /// Returns the variables of all stages by full name, each once, for an optimizer. A parameter that is made of a variable,
    /// such as a cast, stands for the variable.
    ///
    /// # Errors
    /// Those of candle.
    pub fn named_vars(&self) -> Result<Vec<(String, Var)>> {
        named_vars(&self.stages)
    }
}
