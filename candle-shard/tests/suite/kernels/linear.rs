//! The linear map.

use candle_core::{DType, Device::Cpu, Result, Tensor, Var};
use candle_shard::kernels::linear;

use crate::kernels::harness::*;

pub(crate) fn fused_linear(t: &[Tensor]) -> Result<Tensor> {
    linear(&t[0], &t[1], t.get(2))
}

pub(crate) fn composed_linear(t: &[Tensor]) -> Result<Tensor> {
    let y = t[0].broadcast_matmul(&t[1].t()?)?;
    match t.get(2) {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

#[test]
fn linear_equals_its_composed_form() {
    for (lead, k, n) in
        [(&[][..], 3, 2), (&[1], 1, 1), (&[5], 7, 3), (&[2, 3], 5, 9), (&[2, 1, 4], 16, 8), (&[70], 40, 2000)]
    {
        let x = randn(&[lead, &[k]].concat());
        let (weight, bias) = (randn(&[n, k]), randn(&[n]));
        if !lead.is_empty() {
            compare(&fused_linear, &composed_linear, &[x.clone(), weight.clone()]);
            compare(&fused_linear, &composed_linear, &[x, weight, bias]);
        } else {
            let row = x.unsqueeze(0).unwrap();
            let want = composed_linear(&[row, weight.clone(), bias.clone()]).unwrap().squeeze(0).unwrap();
            assert!(distance(&fused_linear(&[x, weight, bias]).unwrap(), &want) < 1e-14);
        }
    }
    differences(&fused_linear, &[randn(&[3, 5]), randn(&[4, 5]), randn(&[4])]);
}

#[test]
fn linear_takes_untracked_and_repeated_operands() -> Result<()> {
    let (x, weight) = (Var::from_tensor(&randn(&[4, 4]))?, randn(&[4, 4]));
    let grads = linear(&x, &weight, None)?.sum_all()?.backward()?;
    let want = Tensor::ones((4, 4), DType::F64, &Cpu)?.matmul(&weight)?;
    assert!(distance(grads.get(&x).unwrap(), &want) < 1e-14);
    let square = |t: &[Tensor]| linear(&t[0], &t[0], None);
    compare(&square, &|t| t[0].matmul(&t[0].t()?), &[randn(&[4, 4])]);
    Ok(())
}

#[test]
fn few_rows_in_16_bits_are_computed_as_in_32() -> Result<()> {
    for (m, n, k) in
        [(1, 1, 1), (1, 7, 33), (1, 300, 700), (2, 5, 64), (4, 70, 100), (3, 0, 5), (2, 3, 0), (0, 3, 4)]
    {
        for dtype in [DType::BF16, DType::F16] {
            let [x, weight, bias] =
                [&[m, k][..], &[n, k], &[n]].map(|dims| randn(dims).to_dtype(dtype).unwrap());
            let wide = |t: &Tensor| t.to_dtype(DType::F32);
            let want = linear(&wide(&x)?, &wide(&weight)?, Some(&wide(&bias)?))?.to_dtype(dtype)?;
            let got = linear(&x, &weight, Some(&bias))?;
            assert_eq!((got.dims(), got.dtype()), (&[m, n][..], dtype));
            let [got, want] = [got, want].map(|t| t.to_dtype(DType::F64).unwrap());
            assert!(m * n == 0 || distance(&got, &want) < 1e-12, "{m} {n} {k}");
            if n > 2 && k > 3 && m > 0 {
                // Rows of a larger weight, and columns, which lie apart.
                let part = |t: &Tensor| t.narrow(0, 1, n - 1)?.narrow(1, 2, k - 2);
                let (x, part) = (x.narrow(1, 1, k - 2)?, part(&weight)?);
                let want = linear(&wide(&x)?, &wide(&part.contiguous()?)?, None)?.to_dtype(dtype)?;
                assert_eq!(
                    linear(&x, &part, None)?.to_dtype(DType::F32)?.to_vec2::<f32>()?,
                    wide(&want)?.to_vec2::<f32>()?
                );
            }
        }
    }
    Ok(())
}
