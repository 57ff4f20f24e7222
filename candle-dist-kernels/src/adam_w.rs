use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, InplaceOp2, InplaceOp3, Layout, Result, Tensor, Var, bail};
use candle_nn::{Optimizer, ParamsAdamW};

use super::master::{master_of, on_master};
use super::{elements, real::Real, rows::by_blocks, share_memory};

/// AdamW (Loshchilov and Hutter, 2019) in place: the numbers of `candle_nn::AdamW` without its temporary tensors.
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

    fn build(vars: Vec<Var>, params: ParamsAdamW, master: impl Fn(&Var) -> Result<Option<Var>>) -> Result<Self> {
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
        self.steps += 1;
        for Moments { var, master, first, second } in &self.moments {
            if let Some(grad) = grads.get(var) {
                step_adam_w(&self.params, self.steps, (var, master.as_ref()), [first, second], grad)?;
            }
        }
        Ok(())
    }
}

/// Updates a variable, or its master, and these moments. `steps` counts this step.
pub fn step_adam_w(
    params: &ParamsAdamW,
    steps: u32,
    var: (&Var, Option<&Var>),
    [first, second]: [&Var; 2],
    grad: &Tensor,
) -> Result<()> {
    let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = *params;
    let unbiased = |beta: f64| 1.0 / (1.0 - beta.powi(steps as i32));
    let update = Update { scales: [unbiased(beta1), unbiased(beta2)], eps, lr, keep: 1.0 - lr * weight_decay };
    on_master("AdamW", var, grad, false, |stepped, grad| update.step([stepped, first, second], grad, [beta1, beta2]))
}

/// Updates a running mean of a tensor, or of its square.
struct Mean {
    keep: f64,
    squared: bool,
}

impl Mean {
    fn run<T: Real>(&self, mean: &mut [T], of: &[T]) {
        let (keep, part, squared) = (T::from_f64(self.keep), T::from_f64(1.0 - self.keep), self.squared);
        by_blocks(
            mean,
            1,
            1,
            #[inline(always)]
            |first, mean| {
                for (mean, &x) in mean.iter_mut().zip(&of[first..]) {
                    let x = if squared { x * x } else { x };
                    *mean = *mean * keep + x * part;
                }
            },
        );
    }
}

impl InplaceOp2 for Mean {
    fn name(&self) -> &'static str {
        "running_mean"
    }

    fn cpu_fwd(&self, mean: &mut CpuStorage, mean_l: &Layout, of: &CpuStorage, of_l: &Layout) -> Result<()> {
        let (start, len) = (mean_l.start_offset(), mean_l.shape().elem_count());
        match mean {
            CpuStorage::F32(mean) => self.run(&mut mean[start..start + len], elements(of, of_l)?),
            CpuStorage::F64(mean) => self.run(&mut mean[start..start + len], elements(of, of_l)?),
            other => bail!("a running mean of {:?} in place", other.dtype()),
        }
        Ok(())
    }
}

/// Updates a variable by its moments.
struct Update {
    /// The factors that make the moments unbiased.
    scales: [f64; 2],
    eps: f64,
    lr: f64,
    /// The factor of weight decay.
    keep: f64,
}

impl Update {
    /// Updates the moments by the gradient, and the variable by the moments; in place where possible.
    fn step(&self, vars: [&Var; 3], grad: &Tensor, [beta1, beta2]: [f64; 2]) -> Result<()> {
        let [var, first, second] = vars;
        let [var_now, first_now, second_now] = vars.map(Var::as_detached_tensor);
        let in_place = var_now.is_contiguous() && matches!(var.dtype(), DType::F32 | DType::F64);
        if in_place && var.device().is_cpu() && !share_memory(grad, &var_now) {
            first_now.inplace_op2(grad, &Mean { keep: beta1, squared: false })?;
            second_now.inplace_op2(grad, &Mean { keep: beta2, squared: true })?;
            return var_now.inplace_op3(&first_now, &second_now, self);
        }
        let next_first = ((first_now * beta1)? + (grad * (1.0 - beta1))?)?;
        let next_second = ((second_now * beta2)? + (grad.sqr()? * (1.0 - beta2))?)?;
        let [scale_first, scale_second] = self.scales;
        let change = ((&next_first * scale_first)? / ((&next_second * scale_second)?.sqrt()? + self.eps)?)?;
        var.set(&((var_now * self.keep)? - (change * self.lr)?)?)?;
        first.set(&next_first)?;
        second.set(&next_second)
    }

    fn run<T: Real>(&self, var: &mut [T], first: &[T], second: &[T]) {
        let [scale_first, scale_second] = self.scales.map(T::from_f64);
        let [eps, lr, keep] = [self.eps, self.lr, self.keep].map(T::from_f64);
        by_blocks(
            var,
            1,
            1,
            #[inline(always)]
            |at, var| {
                for ((var, &first), &second) in var.iter_mut().zip(&first[at..]).zip(&second[at..]) {
                    let change = first * scale_first / ((second * scale_second).sqrt() + eps);
                    *var = *var * keep - change * lr;
                }
            },
        );
    }
}

impl InplaceOp3 for Update {
    fn name(&self) -> &'static str {
        "adam_w"
    }

    fn cpu_fwd(
        &self,
        var: &mut CpuStorage,
        var_l: &Layout,
        first: &CpuStorage,
        first_l: &Layout,
        second: &CpuStorage,
        second_l: &Layout,
    ) -> Result<()> {
        let (start, len) = (var_l.start_offset(), var_l.shape().elem_count());
        match var {
            CpuStorage::F32(var) => {
                self.run(&mut var[start..start + len], elements(first, first_l)?, elements(second, second_l)?);
            }
            CpuStorage::F64(var) => {
                self.run(&mut var[start..start + len], elements(first, first_l)?, elements(second, second_l)?);
            }
            other => bail!("AdamW of {:?} in place", other.dtype()),
        }
        Ok(())
    }
}
