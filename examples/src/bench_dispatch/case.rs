//! The measured ops, each in a distributed and a plain form.

use candle_core::Tensor;
use candle_dist::DeviceMesh;
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};

/// An op in both forms.
pub struct Case {
    /// The name in reports.
    pub op: &'static str,
    /// The placements of the inputs on the last axis of the mesh; an outer axis shards their first dim, or nothing.
    pub inputs: &'static [Placement],
    /// The distributed op.
    pub distributed: fn(&[DTensor]) -> Result<DTensor>,
    /// candle's op on the shards, or the collective that moves them.
    pub plain: fn(&[Tensor], &DeviceMesh) -> Result<Tensor>,
}

const S0: Placement = Shard(0);
const S1: Placement = Shard(1);

/// All measured ops.
pub const CASES: [Case; 13] = [
    // The comparison of a tensor that was compared before: one look-up.
    Case {
        op: "distribute_s0",
        inputs: &[Replicate],
        distributed: |x| DTensor::distribute(&x[0].to_local().detach(), x[0].mesh(), &last(&x[0], S0)),
        plain: |x, _| Ok(x[0].narrow(0, 0, x[0].dims()[0] / 2)?.force_contiguous()?),
    },
    Case { op: "add", inputs: &[S0, S0], distributed: |x| &x[0] + &x[1], plain: |x, _| Ok((&x[0] + &x[1])?) },
    Case { op: "mul_scalar", inputs: &[S0], distributed: |x| &x[0] * 2.0, plain: |x, _| Ok((&x[0] * 2.0)?) },
    Case { op: "relu", inputs: &[S0], distributed: |x| x[0].relu(), plain: |x, _| Ok(x[0].relu()?) },
    Case {
        op: "matmul_s0_r",
        inputs: &[S0, Replicate],
        distributed: |x| x[0].matmul(&x[1]),
        plain: |x, _| Ok(x[0].matmul(&x[1])?),
    },
    Case {
        op: "matmul_r_s1",
        inputs: &[Replicate, S1],
        distributed: |x| x[0].matmul(&x[1]),
        plain: |x, _| Ok(x[0].matmul(&x[1])?),
    },
    Case { op: "sum", inputs: &[S0], distributed: |x| x[0].sum_all(), plain: |x, _| Ok(x[0].sum_all()?) },
    Case {
        op: "reshape",
        inputs: &[S0],
        distributed: |x| x[0].reshape((x[0].dims()[0], 2, x[0].dims()[1] / 2)),
        plain: |x, _| Ok(x[0].reshape((x[0].dims()[0], 2, x[0].dims()[1] / 2))?),
    },
    Case {
        op: "transpose",
        inputs: &[S0],
        distributed: |x| x[0].transpose(0, 1),
        plain: |x, _| Ok(x[0].transpose(0, 1)?),
    },
    Case {
        op: "redistribute_nothing",
        inputs: &[S0],
        distributed: |x| x[0].redistribute(x[0].placements()),
        plain: |x, _| Ok(x[0].clone()),
    },
    Case {
        op: "redistribute_s0_r",
        inputs: &[S0],
        distributed: |x| x[0].redistribute(&last(&x[0], Replicate)),
        plain: |x, mesh| Ok(mesh.axis_group(mesh.ndim() - 1)?.all_gather(&x[0], 0)?),
    },
    Case {
        op: "redistribute_r_s0",
        inputs: &[Replicate],
        distributed: |x| x[0].redistribute(&last(&x[0], S0)),
        plain: |x, _| Ok(x[0].narrow(0, 0, x[0].dims()[0] / 2)?.force_contiguous()?),
    },
    Case {
        op: "redistribute_s0_s1",
        inputs: &[S0],
        distributed: |x| x[0].redistribute(&last(&x[0], S1)),
        plain: |x, mesh| Ok(mesh.axis_group(mesh.ndim() - 1)?.all_to_all(&x[0], 1, 0)?),
    },
];

/// Returns the placements of `x` with another one on the last axis.
fn last(x: &DTensor, placement: Placement) -> Vec<Placement> {
    let mut placements = x.placements().to_vec();
    if let Some(last) = placements.last_mut() {
        *last = placement;
    }
    placements
}
