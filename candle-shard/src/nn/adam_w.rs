//! AdamW whose state can be saved.
use crate::nn::{Parameter, Parameters};
use crate::placement::Replicate;
use crate::spec::Spec;
use crate::{DTensor, Result, checkpoint};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::ParamsAdamW;
use std::path::Path;

/// AdamW (Loshchilov and Hutter, 2019) over this rank's shards: the steps of `candle_nn::AdamW`, and a
/// [`state`](Self::state) that is saved and loaded like the parameters.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::nn::{AdamW, Linear, ShardedVarBuilder};
/// use candle_shard::parallel::Plan;
/// use candle_shard::{DTensor, Replicate, Result};
///
/// World::local(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let vb = ShardedVarBuilder::fresh(1, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
///     let layer = Linear::new(4, 1, true, &vb.pp("out"))?;
///     let parameters = vb.finish()?;
///     let mut optimiser = AdamW::new(&parameters, candle_nn::ParamsAdamW::default())?;
///     let x = DTensor::distribute(&Tensor::ones((1, 4), DType::F32, &Device::Cpu)?, &mesh, &[Replicate])?;
///     optimiser.step(&parameters.backward(&layer.forward(&x)?.sum_all()?)?)?;
///     assert_eq!(optimiser.state()?[0].0, "adam_w.first_moment.out.weight");
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug)]
pub struct AdamW {
    params: ParamsAdamW,
    steps: u32,
    moments: Vec<Moments>,
}

/// A parameter and the running means of its gradient and of the gradient's square.
#[derive(Debug)]
struct Moments {
    of: Parameter,
    first: Var,
    second: Var,
}

const STEPS: &str = "adam_w.steps";

impl AdamW {
    /// An optimiser of all floating parameters.
    pub fn new(parameters: &Parameters, params: ParamsAdamW) -> Result<Self> {
        let moments = |of: &Parameter| {
            let zeros = || Var::from_tensor(&of.var.zeros_like()?);
            Ok(Moments { of: of.clone(), first: zeros()?, second: zeros()? })
        };
        let floats = parameters.iter().filter(|p| p.var.dtype().is_float());
        Ok(Self { params, steps: 0, moments: floats.map(moments).collect::<Result<_>>()? })
    }

    /// The learning rate.
    pub fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    /// Another learning rate for the steps to come.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.params.lr = lr;
    }

    /// Changes every parameter that has a gradient.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = self.params;
        self.steps += 1;
        let (scale_first, scale_second) =
            (1.0 / (1.0 - beta1.powi(self.steps as i32)), 1.0 / (1.0 - beta2.powi(self.steps as i32)));
        for Moments { of: Parameter { var, .. }, first, second } in &self.moments {
            let Some(grad) = grads.get(var).filter(|grad| grad.elem_count() > 0) else { continue };
            // Detached from the graph: what is kept would keep it.
            let grad = grad.detach();
            let next_first = ((first.as_detached_tensor() * beta1)? + (&grad * (1.0 - beta1))?)?;
            let next_second = ((second.as_detached_tensor() * beta2)? + (grad.sqr()? * (1.0 - beta2))?)?;
            let change = ((&next_first * scale_first)? / ((&next_second * scale_second)?.sqrt()? + eps)?)?;
            let decayed = (var.as_detached_tensor() * (1.0 - lr * weight_decay))?;
            var.set(&(decayed - (change * lr)?)?)?;
            first.set(&next_first)?;
            second.set(&next_second)?;
        }
        Ok(())
    }

    /// The moments, which lie like their parameters, and the number of steps, for [`checkpoint::save`].
    ///
    /// Empty if there are no parameters.
    pub fn state(&self) -> Result<Vec<(String, DTensor)>> {
        let Some(layouts) = self.layouts()? else { return Ok(Vec::new()) };
        let device = self.moments[0].of.var.device();
        let values = self.vars().map(|var| Ok(var.as_detached_tensor()));
        let steps = Tensor::new(self.steps, device).map_err(Into::into);
        let tensor = |((name, spec), value): ((String, Spec), Result<Tensor>)| {
            Ok((name, DTensor::from_local_with_spec(value?, spec)?))
        };
        layouts.into_iter().zip(values.chain([steps])).map(tensor).collect()
    }

    /// Takes up the state of a checkpoint, of whatever mesh. Every rank calls it.
    ///
    /// # Errors
    /// On every rank alike, without a change, if a part of the state is not there or cannot be read.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let Some(layouts) = self.layouts()? else { return Ok(()) };
        let (mesh, device) = (self.moments[0].of.tensor.mesh(), self.moments[0].of.var.device());
        let wanted = layouts.iter().map(|(name, spec)| (name.as_str(), None, spec));
        let read = checkpoint::read(path.as_ref(), mesh, wanted, device)?;
        self.vars().zip(&read).try_for_each(|(var, value)| checkpoint::set(var, value))?;
        if let Some(steps) = read.last() {
            self.steps = steps.to_local().to_scalar()?;
        }
        Ok(())
    }

    /// The moments' variables, in the order of [`layouts`](Self::layouts).
    fn vars(&self) -> impl Iterator<Item = &Var> {
        self.moments.iter().flat_map(|moments| [&moments.first, &moments.second])
    }

    /// Name and layout of every part of the state, the number of steps last; `None` without parameters.
    fn layouts(&self) -> Result<Option<Vec<(String, Spec)>>> {
        let Some(mesh) = self.moments.first().map(|moments| moments.of.tensor.mesh()) else { return Ok(None) };
        let both = |moments: &Moments| {
            let Parameter { name, tensor, .. } = &moments.of;
            ["first", "second"].map(|which| (format!("adam_w.{which}_moment.{name}"), tensor.spec().clone()))
        };
        let steps = Spec::new(mesh, &vec![Replicate; mesh.ndim()], (), DType::U32)?;
        Ok(Some(self.moments.iter().flat_map(both).chain([(STEPS.to_string(), steps)]).collect()))
    }
}
