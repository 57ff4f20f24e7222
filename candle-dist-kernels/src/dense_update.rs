//! Optimizer steps that update all elements of a variable in place.
use candle_core::{DType, Result, Tensor, Var, bail};

use super::element::Element;
use super::master::{check_gradient, on_master};
use super::numbers::{Numbers, NumbersRef, change_numbers};
use super::real::{Real, is_computed};
use super::rows::by_blocks;
use super::rule::UpdateRule;
use super::{TensorReader, share_memory};

/// See [`Update::update_all`](super::rules::Update::update_all).
pub(super) fn update_all<const N: usize>(
    name: &str,
    (var, master): (&Var, Option<&Var>),
    states: [&Var; N],
    grad: &Tensor,
    rule: &(impl UpdateRule<N> + Sync),
) -> Result<()> {
    check_gradient(name, var, grad)?;
    if var.elem_count() == 0 {
        return Ok(());
    }
    let changed: Vec<&Tensor> =
        std::iter::once(var).chain(master).chain(states).map(|var| var.as_tensor()).collect();
    if !changed.iter().all(|x| x.device().is_cpu() && x.is_contiguous() && is_computed(x.dtype())) {
        return on_master(name, (var, master), grad, |var, grad| compose(var, states, grad, rule));
    }
    let grad = grad.contiguous()?;
    let lies_in_both = changed.iter().any(|x| share_memory(&grad, x));
    let grad = if lies_in_both { grad.copy()? } else { grad };
    match var.dtype() {
        DType::F64 => step::<f64, N>(&changed, master.is_some(), &grad, rule),
        _ => step::<f32, N>(&changed, master.is_some(), &grad, rule),
    }
}

fn step<R: Real + Element<Real = R>, const N: usize>(
    changed: &[&Tensor],
    has_master: bool,
    grad: &Tensor,
    rule: &(impl UpdateRule<N> + Sync),
) -> Result<()> {
    let (reading, len) = (TensorReader::new(grad), grad.elem_count());
    let grad = NumbersRef::<R>::of(&reading)?;
    change_numbers(changed, Vec::new(), &mut |changed| {
        let mut changed = changed.into_iter();
        let (Some(x), master) = (changed.next(), has_master.then(|| changed.next()).flatten()) else {
            bail!("step: no variable");
        };
        let states: Vec<_> = changed.collect();
        let states =
            states.try_into().or_else(|given: Vec<_>| bail!("step: {} states, not {N}", given.len()))?;
        move_all(UpdateBlock { x, master, states, grad: grad.part(0, len) }, len, rule);
        Ok(())
    })
}

/// Elements that are updated together.
struct UpdateBlock<'a, R, const N: usize> {
    x: Numbers<'a, R>,
    master: Option<Numbers<'a, R>>,
    states: [Numbers<'a, R>; N],
    grad: NumbersRef<'a, R>,
}

fn move_all<R: Real + Element<Real = R>, const N: usize>(
    mut all: UpdateBlock<'_, R, N>,
    len: usize,
    rule: &(impl UpdateRule<N> + Sync),
) {
    /// The elements of one thread.
    const BLOCK: usize = 8 * 1024;
    let starts = (0..len).step_by(BLOCK);
    let mut blocks: Vec<_> = starts
        .map(|start| {
            let len = BLOCK.min(len - start);
            let block = UpdateBlock {
                x: all.x.take(len),
                master: all.master.as_mut().map(|master| master.take(len)),
                states: all.states.each_mut().map(|state| state.take(len)),
                grad: all.grad.part(start, len),
            };
            (block, len)
        })
        .collect();
    by_blocks(
        &mut blocks,
        1,
        BLOCK,
        #[inline(always)]
        |_, blocks| blocks.iter_mut().for_each(|(block, len)| move_block(block, *len, rule)),
    );
}

#[inline(always)]
fn move_block<R: Real + Element<Real = R>, const N: usize>(
    UpdateBlock { x, master, states, grad }: &mut UpdateBlock<'_, R, N>,
    len: usize,
    rule: &impl UpdateRule<N>,
) {
    /// The elements that are computed at once, so that all operands stay in a core's L1 cache.
    const AT_ONCE: usize = 512;
    let moved = rule.of();
    let (mut of_x, mut of_master, mut of_grad) =
        ([R::zero(); AT_ONCE], [R::zero(); AT_ONCE], [R::zero(); AT_ONCE]);
    let mut of_states = [[R::zero(); AT_ONCE]; N];
    for start in (0..len).step_by(AT_ONCE) {
        let now = AT_ONCE.min(len - start);
        let grad = grad.read(start, &mut of_grad[..now]);
        let mut lent =
            states.iter_mut().zip(&mut of_states).map(|(state, room)| state.lend(start, &mut room[..now]));
        let now_states: [&mut [R]; N] = std::array::from_fn(|_| lent.next().unwrap_or_default());
        match master {
            Some(master) => {
                let values = master.lend(start, &mut of_master[..now]);
                x.lead(start, values);
                move_numbers(values, now_states, grad, &moved);
                x.set(start, values);
                master.settle(start, &of_master[..now]);
            }
            None => {
                move_numbers(x.lend(start, &mut of_x[..now]), now_states, grad, &moved);
                x.settle(start, &of_x[..now]);
            }
        }
        states.iter_mut().zip(&of_states).for_each(|(state, room)| state.settle(start, &room[..now]));
    }
}

