//! The gated SiLU.

use candle_core::{Result, Tensor, Var};
use candle_shard::kernels::silu_gate;

use crate::kernels::harness::*;

pub(crate) fn fused_silu_gate(t: &[Tensor]) -> Result<Tensor> {
    silu_gate(&t[0], &t[1])
}

pub(crate) fn composed_silu_gate(t: &[Tensor]) -> Result<Tensor> {
    t[0].silu()? * &t[1]
}

#[test]
fn silu_gate_equals_its_composed_form() {
    for dims in SHAPES {
        compare(&fused_silu_gate, &composed_silu_gate, &[(randn(dims) * 3.0).unwrap(), randn(dims)]);
    }
    differences(&fused_silu_gate, &[(randn(&[31]) * 3.0).unwrap(), randn(&[31])]);
}

#[test]
fn silu_gate_takes_untracked_and_repeated_operands() -> Result<()> {
    let (x, gate) = (Var::from_tensor(&randn(&[7]))?, randn(&[7]));
    for (y, want) in
        [(silu_gate(&x, &gate)?, (x.silu()? * &gate)?), (silu_gate(&gate, &x)?, (gate.silu()? * &*x)?)]
    {
        let (got, want) = (y.backward()?, want.backward()?);
        assert!(distance(got.get(&x).unwrap(), want.get(&x).unwrap()) < 1e-14);
    }
    compare(&|t| silu_gate(&t[0], &t[0]), &|t| t[0].silu()? * &t[0], &[randn(&[9])]);
    Ok(())
}
