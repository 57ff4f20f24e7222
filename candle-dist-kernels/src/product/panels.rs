//! Products of 16-bit matrices, widened a panel at a time.
use candle_core::Result;
use gemm::Parallelism;

use super::columns::by_columns;
use super::matrix::{Matrix, multiply};
use crate::element::Element;
use crate::parallel;
use crate::rows::vectorised;

/// The least elements of a panel: as floats they lie in the L2 cache of a core.
const PANEL: usize = 64 * 1024;

/// The most columns of a panel. From this many on, the product takes far longer than the widening of the panel.
const MOST: usize = 1024;

/// Returns the product of 16-bit matrices that are not empty, computed in f32. The larger operand is widened a panel of
/// columns of the result at a time, or of rows. `most` bounds the columns of a panel.
pub(super) fn product<E: Element<Real = f32>, O: Element<Real = f32>>(
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    most: Option<usize>,
) -> Result<Vec<O>> {
    let ([m, k], [_, n]) = (a.dims, b.dims);
    // The rows of both operands are multiplied with each other.
    let (cut, whole) = if n >= m { (b.turned(), a) } else { (a, b.turned()) };
    let (lines, others) = (cut.dims[0], whole.dims[0]);
    let panel = most.unwrap_or((PANEL / k).max(others).clamp(16, MOST));
    let wide = widen(whole, 0, others);
    let whole = wide.matrix()?;
    let starts: Vec<usize> = (0..lines).step_by(panel).collect();
    let threads = parallel::threads();
    let inside = if threads > starts.len() { Parallelism::Rayon(threads) } else { Parallelism::None };
    let of_panel = |start: usize| -> Result<Vec<f32>> {
        let part = widen(cut, start, panel.min(lines - start));
        let part = part.matrix()?;
        match n >= m {
            true => multiply(whole, part.turned(), inside),
            false => multiply(part, whole.turned(), inside),
        }
    };
    let is_cut = threads <= starts.len();
    if n < m {
        let of_rows = |_, start: usize| {
            let made = of_panel(start)?;
            Ok(vectorised(
                #[inline(always)]
                || made.iter().map(|&x| O::store(x)).collect(),
            ))
        };
        let parts = parallel::map(is_cut, starts.into_iter(), of_rows);
        let parts: Vec<Vec<O>> = parts.into_iter().collect::<Result<_>>()?;
        return Ok(parts.concat());
    }
    let widths: Vec<usize> = starts.iter().map(|start| panel.min(n - start)).collect();
    by_columns(m, &widths, is_cut, |number, out| {
        let (made, width) = (of_panel(starts[number])?, widths[number]);
        vectorised(
            #[inline(always)]
            || {
                for (row, made) in made.chunks_exact(width).enumerate() {
                    let numbers = out.row(row, 0..width).iter_mut().zip(made);
                    numbers.for_each(|(out, &x)| _ = out.write(O::store(x)));
                }
            },
        );
        // SAFETY: the product has `m` rows of all of these columns.
        unsafe { out.set_written() };
        Ok(())
    })
}

/// Some rows of a matrix in f32.
struct F32Rows {
    elements: Vec<f32>,
    dims: [usize; 2],
    strides: [usize; 2],
}

impl F32Rows {
    fn matrix(&self) -> Result<Matrix<'_, f32>> {
        Matrix::new(&self.elements, self.dims, self.strides)
    }
}

/// Widens `count` rows, in the order in which they lie in memory.
fn widen<E: Element<Real = f32>>(from: Matrix<'_, E>, start: usize, count: usize) -> F32Rows {
    let (columns, [of_row, of_column]) = (from.dims[1], from.strides);
    let by_columns = of_row == 1 && of_column != 1;
    let (outer, inner) = if by_columns { (columns, count) } else { (count, columns) };
    let (of_outer, of_inner) = if by_columns { (of_column, of_row) } else { (of_row, of_column) };
    let mut elements = Vec::with_capacity(count * columns);
    vectorised(
        #[inline(always)]
        || {
            for line in 0..outer {
                let line = &from.elements[start * of_row + line * of_outer..];
                match of_inner {
                    1 => elements.extend(line[..inner].iter().map(|&x| x.load())),
                    step => elements.extend((0..inner).map(|i| line[i * step].load())),
                }
            }
        },
    );
    F32Rows { elements, dims: [count, columns], strides: if by_columns { [1, count] } else { [columns, 1] } }
}
