//! A tensor distributed over a mesh.
use super::lineage::Lineage;
use super::registry::VarName;
use crate::layout::{Axes, Placement, Replicate, Shard, Spec};
use crate::{Error, Result};
use candle_core::shape::Dim;
use candle_core::{DType, Device, Shape, Tensor};
use candle_dist::{DeviceMesh, ShardedVar};
use std::fmt;
use std::sync::{Arc, Mutex};

/// A tensor distributed over a mesh: this rank's local tensor and the [`Spec`] that every rank shares.
///
/// Ops on it compute the numbers and gradients of one device. Cheap to clone.
///
/// On an axis where a tensor is `Replicate`, its gradient is either replicated (*invariant*) or a partial sum
/// (*varying*). The ops keep track of this; see ARCHITECTURE.md.
///
/// # Ops, and what stays sharded
///
/// Every layout of every input is accepted. Inputs that no row keeps are moved first; [`explain`](crate::explain())
/// reports these moves. Names are candle's, and ops of two tensors broadcast without a separate name.
///
/// | Ops | What stays where it is |
/// |---|---|
/// | `relu`, `gelu`, `gelu_erf`, `exp`, `abs`, `powf`, .., `activation`, `selu`, `dropout`, `to_dtype` | all dims; partial maxima and minima where the function keeps their order |
/// | `+ - * /`, `maximum`, `minimum`, `clamp`, `pow`, `prelu`, `silu_gate`, `where_cond` | all dims of the result; partial sums where the op is linear |
/// | `eq`, `ne`, `lt`, `le`, `gt`, `ge` | all dims |
/// | `sum`, `mean`, `var`, `std`, `norm`, `dot`, `max`, `min`, `any`, `all` (`_all`, `_keepdim`) | all dims; reduced ones leave partial results |
/// | `argmax`, `argmin`, `softmax`, `log_softmax`, `log_sum_exp`, `prod`, `cumsum`, `logcumsumexp`, `topk` | all dims; over a sharded one a few numbers per row are exchanged |
/// | `sort_last_dim`, `arg_sort_last_dim`, `causal_softmax`, `masked_softmax`, `layer_norm`, `rms_norm`, `swiglu` | leading dims |
/// | `matmul`, `mv`, `linear`, `einsum` | batch, rows or columns; a sharded inner dim gives partial sums |
/// | `scaled_dot_product_attention`, `flash_attn`, `rope` | batch and heads; rows of queries, whose keys are whole or sharded alike; positions of `rope` |
/// | `embedding`, `embedding_bag`, `index_select`, `gather`, `i`, `unfold` | other dims and those of the indexes; a sharded indexed dim gives partial sums |
/// | `scatter`, `scatter_add`, `index_add` | all dims |
/// | `narrow`, `chunk`, `get`, `pad_with_zeros`, `slice_scatter`, `slice_assign` | all dims, the sliced one with shards of unequal sizes |
/// | `permute`, `transpose`, `broadcast_as`, `unsqueeze`, `squeeze` | all dims |
/// | `reshape`, `flatten`, `split_units`, `pixel_shuffle`, `pixel_unshuffle` | dims whose shards end on rows of the new shape |
/// | `cat`, `stack`, `repeat`, `roll`, `flip`, `pad_with_same`, `replication_pad2d` | other dims than the one that changes |
/// | `conv1d`, `conv2d`, `conv_transpose1d`, `conv_transpose2d` | batch or output channels; sharded input channels give partial sums |
/// | `short_conv`, `gated_delta_rule`, `state_space_scan` | batch, and channels, groups or heads |
/// | `max_pool2d`, `avg_pool2d`, `upsample_nearest1d`, `upsample_nearest2d`, `upsample_bilinear2d` | batch and channels |
/// | `group_norm` | batch, and whole groups of channels |
/// | `cross_entropy`, `mse_loss`, `l1_loss`, `huber_loss`, `bce_with_logits_loss` | all dims, the classes too |
/// | [`on_whole`](Self::on_whole), for any other op | nothing: the inputs are gathered, with a warning |
///
/// Tensors that were given or made by a factory, and parameters, can be changed in place:
/// [`slice_set`](Self::slice_set), `const_set`, `zero_set`, `one_set`, `scatter_set`, `scatter_add_set`,
/// [`embedding_renorm`](Self::embedding_renorm). Not available: ops whose shape depends on the elements, and properties
/// of one rank's memory (`layout`, `stride`), which [`to_local`](Self::to_local) has.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Replicate, Result, Shard};
///
/// let sums = World::threads(2).run(|ctx| -> Result<f32> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let x = Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((3, 2))?;
///     let x = DTensor::distribute(&x, &mesh, &[Shard(0)])?; // ranks hold 2 rows and 1 row
///     Ok(x.sum_all()?.full_tensor()?.to_scalar::<f32>()?)
/// })?;
/// assert_eq!(sums, [15.0, 15.0]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Clone)]
pub struct DTensor {
    pub(super) local: Tensor,
    pub(super) spec: Arc<Spec>,
    /// The axes on which its gradient is a partial sum (`gradient.rs`).
    pub(super) varying: Axes,
    pub(super) trail: Option<Arc<Trail>>,
    /// Whether it was given, not made by an op.
    pub(super) leaf: bool,
    /// Whether its memory is that of a variable, which an optimizer changes in place.
    pub(super) in_variable: bool,
    /// The variable that this is, or from which local ops made it; `None` for a variable that was given as it is.
    pub(super) made_of: Option<Arc<Variable>>,
    /// What it was computed from.
    pub(super) lineage: Lineage,
    /// Says that the variable is a shard, to those who see only the variable.
    pub(super) shard: Option<ShardedVar>,
}

