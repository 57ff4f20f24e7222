//! Layers of a plan on plain tensors, where the code around them knows nothing of meshes.
use super::module::ModuleStyle;
use super::style::Style;
use crate::placement::{Placement, Replicate, Shard};
use crate::spec::{Sizes, Spec, chunk_sizes};
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
use candle_dist::DeviceMesh;
use itertools::Itertools;

impl ModuleStyle {
    /// What `f` makes of a plain input, as a plain tensor: PyTorch's `use_local_output`.
    ///
    /// The input lies as the style says; `known` are the sizes of its last dim on the plan's axis. Where they are not known, the
    /// ranks tell each other.
    pub(crate) fn plain(
        &self,
        mesh: &DeviceMesh,
        x: &Tensor,
        known: Option<(usize, Sizes)>,
        f: impl FnOnce(&DTensor) -> Result<DTensor>,
    ) -> Result<Tensor> {
        let x = self.spread(mesh, x, self.plain_input(x.rank(), known.is_some()), known)?;
        self.local(&f(&x)?)
    }

    /// [`inputs`](Self::inputs) of plain tensors, which lie as the style's `layouts` say, as plain tensors.
    ///
    /// # Errors
    /// Those of [`inputs`](Self::inputs), and if a rank alone has no elements of one, or `mesh` has other axes.
    pub fn plain_inputs<const N: usize>(&self, mesh: &DeviceMesh, x: [&Tensor; N]) -> Result<[Tensor; N]> {
        let x = self.spread_all(mesh, x, self.style.as_ref().map_or(&[], Style::plain_inputs))?;
        self.all_local(self.inputs(x.each_ref())?)
    }

    /// [`outputs`](Self::outputs) of plain tensors, which lie as the style's `layouts` say, as plain tensors.
    ///
    /// # Errors
    /// As [`plain_inputs`](Self::plain_inputs).
    pub fn plain_outputs<const N: usize>(&self, mesh: &DeviceMesh, y: [&Tensor; N]) -> Result<[Tensor; N]> {
        let y = self.spread_all(mesh, y, self.style.as_ref().map_or(&[], Style::plain_outputs))?;
        self.all_local(self.outputs(y.each_ref())?)
    }

    fn spread_all<const N: usize>(
        &self,
        mesh: &DeviceMesh,
        x: [&Tensor; N],
        layouts: &[Option<Placement>],
    ) -> Result<[DTensor; N]> {
        let at = |i: usize| layouts.get(i).copied().flatten().unwrap_or(Replicate);
        let spread =
            x.iter().enumerate().map(|(i, x)| self.spread(mesh, x, at(i), None)).collect::<Result<Vec<_>>>()?;
        array(spread)
    }

    fn all_local<const N: usize>(&self, y: [DTensor; N]) -> Result<[Tensor; N]> {
        array(y.iter().map(|y| self.local(y)).collect::<Result<Vec<_>>>()?)
    }

    /// This rank's part, whose gradient is that of a piece, or alike on all ranks.
    fn local(&self, y: &DTensor) -> Result<Tensor> {
        self.check_whole("gives", y)?;
        let gradient = y.placements().iter().map(|at| if matches!(at, Shard(_)) { *at } else { Replicate });
        y.to_local_with_grad(&gradient.collect_vec())
    }

    /// How a plain input with `rank` dims lies on the plan's axis, of a layer that takes a product with it, or of ids.
    fn plain_input(&self, rank: usize, is_product: bool) -> Placement {
        let last = if is_product { Shard(rank.saturating_sub(1)) } else { Replicate };
        match &self.style {
            Some(Style::Colwise(style)) => style.input,
            Some(Style::Rowwise(style)) => style.input.unwrap_or(last),
            Some(Style::Sequence(style)) => Shard(style.dim),
            _ => Replicate,
        }
    }

    fn spread(&self, mesh: &DeviceMesh, x: &Tensor, at: Placement, known: Option<(usize, Sizes)>) -> Result<DTensor> {
        if let Some(other) = (0..mesh.ndim()).find(|&axis| axis != self.axis && mesh.shape()[axis] > 1) {
            let (name, own) = (&mesh.names()[other], &mesh.names()[self.axis]);
            return Err(self.error(format_args!(
                "gets a plain tensor, of which nothing says how it lies on axis {name:?} of {mesh}; give it a DTensor, or build \
                 the model on mesh.axis({own:?})"
            )));
        }
        let placements = (0..mesh.ndim()).map(|axis| if axis == self.axis { at } else { Replicate }).collect_vec();
        let spread = match (at, known) {
            (Shard(dim), Some((size, sizes))) if dim + 1 == x.rank() => {
                let mut shape = x.dims().to_vec();
                shape[dim] = size;
                let spec = Spec::new(mesh, &placements, shape, x.dtype())?.with_sizes(self.axis, Some(sizes))?;
                DTensor::from_local_with_spec(x.clone(), spec)?
            }
            (Shard(_), _) if mesh.size() > 1 => DTensor::from_local_ragged(x.clone(), mesh, &placements)?,
            _ => DTensor::from_local(x.clone(), mesh, &placements, x.shape())?,
        };
        self.check_whole("gets", &spread)?;
        Ok(spread)
    }

    /// Refuses a plain tensor that has no elements on some rank alone: candle's operations leave the graph there, and the rank
    /// would leave out what the others send in the backward pass.
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

/// The size of the last dim of what a linear layer with this weight takes, and how a weight cut by it is cut.
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

/// candle's `Module` for layers of a plan, so that they stand where candle-nn's layers stood: `x.apply(&layer)`.
macro_rules! plain_module {
    ($layer:ty, |$self:ident| $known:expr) => {
        impl candle_core::Module for $layer {
            /// The layer's plain output for a plain input, each as its style lays it out; see [`parallel`](crate::parallel).
            fn forward(&self, x: &candle_core::Tensor) -> candle_core::Result<candle_core::Tensor> {
                let $self = self;
                let y = $self.style.plain($self.weight.mesh(), x, $known, |x| $self.forward(x));
                Ok(y?)
            }
        }
    };
}
pub(crate) use plain_module;
