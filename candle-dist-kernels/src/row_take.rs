use candle_core::{Result, Tensor, WithDType};
use candle_dist_base::Fresh;

use super::element::with_element;
use super::prefetch::Prefetch;
use super::{TensorReader, check_rows, device_rows};

/// Copies the `rows` of a contiguous table `[.., width]`.
pub fn take_rows(table: &Tensor, rows: &[u32]) -> Result<Fresh> {
    let width = check_rows("lookup", table, rows)?;
    if !table.device().is_cpu() {
        return device_rows::take(table, &Tensor::new(rows, table.device())?, 0.0);
    }
    let reading = TensorReader::new(table);
    let taken = with_element!("lookup", table.dtype(), E => Ok(E::to_cpu_storage_owned(take(reading.elements::<E>()?, width, rows))));
    Ok(Fresh::host(taken?, (rows.len(), width)))
}

fn take<E: Copy>(table: &[E], width: usize, rows: &[u32]) -> Vec<E> {
    let mut taken = Vec::with_capacity(rows.len() * width);
    let row_of = |entry: usize| rows[entry] as usize;
    Prefetch::along(&[Prefetch::of(table, width)], rows.len(), row_of, |entry| {
        taken.extend_from_slice(&table[row_of(entry) * width..][..width]);
    });
    taken
}
