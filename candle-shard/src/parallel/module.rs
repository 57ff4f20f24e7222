//! The style of one module of a model, and how the module applies it.
use super::shares::{Shares, cut};
use super::style::{ColwiseParallel, Style};
use crate::layout::{Axes, Placement, Replicate, Shard, Width};
use crate::redistribute::{Target, Targets};
use crate::{DTensor, Error, Result};
use candle_dist::backend::{Dims, called_from};
use std::panic::Location;

/// The kinds of layers that a style can be applied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerKind {
    /// `weight` `[out, in]`, `bias` `[out]`.
    Linear,
    /// Three linear layers of one input, with their weights stacked by rows.
    FusedQkv,
    /// `weight` `[rows, width]`.
    Embedding,
    /// `weight` `[width]`, `bias` `[width]`.
    Norm,
    /// `weight` `[out, in, ..]`, `bias` `[out]`; inputs and outputs have their channels in dim 1.
    Conv,
    /// `weight` `[in, out, ..]`, `bias` `[out]`; inputs and outputs have their channels in dim 1.
    ConvTranspose,
    /// `weight` `[channels]`, `bias` `[channels]`; inputs and outputs have their channels in dim 1.
    Channels,
    /// Weights `[gates · hidden, ..]` and biases `[gates · hidden]`; outputs have the hidden units in dim 1.
    Recurrent,
    /// A module of other layers, without parameters of its own.
    Module,
}

/// The placements of a layer's parameters on the plan's axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamPlacements {
    /// The weight.
    pub weight: Placement,
    /// The bias.
    pub bias: Placement,
    /// Whether the weight's gradient is left partial.
    pub varying: bool,
    /// Whether the bias's gradient is left partial.
    pub varying_bias: bool,
}

/// The former name of [`ParamPlacements`].
#[deprecated(since = "0.1.0", note = "renamed to ParamPlacements")]
pub type Layout = ParamPlacements;

/// The style that a plan gives one module of a model; none by default.
#[derive(Debug, Clone, Default)]
pub struct ModuleStyle {
    pub(super) path: String,
    pub(super) style: Option<Style>,
    /// The axis of the mesh that the plan is for; any for a plan without one.
    pub(crate) axis: usize,
    /// The shares of the ranks of this axis, if they are unlike.
    pub(super) shares: Option<Shares>,
}

impl ModuleStyle {
    /// No style, for a module at this path.
    pub(crate) fn none(path: String) -> Self {
        Self { path, ..Self::default() }
    }

    /// Returns the sizes of the shards of a dim on `ranks` ranks of the plan's axis.
    pub(crate) fn cut(&self, width: Width, ranks: usize) -> Dims {
        cut(self.shares.as_ref(), width, ranks)
    }

    /// Returns the placements of the parameters of a layer of this kind.
    ///
    /// # Errors
    /// If the style does not apply to the kind.
    pub fn layout(&self, kind: LayerKind) -> Result<ParamPlacements> {
        use LayerKind::{
            Channels, Conv, ConvTranspose, Embedding, FusedQkv, Linear, Module, Norm, Recurrent,
        };
        let fixed = |weight, bias| ParamPlacements { weight, bias, varying: false, varying_bias: false };
        let whole = fixed(Replicate, Replicate);
        match (&self.style, kind) {
            (None, _) | (Some(Style::PrepareInput(_)), Linear | FusedQkv | Norm | Module) => Ok(whole),
            (Some(Style::PrepareOutput(_)), Linear | Embedding | Norm | Module) => Ok(whole),
            (Some(Style::PrepareInputOutput(_)), Linear | Norm | Module) => Ok(whole),
            (
                Some(Style::PrepareInput(_) | Style::PrepareOutput(_) | Style::PrepareInputOutput(_)),
                Conv | ConvTranspose | Channels | Recurrent,
            ) => Ok(whole),
            (Some(Style::Colwise(_)), Linear | FusedQkv | Conv | Channels | Recurrent) => {
                Ok(fixed(Shard(0), Shard(0)))
            }
            (Some(Style::Colwise(_)), ConvTranspose) => Ok(fixed(Shard(1), Shard(0))),
            (Some(Style::Colwise(_)), Embedding) => Ok(fixed(Shard(1), Replicate)),
            (Some(Style::Rowwise(style)), Linear | Conv | ConvTranspose) => {
                // If the output is sharded when the bias is added, each rank has only a part of the bias's gradient.
                let varying_bias = style.output.shard_dim().is_some();
                let weight = Shard(if kind == ConvTranspose { 0 } else { 1 });
                Ok(ParamPlacements { varying_bias, ..fixed(weight, Replicate) })
            }
            (Some(Style::Rowwise(_)), Embedding) => Ok(fixed(Shard(0), Replicate)),
            (Some(Style::Sequence(_)), Norm | Embedding) => {
                Ok(ParamPlacements { varying: true, varying_bias: true, ..whole })
            }
            (Some(style), kind) => {
                let fit = match kind {
                    Linear | Conv | ConvTranspose => "ColwiseParallel or RowwiseParallel",
                    Channels | FusedQkv | Recurrent => "ColwiseParallel",
                    Embedding => "ColwiseParallel, RowwiseParallel or SequenceParallel",
                    Norm => "SequenceParallel",
                    Module => "a PrepareModule style, or name its layers",
                };
                Err(self.error(format_args!(
                    "has the style {style:?}, which does not apply to a {kind:?}; give it {fit}"
                )))
            }
        }
    }