#[inline(always)]
fn move_numbers<R: Real, const N: usize>(
    x: &mut [R],
    mut states: [&mut [R]; N],
    grad: &[R],
    moved: &impl Fn(R, [R; N], R) -> (R, [R; N]),
) {
    let len = x.len().min(grad.len());
    let mut states = states.each_mut().map(|state| &mut state[..len]);
    for i in 0..len {
        let (value, next) = moved(x[i], states.each_ref().map(|state| state[i]), grad[i]);
        x[i] = value;
        states.iter_mut().zip(next).for_each(|(state, next)| state[i] = next);
    }
}

/// The update composed of candle's operations. `grad` is in the compute dtype.
fn compose<const N: usize>(
    var: &Var,
    states: [&Var; N],
    grad: &Tensor,
    rule: &impl UpdateRule<N>,
) -> Result<()> {
    let wide = |var: &Var| var.as_detached_tensor().to_dtype(grad.dtype());
    let mut now = Vec::with_capacity(N);
    for state in states {
        now.push(wide(state)?);
    }
    let (x, next) = rule.composed(&wide(var)?, std::array::from_fn(|i| &now[i]), grad)?;
    var.set(&x.to_dtype(var.dtype())?)?;
    states.iter().zip(&next).try_for_each(|(state, next)| state.set(&next.to_dtype(state.dtype())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::master::master_of;
    use crate::rules::{AdagradRule, AdamWRule, MomentumRule, SgdRule};
    use candle_core::Device::Cpu;

    /// Numbers of both signs, as a strided matrix of two columns if `len` is even.
    fn numbers(len: usize, scale: f64, dtype: DType) -> Result<Tensor> {
        let list = (Tensor::arange(0f64, len as f64, &Cpu)? * scale)?.sin()?.to_dtype(dtype)?;
        if len.is_multiple_of(2) { list.reshape((2, len / 2))?.t() } else { Ok(list) }
    }

    fn check<const N: usize>(rule: &(impl UpdateRule<N> + Sync)) -> Result<()> {
        let lens = [0, 1, 511, 9000, 150_000];
        for (dtype, len) in itertools::iproduct!([DType::F32, DType::F64, DType::BF16, DType::F16], lens) {
            let wide = candle_dist_base::sum_dtype(dtype);
            for (state_dtype, has_master) in [(wide, false), (dtype, false), (wide, true)] {
                let make = || -> Result<(Var, Option<Var>, Vec<Var>)> {
                    let x = Var::from_tensor(&numbers(len, 0.3, dtype)?.contiguous()?)?;
                    let master = if has_master { master_of(&x)? } else { None };
                    let state = |_| Var::from_tensor(&numbers(len, 0.7, state_dtype)?.contiguous()?.abs()?);
                    Ok((x, master, (0..N).map(state).collect::<Result<_>>()?))
                };
                let ((x, x_master, xs), (y, y_master, ys)) = (make()?, make()?);
                let of = |states: &[Var]| -> [Var; N] { std::array::from_fn(|i| states[i].clone()) };
                for step in 1..4 {
                    let grad = numbers(len, f64::from(step), if step == 2 { wide } else { dtype })?;
                    if step == 3 && len > 1 {
                        // Written from outside.
                        [&x, &y]
                            .into_iter()
                            .try_for_each(|var| var.set(&(var.as_detached_tensor() * 1.5)?))?;
                    }
                    update_all("kernel", (&x, x_master.as_ref()), of(&xs).each_ref(), &grad, rule)?;
                    on_master("composed", (&y, y_master.as_ref()), &grad, |var, grad| {
                        compose(var, of(&ys).each_ref(), grad, rule)
                    })?;
                }
                let pairs =
                    std::iter::once((&x, &y)).chain(x_master.iter().zip(&y_master)).chain(xs.iter().zip(&ys));
                for (a, b) in pairs {
                    let [a, b] = [a, b].map(|x| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>());
                    assert!(a? == b?, "{dtype:?} {len}, states {state_dtype:?}, master {has_master}");
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
        check(&AdagradRule { lr, weight_decay, eps: 1e-10 })?;
        check(&AdamWRule { lr, betas: [0.9, 0.99], scales: [1.5, 1.25], eps: 1e-8, keep: 0.97 })
    }

    #[test]
    fn an_operand_that_shares_memory_or_has_another_dtype_is_no_deadlock() -> Result<()> {
        let rule = AdagradRule { lr: 0.1, weight_decay: 0.0, eps: 1e-10 };
        let (x, sum) = (Var::new(&[1f32, -2.], &Cpu)?, Var::new(&[3f32, 3.], &Cpu)?);
        update_all("test", (&x, None), [&sum], &sum.as_detached_tensor(), &rule)?;
        assert_eq!(sum.to_vec1::<f32>()?, [12., 12.]);
        update_all("test", (&x, None), [&sum], &x.as_detached_tensor(), &rule)?;
        let wide = Var::new(&[3f64, 3.], &Cpu)?;
        assert!(update_all("test", (&x, None), [&wide], &sum, &rule).is_err());
        Ok(())
    }
}
