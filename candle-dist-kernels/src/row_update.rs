//! Optimizer steps that read and write only the rows that have a gradient.

use candle_core::{Result, Tensor, Var, bail};

use super::element::{Element, change, change_all, with_element};
use super::prefetch::Prefetch;
use super::real::Real;
use super::row_order::RowOrder;
use super::row_sum::GroupSum;
use super::rule::UpdateRule;
use super::{TensorReader, check_rows, rows, rows_off_host, share_memory};

/// See [`Update::update_rows`](super::rules::Update::update_rows).
pub(super) fn update_rows<const N: usize>(
    table: &Var,
    states: &[Var],
    listed: &[u32],
    grad: &Tensor,
    rule: &impl UpdateRule<N>,
) -> Result<()> {
    let width = check_rows("step", table, listed)?;
    if grad.dims() != [listed.len(), width] || grad.dtype() != table.dtype() {
        let (got, want) = (grad.shape(), table.shape());
        let (of, dtype) = (listed.len(), table.dtype());
        bail!("step: a gradient {got:?} {:?} of {of} rows of a table {want:?} {dtype:?}", grad.dtype());
    }
    if !table.device().is_cpu() {
        return rows_off_host::update_rows(table, states, listed, grad, rule);
    }
    let grad = grad.contiguous()?;
    let lies_in_both = std::iter::once(table).chain(states).any(|var| share_memory(&grad, var));
    let grad = if lies_in_both { grad.copy()? } else { grad };
    let order = RowOrder::of(listed);
    let reading = TensorReader::new(&grad);
    let states: Vec<&Tensor> = states.iter().map(|state| state.as_tensor()).collect();
    with_element!("step", table.dtype(), E => {
        let grad = reading.elements::<E>()?;
        change(table, |table| {
            change_all(&states, Vec::new(), &mut |states| {
                let states = states.try_into().or_else(|given: Vec<_>| bail!("step: {} states, not {N}", given.len()))?;
                move_rows(table, states, &order, GroupSum::<E>::new(grad, width), width, rule.of());
                Ok(())
            })
        })
    })
}

fn move_rows<R: Real, E: Element<Real = R>, const N: usize>(
    table: &mut [E],
    mut states: [&mut [R]; N],
    order: &RowOrder,
    mut sums: GroupSum<'_, E>,
    width: usize,
    moved: impl Fn(R, [R; N], R) -> (R, [R; N]),
) {
    rows::vectorised(
        #[inline(always)]
        || {
            let of_table = Prefetch::of(table, width);
            let of_states = states.each_ref().map(|state| Prefetch::of(state, width));
            let tables: Vec<Prefetch> = std::iter::once(of_table).chain(of_states).collect();
            let groups: Vec<(u32, &[u64])> = order.groups().collect();
            let row_of = |entry: usize| groups[entry].0 as usize;
            Prefetch::along(
                &tables,
                groups.len(),
                row_of,
                #[inline(always)]
                |entry: usize| {
                    let (row, group) = groups[entry];
                    let at = row as usize * width;
                    let (row, grad) = (&mut table[at..][..width], &sums.of(group)[..width]);
                    let mut states = states.each_mut().map(|state| &mut state[at..][..width]);
                    for i in 0..width {
                        let state = states.each_ref().map(|state| state[i]);
                        let (x, state) = moved(row[i].load(), state, grad[i].load());
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
