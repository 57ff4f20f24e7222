//! Steps of optimisers that read and write only the rows that have a gradient.

use candle_core::{Result, Tensor, Var, bail};

use super::element::{Element, change, change_all, with_element};
use super::real::Real;
use super::row_order::RowOrder;
use super::row_sum::RowSums;
use super::{Reading, check_rows, rows, share_memory};

/// How one number moves, which has `N` numbers of state.
pub(crate) trait Rule<const N: usize>: Sync {
    /// The number `x` and its state after the gradient `grad`.
    fn moved<T: Real>(&self, x: T, state: [T; N], grad: T) -> (T, [T; N]);
}

/// Gradient descent.
pub(crate) struct SgdRule {
    pub(crate) lr: f64,
}

impl Rule<0> for SgdRule {
    #[inline(always)]
    fn moved<T: Real>(&self, x: T, []: [T; 0], grad: T) -> (T, [T; 0]) {
        (x - grad * T::from_f64(self.lr), [])
    }
}

/// Adagrad, with the sum of the squared gradients as state.
pub(crate) struct AdagradRule {
    pub(crate) lr: f64,
    pub(crate) eps: f64,
}

impl Rule<1> for AdagradRule {
    #[inline(always)]
    fn moved<T: Real>(&self, x: T, [sum]: [T; 1], grad: T) -> (T, [T; 1]) {
        let sum = sum + grad * grad;
        (x - grad / (sum.sqrt() + T::from_f64(self.eps)) * T::from_f64(self.lr), [sum])
    }
}

/// AdamW, with the running means of the gradient and of its square as state.
pub(crate) struct AdamWRule {
    pub(crate) lr: f64,
    pub(crate) betas: [f64; 2],
    /// What makes the means unbiased.
    pub(crate) scales: [f64; 2],
    pub(crate) eps: f64,
    /// What weight decay leaves.
    pub(crate) keep: f64,
}

impl Rule<2> for AdamWRule {
    #[inline(always)]
    fn moved<T: Real>(&self, x: T, [first, second]: [T; 2], grad: T) -> (T, [T; 2]) {
        let [[keep_first, part_first], [keep_second, part_second]] =
            self.betas.map(|beta| [beta, 1.0 - beta].map(T::from_f64));
        let [scale_first, scale_second] = self.scales.map(T::from_f64);
        let [lr, eps, keep] = [self.lr, self.eps, self.keep].map(T::from_f64);
        let first = first * keep_first + grad * part_first;
        let second = second * keep_second + grad * grad * part_second;
        let change = first * scale_first / ((second * scale_second).sqrt() + eps);
        (x * keep - change * lr, [first, second])
    }
}

/// Moves the rows of `table` that are listed in `rows`, by the sum of their rows in `grad`: `[rows.len(), width]`.
///
/// Each of `states` has the shape of the table, and its dtype or f32 for 16-bit floats.
pub(crate) fn update_rows<const N: usize>(
    table: &Var,
    states: &[Var; N],
    listed: &[u32],
    grad: &Tensor,
    rule: &impl Rule<N>,
) -> Result<()> {
    let width = check_rows("step", table, listed)?;
    if grad.dims() != [listed.len(), width] || grad.dtype() != table.dtype() {
        let (got, want) = (grad.shape(), table.shape());
        let (of, dtype) = (listed.len(), table.dtype());
        bail!("step: a gradient {got:?} {:?} of {of} rows of a table {want:?} {dtype:?}", grad.dtype());
    }
    let grad = grad.contiguous()?;
    let lies_in_both = std::iter::once(table).chain(states).any(|var| share_memory(&grad, var));
    let grad = if lies_in_both { grad.copy()? } else { grad };
    let order = RowOrder::of(listed);
    let reading = Reading::new(&grad);
    let states = states.each_ref().map(|state| state.as_tensor());
    with_element!("step", table.dtype(), E => {
        let grad = reading.elements::<E>()?;
        change(table, |table| {
            change_all(&states, Vec::new(), &mut |states| {
                let Ok(states) = <[_; N]>::try_from(states) else { bail!("step: states were lost") };
                move_rows(table, states, RowSums::<E>::new(&order, grad, width), width, rule);
                Ok(())
            })
        })
    })
}

fn move_rows<E: Element, const N: usize>(
    table: &mut [E],
    mut states: [&mut [E::Real]; N],
    grads: RowSums<'_, E>,
    width: usize,
    rule: &impl Rule<N>,
) {
    rows::vectorised(
        #[inline(always)]
        || {
            grads.for_each(
                #[inline(always)]
                |row, grad| {
                    let at = row as usize * width;
                    let row = &mut table[at..][..width];
                    let mut states = states.each_mut().map(|state| &mut state[at..][..width]);
                    let grad = &grad[..width];
                    for i in 0..width {
                        let state = states.each_ref().map(|state| state[i]);
                        let (x, state) = rule.moved(row[i].load(), state, grad[i].load());
                        row[i] = E::store(x);
                        for (old, new) in states.iter_mut().zip(state) {
                            old[i] = new;
                        }
                    }
                },
            );
        },
    );
}
