//! The styles that a plan can give a module: how its parameters lie, how its inputs come and its outputs go.
use crate::placement::{Partial, Placement, Replicate};
use crate::{Error, Result};
use candle_dist::ReduceOp;

/// A module cut by output columns: `weight` `[out, in]` of a linear layer by rows, an embedding's table by columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColwiseParallel {
    /// How a plain input lies: PyTorch's `input_layouts`. A [`DTensor`](crate::DTensor) says so itself.
    pub input: Placement,
    /// How the output is left; `None` leaves it sharded on the last dim.
    pub output: Option<Placement>,
}

/// A module cut by input rows: `weight` `[out, in]` of a linear layer by columns, an embedding's table by rows.
///
/// Its output arrives as partial sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowwiseParallel {
    /// How a plain input lies: `None` is sharded on the last dim for a linear layer, and replicated for the ids of a table.
    pub input: Option<Placement>,
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

/// A module, of any kind but an embedding, whose inputs are laid out once for all layers in it.
///
/// ```
/// use candle_shard::parallel::{Plan, PrepareModuleInput};
/// use candle_shard::{Replicate, Shard};
///
/// // Of query, key and mask the first two are gathered; the mask stays as it comes.
/// let gather = PrepareModuleInput::new([Some(Replicate), Some(Replicate), None]);
/// let plan = Plan::new("tp").with("layers.*.attention", gather);
/// # assert_eq!(PrepareModuleInput::new([Shard(1)]).desired, [Some(Shard(1))]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleInput {
    /// How each plain input lies: PyTorch's `input_layouts`. `None`, and what is not listed, is replicated.
    pub layouts: Vec<Option<Placement>>,
    /// How each input is laid out; `None` leaves it as it comes.
    pub desired: Vec<Option<Placement>>,
}

/// A module, of any kind but a [`FusedQkv`](crate::nn::FusedQkv), whose outputs are laid out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleOutput {
    /// How each plain output lies: PyTorch's `output_layouts`. `None`, and what is not listed, is replicated.
    pub layouts: Vec<Option<Placement>>,
    /// How each output is laid out; `None` leaves it as it is.
    pub desired: Vec<Option<Placement>>,
}

/// A module whose inputs and outputs are laid out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleInputOutput {
    /// The inputs.
    pub input: PrepareModuleInput,
    /// The outputs.
    pub output: PrepareModuleOutput,
}

impl Default for ColwiseParallel {
    /// Plain inputs are replicated; the output stays sharded on its last dim.
    fn default() -> Self {
        Self { input: Replicate, output: None }
    }
}

impl Default for RowwiseParallel {
    /// Plain inputs are sharded on the last dim; the output is replicated.
    fn default() -> Self {
        Self { input: None, output: Replicate }
    }
}

impl Default for SequenceParallel {
    /// Dim 1, the sequence of `[batch, sequence, width]`.
    fn default() -> Self {
        Self { dim: 1 }
    }
}

impl PrepareModuleInput {
    /// A layout for each input: placements, or options of them where some inputs are left alone.
    pub fn new(desired: impl IntoIterator<Item = impl Into<Option<Placement>>>) -> Self {
        Self { layouts: Vec::new(), desired: desired.into_iter().map(Into::into).collect() }
    }

    /// The same style for plain tensors that lie so.
    pub fn with_layouts(self, layouts: impl IntoIterator<Item = impl Into<Option<Placement>>>) -> Self {
        Self { layouts: layouts.into_iter().map(Into::into).collect(), ..self }
    }
}

impl PrepareModuleOutput {
    /// A layout for each output: placements, or options of them where some outputs are left alone.
    pub fn new(desired: impl IntoIterator<Item = impl Into<Option<Placement>>>) -> Self {
        Self { layouts: Vec::new(), desired: desired.into_iter().map(Into::into).collect() }
    }

    /// The same style for plain tensors that lie so.
    pub fn with_layouts(self, layouts: impl IntoIterator<Item = impl Into<Option<Placement>>>) -> Self {
        Self { layouts: layouts.into_iter().map(Into::into).collect(), ..self }
    }
}

/// What a plan can say about a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Style {
    /// See [`ColwiseParallel`].
    Colwise(ColwiseParallel),
    /// See [`RowwiseParallel`].
    Rowwise(RowwiseParallel),
    /// See [`SequenceParallel`].
    Sequence(SequenceParallel),
    /// See [`PrepareModuleInput`].
    PrepareInput(PrepareModuleInput),
    /// See [`PrepareModuleOutput`].
    PrepareOutput(PrepareModuleOutput),
    /// See [`PrepareModuleInputOutput`].
    PrepareInputOutput(PrepareModuleInputOutput),
}

macro_rules! into_style {
    ($($from:ty => $variant:ident),* $(,)?) => {
        $(impl From<$from> for Style {
            fn from(style: $from) -> Self {
                Self::$variant(style)
            }
        })*
    };
}
into_style!(
    ColwiseParallel => Colwise,
    RowwiseParallel => Rowwise,
    SequenceParallel => Sequence,
    PrepareModuleInput => PrepareInput,
    PrepareModuleOutput => PrepareOutput,
    PrepareModuleInputOutput => PrepareInputOutput,
);

impl Style {
    /// The layouts of all inputs, if the style lists them.
    pub(super) fn listed_inputs(&self) -> Option<&[Option<Placement>]> {
        match self {
            Self::PrepareInput(input) | Self::PrepareInputOutput(PrepareModuleInputOutput { input, .. }) => {
                Some(&input.desired)
            }
            _ => None,
        }
    }

    /// The layouts of all outputs, if the style lists them.
    pub(super) fn listed_outputs(&self) -> Option<&[Option<Placement>]> {
        match self {
            Self::PrepareOutput(output) | Self::PrepareInputOutput(PrepareModuleInputOutput { output, .. }) => {
                Some(&output.desired)
            }
            _ => None,
        }
    }

    /// How the plain inputs of a module lie, as far as the style lists them.
    pub(super) fn plain_inputs(&self) -> &[Option<Placement>] {
        match self {
            Self::PrepareInput(input) | Self::PrepareInputOutput(PrepareModuleInputOutput { input, .. }) => {
                &input.layouts
            }
            _ => &[],
        }
    }

    /// How the plain outputs of a module lie, as far as the style lists them.
    pub(super) fn plain_outputs(&self) -> &[Option<Placement>] {
        match self {
            Self::PrepareOutput(output) | Self::PrepareInputOutput(PrepareModuleInputOutput { output, .. }) => {
                &output.layouts
            }
            _ => &[],
        }
    }

    /// Refuses layouts that nothing can be brought to.
    pub(super) fn check(&self, pattern: &str) -> Result<()> {
        let fixed = match self {
            Self::Colwise(style) => [style.output, Some(style.input)],
            Self::Rowwise(style) => [Some(style.output), style.input],
            _ => [None, None],
        };
        let listed = [self.listed_inputs(), self.listed_outputs()].into_iter().flatten().flatten().copied();
        let made_by_ops = |p: &Placement| matches!(p, Partial(op) if *op != ReduceOp::Sum);
        match listed.chain(fixed).flatten().find(made_by_ops) {
            None => Ok(()),
            Some(p) => Err(Error::Plan(format!(
                "{self:?} for {pattern:?} asks for {p}, which only ops make; ask for S(dim), R or {}",
                Placement::PARTIAL_SUM
            ))),
        }
    }
}
