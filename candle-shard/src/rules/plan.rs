//! How an op runs on inputs that lie in a certain way.
use super::{Row, Signature};
use crate::dtensor::{Axes, DTensor};
use crate::placement::{Placement, Placements, Replicate};
use crate::redistribute::{Target, Targets, conversion_cost};
use crate::spec::Spec;
use crate::{Error, Result};
use candle_core::DType;
use candle_dist::backend::Dims;
use smallvec::SmallVec;
use std::sync::Arc;

/// How an op runs on inputs that lie in a certain way.
pub(crate) struct Plan {
    pub(crate) inputs: SmallVec<[Lay; 3]>,
    /// The axes on which replicated inputs are used through their varying views.
    pub(crate) vary: Axes,
    pub(crate) outs: SmallVec<[Arc<Spec>; 1]>,
    /// The axes on which the outputs are varying.
    pub(crate) varying: Axes,
    /// This rank has no elements of any output.
    pub(crate) nothing: bool,
}

/// How one input must lie.
pub(crate) struct Lay {
    pub(crate) targets: Targets,
    /// It lies so already.
    pub(crate) ready: bool,
}

impl Plan {
    pub(super) fn new(op: &'static str, inputs: &[&DTensor], signature: Signature) -> Result<Self> {
        check_meshes(op, inputs)?;
        let mut out = Targets::new();
        let mut lays: SmallVec<[Targets; 3]> = inputs.iter().map(|_| Targets::new()).collect();
        for axis in 0..inputs[0].mesh().ndim() {
            let row = cheapest(inputs, &signature.rows, axis);
            let placement_of = |i: usize| row.map_or(Replicate, |row| row.ins[i]);
            // Inputs that are cut together must be cut alike: the first that lies as the row wants sets the sizes.
            // An axis that cuts what another axis has left takes the default sizes.
            let sizes = (0..inputs.len())
                .find(|&i| placement_of(i).shard_dim().is_some() && inputs[i].placements()[axis] == placement_of(i))
                .filter(|&i| lays[i].iter().all(|outer| outer.placement != placement_of(i)))
                .and_then(|i| inputs[i].spec().sizes(axis).cloned());
            for (i, lay) in lays.iter_mut().enumerate() {
                let placement = placement_of(i);
                let sizes = placement.shard_dim().and(sizes.clone());
                lay.push(Target { placement, sizes });
            }
            let placement = row.map_or(Replicate, |row| row.out);
            out.push(Target { placement, sizes: placement.shard_dim().and(sizes) });
        }
        Self::laid(inputs, lays, &out, &signature.outs)
    }

    /// The plan that brings each input to its targets, for outputs of these shapes and dtypes that lie as `out`.
    ///
    /// On each axis the targets and `out` must be what one row could say.
    pub(crate) fn laid(
        inputs: &[&DTensor],
        targets: impl IntoIterator<Item = Targets>,
        out: &[Target],
        outs: &[(Dims, DType)],
    ) -> Result<Self> {
        let (mut vary, mut varying): (Axes, Axes) = (0, 0);
        for (axis, to) in out.iter().enumerate() {
            let differs = to.placement != Replicate;
            if differs || inputs.iter().any(|x| x.varying() & (1 << axis) != 0) {
                vary |= 1 << axis;
                varying |= Axes::from(!differs) << axis;
            }
        }
        let lay = |(targets, input): (Targets, &&DTensor)| Lay { ready: input.lies_as(&targets, vary), targets };
        let lays = targets.into_iter().zip(inputs).map(lay).collect();
        let placements: Placements = out.iter().map(|to| to.placement).collect();
        let spec = |(shape, dtype): &(Dims, DType)| {
            let mut spec = Spec::new(inputs[0].mesh(), &placements, shape.as_slice(), *dtype)?;
            for (axis, to) in out.iter().enumerate() {
                spec = spec.with_sizes(axis, to.sizes.clone())?;
            }
            Ok(spec.shared())
        };
        let outs: SmallVec<[Arc<Spec>; 1]> = outs.iter().map(spec).collect::<Result<_>>()?;
        let nothing = outs.iter().all(|out| out.local_shape().contains(&0));
        Ok(Self { inputs: lays, vary, outs, varying, nothing })
    }
}

/// Refuses inputs that lie on different meshes.
pub(crate) fn check_meshes(op: &'static str, inputs: &[&DTensor]) -> Result<()> {
    let mesh = inputs[0].mesh();
    let Some(other) = inputs.iter().find(|x| x.mesh() != mesh) else { return Ok(()) };
    let other = other.mesh();
    Error::op(op, format!("inputs lie on different meshes, {mesh} and {other}; redistribute one of them"))
}

impl Plan {
    /// The inputs stay as they lie, and the outputs vary where the first input does.
    pub(crate) fn in_place(inputs: &[&DTensor], outs: SmallVec<[Arc<Spec>; 1]>) -> Self {
        let stays = |x: &&DTensor| Lay { targets: x.targets(), ready: true };
        let nothing = outs.iter().all(|out| out.local_shape().contains(&0));
        Self { inputs: inputs.iter().map(stays).collect(), vary: 0, outs, varying: inputs[0].varying(), nothing }
    }
}

/// The row that moves the fewest bytes and then changes the fewest inputs; `None` stands for all replicated.
fn cheapest<'r>(inputs: &[&DTensor], rows: &'r [Row], axis: usize) -> Option<&'r Row> {
    let cost = |placement: &dyn Fn(usize) -> Placement| {
        inputs.iter().enumerate().try_fold((0, 0), |(bytes, changes), (i, input)| {
            let cost = conversion_cost(input.spec(), axis, placement(i))?;
            Some((bytes + cost, changes + usize::from(input.placements()[axis] != placement(i))))
        })
    };
    let listed = rows.iter().filter_map(|row| Some((cost(&|i| row.ins[i])?, Some(row))));
    let replicated = cost(&|_| Replicate).map(|cost| (cost, None));
    listed.chain(replicated).min_by_key(|(cost, _)| *cost).and_then(|(_, row)| row)
}
