//! Inputs that every rank can compute, and the expected results of reductions.
use crate::{ReduceOp, Result};
use candle_core::{DType, Device, Tensor};

/// Returns the tensor of `rank`: small whole numbers, which are exact in every dtype.
pub(super) fn input(rank: usize, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i * 7 + rank * 3) % 5 + 1) as f32).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?)
}

/// Returns the tensor of `rank` with fractions, whose sums depend on their order.
pub(super) fn fractions(rank: usize, len: usize) -> Result<Tensor> {
    let values: Vec<f32> = (0..len).map(|i| ((i * 37 + rank * 101) as f32).sin() * 1e3).collect();
    Ok(Tensor::new(values, &Device::Cpu)?)
}

/// Returns all elements, exact for the values that are used here.
pub(super) fn values(t: &Tensor) -> Result<Vec<f64>> {
    if t.dtype() == DType::F8E4M3 {
        // One by one: compilers may turn candle's conversion of a whole slice into an endless loop.
        let f8 = t.flatten_all()?.to_vec1::<float8::F8E4M3>()?;
        return Ok(f8.into_iter().map(|x| std::hint::black_box(x).to_f64()).collect());
    }
    // candle cannot cast empty tensors on GPUs.
    Ok(t.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

/// Checks shape, dtype, layout and every bit.
pub(super) fn assert_same(got: &Tensor, want: &Tensor, what: &str) -> Result<()> {
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    let (got_values, want_values) = (values(got)?, values(want)?);
    let equal = got_values.iter().zip(&want_values).all(|(got, want)| got.to_bits() == want.to_bits());
    assert!(equal && got_values.len() == want_values.len(), "{what}: {got_values:?} is not {want_values:?}");
    assert!(got.is_contiguous(), "{what}");
    Ok(())
}

/// Returns the reduction of the ranks' tensors in rank order, elementwise in f64: exact for whole numbers.
pub(super) fn reduced(n: usize, shape: &[usize], dtype: DType, op: ReduceOp) -> Result<Tensor> {
    let all = (0..n).map(|r| values(&input(r, shape, dtype)?)).collect::<Result<Vec<_>>>()?;
    let out: Vec<f64> = (0..all[0].len())
        .map(|i| {
            let column = all.iter().map(|v| v[i]);
            match op {
                ReduceOp::Sum => column.sum(),
                ReduceOp::Avg => column.sum::<f64>() / n as f64,
                ReduceOp::Min => column.fold(f64::INFINITY, f64::min),
                ReduceOp::Max => column.fold(f64::NEG_INFINITY, f64::max),
                ReduceOp::Product => column.product(),
                ReduceOp::And => column.fold(u64::MAX, |a, b| a & b as u64) as f64,
                ReduceOp::Or => column.fold(0, |a, b| a | b as u64) as f64,
                ReduceOp::Xor => column.fold(0, |a, b| a ^ b as u64) as f64,
                ReduceOp::PreMulSum(factor) => column.map(|x| x * factor.value()).sum(),
            }
        })
        .collect();
    Ok(Tensor::from_vec(out, shape, &Device::Cpu)?.to_dtype(dtype)?)
}

/// Returns sizes of a dim for `n` ranks: even, uneven, and with empty pieces.
pub(super) fn cuts(n: usize) -> Vec<Vec<usize>> {
    let empty_tail = (0..n).map(|r| if r == 0 { 3 } else { 0 }).collect();
    vec![vec![2; n], (0..n).map(|r| (r * 2) % 3 + 1).collect(), (0..n).collect(), empty_tail]
}

/// Returns the offset of the piece of `rank`.
pub(super) fn start(sizes: &[usize], rank: usize) -> usize {
    sizes[..rank].iter().sum()
}

/// Lengths of f32 tensors that backends may treat differently: sent at once, in several messages, in pieces. Most are
/// not divisible by the number of ranks.
pub(super) const LENGTHS: [usize; 6] = [1, 1023, 5_003, 20_011, 100_003, 300_007];
