use candle_core::backprop::GradStore;
use candle_core::{Result, Var};
use candle_nn::{Optimizer, ParamsAdamW};

use super::fused;
use super::fused::adam_w::{AdamWOptions, AdamWUpdate};
use super::master::{check_gradient, master_of};
use super::rules::{AdamWRule, Update};

/// AdamW (Loshchilov and Hutter, 2019) in place: the numbers of `candle_nn::AdamW`, in one pass over memory.
///
/// 16-bit variables and moments are computed in f32 and rounded once in each step.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Var};
/// use candle_nn::{Optimizer, ParamsAdamW};
/// let weight = Var::new(&[1f32, -1.], &Cpu)?;
/// let config = ParamsAdamW { lr: 0.1, weight_decay: 0.0, ..Default::default() };
/// let mut optimizer = candle_dist_kernels::AdamW::new(vec![weight.clone()], config)?;
/// optimizer.backward_step(&weight.sum_all()?)?;
/// assert_eq!(weight.to_vec1::<f32>()?, [0.9, -1.1]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AdamW {
    params: ParamsAdamW,
    steps: u32,
    moments: Vec<Moments>,
}

/// A variable and the running means of its gradient and of the gradient's square.
#[derive(Debug)]
struct Moments {
    var: Var,
    /// The 32-bit copy that is stepped instead of a 16-bit variable.
    master: Option<Var>,
    first: Var,
    second: Var,
}

impl AdamW {
    /// Creates an optimizer of the float variables. It steps 32-bit copies of 16-bit variables (Micikevicius et al.
    /// 2018). Such a variable is its rounded copy, so steps that are too small for 16 bits add up. Moments have the
    /// dtype of the copies.
    ///
    /// ```
    /// # fn main() -> candle_core::Result<()> {
    /// use candle_core::{DType, Device::Cpu, Var};
    /// use candle_nn::{Optimizer, ParamsAdamW};
    /// use candle_dist_kernels::AdamW;
    /// let small = ParamsAdamW { lr: 1e-3, weight_decay: 0.0, ..Default::default() };
    /// let moved = |make: fn(Vec<Var>, ParamsAdamW) -> candle_core::Result<AdamW>| {
    ///     let weight = Var::ones(1, DType::BF16, &Cpu)?;
    ///     let mut optimizer = make(vec![weight.clone()], small.clone())?;
    ///     (0..100).try_for_each(|_| optimizer.backward_step(&weight.sum_all()?))?;
    ///     Ok::<_, candle_core::Error>(weight.to_dtype(DType::F32)?.to_vec1::<f32>()?[0])
    /// };
    /// assert_eq!(moved(AdamW::new)?, 1.0); // each step is less than half of the gap between two numbers
    /// assert!((moved(AdamW::with_master_weights)? - 0.9).abs() < 4e-3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_master_weights(vars: Vec<Var>, params: ParamsAdamW) -> Result<Self> {
        Self::build(vars, params, master_of)
    }

    fn build(
        vars: Vec<Var>,
        params: ParamsAdamW,
        master: impl Fn(&Var) -> Result<Option<Var>>,
    ) -> Result<Self> {
        let moments = |var: Var| {
            let master = master(&var)?;
            let zeros = || Var::from_tensor(&master.as_ref().unwrap_or(&var).zeros_like()?);
            Ok(Moments { first: zeros()?, second: zeros()?, master, var })
        };
        let floats = vars.into_iter().filter(|var| var.dtype().is_float());
        Ok(Self { params, steps: 0, moments: floats.map(moments).collect::<Result<_>>()? })
    }
}

impl Optimizer for AdamW {
    type Config = ParamsAdamW;

    /// Creates an optimizer of the float variables.
    fn new(vars: Vec<Var>, params: ParamsAdamW) -> Result<Self> {
        Self::build(vars, params, |_| Ok(None))
    }

    fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.params.lr = lr;
    }

    /// Updates each variable that has a gradient.
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        let steps = self.steps.saturating_add(1);
        let mut updates = Vec::with_capacity(self.moments.len());
        for Moments { var, master, first, second } in &self.moments {
            if let Some(grad) = grads.get(var) {
                let (master, moments) = (master.as_ref(), [first, second]);
                updates.push(AdamWUpdate { steps, var, master, moments, grad });
            }
        }
        step_adam_w(&self.params, &updates)?;
        self.steps = steps;
        Ok(())
    }
}

/// Updates variables, in one launch for many on a CUDA device.
///
/// # Errors
/// If a gradient has another shape, or a dtype that gradients of its variable do not have: then no variable is updated.
pub fn step_adam_w(params: &ParamsAdamW, updates: &[AdamWUpdate<'_>]) -> Result<()> {
    updates.iter().try_for_each(|update| check_gradient("AdamW", update.var, update.grad))?;
    let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = *params;
    let options = AdamWOptions { lr, betas: [beta1, beta2], eps, keep: 1.0 - lr * weight_decay };
    let mut launches: Vec<(&'static str, Vec<&AdamWUpdate<'_>>)> = Vec::new();
    for update in updates {
        let AdamWUpdate { steps, var, master, moments, grad } = *update;
        let Some(kernel) = fused::adam_w::kernel(update).filter(|_| var.elem_count() > 0) else {
            let AdamWOptions { lr, betas, eps, keep } = options;
            let rule = AdamWRule { lr, betas, scales: options.scales(steps), eps, keep };
            rule.update_all("AdamW", (var, master), moments, grad)?;
            continue;
        };
        let is_of = |(name, of): &&mut (&str, Vec<&AdamWUpdate<'_>>)| {
            *name == kernel && of[0].var.device().same_device(var.device())
        };
        match launches.iter_mut().find(is_of) {
            Some((_, of)) => of.push(update),
            None => launches.push((kernel, vec![update])),
        }
    }
    launches.iter().try_for_each(|(kernel, of)| fused::adam_w::step(kernel, of, options))
}