/// Data of a tracked tensor that lets several uses share one communication.
#[derive(Default)]
pub(crate) struct Trail {
    /// Views of this tensor that are varying on more axes.
    pub(super) views: Mutex<Vec<(Axes, Tensor)>>,
    /// Results of moves: the axes, their new placement, the axes on which the result varies, and the
    /// result.
    pub(super) moved: Mutex<Vec<(Axes, Placement, Axes, DTensor)>>,
    /// The tensor from which this one was gathered, and the axis.
    pub(crate) gathered: Option<(DTensor, usize)>,
    /// The origin of this copy for one use, and the axes over which its gradient is summed.
    pub(crate) used: Option<(Origin, Axes)>,
}

/// A variable, and its name if a builder made it.
#[derive(Clone)]
pub(crate) struct Variable {
    pub(crate) tensor: Tensor,
    pub(crate) name: Option<VarName>,
    /// Its number among the variables that [`DTensor::to_var`] made in its layout on this thread, from 1.
    pub(crate) ordinal: Option<u64>,
}

/// A variable, or a view that local ops made of one.
#[derive(Clone)]
pub(crate) struct Origin {
    pub(crate) variable: Arc<Variable>,
    /// The view, if this is not the variable itself.
    pub(crate) view: Option<Tensor>,
}

impl DTensor {
    pub(crate) fn assemble(local: Tensor, spec: Arc<Spec>, varying: Axes) -> Self {
        let lineage = Lineage::of_data(&spec);
        Self::of_lineage(local, spec, varying, lineage)
    }

    /// Creates a tensor that was computed from `inputs`.
    pub(crate) fn computed(local: Tensor, spec: Arc<Spec>, varying: Axes, inputs: &[Self]) -> Self {
        let lineage = Lineage::of_all(inputs.iter().map(|input| &input.lineage), &spec);
        Self::of_lineage(local, spec, varying, lineage)
    }

    fn of_lineage(local: Tensor, spec: Arc<Spec>, varying: Axes, lineage: Lineage) -> Self {
        debug_assert_eq!(local.dims(), spec.local_shape().as_slice(), "{spec}");
        // A parameter changes in place between steps, so a copy of it must not be cached (see `aliasing`).
        let in_variable = local.is_variable();
        let keeps_views = local.track_op() && !in_variable;
        let trail = keeps_views.then(Arc::<Trail>::default);
        Self { local, spec, varying, trail, leaf: false, in_variable, made_of: None, lineage, shard: None }
    }

