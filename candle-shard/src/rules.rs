//! From an op's table of rows to local tensors and the layout of the result.
//!
//! A [`Row`] says, for *one* axis, which placements of the inputs give which placement of the output without
//! communication. An op lists its rows; each axis takes the row that costs the fewest bytes, independently of the
//! other axes. All replicated is always possible and need not be listed.
//!
//! The gradient rule: on an axis where the output is not replicated, every replicated input is used through its
//! varying view, because each rank computes only a share of that input's gradient. Where the output is replicated and
//! an input is varying, the output is varying too, and the other inputs go through their views.
use crate::dtensor::{Axes, DTensor};
use crate::placement::{Placement, Placements, Replicate};
use crate::redistribute::{Target, Targets};
use crate::spec::Spec;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// One way to run an op on one axis.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub(crate) out: Placement,
    pub(crate) ins: SmallVec<[Placement; 3]>,
}

/// The rows of an op, best first among equals.
pub(crate) type Rows = SmallVec<[Row; 8]>;

impl Row {
    pub(crate) fn new(out: Placement, ins: &[Placement]) -> Self {
        Self { out, ins: SmallVec::from_slice(ins) }
    }
}

/// Runs an op: lays out the inputs by the cheapest rows, runs `local` on them, and wraps what it made.
pub(crate) fn run(
    op: &'static str,
    inputs: &[&DTensor],
    rows: &[Row],
    (shape, dtype): (&[usize], DType),
    local: impl FnOnce(&[DTensor], &Spec) -> Result<Tensor>,
) -> Result<DTensor> {
    let mesh = inputs[0].mesh();
    if let Some(other) = inputs.iter().find(|x| x.mesh() != mesh) {
        let reason = format!("inputs lie on different meshes, {mesh} and {}; redistribute one of them", other.mesh());
        return Error::op(op, reason);
    }
    let mut out = Placements::new();
    let mut out_sizes: SmallVec<[_; 3]> = SmallVec::new();
    let mut targets: SmallVec<[Targets; 3]> = smallvec![Targets::new(); inputs.len()];
    let (mut vary, mut out_varying): (Axes, Axes) = (0, 0);
    for axis in 0..mesh.ndim() {
        let row = cheapest(inputs, rows, axis);
        let placement_of = |i: usize| row.map_or(Replicate, |row| row.ins[i]);
        // Inputs that are cut together must be cut alike: the first that lies as the row wants sets the sizes.
        // An axis that cuts what another axis has left takes the default sizes.
        let sizes = (0..inputs.len())
            .find(|&i| placement_of(i).shard_dim().is_some() && inputs[i].placements()[axis] == placement_of(i))
            .filter(|&i| targets[i].iter().all(|outer| outer.placement != placement_of(i)))
            .and_then(|i| inputs[i].spec().sizes(axis).cloned());
        for (i, targets) in targets.iter_mut().enumerate() {
            let placement = placement_of(i);
            let sizes = placement.shard_dim().and(sizes.clone());
            targets.push(Target { placement, sizes });
        }
        let to = row.map_or(Replicate, |row| row.out);
        let differs = to != Replicate;
        if differs || inputs.iter().any(|x| x.varying() & (1 << axis) != 0) {
            vary |= 1 << axis;
            out_varying |= Axes::from(!differs) << axis;
        }
        out_sizes.push(to.shard_dim().and(sizes));
        out.push(to);
    }
    let laid_out: SmallVec<[DTensor; 3]> =
        inputs.iter().zip(&targets).map(|(input, targets)| input.to_targets(targets, vary)).collect::<Result<_>>()?;
    let mut spec = Spec::new(mesh, &out, shape, dtype)?;
    for (axis, sizes) in out_sizes.into_iter().enumerate() {
        spec = spec.with_sizes(axis, sizes)?;
    }
    let result = if spec.local_shape().contains(&0) { nothing(&laid_out, &spec)? } else { local(&laid_out, &spec)? };
    Ok(DTensor::assemble(result, Arc::new(spec), out_varying))
}

/// The result of any op where it has no elements on this rank.
///
/// candle drops inputs from the graph there. They must stay in it, in their order: a rank with an empty shard takes
/// part in the communication of their backward passes like every other rank.
fn nothing(inputs: &[DTensor], spec: &Spec) -> Result<Tensor> {
    let nothing_of = |x: &DTensor| x.to_local().flatten_all()?.narrow(0, 0, 0)?.to_dtype(spec.dtype());
    let tracked = inputs.iter().filter(|x| x.tracked()).map(nothing_of).collect::<candle_core::Result<Vec<_>>>()?;
    let shape = spec.local_shape();
    match &tracked[..] {
        [] => Ok(Tensor::zeros(shape.as_slice(), spec.dtype(), inputs[0].device())?),
        parts => Ok(Tensor::cat(parts, 0)?.reshape(shape.as_slice())?),
    }
}

/// The row that moves the fewest bytes and then changes the fewest inputs; `None` stands for all replicated.
fn cheapest<'r>(inputs: &[&DTensor], rows: &'r [Row], axis: usize) -> Option<&'r Row> {
    let cost = |placement: &dyn Fn(usize) -> Placement| {
        inputs.iter().enumerate().try_fold((0, 0), |(bytes, changes), (i, input)| {
            let cost = DTensor::conversion_cost(input.spec(), axis, placement(i))?;
            Some((bytes + cost, changes + usize::from(input.placements()[axis] != placement(i))))
        })
    };
    let listed = rows.iter().filter_map(|row| Some((cost(&|i| row.ins[i])?, Some(row))));
    let replicated = cost(&|_| Replicate).map(|cost| (cost, None));
    listed.chain(replicated).min_by_key(|(cost, _)| *cost).and_then(|(_, row)| row)
}
