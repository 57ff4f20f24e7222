//! Elementwise optimizer rules, for all elements of a variable or for some of its rows.
use candle_core::{Result, Tensor, Var};

use super::dense_update::update_all;
use super::real::Real;
use super::row_update::update_rows;
use super::rule::UpdateRule;

/// The kernels of a rule with `N` states: this crate compiles them once, and not every caller again.
pub trait Update<const N: usize> {
    /// Updates the rows of `table` in `listed` with the sum of their rows in `grad`: `[listed.len(), width]`.
    ///
    /// Each of the `N` states has the shape of the table, and its dtype, or f32 for 16-bit floats.
    fn update_rows(&self, table: &Var, states: &[Var], listed: &[u32], grad: &Tensor) -> Result<()>;

    /// Updates all elements of `var` by `grad`, in one pass over memory.
    ///
    /// With a `master`, the rule updates the master, and `var` becomes the rounded master. A master follows what was
    /// written to `var` from outside. 16-bit floats are computed in f32 and rounded once, in states too.
    ///
    /// # Errors
    /// Those of `on_master`, with `name`.
    fn update_all(
        &self,
        name: &str,
        var_and_master: (&Var, Option<&Var>),
        states: [&Var; N],
        grad: &Tensor,
    ) -> Result<()>;
}

macro_rules! updates {
    ($($rule:ty, $states:literal;)*) => {$(
        impl Update<$states> for $rule {
            fn update_rows(&self, table: &Var, states: &[Var], listed: &[u32], grad: &Tensor) -> Result<()> {
                update_rows(table, states, listed, grad, self)
            }

            fn update_all(
                &self,
                name: &str,
                var_and_master: (&Var, Option<&Var>),
                states: [&Var; $states],
                grad: &Tensor,
            ) -> Result<()> {
                update_all(name, var_and_master, states, grad, self)
            }
        }
    )*};
}

updates! {
    SgdRule, 0;
    MomentumRule, 1;
    AdagradRule, 1;
    AdamWRule, 2;
}

/// Gradient descent.
pub struct SgdRule {
    /// The learning rate.
    pub lr: f64,
    /// The share of the number that is added to its gradient.
    pub weight_decay: f64,
}

impl UpdateRule<0> for SgdRule {
    fn of<T: Real>(&self) -> impl Fn(T, [T; 0], T) -> (T, [T; 0]) {
        let lr = T::from_f64(self.lr);
        let decayed = decayed::<T>(self.weight_decay);
        #[inline(always)]
        move |x, [], grad| (x - decayed(x, grad) * lr, [])
    }

    fn composed(&self, x: &Tensor, []: [&Tensor; 0], grad: &Tensor) -> Result<(Tensor, [Tensor; 0])> {
        Ok(((x - (decay(self.weight_decay, x, grad)? * self.lr)?)?, []))
    }
}

/// Gradient descent with momentum, whose buffer is the state.
pub struct MomentumRule {
    /// The learning rate.
    pub lr: f64,
    /// The share of the number that is added to its gradient.
    pub weight_decay: f64,
    /// The share of the last move that is kept.
    pub momentum: f64,
    /// The factor of the gradient when it is added to the buffer.
    pub part: f64,
    /// Whether the gradient is taken ahead (Nesterov).
    pub nesterov: bool,
}

impl UpdateRule<1> for MomentumRule {
    fn of<T: Real>(&self) -> impl Fn(T, [T; 1], T) -> (T, [T; 1]) {
        let [lr, momentum, part] = [self.lr, self.momentum, self.part].map(T::from_f64);
        let (decayed, nesterov) = (decayed::<T>(self.weight_decay), self.nesterov);
        #[inline(always)]
        move |x, [buffer], grad| {
            let grad = decayed(x, grad);
            let buffer = buffer * momentum + grad * part;
            let change = if nesterov { grad + buffer * momentum } else { buffer };
            (x - change * lr, [buffer])
        }
    }

