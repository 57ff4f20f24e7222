//! How an op runs on inputs that lie in a certain way.
use super::{Row, Signature};
use crate::dtensor::{Axes, DTensor};
use crate::placement::{Placement, Placements, Replicate};
use crate::redistribute::{Target, Targets, conversion_cost};
use crate::spec::{Sizes, Spec};
use crate::{Error, Result};
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
        let mesh = inputs[0].mesh();
        if let Some(other) = inputs.iter().find(|x| x.mesh() != mesh) {
            let other = other.mesh();
            let reason = format!("inputs lie on different meshes, {mesh} and {other}; redistribute one of them");
            return Error::op(op, reason);
        }
        let mut out = Placements::new();
        let mut out_sizes: SmallVec<[Option<Sizes>; 3]> = SmallVec::new();
        let mut lays: SmallVec<[Lay; 3]> =
            inputs.iter().map(|_| Lay { targets: Targets::new(), ready: false }).collect();
        let (mut vary, mut varying): (Axes, Axes) = (0, 0);
        for axis in 0..mesh.ndim() {
            let row = cheapest(inputs, &signature.rows, axis);
            let placement_of = |i: usize| row.map_or(Replicate, |row| row.ins[i]);
            // Inputs that are cut together must be cut alike: the first that lies as the row wants sets the sizes.
            // An axis that cuts what another axis has left takes the default sizes.
            let sizes = (0..inputs.len())
                .find(|&i| placement_of(i).shard_dim().is_some() && inputs[i].placements()[axis] == placement_of(i))
                .filter(|&i| lays[i].targets.iter().all(|outer| outer.placement != placement_of(i)))
                .and_then(|i| inputs[i].spec().sizes(axis).cloned());
            for (i, lay) in lays.iter_mut().enumerate() {
                let placement = placement_of(i);
                let sizes = placement.shard_dim().and(sizes.clone());
                lay.targets.push(Target { placement, sizes });
            }
            let to = row.map_or(Replicate, |row| row.out);
            let differs = to != Replicate;
            if differs || inputs.iter().any(|x| x.varying() & (1 << axis) != 0) {
                vary |= 1 << axis;
                varying |= Axes::from(!differs) << axis;
            }
            out_sizes.push(to.shard_dim().and(sizes));
            out.push(to);
        }
        for (lay, input) in lays.iter_mut().zip(inputs) {
            lay.ready = input.lies_as(&lay.targets, vary);
        }
        let mut outs: SmallVec<[Arc<Spec>; 1]> = SmallVec::new();
        for (shape, dtype) in &signature.outs {
            let mut spec = Spec::new(mesh, &out, shape.as_slice(), *dtype)?;
            for (axis, sizes) in out_sizes.iter().enumerate() {
                spec = spec.with_sizes(axis, sizes.clone())?;
            }
            outs.push(spec.shared());
        }
        let nothing = outs.iter().all(|out| out.local_shape().contains(&0));
        Ok(Self { inputs: lays, vary, outs, varying, nothing })
    }
}

impl Plan {
    /// The inputs stay as they lie, and the outputs vary where the first input does.
    pub(crate) fn in_place(inputs: &[&DTensor], outs: SmallVec<[Arc<Spec>; 1]>) -> Self {
        let stays = |x: &&DTensor| {
            let (spec, axes) = (x.spec(), 0..x.mesh().ndim());
            let target = |axis| Target { placement: spec.placements()[axis], sizes: spec.sizes(axis).cloned() };
            Lay { targets: axes.map(target).collect(), ready: true }
        };
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
