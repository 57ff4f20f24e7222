//! Layers of a plan on plain tensors, for code without meshes.
use super::module::ModuleStyle;
use super::style::Style;
use crate::agreement::{Frequency, alike};
use crate::layout::{Placement, Replicate, Shard, Sizes, Spec, chunk_sizes};
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
use candle_dist::DeviceMesh;
use itertools::Itertools;

impl ModuleStyle {
    /// Applies `f` to a plain input and returns a plain tensor: this rank's part, or the whole one.
    ///
    /// The style says how the input is laid out. `known` are the sizes of the shards of its last dim on the plan's
    /// axis; if `None`, the ranks exchange them.
    pub(crate) fn plain(
        &self,
        mesh: &DeviceMesh,
        x: &Tensor,
        known: Option<(usize, Sizes)>,
        f: impl FnOnce(&DTensor) -> Result<DTensor>,
    ) -> Result<Tensor> {
        let x = self.spread(mesh, x, self.plain_input(x.rank(), known.is_some()), known)?;
        self.local(&f(&x)?, self.style.as_ref().is_none_or(Style::has_local_outputs))
    }

    /// Like [`inputs`](Self::inputs), from and to plain tensors, which are laid out as the style's `layouts` say.
    ///
    /// # Errors
    /// Those of [`inputs`](Self::inputs), and one if only some ranks have elements of an input, or `mesh` has other
    /// axes.
    pub fn plain_inputs<const N: usize>(&self, mesh: &DeviceMesh, x: [&Tensor; N]) -> Result<[Tensor; N]> {
        let x = self.spread_all(mesh, x, self.style.as_ref().map_or(&[], Style::plain_inputs))?;
        self.all_local(self.inputs(x.each_ref())?, self.style.as_ref().is_none_or(Style::has_local_inputs))
    }

    /// Like [`outputs`](Self::outputs), from and to plain tensors, which are laid out as the style's `layouts` say.
    ///
    /// # Errors
    /// Those of [`plain_inputs`](Self::plain_inputs).
    pub fn plain_outputs<const N: usize>(&self, mesh: &DeviceMesh, y: [&Tensor; N]) -> Result<[Tensor; N]> {
        let y = self.spread_all(mesh, y, self.style.as_ref().map_or(&[], Style::plain_outputs))?;
        self.all_local(self.outputs(y.each_ref())?, self.style.as_ref().is_none_or(Style::has_local_outputs))
    }

    fn spread_all<const N: usize>(
        &self,
        mesh: &DeviceMesh,
        x: [&Tensor; N],
        layouts: &[Option<Placement>],
    ) -> Result<[DTensor; N]> {
        let at = |i: usize| layouts.get(i).copied().flatten().unwrap_or(Replicate);
        let spread = x
            .iter()
            .enumerate()
            .map(|(i, x)| self.spread(mesh, x, at(i), None))
            .collect::<Result<Vec<_>>>()?;
        array(spread)
    }

    fn all_local<const N: usize>(&self, y: [DTensor; N], is_local: bool) -> Result<[Tensor; N]> {
        array(y.iter().map(|y| self.local(y, is_local)).collect::<Result<Vec<_>>>()?)
    }

    /// Returns this rank's part, or the whole tensor. Its gradient is that of a shard, or equal on all ranks.
    fn local(&self, y: &DTensor, is_local: bool) -> Result<Tensor> {
        let y = match is_local {
            true => y.clone(),
            false => y.placed(|axis, placement| if axis == self.axis { Replicate } else { placement })?,
        };
        let y = &y;
        self.check_whole("gives", y)?;
        let gradient = y.placements().iter().map(|at| if matches!(at, Shard(_)) { *at } else { Replicate });
        y.to_local_with_grad(&gradient.collect_vec())
    }

    /// The placement on the plan's axis of a plain input with `rank` dims: of a linear layer (`is_product`), or of ids.
    fn plain_input(&self, rank: usize, is_product: bool) -> Placement {
        let last = if is_product { Shard(rank.saturating_sub(1)) } else { Replicate };
        match &self.style {
            Some(Style::Colwise(style)) => style.input,
            Some(Style::Rowwise(style)) => style.input.unwrap_or(last),
            Some(Style::Sequence(style)) => Shard(style.dim),
            _ => Replicate,
        }
    }

