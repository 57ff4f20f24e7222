//! Sums of those rows of a matrix that belong together.

use candle_core::{Device, Result, Tensor, WithDType, bail};

use super::element::{Element, with_element};
use super::row_order::{RowOrder, position};
use super::{Reading, rows};

/// The rows of a matrix in groups, each summed in the order of the matrix.
///
/// 16-bit floats are summed in f32 and rounded once.
pub(super) struct RowSums<'a, E: Element> {
    order: &'a RowOrder,
    entries: &'a [E],
    width: usize,
    sum: Vec<E::Real>,
    rounded: Vec<E>,
}

impl<'a, E: Element> RowSums<'a, E> {
    /// Sums of `entries`, as many rows of `width` elements as `order` has entries.
    pub(super) fn new(order: &'a RowOrder, entries: &'a [E], width: usize) -> Self {
        Self { order, entries, width, sum: vec![E::Real::from_f64(0.0); width], rounded: vec![E::from_f64(0.0); width] }
    }

    /// Calls `f(row, sum)` for each row that occurs, in ascending order.
    #[inline(always)]
    pub(super) fn for_each(mut self, mut f: impl FnMut(u32, &[E])) {
        let entry = |key: u64| &self.entries[position(key) * self.width..][..self.width];
        for (row, group) in self.order.groups() {
            let [first, others @ ..] = group else { continue };
            if others.is_empty() {
                f(row, entry(*first));
                continue;
            }
            self.sum.iter_mut().zip(entry(*first)).for_each(|(sum, x)| *sum = x.load());
            for &other in others {
                self.sum.iter_mut().zip(entry(other)).for_each(|(sum, x)| *sum += x.load());
            }
            self.rounded.iter_mut().zip(&self.sum).for_each(|(rounded, &sum)| *rounded = E::store(sum));
            f(row, &self.rounded);
        }
    }
}

/// The rows that occur in `rows`, ascending, and for each the sum of its rows in `values`: `[rows.len(), width]`.
pub(crate) fn sum_rows(rows: &[u32], values: &Tensor) -> Result<(Vec<u32>, Tensor)> {
    let (len, width) = values.dims2()?;
    if len != rows.len() {
        bail!("sum_rows: {} rows for values of shape {:?}", rows.len(), values.shape());
    }
    let order = RowOrder::of(rows);
    let values = values.contiguous()?;
    let reading = Reading::new(&values);
    with_element!("sum_rows", values.dtype(), E => {
        let (mut unique, mut sums) = (Vec::with_capacity(len), Vec::with_capacity(len * width));
        let all = RowSums::<E>::new(&order, reading.elements()?, width);
        rows::vectorised(
            #[inline(always)]
            || all.for_each(|row, sum| {
                unique.push(row);
                sums.extend_from_slice(sum);
            }),
        );
        let sums = Tensor::from_vec(sums, (unique.len(), width), &Device::Cpu)?;
        Ok((unique, sums))
    })
}
