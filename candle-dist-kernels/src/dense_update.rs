//! Optimizer steps that update all elements of a variable in place.
use candle_core::{Result, Tensor, Var, bail};

use super::element::{Element, change, change_all, with_element};
use super::row_update::Rule;
use super::rows::by_blocks;
use super::{Reading, share_memory};

/// A rule that can also be composed of candle's operations, for tensors on which no kernel runs.
pub trait DenseRule<const N: usize>: Rule<N> {
    /// Returns the updated tensor and its states, in the compute dtype.
    fn composed(&self, x: &Tensor, states: [&Tensor; N], grad: &Tensor) -> Result<(Tensor, [Tensor; N])>;
}

/// Updates all elements of `var` by `grad`, which is contiguous. `grad` and the states are f32 for 16-bit floats.
pub fn update_all<const N: usize>(
    var: &Var,
    states: [&Var; N],
    grad: &Tensor,
    rule: &(impl DenseRule<N> + Sync),
) -> Result<()> {
    let in_place = var.device().is_cpu() && var.is_contiguous() && states.iter().all(|state| state.is_contiguous());
    if !in_place {
        return compose(var, states, grad, rule);
    }
    let lies_in_both = std::iter::once(&var).chain(&states).any(|var| share_memory(grad, var));
    let grad = if lies_in_both { &grad.copy()? } else { grad };
    let reading = Reading::new(grad);
    let states = states.map(|state| state.as_tensor());
    with_element!("step", var.dtype(), E => {
        let grad = reading.elements::<<E as Element>::Real>()?;
        change(var, |x| {
            change_all(&states, Vec::new(), &mut |states| {
                let states = states.try_into().or_else(|given: Vec<_>| bail!("step: {} states, not {N}", given.len()))?;
                move_all::<E, N>(x, states, grad, rule);
                Ok(())
            })
        })
    })
}

/// The elements that one thread updates.
struct Block<'a, E: Element, const N: usize> {
    x: &'a mut [E],
    states: [&'a mut [E::Real]; N],
    grad: &'a [E::Real],
}

fn move_all<E: Element, const N: usize>(
    x: &mut [E],
    states: [&mut [E::Real]; N],
    grad: &[E::Real],
    rule: &(impl Rule<N> + Sync),
) {
    const BLOCK: usize = 8 * 1024;
    let mut states = states.map(|state| state.chunks_mut(BLOCK));
    let blocks = x.chunks_mut(BLOCK).zip(grad.chunks(BLOCK));
    let blocks = blocks.map(|(x, grad)| {
        let states = states.each_mut().map(|state| state.next().unwrap_or_default());
        Block { x, states, grad }
    });
    let mut blocks: Vec<Block<'_, E, N>> = blocks.collect();
    by_blocks(
        &mut blocks,
        1,
        BLOCK,
        #[inline(always)]
        |_, blocks| {
            let moved = rule.of();
            for Block { x, states, grad } in blocks {
                let len = x.len().min(grad.len());
                let mut states = states.each_mut().map(|state| &mut state[..len]);
                for i in 0..len {
                    let (value, now) = moved(x[i].load(), states.each_ref().map(|state| state[i]), grad[i]);
                    x[i] = E::store(value);
                    states.iter_mut().zip(now).for_each(|(state, now)| state[i] = now);
                }
            }
        },
    );
}

/// The update composed of candle's operations.
fn compose<const N: usize>(var: &Var, states: [&Var; N], grad: &Tensor, rule: &impl DenseRule<N>) -> Result<()> {
    let now = states.map(|state| state.as_detached_tensor());
    let x = var.as_detached_tensor().to_dtype(grad.dtype())?;
    let (x, next) = rule.composed(&x, now.each_ref(), grad)?;
    var.set(&x.to_dtype(var.dtype())?)?;
    states.iter().zip(&next).try_for_each(|(state, next)| state.set(next))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{AdagradRule, MomentumRule, SgdRule};
    use candle_core::{DType, Device::Cpu};

    fn check<const N: usize>(rule: &(impl DenseRule<N> + Sync)) -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            for len in [1, 9000, 150_000] {
                let wide = candle_dist::sum_dtype(dtype);
                let numbers = |scale: f64| (Tensor::arange(0f64, len as f64, &Cpu)? * scale)?.sin()?.to_dtype(wide);
                let var = || Var::from_tensor(&numbers(0.3)?.to_dtype(dtype)?);
                let state = |_| Var::from_tensor(&numbers(0.7)?.abs()?);
                let states = || (0..N).map(state).collect::<Result<Vec<_>>>();
                let (x, y, xs, ys) = (var()?, var()?, states()?, states()?);
                let of = |states: &[Var]| -> [Var; N] { std::array::from_fn(|i| states[i].clone()) };
                for step in 1..4 {
                    let grad = numbers(f64::from(step))?;
                    update_all(&x, of(&xs).each_ref(), &grad, rule)?;
                    compose(&y, of(&ys).each_ref(), &grad, rule)?;
                }
                for (a, b) in std::iter::once((&x, &y)).chain(xs.iter().zip(&ys)) {
                    let [a, b] = [a.to_dtype(DType::F64)?, b.to_dtype(DType::F64)?];
                    let error = (a - b)?.abs()?.max_all()?.to_scalar::<f64>()?;
                    let bound = if dtype == wide { 1e-5 } else { 1e-2 };
                    assert!(error < bound, "{dtype:?} {len}: {error}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn kernels_move_numbers_as_candles_operations_do() -> Result<()> {
        let (lr, weight_decay) = (0.1, 0.03);
        check(&SgdRule { lr, weight_decay })?;
        check(&SgdRule { lr, weight_decay: 0.0 })?;
        check(&MomentumRule { lr, weight_decay, momentum: 0.9, part: 0.5, nesterov: false })?;
        check(&MomentumRule { lr, weight_decay, momentum: 0.9, part: 1.0, nesterov: true })?;
        check(&AdagradRule { lr, weight_decay, eps: 1e-10 })
    }
}
