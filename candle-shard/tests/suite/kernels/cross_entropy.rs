//! Cross entropy.

use candle_core::{DType, Device::Cpu, Result, Tensor};
use candle_shard::kernels::cross_entropy;

use crate::kernels::harness::*;

fn targets(n: usize, classes: usize) -> Tensor {
    Tensor::from_iter((0..n).map(|i| (i * 7 % classes) as u32), &Cpu).unwrap()
}

pub(crate) fn fused_cross_entropy(t: &[Tensor]) -> Result<Tensor> {
    let (n, c) = t[0].dims2()?;
    let targets = targets(n, c).to_device(t[0].device())?;
    // Both index types, told apart by the parity of the shape.
    cross_entropy(&t[0], &if c % 2 == 0 { targets } else { targets.to_dtype(DType::I64)? })
}

pub(crate) fn composed_cross_entropy(t: &[Tensor]) -> Result<Tensor> {
    let (n, c) = t[0].dims2()?;
    candle_nn::ops::log_softmax(&t[0], 1)?.gather(&targets(n, c).unsqueeze(1)?, 1)?.squeeze(1)?.neg()
}

#[test]
fn cross_entropy_equals_its_composed_form() {
    for dims in [[1, 1], [3, 7], [5, 10], [17, 65], [601, 256]] {
        compare(&fused_cross_entropy, &composed_cross_entropy, &[randn(&dims)]);
        let large = (randn(&dims) * 1e3).unwrap();
        compare(&fused_cross_entropy, &composed_cross_entropy, &[large]);
    }
    differences(&fused_cross_entropy, &[randn(&[4, 5])]);
}
