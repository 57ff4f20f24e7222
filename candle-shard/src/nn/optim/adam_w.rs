//! AdamW.
use super::element::{ElementOptimizer, ElementParams};
use super::params::{Params, check, unknown};
use super::slot::Slot;
use crate::Result;
use crate::kernels::{self, AdamWUpdate};
use candle_core::{DType, Tensor, bail};
use candle_nn::ParamsAdamW;

/// AdamW (Loshchilov and Hutter, 2019) over this rank's shards, with the options of `candle_nn::AdamW`.
///
/// State: `adam_w.first_moment.NAME`, `adam_w.second_moment.NAME`, `adam_w.step.NAME` and `adam_w.options.NAME`. The moments
/// have the dtype of the parameter, or of its master weight.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::nn::{AdamW, Linear, MeshVarBuilder};
/// use candle_shard::parallel::{ColwiseParallel, Plan};
/// use candle_shard::{DTensor, Replicate, Result};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let plan = Plan::new("tp").with("out", ColwiseParallel::default());
///     let vb = MeshVarBuilder::fresh(1, &mesh, plan, DType::BF16, &Device::Cpu)?;
///     let layer = Linear::new(4, 6, false, &vb.pp("out"))?;
///     let parameters = vb.finish()?;
///     let mut optimizer = AdamW::with_master_weights(&parameters, candle_nn::ParamsAdamW::default())?;
///     let x = DTensor::distribute(&Tensor::ones((1, 4), DType::BF16, &Device::Cpu)?, &mesh, &[Replicate])?;
///     optimizer.step(&parameters.backward(&layer.forward(&x)?.sum_all()?)?)?;
///     let state = optimizer.state()?;
///     let (name, master) = &state[2];
///     assert_eq!((name.as_str(), master.dtype()), ("adam_w.master_weight.out.weight", DType::F32));
///     assert_eq!(master.to_local().dims(), [3, 4]); // this rank's shard
///     assert_eq!(state[3].0, "adam_w.step.out.weight");
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub type AdamW = ElementOptimizer<ParamsAdamW>;

impl Params for ParamsAdamW {
    const TYPE: &'static str = "AdamW";
    const PREFIX: &'static str = "adam_w";
    const OPTIONS: &'static [&'static str] = &["lr", "beta1", "beta2", "eps", "weight_decay"];

    fn check(&self) -> Result<()> {
        let Self { lr, beta1, beta2, eps, weight_decay } = *self;
        for (name, value) in [("lr", lr), ("eps", eps), ("weight_decay", weight_decay)] {
            check(Self::TYPE, name, value, f64::INFINITY)?;
        }
        check(Self::TYPE, "beta1", beta1, 1.0)?;
        check(Self::TYPE, "beta2", beta2, 1.0)
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn lr_mut(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn options(&self) -> Vec<f64> {
        let Self { lr, beta1, beta2, eps, weight_decay } = *self;
        vec![lr, beta1, beta2, eps, weight_decay]
    }

    fn with_options(&self, options: &[f64]) -> Result<Self> {
        let [lr, beta1, beta2, eps, weight_decay] = *options else { return unknown(options) };
        Ok(Self { lr, beta1, beta2, eps, weight_decay })
    }

    fn states(&self) -> &'static [&'static str] {
        &["first_moment", "second_moment"]
    }

    fn state_dtype(of: DType) -> DType {
        of
    }

    fn counts_steps(&self) -> bool {
        true
    }
}

impl ElementParams for ParamsAdamW {
    fn step(&self, slot: &Slot, grad: &Tensor) -> candle_core::Result<()> {
        self.step_all(&[(slot, grad)])
    }

    fn step_all(&self, slots: &[(&Slot, &Tensor)]) -> candle_core::Result<()> {
        let mut updates = Vec::with_capacity(slots.len());
        for &(Slot { of, master, states, steps }, grad) in slots {
            let [first, second] = &states[..] else {
                bail!("AdamW: {} has {} states", of.name, states.len())
            };
            let (var, master, moments) = (&of.var, master.as_ref(), [first, second]);
            updates.push(AdamWUpdate { steps: *steps, var, master, moments, grad });
        }
        kernels::step_adam_w(self, &updates)
    }
}
