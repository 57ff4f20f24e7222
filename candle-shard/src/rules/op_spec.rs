//! Op specs: how an op runs on inputs with certain layouts.
use super::row::{ShardingRule, Signature};
use crate::DTensor;
use crate::layout::{Axes, Placements, Replicate, Sizes, Spec};
use crate::redistribute::{Moves, Target, Targets, cost, moves};
use crate::{Error, Result};
use candle_core::DType;
use candle_dist::backend::Dims;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// How an op runs on inputs with certain layouts.
pub(crate) struct OpSpec {
    /// The moves that lay out each input.
    pub(crate) inputs: SmallVec<[Moves; 3]>,
    /// Whether some of these moves communicate.
    pub(crate) communicates: bool,
    /// Whether that was logged.
    pub(crate) told: AtomicBool,
    /// The axes on which replicated inputs are used through their varying views.
    pub(crate) vary: Axes,
    pub(crate) outs: SmallVec<[Arc<Spec>; 1]>,
    /// The axes on which the outputs are varying.
    pub(crate) varying: Axes,
    /// Whether this rank has no elements of any output.
    pub(crate) nothing: bool,
}

impl OpSpec {
    pub(crate) fn new(op: &'static str, inputs: &[&DTensor], signature: Signature) -> Result<Self> {
        check_meshes(op, inputs)?;
        let mut out = Targets::new();
        let mut lays: SmallVec<[Targets; 3]> = inputs.iter().map(|_| Targets::new()).collect();
        for axis in 0..inputs[0].mesh().ndim() {
            let choice = cheapest(inputs, &signature.rows, &lays, axis);
            for (i, lay) in lays.iter_mut().enumerate() {
                lay.push(choice.target(i));
            }
            let placement = choice.row.map_or(Replicate, |row| row.out);
            let keeps = placement.shard_dim().filter(|dim| Some(*dim) != signature.resized);
            out.push(Target { placement, sizes: keeps.and(choice.sizes) });
        }
        Self::laid(inputs, lays, &out, &signature.outs)
    }

    /// Makes the op spec that brings each input to its targets, for outputs of these shapes and dtypes laid out as `out`.
    ///
    /// On each axis the targets and `out` must form a valid row.
    pub(crate) fn laid(
        inputs: &[&DTensor],
        targets: impl IntoIterator<Item = Targets>,
        out: &[Target],
        outs: &[(Dims, DType)],
    ) -> Result<Self> {
        let outs: SmallVec<[_; 1]> = outs.iter().map(|(shape, dtype)| (out, shape.clone(), *dtype)).collect();
        Self::laid_apart(inputs, targets, &outs)
    }

    /// Like [`laid`](Self::laid), for outputs with the same placements and sizes of their own. There is an output.
    pub(crate) fn laid_apart(
        inputs: &[&DTensor],
        targets: impl IntoIterator<Item = Targets>,
        outs: &[(&[Target], Dims, DType)],
    ) -> Result<Self> {
        Self::laid_as(inputs, &targets.into_iter().collect::<SmallVec<[Targets; 3]>>(), outs)
    }

    /// [`laid_apart`](Self::laid_apart) without the type of the targets' source, so that it is compiled once.
    fn laid_as(inputs: &[&DTensor], targets: &[Targets], outs: &[(&[Target], Dims, DType)]) -> Result<Self> {
        let out = outs[0].0;
        let (mut vary, mut varying): (Axes, Axes) = (0, 0);
        for (axis, to) in out.iter().enumerate() {
            let differs = to.placement != Replicate;
            if differs || inputs.iter().any(|x| x.varying() & (1 << axis) != 0) {
                vary |= 1 << axis;
                varying |= Axes::from(!differs) << axis;
            }
        }
        let lays: SmallVec<[Moves; 3]> = targets
            .iter()
            .zip(inputs)
            .map(|(targets, input)| moves(input, targets, vary))
            .collect::<Result<_>>()?;
        let communicates = lays.iter().flatten().any(|next| next.step.communicates());
        let placements: Placements = out.iter().map(|to| to.placement).collect();
        let spec = |(out, shape, dtype): &(&[Target], Dims, DType)| {
            let mut spec = Spec::new(inputs[0].mesh(), &placements, shape.as_slice(), *dtype)?;
            for (axis, to) in out.iter().enumerate() {
                spec = spec.with_sizes(axis, to.sizes.clone())?;
            }
            Ok(spec.shared())
        };
        let outs: SmallVec<[Arc<Spec>; 1]> = outs.iter().map(spec).collect::<Result<_>>()?;
        let nothing = outs.iter().all(|out| out.local_shape().contains(&0));
        Ok(Self { inputs: lays, communicates, told: AtomicBool::new(false), vary, outs, varying, nothing })
    }
}

