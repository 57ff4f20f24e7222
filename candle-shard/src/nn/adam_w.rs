//! AdamW whose state can be saved.
use crate::nn::{Parameter, Parameters, found};
use crate::placement::Replicate;
use crate::spec::Spec;
use crate::{DTensor, Result, checkpoint, kernels};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
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
    of: Vec<Parameter>,
    kernel: kernels::AdamW,
}

const STEPS: &str = "adam_w.steps";

impl AdamW {
    /// An optimizer of all floating parameters that are not frozen.
    pub fn new(parameters: &Parameters, params: ParamsAdamW) -> Result<Self> {
        Self::build(parameters, |vars| kernels::AdamW::new(vars, params))
    }

    /// Like [`new`](Self::new) with a 32-bit copy of each 16-bit shard, which takes the steps; the parameter is the copy,
    /// rounded. See [`kernels::AdamW::with_master_weights`].
    ///
    /// The copies are part of the [`state`](Self::state), as `adam_w.master_weight.NAME`.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::Result;
    /// use candle_shard::nn::{AdamW, Linear, ShardedVarBuilder};
    /// use candle_shard::parallel::{ColwiseParallel, Plan};
    ///
    /// World::local(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let plan = Plan::new("tp").with("out", ColwiseParallel::default());
    ///     let vb = ShardedVarBuilder::fresh(1, &mesh, plan, DType::BF16, &Device::Cpu)?;
    ///     Linear::new(4, 6, false, &vb.pp("out"))?;
    ///     let optimiser = AdamW::with_master_weights(&vb.finish()?, candle_nn::ParamsAdamW::default())?;
    ///     let (name, master) = &optimiser.state()?[2];
    ///     assert_eq!((name.as_str(), master.dtype()), ("adam_w.master_weight.out.weight", DType::F32));
    ///     assert_eq!(master.to_local().dims(), [3, 4]); // this rank's shard
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn with_master_weights(parameters: &Parameters, params: ParamsAdamW) -> Result<Self> {
        Self::build(parameters, |vars| kernels::AdamW::with_master_weights(vars, params))
    }

    fn build(
        parameters: &Parameters,
        kernel: impl FnOnce(Vec<Var>) -> candle_core::Result<kernels::AdamW>,
    ) -> Result<Self> {
        let of: Vec<Parameter> =
            parameters.iter().filter(|p| p.var.dtype().is_float() && !p.is_frozen()).cloned().collect();
        let kernel = kernel(of.iter().map(|of| of.var.clone()).collect())?;
        Ok(Self { of, kernel })
    }

    /// The learning rate.
    pub fn learning_rate(&self) -> f64 {
        self.kernel.learning_rate()
    }

    /// Another learning rate for the steps to come.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.kernel.set_learning_rate(lr);
    }

    /// Changes every parameter that has a gradient.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        found::parameters_change();
        Ok(self.kernel.step(grads)?)
    }

    /// The moments and master weights, which lie like their parameters, and the number of steps, for
    /// [`checkpoint::save`].
    ///
    /// Empty if there are no parameters.
    pub fn state(&self) -> Result<Vec<(String, DTensor)>> {
        let Some(layouts) = self.layouts()? else { return Ok(Vec::new()) };
        let device = self.of[0].var.device();
        let values = self.vars().map(|var| Ok(var.as_detached_tensor()));
        let steps = Tensor::new(self.kernel.steps, device).map_err(Into::into);
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
        let (mesh, device) = (self.of[0].tensor.mesh(), self.of[0].var.device());
        let wanted = layouts.iter().map(|(name, spec)| (name.as_str(), None, spec));
        let read = checkpoint::read(path.as_ref(), mesh, wanted, device)?;
        self.vars().zip(&read).try_for_each(|(var, value)| checkpoint::set(var, value))?;
        if let Some(steps) = read.last() {
            self.kernel.steps = steps.to_local().to_scalar()?;
        }
        Ok(())
    }

    /// What is kept beside the parameters, in the order of [`layouts`](Self::layouts).
    fn vars(&self) -> impl Iterator<Item = &Var> {
        self.kernel.state().flatten().map(|(_, var)| var)
    }

    /// Name and layout of every part of the state, the number of steps last; `None` without parameters.
    fn layouts(&self) -> Result<Option<Vec<(String, Spec)>>> {
        let Some(mesh) = self.of.first().map(|of| of.tensor.mesh()) else { return Ok(None) };
        let kept = self.of.iter().zip(self.kernel.state()).flat_map(|(of, state)| {
            let layout = |(which, var): (_, &Var)| {
                (format!("adam_w.{which}.{}", of.name), of.tensor.spec().clone().with_dtype(var.dtype()))
            };
            state.map(layout)
        });
        let steps = Spec::new(mesh, &vec![Replicate; mesh.ndim()], (), DType::U32)?;
        Ok(Some(kept.chain([(STEPS.to_string(), steps)]).collect()))
    }
}
