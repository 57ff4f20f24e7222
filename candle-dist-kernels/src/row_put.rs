use candle_core::{Result, Tensor};

use super::element::{change, with_element};
use super::{Reading, check_rows, device_rows};

/// Writes `values`, `[rows.len(), width]`, to distinct `rows` of a contiguous table of the same dtype, in place.
pub fn put_rows(table: &Tensor, rows: &[u32], values: &Tensor) -> Result<()> {
    let width = check_rows("put_rows", table, rows)?;
    if values.elem_count() == 0 {
        return Ok(());
    }
    if !table.device().is_cpu() {
        return device_rows::put(table, &Tensor::new(rows, table.device())?, values);
    }
    let values = values.contiguous()?;
    let reading = Reading::new(&values);
    with_element!("put_rows", table.dtype(), E => {
        let values = reading.elements::<E>()?;
        change::<E>(table, |table| {
            for (&row, values) in rows.iter().zip(values.chunks_exact(width)) {
                table[row as usize * width..][..width].copy_from_slice(values);
            }
            Ok(())
        })
    })
}
