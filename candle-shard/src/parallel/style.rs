//! The styles of modules: placements of parameters, inputs and outputs.
use crate::layout::{Partial, Placement, Replicate};
use crate::{Error, Result};
use candle_dist::ReduceOp;

/// Shards a module by output columns: `weight` `[out, in]` of a linear layer by rows, an embedding's table by columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ColwiseParallel {
    /// The placement of a plain input: PyTorch's `input_layouts`. A [`DTensor`](crate::DTensor) has its own.
    pub input: Placement,
    /// The placement of the output; `None` leaves it sharded on the last dim.
    pub output: Option<Placement>,
    /// Whether a plain output is this rank's part, or the whole tensor; see [`parallel`](crate::parallel).
    pub use_local_output: bool,
}

/// Shards a module by input rows: `weight` `[out, in]` of a linear layer by columns, an embedding's table by rows.
///
/// Its output is computed as partial sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowwiseParallel {
    /// The placement of a plain input. `None` means sharded on the last dim for a linear layer, and replicated for ids.
    pub input: Option<Placement>,
    /// The placement of the output: `Replicate` sums it on all ranks, `Shard(d)` leaves each rank a shard.
    pub output: Placement,
    /// Whether a plain output is this rank's part, or the whole tensor; see [`parallel`](crate::parallel).
    pub use_local_output: bool,
}

/// Runs a module on a shard of a dim, usually the sequence, with replicated parameters.
///
/// Norms expect their input sharded there; an embedding's output is sharded there. The parameters' gradients stay
/// partial until [`Parameters::reduce`](crate::nn::Parameters::reduce) sums all of them in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceParallel {
    /// The sharded dim of the activations.
    pub dim: usize,
    /// Whether a plain output is this rank's part, or the whole tensor; see [`parallel`](crate::parallel).
    pub use_local_output: bool,
}

/// Lays out the inputs of a module of any kind but an embedding, once for all layers in it.
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
#[non_exhaustive]
pub struct PrepareModuleInput {
    /// The placement of each plain input: PyTorch's `input_layouts`. `None`, and inputs not listed, are replicated.
    pub layouts: Vec<Option<Placement>>,
    /// The new placement of each input; `None` leaves it unchanged.
    pub desired: Vec<Option<Placement>>,
    /// Whether each plain input of the module is this rank's part, or the whole tensor; see [`parallel`](crate::parallel).
    pub use_local_output: bool,
}

/// Lays out the outputs of a module of any kind but a [`FusedQkv`](crate::nn::FusedQkv).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrepareModuleOutput {
    /// The placement of each plain output: PyTorch's `output_layouts`. `None`, and outputs not listed, are replicated.
    pub layouts: Vec<Option<Placement>>,
    /// The new placement of each output; `None` leaves it unchanged.
    pub desired: Vec<Option<Placement>>,
    /// Whether a plain output is this rank's part, or the whole tensor; see [`parallel`](crate::parallel).
    pub use_local_output: bool,
}

/// Lays out the inputs and outputs of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrepareModuleInputOutput {
    /// The inputs.
    pub input: PrepareModuleInput,
    /// The outputs.
    pub output: PrepareModuleOutput,
}

impl Default for ColwiseParallel {
    /// Plain inputs are replicated; the output stays sharded on its last dim.
    fn default() -> Self {
        Self { input: Replicate, output: None, use_local_output: true }
    }
}

impl Default for RowwiseParallel {
    /// Plain inputs are sharded on the last dim; the output is replicated.
    fn default() -> Self {
        Self { input: None, output: Replicate, use_local_output: true }
    }
}

impl Default for SequenceParallel {
    /// Dim 1, the sequence of `[batch, sequence, width]`.
    fn default() -> Self {
        Self { dim: 1, use_local_output: true }
    }
}

impl ColwiseParallel {
    /// Sets the placement of a plain input.
    pub fn input(self, input: Placement) -> Self {
        Self { input, ..self }
    }

    /// Sets the placement of the output; `None` leaves it sharded on the last dim.
    pub fn output(self, output: impl Into<Option<Placement>>) -> Self {
        Self { output: output.into(), ..self }
    }

    /// Sets whether a plain output is this rank's part, or the whole tensor.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        Self { use_local_output, ..self }
    }
}

impl RowwiseParallel {
    /// Sets the placement of a plain input; `None` is the default of the kind of layer.
    pub fn input(self, input: impl Into<Option<Placement>>) -> Self {
        Self { input: input.into(), ..self }
    }

