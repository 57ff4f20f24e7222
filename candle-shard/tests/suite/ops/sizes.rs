//! Inputs with explicit sizes, which need not be those of the other inputs.
use crate::common::*;
use candle_core::{DType, Tensor, Var};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard, Spec};
use itertools::Itertools;
use test_utils::on_ranks;

/// All layouts of a `[5, 4]` tensor on a mesh, each outermost shard of dim 0 also with explicit sizes.
fn specs(mesh: &candle_dist::DeviceMesh) -> Result<Vec<Spec>> {
    let mut specs = Vec::new();
    for at in on_axes(&[Shard(0), Shard(1), Replicate], mesh.ndim()) {
        let spec = Spec::new(mesh, &at, (5, 4), DType::F64)?;
        let outermost = at.iter().position(|p| *p == Shard(0));
        for sizes in [&[1, 4][..], &[5, 0], &[0, 1, 4], &[3, 0, 2]] {
            if let Some(axis) = outermost.filter(|&axis| mesh.shape()[axis] == sizes.len()) {
                specs.push(spec.clone().with_sizes(axis, Some(sizes.into()))?);
            }
        }
        specs.push(spec);
    }
    Ok(specs)
}

type Op = (
    &'static str,
    fn(&DTensor, &DTensor) -> Result<DTensor>,
    fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
);

const OPS: [Op; 12] = [
    ("mul", |a, b| a.mul(b), |a, b| a * b),
    ("aᵀ b", |a, b| a.t()?.matmul(b), |a, b| a.t()?.matmul(b)),
    ("linear", |a, b| a.linear(b, None), |a, b| a.matmul(&b.t()?)),
    ("flat sum", |a, b| a.reshape(20)?.add(&b.reshape(20)?), |a, b| a.reshape(20)? + b.reshape(20)?),
    ("max", |a, b| a.max(0)?.mul(b.min(0)?), |a, b| a.max(0)? * b.min(0)?),
    ("softmax", |a, b| a.softmax(0)?.mul(b), |a, b| candle_nn::ops::softmax(a, 0)? * b),
    ("cumsum", |a, b| a.cumsum(0)?.mul(b), |a, b| a.cumsum(0)? * b),
    ("logcumsumexp", |a, b| a.logcumsumexp(0)?.mul(b), |a, b| crate::plain::logcumsumexp(a, 0)? * b),
    ("var", |a, b| a.var_keepdim(0)?.mul(b), |a, b| a.var_keepdim(0)?.broadcast_mul(b)),
    (
        "argmax",
        |a, b| a.argmax_keepdim(0)?.to_dtype(DType::F64)?.mul(b)?.add(a),
        |a, b| a.argmax_keepdim(0)?.to_dtype(DType::F64)?.broadcast_mul(b)? + a,
    ),
    ("topk", |a, b| a.t()?.topk(1)?.0.mul(b.t()?), |a, b| a.t()?.max_keepdim(1)?.broadcast_mul(&b.t()?)),
    (
        "split",
        |a, b| a.reshape((5, 2, 2))?.mul(&b.sum_keepdim(0)?.reshape((2, 2))?),
        |a, b| a.reshape((5, 2, 2))?.broadcast_mul(&b.sum_keepdim(0)?.reshape((2, 2))?),
    ),
];

#[test]
fn inputs_cut_in_different_sizes() {
    for shape in [&[3][..], &[2], &[2, 2], &[3, 2]] {
        on_ranks(shape.iter().product(), "sizes", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            let wholes = [values(&[5, 4], 1, DType::F64), values(&[5, 4], 2, DType::F64)];
            let specs = specs(&mesh)?;
            for (name, distributed, plain) in OPS {
                let vars = [Var::from_tensor(&wholes[0])?, Var::from_tensor(&wholes[1])?];
                let want = plain(&vars[0], &vars[1])?;
                let weights = values(want.dims(), 3, DType::F64);
                let wants = (&want * &weights)?.sum_all()?.backward()?;
                let weights = DTensor::distribute(&weights, &mesh, &vec![Replicate; mesh.ndim()])?;
                for (a, b) in specs.iter().cartesian_product(&specs) {
                    let leaf = |whole: &Tensor, spec: &Spec| {
                        let lays = spec.placements().iter().map(|&p: &Placement| Lay::At(p)).collect_vec();
                        Leaf::with_spec(whole, spec.clone(), &lays)
                    };
                    let leaves = [leaf(&wholes[0], a)?, leaf(&wholes[1], b)?];
                    let out = distributed(&leaves[0].tensor, &leaves[1].tensor)?;
                    let grads = out.mul(&weights)?.sum_all()?.backward()?;
                    let mut error = value_error(&out, &want)?;
                    for (leaf, var) in leaves.iter().zip(&vars) {
                        error = error.max(leaf.gradient_error(&grads, wants.get(var).unwrap())?);
                    }
                    assert!(error <= 1e-11, "{name} of {a} and {b}: error {error:e}");
                }
            }
            Ok(())
        });
    }
}
