//! Matrix products into new memory.

use candle_core::backend::BackendStorage;
use candle_core::utils::get_num_threads;
use candle_core::{CpuStorage, DType, Layout, Result, bail};
use gemm::{Parallelism, gemm};

use super::real::Real;

/// Returns the product of `a [m, k]` and `b [k, n]` with any strides.
///
/// The bits are those of candle's product. candle fills the result with zeros before it computes it; this does not.
pub(super) fn product(a: &CpuStorage, a_l: &Layout, b: &CpuStorage, b_l: &Layout) -> Result<CpuStorage> {
    let ((m, k), (_, n)) = (a_l.shape().dims2()?, b_l.shape().dims2()?);
    if m * k * n == 0 {
        return Ok(match a.dtype() {
            DType::F64 => CpuStorage::F64(vec![0.0; m * n]),
            _ => CpuStorage::F32(vec![0.0; m * n]),
        });
    }
    match (a, b) {
        // On other processors candle may be built with a faster library.
        (CpuStorage::F32(a), CpuStorage::F32(b)) if cfg!(target_arch = "x86_64") => {
            Ok(CpuStorage::F32(dense(a, a_l, b, b_l)?))
        }
        (CpuStorage::F64(a), CpuStorage::F64(b)) if cfg!(target_arch = "x86_64") => {
            Ok(CpuStorage::F64(dense(a, a_l, b, b_l)?))
        }
        _ => a.matmul(b, (1, m, n, k), a_l, b_l),
    }
}

/// Returns the dense product of matrices that are not empty.
fn dense<T: Real>(a: &[T], a_l: &Layout, b: &[T], b_l: &Layout) -> Result<Vec<T>> {
    let ((m, k), (inner, n)) = (a_l.shape().dims2()?, b_l.shape().dims2()?);
    if k != inner {
        bail!("product: [{m}, {k}] does not fit [{inner}, {n}]");
    }
    let (a, [a_rows, a_columns]) = (within(a, a_l)?, strides(a_l)?);
    let (b, [b_rows, b_columns]) = (within(b, b_l)?, strides(b_l)?);
    let mut out = Vec::with_capacity(m * n);
    if m == 1 || n == 1 || k <= 2 {
        out.resize(m * n, T::zero()); // gemm adds to the result of vectors and of thin matrices
    }
    let threads = get_num_threads();
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    // SAFETY: `within` has checked that all elements of `a` and `b` lie in their slices, and `out` has room for `m * n`
    // elements, which no other slice overlaps. gemm does not read the result, as `read_dst` is false, except in the cases
    // where it is filled above. It writes every element.
    unsafe {
        gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            false,
            a.as_ptr(),
            a_columns,
            a_rows,
            b.as_ptr(),
            b_columns,
            b_rows,
            T::zero(),
            T::one(),
            false,
            false,
            false,
            parallelism,
        );
        out.set_len(m * n);
    }
    Ok(out)
}

/// Returns the elements from the first one of a matrix that is not empty; an error if its last one is outside.
fn within<'a, T>(elements: &'a [T], layout: &Layout) -> Result<&'a [T]> {
    let last: usize = layout.dims().iter().zip(layout.stride()).map(|(&dim, &stride)| (dim - 1) * stride).sum();
    match elements.get(layout.start_offset()..) {
        Some(rest) if last < rest.len() => Ok(rest),
        _ => bail!("product: a matrix {layout:?} lies outside of its {} elements", elements.len()),
    }
}

fn strides(layout: &Layout) -> Result<[isize; 2]> {
    match *layout.stride() {
        [rows, columns] => Ok([rows as isize, columns as isize]),
        _ => bail!("product: {layout:?} is no matrix"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::product;
    use candle_core::backend::BackendStorage;
    use candle_core::{CpuStorage, Layout, Shape};

    /// A matrix of this shape that begins at `start` and is stored by columns if `is_turned`.
    fn matrix(rows: usize, columns: usize, start: usize, is_turned: bool) -> (CpuStorage, Layout) {
        let data = (0..rows * columns + start).map(|i| ((i * 37 + rows) % 101) as f32 * 0.13 - 5.0).collect();
        let stride = if is_turned { vec![1, rows] } else { vec![columns, 1] };
        (CpuStorage::F32(data), Layout::new(Shape::from((rows, columns)), stride, start))
    }

    fn wide(s: &CpuStorage) -> CpuStorage {
        CpuStorage::F64(s.as_slice::<f32>().unwrap().iter().map(|&x| f64::from(x)).collect())
    }

    #[test]
    fn products_have_the_bits_of_candle() {
        let sizes = [1, 2, 3, 8, 17, 65, 130];
        for (m, k, n) in itertools::iproduct!(sizes, [1, 2, 3, 64, 300], sizes) {
            for (a_turned, b_turned, start) in itertools::iproduct!([false, true], [false, true], [0, 5]) {
                let ((a, a_l), (b, b_l)) = (matrix(m, k, start, a_turned), matrix(k, n, 2 * start, b_turned));
                for (a, b) in [(wide(&a), wide(&b)), (a, b)] {
                    let got = product(&a, &a_l, &b, &b_l).unwrap();
                    let want = a.matmul(&b, (1, m, n, k), &a_l, &b_l).unwrap();
                    let same = match (&got, &want) {
                        (CpuStorage::F32(got), CpuStorage::F32(want)) => got == want,
                        (CpuStorage::F64(got), CpuStorage::F64(want)) => got == want,
                        _ => false,
                    };
                    assert!(same, "[{m}, {k}] {a_turned} and [{k}, {n}] {b_turned} from {start}");
                }
            }
        }
    }

    #[test]
    fn a_matrix_outside_of_its_memory_is_an_error() {
        let ((a, a_l), (b, _)) = (matrix(3, 4, 0, false), matrix(4, 2, 0, false));
        for outside in [Layout::contiguous((4, 3)), Layout::new(Shape::from((4, 2)), vec![2, 1], 1)] {
            assert!(product(&a, &a_l, &b, &outside).is_err());
        }
        assert!(product(&a, &a_l, &b, &Layout::contiguous((2, 4))).is_err());
    }
}
