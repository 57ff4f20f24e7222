//! The dtype of sums, and sums of squares.
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::utils::barrier_pool;
use candle_core::{CpuStorage, DType, Device, Layout, Result, Storage, Tensor, WithDType};

/// Returns the dtype in which gradients of parameters of `dtype` are summed: f32 for 16-bit floats, otherwise `dtype`.
///
/// A sum in 16 bits has an error of 0.3 % over 8 passes and 1 % over 128, which an optimizer with 32-bit weights sees
/// as a different gradient.
pub fn sum_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    }
}

/// Returns the sum of the squares of all elements in f64, or of their differences to those of a tensor of the same shape
/// and dtype: a list of one number, where the tensor is.
///
/// On the CPU it reads contiguous tensors once, and the bits do not depend on the number of threads.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist_base::square_sum;
///
/// let [a, b] = [[1f32, 2.], [4., 2.]].map(|x| Tensor::new(&x, &Device::Cpu));
/// let (a, b) = (a?, b?);
/// assert_eq!(square_sum(&a, None)?.to_vec1::<f64>()?, [5.0]);
/// assert_eq!(square_sum(&a, Some(&b))?.to_vec1::<f64>()?, [9.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If the shapes or dtypes differ, or candle fails.
pub fn square_sum(x: &Tensor, less: Option<&Tensor>) -> Result<Tensor> {
    let less = less.unwrap_or(x);
    let is_alone = std::ptr::eq(x, less);
    if x.elem_count() == 0 {
        return Tensor::zeros(1, DType::F64, x.device());
    }
    if x.dims() == less.dims() && x.is_contiguous() && less.is_contiguous() {
        let ((x_s, x_l), (less_s, less_l)) = (x.storage_and_layout(), less.storage_and_layout());
        let made = match (&*x_s, &*less_s) {
            (Storage::Cpu(CpuStorage::F64(x)), Storage::Cpu(CpuStorage::F64(less))) => {
                Some(of_elements((x, x_l), (less, less_l), is_alone, |x| x, |a, b| a - b))
            }
            (Storage::Cpu(CpuStorage::F32(x)), Storage::Cpu(CpuStorage::F32(less))) => {
                Some(of_elements((x, x_l), (less, less_l), is_alone, f64::from, |a, b| a - b))
            }
            (Storage::Cpu(CpuStorage::BF16(x)), Storage::Cpu(CpuStorage::BF16(less))) if is_alone => {
                Some(of_elements((x, x_l), (less, less_l), is_alone, f64::from, |a, b| a - b))
            }
            _ => None,
        };
        if let Some(sum) = made {
            return Tensor::new(&[sum], &Device::Cpu);
        }
    }
    let x = if is_alone { x.detach() } else { (x.detach() - less.detach())? };
    x.to_dtype(DType::F64)?.sqr()?.sum_all()?.reshape(1)
}

/// Sums over the elements of contiguous operands.
fn of_elements<T: WithDType>(
    (x, x_l): (&[T], &Layout),
    (less, less_l): (&[T], &Layout),
    is_alone: bool,
    wide: impl Fn(T) -> f64 + Sync,
    minus: impl Fn(T, T) -> T + Sync,
) -> f64 {
    let len = x_l.shape().elem_count();
    let (x, less) = (&x[x_l.start_offset()..][..len], &less[less_l.start_offset()..][..len]);
    let square = |x: T| wide(x) * wide(x);
    by_blocks(len, &|block| match is_alone {
        true => in_lanes(&x[block.clone()], &x[block], |x, _| square(x)),
        false => in_lanes(&x[block.clone()], &less[block], |x, less| square(minus(x, less))),
    })
}

/// Adds up the sums of blocks of the numbers below `len`, on the threads of candle's elementwise ops.
fn by_blocks(len: usize, sum: &(dyn Fn(Range<usize>) -> f64 + Sync)) -> f64 {
    const BLOCK: usize = 64 * 1024;
    let sums: Vec<AtomicU64> = (0..len.div_ceil(BLOCK)).map(|_| AtomicU64::new(0)).collect();
    let run = |blocks: Range<usize>| {
        for block in blocks {
            let start = block * BLOCK;
            sums[block].store(sum(start..len.min(start + BLOCK)).to_bits(), Ordering::Relaxed);
        }
    };
    match sums.len() {
        few @ 0..4 => run(0..few),
        many => barrier_pool().execute_chunked(many, run),
    }
    sums.into_iter().map(|sum| f64::from_bits(sum.into_inner())).sum()
}

/// Sums over pairs in lanes, which the compiler computes together.
#[inline(always)]
fn in_lanes<T: Copy>(a: &[T], b: &[T], f: impl Fn(T, T) -> f64) -> f64 {
    const LANES: usize = 16;
    let ((whole_a, rest_a), (whole_b, rest_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0; LANES];
    for (a, b) in whole_a.iter().zip(whole_b) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += f(a, b);
        }
    }
    let rest: f64 = rest_a.iter().zip(rest_b).map(|(&a, &b)| f(a, b)).sum();
    lanes.into_iter().sum::<f64>() + rest
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::square_sum;
    use candle_core::{DType, Device, Tensor};

    #[test]
    fn sums_of_squares_are_those_of_candle_in_f64() {
        for len in [0, 1, 15, 33, 5 * 64 * 1024 + 7] {
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                let numbers = |factor: f64| {
                    let numbers = (Tensor::arange(0f64, len as f64, &Device::Cpu)? * factor)?.sin()?;
                    numbers.to_dtype(dtype)
                };
                let (a, b): (Tensor, Tensor) = (numbers(0.3).unwrap(), numbers(0.7).unwrap());
                let turned = |x: &Tensor| x.narrow(0, 0, len / 3 * 3)?.reshape((len / 3, 3))?.t();
                let views = [&a, &b].map(|x| turned(x).unwrap());
                for (x, less) in [
                    (&a, None),
                    (&a, Some(&b)),
                    (&views[0], None),
                    (&views[0], Some(&views[1])),
                    (&views[0], Some(&views[1].contiguous().unwrap())),
                ] {
                    let got = square_sum(x, less).unwrap().to_vec1::<f64>().unwrap()[0];
                    let each = match less {
                        Some(less) if x.elem_count() > 0 => (x - less).unwrap(),
                        _ => x.clone(),
                    };
                    let all =
                        each.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
                    let want: f64 = all.iter().map(|x| x * x).sum();
                    assert!((got - want).abs() <= 1e-12 * want, "{len} {dtype:?}: {got} for {want}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_reaches_the_sum() {
        for (bad, place) in [(f32::NAN, 3), (f32::INFINITY, 300_000)] {
            let mut numbers = vec![0.5f32; 300_001];
            numbers[place] = bad;
            let x = Tensor::new(numbers, &Device::Cpu).unwrap();
            for dtype in [DType::F32, DType::BF16] {
                let x = x.to_dtype(dtype).unwrap();
                assert!(!square_sum(&x, None).unwrap().to_vec1::<f64>().unwrap()[0].is_finite());
            }
        }
    }

    #[test]
    fn other_shapes_and_dtypes_are_errors() {
        let x = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        for (len, dtype) in [(4, DType::F32), (3, DType::F64)] {
            assert!(square_sum(&x, Some(&Tensor::zeros(len, dtype, &Device::Cpu).unwrap())).is_err());
        }
    }
}