    /// Checks that a shared weight has the placement that this module's own weight would have.
    pub(crate) fn check_tied(&self, kind: LayerKind, weight: &DTensor) -> Result<()> {
        let (want, has) = (self.layout(kind)?.weight, weight.placements()[self.axis]);
        if want == has {
            return Ok(());
        }
        let axis = &weight.mesh().names()[self.axis];
        let reason = format_args!("shares a weight {}, {has} on axis {axis:?}", weight.spec());
        Err(self.error(format_args!("{reason}, but its style expects {want}; choose styles that agree")))
    }

    /// Lays out the module's inputs as the style says; a layer has one input.
    ///
    /// # Errors
    /// If the style lists another number of inputs, or an input lacks a dim. Nothing has been communicated then.
    pub fn inputs<const N: usize>(&self, x: [&DTensor; N]) -> Result<[DTensor; N]> {
        self.inputs_of(LayerKind::Module, x)
    }

    /// Like [`inputs`](Self::inputs), for a layer of this kind: channels are sharded in dim 1.
    ///
    /// # Errors
    /// Those of [`inputs`](Self::inputs).
    pub fn inputs_of<const N: usize>(&self, kind: LayerKind, x: [&DTensor; N]) -> Result<[DTensor; N]> {
        use LayerKind::{Channels, Conv, ConvTranspose};
        let Some(style) = &self.style else { return Ok(x.map(DTensor::clone)) };
        if let Some(listed) = style.listed_inputs() {
            return self.lay_out_all("inputs", x, listed, false);
        }
        let first = match style {
            Style::Colwise(_) if kind == Channels => Some(Shard(1)),
            // A column-sharded layer uses its input differently on each rank, so the input is gathered for that first.
            Style::Colwise(_) => Some(Replicate),
            Style::Rowwise(_) if matches!(kind, Conv | ConvTranspose) => Some(Shard(1)),
            Style::Rowwise(_) => x.first().map(|x| Shard(x.rank().saturating_sub(1))),
            Style::Sequence(style) => Some(Shard(style.dim)),
            _ => None,
        };
        self.lay_out_all(
            "inputs",
            x,
            &first_of::<N>(first),
            matches!(style, Style::Colwise(_)) && kind != Channels,
        )
    }

    /// Lays out the module's outputs as the style says; a layer has one output.
    ///
    /// # Errors
    /// If the style lists another number of outputs, or an output lacks a dim.
    pub fn outputs<const N: usize>(&self, y: [&DTensor; N]) -> Result<[DTensor; N]> {
        let Some(style) = &self.style else { return Ok(y.map(DTensor::clone)) };
        if let Some(listed) = style.listed_outputs() {
            return self.lay_out_all("outputs", y, listed, false);
        }
        let first = match style {
            Style::Colwise(ColwiseParallel { output, .. }) => *output,
            Style::Rowwise(style) => Some(style.output),
            Style::Sequence(style) => Some(Shard(style.dim)),
            _ => None,
        };
        self.lay_out_all("outputs", y, &first_of::<N>(first), false)
    }

    /// Changes the placement of each tensor on the plan's axis; all other axes stay.
    fn lay_out_all<const N: usize>(
        &self,
        what: &str,
        x: [&DTensor; N],
        desired: &[Option<Placement>],
        vary: bool,
    ) -> Result<[DTensor; N]> {
        if desired.len() != N {
            let n = desired.len();
            return Err(self.error(format_args!(
                "has {N} {what}, but its style lays out {n}; give a layout, or None, for each"
            )));
        }
        for (i, (x, to)) in x.iter().zip(desired).enumerate() {
            if let Some(Shard(dim)) = to.filter(|to| to.shard_dim().is_some_and(|dim| dim >= x.rank())) {
                let (spec, axis) = (x.spec(), &x.mesh().names()[self.axis]);
                let reason =
                    format_args!("expects S({dim}) on axis {axis:?} of number {i} of its {what}, {spec}");
                return Err(self
                    .error(format_args!("{reason}, which has no dim {dim}; choose one below {}", x.rank())));
            }
        }
        let mut laid_out = x.map(DTensor::clone);
        for (x, to) in laid_out.iter_mut().zip(desired) {
            if let Some(to) = to {
                *x = self.lay_out(x, *to, vary)?;
            }
        }
        Ok(laid_out)
    }

    fn lay_out(&self, x: &DTensor, to: Placement, vary: bool) -> Result<DTensor> {
        // An inner axis that shards the same dim gets the default sizes.
        let outermost = |axis: usize| axis <= self.axis || x.placements()[axis] != to;
        let keep = |axis: usize| Target {
            placement: x.placements()[axis],
            sizes: x.spec().sizes(axis).filter(|_| outermost(axis)).cloned(),
        };
        let mut targets: Targets = (0..x.mesh().ndim()).map(keep).collect();
        if targets[self.axis].placement != to {
            targets[self.axis] = to.into();
        }
        x.to_targets(&targets, Axes::from(vary) << self.axis)
    }

    /// Runs the forward pass `f` of this layer, whose calls and errors name the layer and the line of its caller.
    #[track_caller]
    pub(crate) fn layer<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let site = Location::caller();
        called_from(site, f).map_err(|error| error.in_layer(&self.path, site))
    }

    /// Makes an error of the plan at this module.
    pub(crate) fn error(&self, reason: impl std::fmt::Display) -> Error {
        Error::Plan(format!("module {:?} {reason}", self.path))
    }
}

/// Returns a layout for the first of `N` tensors.
fn first_of<const N: usize>(first: Option<Placement>) -> [Option<Placement>; N] {
    std::array::from_fn(|i| first.filter(|_| i == 0))
}