    /// Sets the placement of the output.
    pub fn output(self, output: Placement) -> Self {
        Self { output, ..self }
    }

    /// Sets whether a plain output is this rank's part, or the whole tensor.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        Self { use_local_output, ..self }
    }
}

impl SequenceParallel {
    /// Sets the sharded dim of the activations.
    pub fn dim(self, dim: usize) -> Self {
        Self { dim, ..self }
    }

    /// Sets whether a plain output is this rank's part, or the whole tensor.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        Self { use_local_output, ..self }
    }
}

impl PrepareModuleInput {
    /// Creates a style with a placement for each input, or an option of one where some inputs stay unchanged.
    pub fn new(desired: impl IntoIterator<Item = impl Into<Option<Placement>>>) -> Self {
        Self {
            layouts: Vec::new(),
            desired: desired.into_iter().map(Into::into).collect(),
            use_local_output: true,
        }
    }

    /// Sets the placements of plain tensors.
    pub fn layouts(self, layouts: impl IntoIterator<Item = impl Into<Option<Placement>>>) -> Self {
        Self { layouts: layouts.into_iter().map(Into::into).collect(), ..self }
    }

    /// Sets whether each plain input of the module is this rank's part, or the whole tensor.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        Self { use_local_output, ..self }
    }
}

impl PrepareModuleOutput {
    /// Creates a style with a placement for each output, or an option of one where some outputs stay unchanged.
    pub fn new(desired: impl IntoIterator<Item = impl Into<Option<Placement>>>) -> Self {
        Self {
            layouts: Vec::new(),
            desired: desired.into_iter().map(Into::into).collect(),
            use_local_output: true,
        }
    }

    /// Sets the placements of plain tensors.
    pub fn layouts(self, layouts: impl IntoIterator<Item = impl Into<Option<Placement>>>) -> Self {
        Self { layouts: layouts.into_iter().map(Into::into).collect(), ..self }
    }

    /// Sets whether a plain output is this rank's part, or the whole tensor.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        Self { use_local_output, ..self }
    }
}

impl PrepareModuleInputOutput {
    /// Creates a style from those of the inputs and of the outputs.
    pub fn new(input: PrepareModuleInput, output: PrepareModuleOutput) -> Self {
        Self { input, output }
    }
}

/// The style of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
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
    /// Returns the new placements of all inputs, if the style lists them.
    pub(super) fn listed_inputs(&self) -> Option<&[Option<Placement>]> {
        match self {
            Self::PrepareInput(input) | Self::PrepareInputOutput(PrepareModuleInputOutput { input, .. }) => {
                Some(&input.desired)
            }
            _ => None,
        }
    }

    /// Returns the new placements of all outputs, if the style lists them.
    pub(super) fn listed_outputs(&self) -> Option<&[Option<Placement>]> {
        match self {
            Self::PrepareOutput(output)
            | Self::PrepareInputOutput(PrepareModuleInputOutput { output, .. }) => Some(&output.desired),
            _ => None,
        }
    }

    /// Returns the placements of a module's plain inputs, as far as the style lists them.
    pub(super) fn plain_inputs(&self) -> &[Option<Placement>] {
        match self {
            Self::PrepareInput(input) | Self::PrepareInputOutput(PrepareModuleInputOutput { input, .. }) => {
                &input.layouts
            }
            _ => &[],
        }
    }

    /// Returns the placements of a module's plain outputs, as far as the style lists them.
    pub(super) fn plain_outputs(&self) -> &[Option<Placement>] {
        match self {
            Self::PrepareOutput(output)
            | Self::PrepareInputOutput(PrepareModuleInputOutput { output, .. }) => &output.layouts,
            _ => &[],
        }
    }

    /// Returns whether plain inputs of a module are this rank's parts.
    pub(super) fn has_local_inputs(&self) -> bool {
        match self {
            Self::PrepareInput(input) | Self::PrepareInputOutput(PrepareModuleInputOutput { input, .. }) => {
                input.use_local_output
            }
            _ => true,
        }
    }

    /// Returns whether plain outputs are this rank's parts.
    pub(super) fn has_local_outputs(&self) -> bool {
        match self {
            Self::Colwise(style) => style.use_local_output,
            Self::Rowwise(style) => style.use_local_output,
            Self::Sequence(style) => style.use_local_output,
            Self::PrepareOutput(output)
            | Self::PrepareInputOutput(PrepareModuleInputOutput { output, .. }) => output.use_local_output,
            Self::PrepareInput(_) => true,
        }
    }

    /// Refuses placements that no redistribution can produce.
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
