//! The linear map.

use candle_core::{DType, Device::Cpu, Result, Tensor, Var};
use candle_shard::kernels::linear;

use crate::harness::*;

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
