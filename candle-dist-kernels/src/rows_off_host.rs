//! Sums and steps of rows of tables that are not on the host: candle's operations on the rows in use. The lists of rows are on the host.
use super::row_order::{RowOrder, position};
use super::rule::UpdateRule;
use super::{compute_dtype, device_rows};
use candle_core::{Result, Tensor, Var, bail};
use candle_dist_base::empty;

/// Returns the distinct rows in `rows`, ascending, and for each the sum of its rows in `values`, in the dtype of the values.
///
/// The numbers of a row are added in pairs, then the sums in pairs, and so on. So the bits are the same in each run, and the
/// number of launches grows with the logarithm of how often a row occurs. 16-bit floats are summed in f32 and rounded once. If no
/// row repeats, and all are in order, the sums are the values, in their memory.
pub(super) fn sum_rows(rows: &[u32], values: &Tensor) -> Result<(Vec<u32>, Tensor)> {
    let order = RowOrder::of(rows);
    let places = |group: &[u64]| group.iter().map(|&entry| position(entry) as u32).collect();
    let (unique, groups): (Vec<u32>, Vec<Vec<u32>>) =
        order.groups().map(|(row, group)| (row, places(group))).unzip();
    if values.elem_count() == 0 {
        return Ok((unique, Tensor::zeros((groups.len(), values.dim(1)?), values.dtype(), values.device())?));
    }
    let mut sums = values.to_dtype(compute_dtype("sum_rows", values)?)?;
    let mut groups: Vec<(usize, Vec<u32>)> = groups.into_iter().enumerate().collect();
    // Sums that are done, and for each of them which of the distinct rows it belongs to.
    let (mut done, mut place_of_done) = (Vec::new(), Vec::new());
    while !groups.is_empty() {
        let (of_one, others): (Vec<_>, Vec<_>) = groups.into_iter().partition(|(_, group)| group.len() == 1);
        groups = others;
        let (places, ones): (Vec<usize>, Vec<Vec<u32>>) = of_one.into_iter().unzip();
        if !ones.is_empty() {
            done.push(select(&sums, &ones.concat())?);
            place_of_done.extend(places);
        }
        if !groups.is_empty() {
            sums = in_pairs(&sums, &mut groups)?;
        }
    }
    let mut done_of_place = vec![0; place_of_done.len()];
    place_of_done.iter().zip(0..).for_each(|(&place, at)| done_of_place[place] = at);
    let sums = match &done[..] {
        [sums] => sums.clone(), // in order
        _ => select(&Tensor::cat(&done, 0)?, &done_of_place)?,
    };
    Ok((unique, sums.to_dtype(values.dtype())?))
}

/// Selects rows, without a copy if they are all rows in their order.
fn select(values: &Tensor, rows: &[u32]) -> Result<Tensor> {
    let are_all = values.dim(0)? == rows.len() && rows.iter().zip(0..).all(|(&row, at)| row == at);
    if are_all { Ok(values.clone()) } else { empty::index_select(values, rows, 0) }
}

/// Adds the rows of each group in pairs. The groups then name rows of the result.
fn in_pairs(values: &Tensor, groups: &mut [(usize, Vec<u32>)]) -> Result<Tensor> {
    let pairs: usize = groups.iter().map(|(_, group)| group.len() / 2).sum();
    let (mut left, mut right, mut alone) = (Vec::with_capacity(pairs), Vec::with_capacity(pairs), Vec::new());
    for (_, group) in groups {
        let mut next = Vec::with_capacity(group.len().div_ceil(2));
        for pair in group.chunks(2) {
            next.push(match *pair {
                [a, b] => {
                    left.push(a);
                    right.push(b);
                    left.len() - 1
                }
                _ => {
                    alone.extend(pair);
                    pairs + alone.len() - 1
                }
            } as u32);
        }
        *group = next;
    }
    let of = |rows: &[u32]| select(values, rows);
    let sums = (of(&left)? + of(&right)?)?;
    if alone.is_empty() { Ok(sums) } else { Tensor::cat(&[sums, of(&alone)?], 0) }
}