    fn spread(
        &self,
        mesh: &DeviceMesh,
        x: &Tensor,
        at: Placement,
        known: Option<(usize, Sizes)>,
    ) -> Result<DTensor> {
        if let Some(other) = (0..mesh.ndim()).find(|&axis| axis != self.axis && mesh.shape()[axis] > 1) {
            let (name, own) = (&mesh.names()[other], &mesh.names()[self.axis]);
            return Err(self.error(format_args!(
                "gets a plain tensor, of which nothing says how it lies on axis {name:?} of {mesh}; give it a DTensor, or build \
                 the model on mesh.axis({own:?})"
            )));
        }
        let placements =
            (0..mesh.ndim()).map(|axis| if axis == self.axis { at } else { Replicate }).collect_vec();
        let spread = match (at, known) {
            (Shard(dim), Some((size, sizes))) if dim + 1 == x.rank() => {
                let mut shape = x.dims().to_vec();
                shape[dim] = size;
                let spec =
                    Spec::new(mesh, &placements, shape, x.dtype())?.with_sizes(self.axis, Some(sizes))?;
                DTensor::from_local_with_spec(x.clone(), spec)?
            }
            (Shard(_), _) if mesh.size() > 1 => DTensor::from_local_ragged(x.clone(), mesh, &placements)?,
            _ => {
                if at == Replicate {
                    alike("a plain tensor", &self.path, Frequency::PerLine, x, mesh)?;
                }
                DTensor::from_local_with_spec(x.clone(), Spec::new(mesh, &placements, x.shape(), x.dtype())?)?
            }
        };
        self.check_whole("gets", &spread)?;
        Ok(spread)
    }

    /// Refuses a plain tensor that is empty on some ranks only. candle's ops leave the graph there, so the rank would
    /// miss the communication of the others in the backward pass.
    fn check_whole(&self, what: &str, x: &DTensor) -> Result<()> {
        let spec = x.spec();
        let is_empty = |at: Vec<usize>| spec.block_at(&at).iter().any(|range| range.is_empty());
        if x.elem_count() > 0 && x.mesh().coordinates().any(is_empty) {
            return Err(self.error(format_args!(
                "{what} {spec}, of which a rank has no elements, as a plain tensor: that is unsupported; give it a DTensor, or use \
                 fewer ranks"
            )));
        }
        Ok(())
    }
}

/// Returns the input size of a linear layer with this weight, and the sizes of the weight's shards along it.
pub(crate) fn sizes_of(weight: &DTensor, axis: usize) -> Option<(usize, Sizes)> {
    let size = *weight.dims().get(1)?;
    let explicit = weight.spec().sizes(axis).filter(|_| weight.placements()[axis] == Shard(1)).cloned();
    let sizes = explicit.unwrap_or_else(|| chunk_sizes(size, weight.mesh().shape()[axis]).as_slice().into());
    Some((size, sizes))
}

fn array<T, const N: usize>(list: Vec<T>) -> Result<[T; N]> {
    let len = list.len();
    list.try_into().or_else(|_| Error::op("plain", format!("{len} tensors where there are {N}")))
}

/// Implements candle's `Module` for layers of a plan, so that they can replace candle-nn's: `x.apply(&layer)`.
macro_rules! plain_module {
    ($layer:ty, |$self:ident| $known:expr) => {
        impl candle_core::Module for $layer {
            /// Maps a plain input to a plain output, each laid out as the style says; see
            /// [`parallel`](crate::parallel).
            fn forward(&self, x: &candle_core::Tensor) -> candle_core::Result<candle_core::Tensor> {
                let $self = self;
                let y = $self.style.plain($self.weight.mesh(), x, $known, |x| $self.forward(x));
                Ok(y?)
            }
        }
    };
}
pub(crate) use plain_module;
