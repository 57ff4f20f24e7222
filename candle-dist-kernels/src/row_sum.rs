//! Sums of groups of rows of a matrix.

use candle_core::{Device, Result, Tensor, WithDType, bail};

use super::element::{Element, with_element};
use super::row_order::{RowOrder, position};
use super::{TensorReader, rows, rows_off_host, share_memory};

/// Sums groups of the rows of a matrix, in the order of the matrix.
///
/// 16-bit floats are summed in f32 and rounded once.
pub(super) struct GroupSum<'a, E: Element> {
    entries: &'a [E],
    width: usize,
    sum: Vec<E::Real>,
    rounded: Vec<E>,
}

impl<'a, E: Element> GroupSum<'a, E> {
    /// Creates sums of rows with `width` elements.
    pub(super) fn new(entries: &'a [E], width: usize) -> Self {
        Self {
            entries,
            width,
            sum: vec![E::Real::from_f64(0.0); width],
            rounded: vec![E::from_f64(0.0); width],
        }
    }

    /// Returns the sum of the entries of `group`, which must not be empty.
    #[inline(always)]
    pub(super) fn of(&mut self, group: &[u64]) -> &[E] {
        let entry = |key: u64| &self.entries[position(key) * self.width..][..self.width];
        let first = entry(group[0]);
        if group.len() == 1 {
            return first;
        }
        self.sum.iter_mut().zip(first).for_each(|(sum, x)| *sum = x.load());
        for &other in &group[1..] {
            self.sum.iter_mut().zip(entry(other)).for_each(|(sum, x)| *sum += x.load());
        }
        self.rounded.iter_mut().zip(&self.sum).for_each(|(rounded, &sum)| *rounded = E::store(sum));
        &self.rounded
    }
}

/// Returns the distinct rows in `rows`, ascending, and for each the sum of its rows in `values`: `[rows.len(), width]`.
pub fn sum_rows(rows: &[u32], values: &Tensor) -> Result<(Vec<u32>, Tensor)> {
    let (len, width) = values.dims2()?;
    if len != rows.len() {
        bail!("sum_rows: {} rows for values of shape {:?}", rows.len(), values.shape());
    }
    if !values.device().is_cpu() {
        let (rows, sums) = rows_off_host::sum_rows(rows, values)?;
        // Rows that occur once, in their order, are the values themselves.
        let sums = if share_memory(&sums, values) { sums.force_contiguous()? } else { sums };
        return Ok((rows, sums));
    }
    let order = RowOrder::of(rows);
    let values = values.contiguous()?;
    let reading = TensorReader::new(&values);
    with_element!("sum_rows", values.dtype(), E => {
        let (mut unique, mut sums) = (Vec::with_capacity(len), Vec::with_capacity(len * width));
        let mut sum = GroupSum::<E>::new(reading.elements()?, width);
        rows::vectorised(
            #[inline(always)]
            || for (row, group) in order.groups() {
                unique.push(row);
                sums.extend_from_slice(sum.of(group));
            },
        );
        let sums = Tensor::from_vec(sums, (unique.len(), width), &Device::Cpu)?;
        Ok((unique, sums))
    })
}
