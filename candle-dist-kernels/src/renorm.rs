//! Scaling of table rows whose norm is too large, in place.
//!
//! A row may lie in pieces on several ranks. Each rank computes the [`power_sums`] of its piece; [`combine`] says how
//! to reduce them, [`finish`] returns the norm of the whole row, and each rank calls [`scale_rows`] on its piece.

use candle_core::{DType, Device, Result, Tensor, WithDType, bail};
use candle_dist_base::{ReduceOp, empty};
use half::{bf16, f16};

use super::element::{Element, change_memory, with_element};
use super::prefetch::Prefetch;
use super::row_take::take_rows;
use super::{TensorReader, check_rows, device_rows, rows};

/// Returns `Σ|w|^p` over each of the `rows` of a piece `[.., width]` of a table, in f64.
///
/// For `p = ∞` it is the largest `|w|`, for `-∞` the smallest, and for 0 the number of non-zero elements. NaN elements
/// make it NaN, except for `p = 0`. A piece without columns yields the identity of [`combine`].
pub fn power_sums(table: &Tensor, rows: &[u32], p: f64) -> Result<Vec<f64>> {
    let width = check_rows("max_norm", table, rows)?;
    if !table.device().is_cpu() {
        // Only these rows are copied to the host.
        let taken = empty::to_host(&take_rows(&table.contiguous()?, rows)?.into_tensor())?;
        return power_sums(&taken, &(0..rows.len() as u32).collect::<Vec<_>>(), p);
    }
    let table = table.contiguous()?;
    let reading = TensorReader::new(&table);
    with_element!("max_norm", table.dtype(), E => {
        let elements = reading.elements::<E>()?;
        Ok(rows::vectorised(
            #[inline(always)]
            || {
                let mut sums = Vec::with_capacity(rows.len());
                let row_of = |entry: usize| rows[entry] as usize;
                Prefetch::along(
                    &[Prefetch::of(elements, width)],
                    rows.len(),
                    row_of,
                    #[inline(always)]
                    |entry| sums.push(power_sum(&elements[row_of(entry) * width..][..width], p)),
                );
                sums
            },
        ))
    })
}

#[inline(always)]
fn power_sum<E: Element>(row: &[E], p: f64) -> f64 {
    let size = |x: E| x.to_f64().abs();
    // Both functions propagate NaN.
    let larger = |a: f64, b: f64| if b > a || b.is_nan() { b } else { a };
    let smaller = |a: f64, b: f64| if b < a || b.is_nan() { b } else { a };
    match (combine(p), p) {
        (ReduceOp::Max, _) => rows::reduce(row, 0.0, |a, x| larger(a, size(x)), larger),
        (ReduceOp::Min, _) => rows::reduce(row, f64::INFINITY, |a, x| smaller(a, size(x)), smaller),
        (_, 0.0) => sum(row, |x| if x == 0.0 { 0.0 } else { 1.0 }),
        (_, 1.0) => sum(row, |x| x),
        (_, 2.0) => sum(row, |x| x * x),
        (_, p) => sum(row, |x| x.powf(p)),
    }
}

/// Returns the sum of `f(|x|)`.
#[inline(always)]
fn sum<E: Element>(row: &[E], f: impl Fn(f64) -> f64) -> f64 {
    rows::reduce(row, 0.0, |sum, x| sum + f(x.to_f64().abs()), |a, b| a + b)
}

/// Returns the reduction that joins the [`power_sums`] of the pieces of a row.
pub fn combine(p: f64) -> ReduceOp {
    match p {
        f64::INFINITY => ReduceOp::Max,
        f64::NEG_INFINITY => ReduceOp::Min,
        _ => ReduceOp::Sum,
    }
}

/// Returns the norm of a whole row with this power sum, rounded to the dtype of its table as in PyTorch.
pub fn finish(sum: f64, p: f64, dtype: DType) -> f64 {
    let norm = match p {
        2.0 => sum.sqrt(),
        p if p == 0.0 || p == 1.0 || p.is_infinite() => sum,
        p => sum.powf(1.0 / p),
    };
    match dtype {
        DType::F32 => norm as f32 as f64,
        DType::F16 => f16::from_f64(norm).to_f64(),
        DType::BF16 => bf16::from_f64(norm).to_f64(),
        _ => norm,
    }
}

/// Multiplies each of the `rows` of a table whose norm is above `max_norm` by `max_norm / (norm + 1e-7)`, in place.
///
/// The factor is rounded to the table's dtype, as in PyTorch. Other rows are not written, nor are rows whose norm is
/// NaN. `rows` must be unique: each is multiplied once per occurrence. Fails on a view that repeats elements.
pub fn scale_rows(table: &Tensor, rows: &[u32], norms: &[f64], max_norm: f64) -> Result<()> {
    let width = check_rows("max_norm", table, rows)?;
    if norms.len() != rows.len() {
        bail!("max_norm: {} norms of {} rows", norms.len(), rows.len());
    }
    if table.elem_count() == 0 {
        return Ok(()); // candle mistakes it for a view that repeats elements
    }
    let long = rows.iter().zip(norms).filter(|&(_, &norm)| norm > max_norm);
    let (rows, factors): (Vec<u32>, Vec<f64>) =
        long.map(|(&row, norm)| (row, max_norm / (norm + 1e-7))).unzip();
    if !table.device().is_cpu() {
        return composed(table, rows, factors);
    }
    with_element!("max_norm", table.dtype(), E => change_memory::<E>(table, |memory, layout| {
        let (memory, strides) = (&mut memory[layout.start_offset()..], layout.stride());
        let factors = factors.iter().map(|&factor| E::from_f64(factor).load());
        let of_rows = rows.iter().map(|&row| row as usize * strides[0]).zip(factors);
        if strides[1] == 1 {
            scale_dense(memory, of_rows, width);
            return Ok(());
        }
        for (start, factor) in of_rows {
            for x in memory[start..].iter_mut().step_by(strides[1].max(1)).take(width) {
                *x = E::store(x.load() * factor);
            }
        }
        Ok(())
    }))
}