    /// Creates a tensor that was given, not made by an op.
    pub(crate) fn leaf(local: Tensor, spec: Arc<Spec>) -> Self {
        Self { leaf: true, ..Self::assemble(local, spec, 0) }
    }

    /// Marks this tensor, which owns its memory, as made by a factory.
    pub(crate) fn into_made(self) -> Self {
        Self { leaf: true, ..self }
    }

    /// Returns the spec at the address that identifies it on this thread.
    pub(crate) fn shared_spec(&self) -> &Arc<Spec> {
        &self.spec
    }

    /// Returns the layout, equal on every rank.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        self.spec.mesh()
    }

    /// Returns the placement on each axis of the mesh.
    pub fn placements(&self) -> &[Placement] {
        self.spec.placements()
    }

    /// Returns the global shape.
    pub fn dims(&self) -> &[usize] {
        self.spec.dims()
    }

    /// Returns the global shape as candle's type, for its `dims2`, `dims3` and so on.
    pub fn shape(&self) -> Shape {
        Shape::from(self.dims())
    }

    /// Returns the index of a dim that may be counted from the end, from -1.
    ///
    /// # Errors
    /// If there is no such dim.
    pub fn normalize_axis(&self, axis: i64) -> Result<usize> {
        let at = if axis < 0 { axis.checked_add(self.rank() as i64) } else { Some(axis) };
        match at.and_then(|at| usize::try_from(at).ok()).filter(|&at| at < self.rank()) {
            Some(at) => Ok(at),
            None => Error::op("normalize_axis", format!("{} has no dim {axis}", self.spec())),
        }
    }

    /// Returns the global size of a dim.
    pub fn dim(&self, dim: impl Dim) -> Result<usize> {
        Ok(self.dims()[dim.to_index(&self.shape(), "dim")?])
    }

    /// Returns the number of dims.
    pub fn rank(&self) -> usize {
        self.dims().len()
    }

    /// Returns the number of elements of the whole tensor.
    pub fn elem_count(&self) -> usize {
        self.dims().iter().product()
    }

    /// Returns the dtype.
    pub fn dtype(&self) -> DType {
        self.spec.dtype()
    }

    /// Returns the device of this rank's shard.
    pub fn device(&self) -> &Device {
        self.local.device()
    }

    /// This rank's shard, connected to the graph; if the tensor is `Partial`, this rank's operand of the reduction.
    ///
    /// A gradient that enters through it must be that of the shard. Where the tensor is `Partial`, it must be
    /// replicated, and on axes where it [varies](Self::is_varying), a part of the whole gradient.
    pub fn to_local(&self) -> &Tensor {
        &self.local
    }

    /// Refuses integers by the dtype alone: ranks without elements must refuse them too.
    pub(crate) fn check_float(&self, op: &'static str) -> Result<()> {
        if self.dtype().is_float() {
            return Ok(());
        }
        Error::op(op, format!("{} holds no floats; convert it with to_dtype", self.spec))
    }

    /// Returns whether every rank holds the whole tensor.
    pub fn is_replicated(&self) -> bool {
        self.placements().iter().all(|p| *p == Replicate)
    }

    /// Returns the axes that shard `dim`.
    pub(crate) fn sharded_axes(&self, dim: usize) -> impl Iterator<Item = usize> + '_ {
        self.placements().iter().enumerate().filter(move |(_, p)| **p == Shard(dim)).map(|(axis, _)| axis)
    }
}

macro_rules! sizes {
    ($($name:ident: $sizes:ty),*) => {
        impl DTensor {
            $(/// The global sizes of all dims.
            ///
            /// # Errors
            /// If the number of dims differs.
            pub fn $name(&self) -> Result<$sizes> {
                Ok(self.shape().$name()?)
            })*
        }
    };
}
sizes!(
    dims0: (),
    dims1: usize,
    dims2: (usize, usize),
    dims3: (usize, usize, usize),
    dims4: (usize, usize, usize, usize),
    dims5: (usize, usize, usize, usize, usize)
);

impl fmt::Display for DTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DTensor {} at {:?}", self.spec, self.spec.local_block())
    }
}

impl fmt::Debug for DTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