impl OpSpec {
    /// Returns whether two op specs run a call in the same way.
    pub(super) fn is(&self, other: &Self) -> bool {
        let Self { inputs, communicates: _, told: _, vary, outs, varying, nothing } = self;
        (inputs, vary, outs) == (&other.inputs, &other.vary, &other.outs)
            && (*varying, *nothing) == (other.varying, other.nothing)
    }
}

/// Refuses inputs that lie on different meshes.
pub(crate) fn check_meshes(op: &'static str, inputs: &[&DTensor]) -> Result<()> {
    let mesh = inputs[0].mesh();
    let Some(other) = inputs.iter().find(|x| x.mesh() != mesh) else { return Ok(()) };
    let other = other.mesh();
    Error::op(op, format!("inputs lie on different meshes, {mesh} and {other}; redistribute one of them"))
}

impl OpSpec {
    /// Creates an op spec that leaves the inputs as they are. The outputs vary where the first input does.
    pub(crate) fn in_place(inputs: &[&DTensor], outs: SmallVec<[Arc<Spec>; 1]>) -> Self {
        let nothing = outs.iter().all(|out| out.local_shape().contains(&0));
        let stay = inputs.iter().map(|_| Moves::new()).collect();
        let varying = inputs[0].varying();
        Self {
            inputs: stay,
            communicates: false,
            told: AtomicBool::new(false),
            vary: 0,
            outs,
            varying,
            nothing,
        }
    }
}

/// A row for an axis, with the sizes of the inputs' shards if they are not the default ones.
struct RuleChoice<'r> {
    /// `None` means all replicated.
    row: Option<&'r ShardingRule>,
    sizes: Option<Sizes>,
}

impl RuleChoice<'_> {
    fn target(&self, input: usize) -> Target {
        let placement = self.row.map_or(Replicate, |row| row.ins[input]);
        Target { placement, sizes: placement.shard_dim().and(self.sizes.clone()) }
    }

    /// Returns the bytes that it moves, and the number of inputs that it changes; `None` if it is impossible.
    fn cost(&self, inputs: &[&DTensor], axis: usize) -> Option<(usize, usize)> {
        inputs.iter().enumerate().try_fold((0, 0), |(bytes, changes), (i, input)| {
            let target = self.target(i);
            let changed = usize::from(input.placements()[axis] != target.placement);
            Some((bytes + cost(input.spec(), axis, &target)?, changes + changed))
        })
    }
}

/// Finds the row that moves the fewest bytes, then changes the fewest inputs, given the layout on outer axes.
///
/// Inputs that are sharded together need equal sizes: those of an input that already has the placement of the row. An
/// axis that shards what another axis has sharded uses the default sizes.
fn cheapest<'r>(
    inputs: &[&DTensor],
    rows: &'r [ShardingRule],
    outer: &[Targets],
    axis: usize,
) -> RuleChoice<'r> {
    let choices_of = |row: &'r ShardingRule| {
        let lies =
            |&i: &usize| row.ins[i].shard_dim().is_some() && inputs[i].placements()[axis] == row.ins[i];
        let outermost = |i: usize| outer[i].iter().all(|outer| outer.placement != row.ins[i]);
        let sizes_of = |i: usize| inputs[i].spec().sizes(axis).filter(|_| outermost(i)).cloned();
        let mut sizes: SmallVec<[Option<Sizes>; 3]> = SmallVec::new();
        for of_one in (0..inputs.len()).filter(lies).map(sizes_of) {
            if !sizes.contains(&of_one) {
                sizes.push(of_one);
            }
        }
        if sizes.is_empty() {
            sizes.push(None);
        }
        sizes.into_iter().map(move |sizes| RuleChoice { row: Some(row), sizes })
    };
    let replicated = || RuleChoice { row: None, sizes: None };
    let priced = |choice: RuleChoice<'r>| Some((choice.cost(inputs, axis)?, choice));
    let all = rows.iter().flat_map(choices_of).chain([replicated()]).filter_map(priced);
    all.min_by_key(|(cost, _)| *cost).map_or_else(replicated, |(_, choice)| choice)
}