    fn composed(&self, x: &Tensor, [buffer]: [&Tensor; 1], grad: &Tensor) -> Result<(Tensor, [Tensor; 1])> {
        let grad = decay(self.weight_decay, x, grad)?;
        let buffer = ((buffer * self.momentum)? + (&grad * self.part)?)?;
        let change = if self.nesterov { (grad + (&buffer * self.momentum)?)? } else { buffer.clone() };
        Ok(((x - (change * self.lr)?)?, [buffer]))
    }
}

/// Adagrad, with the sum of the squared gradients as state.
pub struct AdagradRule {
    /// The learning rate.
    pub lr: f64,
    /// The share of the number that is added to its gradient.
    pub weight_decay: f64,
    /// What is added to the divisor.
    pub eps: f64,
}

impl UpdateRule<1> for AdagradRule {
    fn of<T: Real>(&self) -> impl Fn(T, [T; 1], T) -> (T, [T; 1]) {
        let [lr, eps] = [self.lr, self.eps].map(T::from_f64);
        let decayed = decayed::<T>(self.weight_decay);
        #[inline(always)]
        move |x, [sum], grad| {
            let grad = decayed(x, grad);
            let sum = sum + grad * grad;
            (x - grad / (sum.sqrt() + eps) * lr, [sum])
        }
    }

    fn composed(&self, x: &Tensor, [sum]: [&Tensor; 1], grad: &Tensor) -> Result<(Tensor, [Tensor; 1])> {
        let grad = decay(self.weight_decay, x, grad)?;
        let sum = (sum + grad.sqr()?)?;
        let change = (grad / (sum.sqrt()? + self.eps)?)?;
        Ok(((x - (change * self.lr)?)?, [sum]))
    }
}

/// AdamW, with the running means of the gradient and of its square as state.
pub struct AdamWRule {
    /// The learning rate.
    pub lr: f64,
    /// The decay of the two running means.
    pub betas: [f64; 2],
    /// The factors of the bias correction.
    pub scales: [f64; 2],
    /// What is added to the divisor.
    pub eps: f64,
    /// The factor of weight decay.
    pub keep: f64,
}

impl UpdateRule<2> for AdamWRule {
    fn of<T: Real>(&self) -> impl Fn(T, [T; 2], T) -> (T, [T; 2]) {
        let [keep_first, keep_second] = self.betas.map(T::from_f64);
        let [part_first, part_second] = self.betas.map(|beta| T::from_f64(1.0 - beta));
        let [scale_first, scale_second] = self.scales.map(T::from_f64);
        let [lr, eps, keep] = [self.lr, self.eps, self.keep].map(T::from_f64);
        #[inline(always)]
        move |x, [first, second], grad| {
            let first = first * keep_first + grad * part_first;
            let second = second * keep_second + grad * grad * part_second;
            let change = first * scale_first / ((second * scale_second).sqrt() + eps);
            (x * keep - change * lr, [first, second])
        }
    }

    fn composed(
        &self,
        x: &Tensor,
        [first, second]: [&Tensor; 2],
        grad: &Tensor,
    ) -> Result<(Tensor, [Tensor; 2])> {
        let [keep_first, keep_second] = self.betas;
        let first = ((first * keep_first)? + (grad * (1.0 - keep_first))?)?;
        let second = ((second * keep_second)? + (grad.sqr()? * (1.0 - keep_second))?)?;
        let [scale_first, scale_second] = self.scales;
        let change = ((&first * scale_first)? / ((&second * scale_second)?.sqrt()? + self.eps)?)?;
        Ok((((x * self.keep)? - (change * self.lr)?)?, [first, second]))
    }
}

/// Adds the gradient of the weight decay. Without decay the gradient is unchanged, because `0 · x` may be NaN.
#[inline(always)]
fn decayed<T: Real>(weight_decay: f64) -> impl Fn(T, T) -> T {
    let (is_on, weight_decay) = (weight_decay != 0.0, T::from_f64(weight_decay));
    #[inline(always)]
    move |x, grad| if is_on { grad + x * weight_decay } else { grad }
}

/// Like [`decayed`], for tensors.
fn decay(weight_decay: f64, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    if weight_decay == 0.0 { Ok(grad.clone()) } else { grad + (x * weight_decay)? }
}