/// Multiplies rows of `width` elements that lie side by side.
fn scale_dense<E: Element>(memory: &mut [E], rows: impl Iterator<Item = (usize, E::Real)>, width: usize) {
    rows::vectorised(
        #[inline(always)]
        || {
            for (start, factor) in rows {
                for x in &mut memory[start..][..width] {
                    *x = E::store(x.load() * factor);
                }
            }
        },
    );
}

/// Multiplies rows by their factors in place off the host; the table must be contiguous.
fn composed(table: &Tensor, rows: Vec<u32>, factors: Vec<f64>) -> Result<()> {
    let count = rows.len();
    if count == 0 {
        return Ok(());
    }
    let rows = Tensor::from_vec(rows, count, table.device())?;
    let factors = Tensor::from_vec(factors, (count, 1), &Device::Cpu)?.to_dtype(table.dtype())?;
    let scaled = device_rows::take(table, &rows, 0.0)?
        .into_tensor()
        .broadcast_mul(&factors.to_device(table.device())?)?;
    device_rows::put(table, &rows, &scaled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device::Cpu, Var};

    #[test]
    fn candles_own_operations_scale_alike_in_every_dtype() -> Result<()> {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let table = Tensor::arange(1f64, 13., &Cpu)?.reshape((4, 3))?.to_dtype(dtype)?;
            let [fused, plain] = [Var::from_tensor(&table)?, Var::from_tensor(&table)?];
            scale_rows(&fused, &[2, 0], &[3.0, 7.0], 1.3)?;
            composed(&plain, vec![2, 0], vec![1.3 / (3.0 + 1e-7), 1.3 / (7.0 + 1e-7)])?;
            let [fused, plain] = [fused, plain].map(|var| var.to_dtype(DType::F64)?.to_vec2::<f64>());
            assert_eq!(fused?, plain?, "{dtype:?}");
        }
        Ok(())
    }

    #[test]
    fn pieces_of_columns_combine_to_the_norms_of_whole_rows() -> Result<()> {
        let table =
            Tensor::from_iter((0..60).map(|i| (i * 37 % 23) as f64 / 7.0 - 1.0), &Cpu)?.reshape((5, 12))?;
        let rows = [4, 0, 3];
        for p in [0.0, 0.5, 1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY, -1.0] {
            let whole = power_sums(&table, &rows, p)?;
            let mut pieces = Vec::new();
            for (start, len) in [(0, 5), (5, 0), (5, 7)] {
                pieces.push(power_sums(&table.narrow(1, start, len)?.contiguous()?, &rows, p)?);
            }
            for (i, &whole) in whole.iter().enumerate() {
                let parts = pieces.iter().map(|piece| piece[i]);
                let joined = match combine(p) {
                    ReduceOp::Max => parts.fold(f64::NEG_INFINITY, f64::max),
                    ReduceOp::Min => parts.fold(f64::INFINITY, f64::min),
                    _ => parts.sum(),
                };
                assert!(
                    joined == whole || (joined / whole - 1.0).abs() < 1e-14,
                    "p {p}, row {i}: {joined} for {whole}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn norms_are_rounded_to_the_dtype() {
        let third = finish(1.0 / 9.0, 2.0, DType::F64);
        assert_eq!(third, (1.0f64 / 9.0).sqrt());
        assert_eq!(finish(1.0 / 9.0, 2.0, DType::F32), third as f32 as f64);
        assert_eq!(finish(1e10, 2.0, DType::F16), f64::INFINITY);
        assert_eq!(finish(8.0, 3.0, DType::BF16), 2.0);
        assert_eq!(finish(4.0, -1.0, DType::F64), 0.25);
    }

    #[test]
    fn a_view_of_a_variable_is_scaled_in_its_memory() -> Result<()> {
        let var = Var::new(&[[1f32, 1.], [2., 2.], [3., 3.]], &Cpu)?;
        let view = var.narrow(0, 1, 2)?;
        scale_rows(&view, &[1, 0], &[2.0 - 1e-7, 1.0], 1.0)?;
        assert_eq!(var.to_vec2::<f32>()?, [[1., 1.], [2., 2.], [1.5, 1.5]]);
        assert!(scale_rows(&view, &[2], &[9.0], 1.0).is_err(), "no row of the view");
        assert!(scale_rows(&view, &[0], &[], 1.0).is_err(), "no norm");
        let (columns, before) = (var.t()?, var.to_vec2::<f32>()?);
        scale_rows(&columns, &[1], &power_sums(&columns, &[1], 1.0)?, 4.5)?;
        assert_eq!(before.iter().map(|row| row[1]).sum::<f32>(), 4.5);
        assert_eq!(
            columns.to_vec2::<f32>()?,
            Tensor::new(before, &Cpu)?.t()?.to_vec2::<f32>()?,
            "none is too long"
        );
        scale_rows(&columns, &[1], &[9.0 - 1e-7], 4.5)?;
        assert_eq!(var.to_vec2::<f32>()?, [[1., 0.5], [2., 1.], [1.5, 0.75]]);
        assert!(
            scale_rows(&var.get(0)?.unsqueeze(0)?.expand((3, 2))?, &[0], &[9.0], 1.0).is_err(),
            "one row thrice"
        );
        Ok(())
    }
}
