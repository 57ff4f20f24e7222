//! How one module runs on an axis: how its parameters lie, how its input comes and its output goes.
use crate::dtensor::Axes;
use crate::placement::{Placement, Replicate, Shard};
use crate::redistribute::{Target, Targets};
use crate::{DTensor, Error, Result};

/// A module cut by output columns: `weight` `[out, in]` of a linear layer by rows, an embedding's table by columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColwiseParallel {
    /// How the output is left; `None` leaves it sharded on the last dim.
    pub output: Option<Placement>,
}

/// A module cut by input rows: `weight` `[out, in]` of a linear layer by columns, an embedding's table by rows.
///
/// Its output arrives as partial sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowwiseParallel {
    /// How the output is left: `Replicate` adds it up everywhere, `Shard(d)` leaves each rank a piece.
    pub output: Placement,
}

/// A module that works on a piece of a dim, usually the sequence, with replicated parameters.
///
/// Norms expect their input there; an embedding's output is cut to it. The parameters' gradients stay partial until
/// [`Parameters::reduce`](crate::nn::Parameters::reduce) adds all of them up in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceParallel {
    /// The sharded dim of the activations.
    pub dim: usize,
}

/// A module, of any kind, whose input is brought to a layout once for all layers in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrepareModuleInput {
    /// How the input is laid out.
    pub desired: Placement,
}

impl Default for ColwiseParallel {
    /// The output stays sharded on its last dim.
    fn default() -> Self {
        Self { output: None }
    }
}

impl Default for RowwiseParallel {
    /// The output is replicated.
    fn default() -> Self {
        Self { output: Replicate }
    }
}

impl Default for SequenceParallel {
    /// Dim 1, the sequence of `[batch, sequence, width]`.
    fn default() -> Self {
        Self { dim: 1 }
    }
}

/// What a plan can say about a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// See [`ColwiseParallel`].
    Colwise(ColwiseParallel),
    /// See [`RowwiseParallel`].
    Rowwise(RowwiseParallel),
    /// See [`SequenceParallel`].
    Sequence(SequenceParallel),
    /// See [`PrepareModuleInput`].
    PrepareInput(PrepareModuleInput),
}

macro_rules! into_style {
    ($($from:ty => $variant:ident),*) => {
        $(impl From<$from> for Style {
            fn from(style: $from) -> Self {
                Self::$variant(style)
            }
        })*
    };
}
into_style!(ColwiseParallel => Colwise, RowwiseParallel => Rowwise, SequenceParallel => Sequence, PrepareModuleInput => PrepareInput);

/// The kinds of layers that a style can be applied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// `weight` `[out, in]`, `bias` `[out]`.
    Linear,
    /// `weight` `[rows, width]`.
    Embedding,
    /// `weight` `[width]`, `bias` `[width]`.
    Norm,
}

/// How the parameters of a layer lie on the plan's axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// The weight.
    pub weight: Placement,
    /// The bias.
    pub bias: Placement,
    /// Whether the weight's gradient is left partial.
    pub varying: bool,
    /// Whether the bias's gradient is left partial.
    pub varying_bias: bool,
}

/// What a plan says about one module of a model.
#[derive(Debug, Clone)]
pub struct ModuleStyle {
    pub(super) path: String,
    pub(super) style: Option<Style>,
    pub(super) axis: usize,
}

impl ModuleStyle {
    /// How the parameters of a layer of this kind lie.
    ///
    /// # Errors
    /// If the style does not apply to the kind.
    pub fn layout(&self, kind: LayerKind) -> Result<Layout> {
        let fixed = |weight, bias| Layout { weight, bias, varying: false, varying_bias: false };
        match (self.style, kind) {
            (None, _) => Ok(fixed(Replicate, Replicate)),
            (Some(Style::Colwise(_)), LayerKind::Linear) => Ok(fixed(Shard(0), Shard(0))),
            (Some(Style::Colwise(_)), LayerKind::Embedding) => Ok(fixed(Shard(1), Replicate)),
            (Some(Style::Rowwise(style)), LayerKind::Linear) => {
                // Added to pieces of the output, the bias gets a share of its gradient on each rank.
                let varying_bias = style.output.shard_dim().is_some();
                Ok(Layout { varying_bias, ..fixed(Shard(1), Replicate) })
            }
            (Some(Style::Rowwise(_)), LayerKind::Embedding) => Ok(fixed(Shard(0), Replicate)),
            (Some(Style::Sequence(_)), LayerKind::Norm | LayerKind::Embedding) => {
                Ok(Layout { varying: true, varying_bias: true, ..fixed(Replicate, Replicate) })
            }
            (Some(style), kind) => {
                Err(Error::Plan(format!("{style:?} for module {:?}: it does not apply to a {kind:?} layer", self.path)))
            }
        }
    }

    /// Checks that a weight shared from elsewhere lies as this module's own would.
    pub(crate) fn check_tied(&self, kind: LayerKind, weight: &DTensor) -> Result<()> {
        let (want, has) = (self.layout(kind)?.weight, weight.placements()[self.axis]);
        if want == has {
            return Ok(());
        }
        Err(Error::Plan(format!(
            "module {:?} shares a weight that lies as {has}, but its style wants {want}; choose styles that agree",
            self.path
        )))
    }

    /// The module's input in the layout that the style wants.
    pub fn input(&self, x: &DTensor) -> Result<DTensor> {
        let last = || Shard(x.rank().saturating_sub(1));
        match self.style {
            None => Ok(x.clone()),
            // A column-cut layer uses its input differently on each rank: gathered for that right away.
            Some(Style::Colwise(_)) => self.lay_out(x, Replicate, true),
            Some(Style::Rowwise(_)) => self.lay_out(x, last(), false),
            Some(Style::Sequence(style)) => self.lay_out(x, Shard(style.dim), false),
            Some(Style::PrepareInput(style)) => self.lay_out(x, style.desired, false),
        }
    }

    /// The module's output in the layout that the style leaves.
    pub fn output(&self, y: &DTensor) -> Result<DTensor> {
        match self.style {
            Some(Style::Colwise(ColwiseParallel { output: Some(output) })) => self.lay_out(y, output, false),
            Some(Style::Rowwise(style)) => self.lay_out(y, style.output, false),
            Some(Style::Sequence(style)) => self.lay_out(y, Shard(style.dim), false),
            _ => Ok(y.clone()),
        }
    }

    /// `x` with one placement changed, all other axes as they are.
    fn lay_out(&self, x: &DTensor, to: Placement, vary: bool) -> Result<DTensor> {
        // An axis inside of one that now cuts the same dim takes the default sizes.
        let outermost = |axis: usize| axis <= self.axis || x.placements()[axis] != to;
        let keep = |axis: usize| Target {
            placement: x.placements()[axis],
            sizes: x.spec().sizes(axis).filter(|_| outermost(axis)).cloned(),
        };
        let mut targets: Targets = (0..x.mesh().ndim()).map(keep).collect();
        if targets[self.axis].placement != to {
            targets[self.axis] = to.into();
        }
        if to.shard_dim().is_some_and(|dim| dim >= x.rank()) {
            let reason = format!("module {:?} wants {to}, but gets {}", self.path, x.spec());
            return Err(Error::Plan(reason));
        }
        x.to_targets(&targets, Axes::from(vary) << self.axis)
    }
}