/// See [`Update::update_rows`](super::rules::Update::update_rows). The table and its states are contiguous.
pub(super) fn update_rows<const N: usize>(
    table: &Var,
    states: &[Var],
    listed: &[u32],
    grad: &Tensor,
    rule: &impl UpdateRule<N>,
) -> Result<()> {
    if grad.elem_count() == 0 {
        return Ok(());
    }
    let (rows, grad) = sum_rows(listed, grad)?;
    if let Some(state) = states.iter().find(|state| state.dims() != table.dims()) {
        bail!("step: a state {:?} of a table {:?}", state.dims(), table.dims());
    }
    let wide = compute_dtype("step", table)?;
    let index = Tensor::new(&rows[..], table.device())?;
    let taken = |var: &Var| device_rows::take(var, &index, 0.0)?.into_tensor().to_dtype(wide);
    let put = |var: &Var, rows: &Tensor| device_rows::put(var, &index, &rows.to_dtype(var.dtype())?);
    let now = states.iter().map(taken).collect::<Result<Vec<_>>>()?;
    let Ok(now) = <[Tensor; N]>::try_from(now) else { bail!("step: {} states, not {N}", states.len()) };
    let (x, next) = rule.composed(&taken(table)?, now.each_ref(), &grad.to_dtype(wide)?)?;
    put(table, &x)?;
    states.iter().zip(&next).try_for_each(|(state, next)| put(state, next))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row_update;
    use crate::rules::{AdagradRule, AdamWRule, SgdRule};
    use candle_core::{DType, Device::Cpu};

    /// Numbers of 1/8, whose sums are exact in each dtype but the 16-bit ones.
    fn numbers(rows: usize, width: usize, dtype: DType) -> Result<Tensor> {
        let list = (0..rows * width).map(|i| (i * 37 % 23) as f64 / 8.0 - 1.0);
        Tensor::from_iter(list, &Cpu)?.reshape((rows, width))?.to_dtype(dtype)
    }

    /// A row that occurs 40 times, some that occur once, twice and thrice, and one at the end.
    fn listed() -> Vec<u32> {
        let hot = std::iter::repeat_n(5, 40);
        [3, 0, 3, 8, 2, 8, 8, 7].into_iter().chain(hot).chain([0, 11]).collect()
    }

    fn elements(x: &Tensor) -> Result<Vec<f64>> {
        x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
    }

    #[test]
    fn sums_are_those_of_the_host() -> Result<()> {
        for (dtype, width) in
            itertools::iproduct!([DType::F64, DType::F32, DType::F16, DType::BF16], [0, 1, 5])
        {
            for rows in [listed(), vec![], vec![4], vec![9; 7]] {
                let values = numbers(rows.len(), width, dtype)?;
                let ((got_rows, got), (want_rows, want)) =
                    (sum_rows(&rows, &values)?, crate::row_sum::sum_rows(&rows, &values)?);
                assert_eq!((got_rows, got.dims(), got.dtype()), (want_rows, want.dims(), dtype));
                assert_eq!(elements(&got)?, elements(&want)?, "{dtype:?}, width {width}, {rows:?}");
            }
        }
        Ok(())
    }

    fn check<const N: usize>(rule: &impl UpdateRule<N>) -> Result<()> {
        for (dtype, width) in
            itertools::iproduct!([DType::F64, DType::F32, DType::F16, DType::BF16], [0, 1, 5])
        {
            let make = || -> Result<(Var, Vec<Var>)> {
                let state =
                    |_| Var::from_tensor(&numbers(12, width, candle_dist_base::sum_dtype(dtype))?.abs()?);
                Ok((
                    Var::from_tensor(&numbers(12, width, dtype)?)?,
                    (0..N).map(state).collect::<Result<_>>()?,
                ))
            };
            let ((x, xs), (y, ys)) = (make()?, make()?);
            for rows in [listed(), vec![], vec![6]] {
                let grad = numbers(rows.len(), width, dtype)?;
                update_rows(&x, &xs, &rows, &grad, rule)?;
                row_update::update_rows(&y, &ys, &rows, &grad, rule)?;
            }
            for (got, want) in std::iter::once((&x, &y)).chain(xs.iter().zip(&ys)) {
                assert_eq!(elements(got)?, elements(want)?, "{dtype:?}, width {width}");
            }
        }
        Ok(())
    }

    #[test]
    fn steps_are_those_of_the_host() -> Result<()> {
        let (lr, weight_decay) = (0.1, 0.0);
        check(&SgdRule { lr, weight_decay })?;
        check(&AdagradRule { lr, weight_decay, eps: 1e-10 })?;
        check(&AdamWRule { lr, betas: [0.9, 0.99], scales: [1.5, 1.25], eps: 1e-8, keep: 0.97 })
    }
}
