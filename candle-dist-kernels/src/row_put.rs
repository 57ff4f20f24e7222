use candle_core::{Result, Tensor, bail};

use super::element::{change, with_element};
use super::{TensorReader, check_rows, device_rows, share_memory};

/// Writes `values`, `[rows.len(), width]`, to distinct `rows` of a contiguous table of the same dtype, in place.
pub fn put_rows(table: &Tensor, rows: &[u32], values: &Tensor) -> Result<()> {
    let width = check_rows("put_rows", table, rows)?;
    if values.dims() != [rows.len(), width] || values.dtype() != table.dtype() {
        let [got, want] = [values, table].map(|x| format!("{:?} {:?}", x.dims(), x.dtype()));
        bail!("put_rows: values {got} for {} rows of a table {want}", rows.len());
    }
    if values.elem_count() == 0 {
        return Ok(());
    }
    if !table.device().is_cpu() {
        return device_rows::put(table, &Tensor::new(rows, table.device())?, values);
    }
    let values =
        if share_memory(values, table) { values.force_contiguous()? } else { values.contiguous()? };
    let reading = TensorReader::new(&values);
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device::Cpu};

    fn table() -> Result<Tensor> {
        Tensor::arange(0f32, 6.0, &Cpu)?.reshape((3, 2))
    }

    #[test]
    fn rows_are_written_where_they_belong() -> Result<()> {
        let (table, values) = (table()?, Tensor::new(&[[7f32, 8.0], [9.0, 10.0]], &Cpu)?);
        put_rows(&table, &[2, 0], &values)?;
        assert_eq!(table.to_vec2::<f32>()?, [[9.0, 10.0], [2.0, 3.0], [7.0, 8.0]]);
        // Also if they are rows of the table itself.
        put_rows(&table, &[0], &table.narrow(0, 1, 1)?)?;
        assert_eq!(table.to_vec2::<f32>()?, [[2.0, 3.0], [2.0, 3.0], [7.0, 8.0]]);
        put_rows(&table, &[], &Tensor::zeros((0, 2), DType::F32, &Cpu)?)
    }

    #[test]
    fn values_of_another_shape_or_dtype_are_refused() -> Result<()> {
        let of = |dims: (usize, usize), dtype| Tensor::zeros(dims, dtype, &Cpu);
        for (rows, values) in [
            (&[2][..], of((1, 4), DType::F32)?),
            (&[2], of((2, 2), DType::F32)?),
            (&[0, 1], of((1, 2), DType::F32)?),
            (&[2], of((1, 2), DType::F64)?),
            (&[3], of((1, 2), DType::F32)?),
        ] {
            assert!(put_rows(&table()?, rows, &values).is_err(), "{rows:?} {values:?}");
        }
        assert!(put_rows(&of((3, 0), DType::F32)?, &[0], &of((1, 2), DType::F32)?).is_err());
        Ok(())
    }
}
