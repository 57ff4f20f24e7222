//! The rows of a table whose norm is too large, made shorter in place.
//!
//! A row may lie in pieces on several ranks: each takes the [`power_sums`] of its piece, these are [`combine`]d,
//! [`finish`]ed to the norm of the whole row, and each rank [`scale_rows`] its piece.

use candle_core::{DType, Result, Tensor, WithDType, bail};
use candle_dist::ReduceOp;
use half::{bf16, f16};

use super::element::{Element, change, with_element};
use super::{Reading, check_rows, rows};

/// `Σ|w|^p` over each of the `rows` of a piece `[.., width]` of a table, in f64.
///
/// For `p = ∞` it is the largest `|w|`, for `-∞` the smallest, and for 0 the number of elements that are not 0. NaN
/// makes it NaN, but for `p = 0`. A piece without columns gives what [`combine`] leaves as it is.
pub(crate) fn power_sums(table: &Tensor, rows: &[u32], p: f64) -> Result<Vec<f64>> {
    let width = check_rows("max_norm", table, rows)?;
    let table = table.contiguous()?;
    let reading = Reading::new(&table);
    with_element!("max_norm", table.dtype(), E => {
        let elements = reading.elements::<E>()?;
        Ok(rows::vectorised(
            #[inline(always)]
            || {
                let mut sums = Vec::with_capacity(rows.len());
                for burst in rows.chunks(rows::BURST) {
                    rows::touch(elements, burst.iter().map(|&row| row as usize), width);
                    sums.extend(burst.iter().map(|&row| power_sum(&elements[row as usize * width..][..width], p)));
                }
                sums
            },
        ))
    })
}

#[inline(always)]
fn power_sum<E: Element>(row: &[E], p: f64) -> f64 {
    let size = |x: E| x.to_f64().abs();
    // NaN passes every comparison of these two.
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

/// The sum of `f(|x|)`.
#[inline(always)]
fn sum<E: Element>(row: &[E], f: impl Fn(f64) -> f64) -> f64 {
    rows::reduce(row, 0.0, |sum, x| sum + f(x.to_f64().abs()), |a, b| a + b)
}

/// How the [`power_sums`] of the pieces of a row make that of the row.
pub(crate) fn combine(p: f64) -> ReduceOp {
    match p {
        f64::INFINITY => ReduceOp::Max,
        f64::NEG_INFINITY => ReduceOp::Min,
        _ => ReduceOp::Sum,
    }
}

/// The norm of a whole row with this power sum, rounded to the dtype of its table as PyTorch does.
pub(crate) fn finish(sum: f64, p: f64, dtype: DType) -> f64 {
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
/// The other rows are not written, nor those whose norm is NaN. `rows` must be unique: each is multiplied as often as
/// it is listed.
pub(crate) fn scale_rows(table: &Tensor, rows: &[u32], norms: &[f64], max_norm: f64) -> Result<()> {
    let width = check_rows("max_norm", table, rows)?;
    if norms.len() != rows.len() {
        bail!("max_norm: {} norms of {} rows", norms.len(), rows.len());
    }
    let long = rows.iter().zip(norms).filter(|&(_, &norm)| norm > max_norm);
    with_element!("max_norm", table.dtype(), E => change::<E>(table, |table| {
        for (&row, norm) in long {
            let scale = <E as Element>::Real::from_f64(max_norm / (norm + 1e-7));
            for x in &mut table[row as usize * width..][..width] {
                *x = E::store(x.load() * scale);
            }
        }
        Ok(())
    }))
}
