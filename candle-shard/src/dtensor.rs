//! A tensor distributed over a mesh.
use crate::agreement::alike;
use crate::factory::placed;
use crate::layout::{Axes, Partial, Placement, Replicate, Shard, Spec};
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::shape::Dim;
use candle_core::{DType, Device, Shape, Tensor, Var, WithDType};
use candle_dist::functional::Exchange;
use candle_dist::{DeviceMesh, ProcessGroup, ReduceOp};
use smallvec::SmallVec;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

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
/// | `sum`, `mean`, `var`, `norm`, `dot`, `max`, `min` (`_all`, `_keepdim`) | all dims; reduced ones leave partial results |
/// | `argmax`, `argmin`, `softmax`, `log_softmax`, `log_sum_exp`, `cumsum`, `topk` | all dims; over a sharded one a few numbers per row are exchanged |
/// | `sort_last_dim`, `arg_sort_last_dim`, `causal_softmax`, `masked_softmax`, `layer_norm`, `rms_norm`, `swiglu` | leading dims |
/// | `matmul`, `mv`, `linear` | batch, rows or columns; a sharded inner dim gives partial sums |
/// | `scaled_dot_product_attention`, `flash_attn`, `rope` | batch and heads; queries without a causal mask; positions of `rope` |
/// | `embedding`, `embedding_bag`, `index_select`, `gather`, `i`, `unfold` | other dims and those of the indexes; a sharded indexed dim gives partial sums |
/// | `scatter`, `scatter_add`, `index_add` | all dims |
/// | `narrow`, `chunk`, `get`, `pad_with_zeros`, `slice_scatter`, `slice_assign` | all dims, the sliced one with shards of unequal sizes |
/// | `permute`, `transpose`, `broadcast_as`, `unsqueeze`, `squeeze` | all dims |
/// | `reshape`, `flatten`, `pixel_shuffle`, `pixel_unshuffle` | dims whose shards end on rows of the new shape |
/// | `cat`, `stack`, `repeat`, `roll`, `flip`, `pad_with_same`, `replication_pad2d` | other dims than the one that changes |
/// | `conv1d`, `conv2d`, `conv_transpose1d`, `conv_transpose2d` | batch or output channels; sharded input channels give partial sums |
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
/// let sums = World::local(2).run(|ctx| -> Result<f32> {
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
    local: Tensor,
    spec: Arc<Spec>,
    varying: Axes,
    trail: Option<Arc<Trail>>,
    /// Whether it was given, not made by an op.
    leaf: bool,
    /// Whether its memory is that of a variable, which an optimizer changes in place.
    in_variable: bool,
    /// The variable from which local ops made this tensor.
    made_of: Option<Tensor>,
}

/// Data of a tracked tensor that lets several uses share one communication.
#[derive(Default)]
pub(crate) struct Trail {
    /// Views of this tensor that are varying on more axes.
    views: Mutex<Vec<(Axes, Tensor)>>,
    /// Results of redistribution steps: the axes, their new placement, the axes on which the result varies, and the
    /// result.
    steps: Mutex<Vec<(Axes, Placement, Axes, DTensor)>>,
    /// The tensor from which this one was gathered, and the axis.
    pub(crate) gathered: Option<(DTensor, usize)>,
    /// The origin of this copy for one use, and the groups over which its gradient is summed.
    pub(crate) used: Option<(Origin, Vec<ProcessGroup>)>,
}

/// A variable, or a view that local ops made of one.
#[derive(Clone)]
pub(crate) struct Origin {
    pub(crate) variable: Tensor,
    /// The view, if this is not the variable itself.
    pub(crate) view: Option<Tensor>,
}

impl DTensor {
    pub(crate) fn assemble(local: Tensor, spec: Arc<Spec>, varying: Axes) -> Self {
        debug_assert_eq!(local.dims(), spec.local_shape().as_slice(), "{spec}");
        // A parameter changes in place between steps, so a copy of it must not be cached (see `aliasing`).
        let in_variable = local.is_variable();
        let keeps_views = local.track_op() && !in_variable;
        let trail = keeps_views.then(Arc::<Trail>::default);
        Self { local, spec, varying, trail, leaf: false, in_variable, made_of: None }
    }

    /// Creates a tensor that was given, not made by an op.
    pub(crate) fn leaf(local: Tensor, spec: Arc<Spec>) -> Self {
        Self { leaf: true, ..Self::assemble(local, spec, 0) }
    }

    /// Marks this tensor as made of `source` without a copy: if that is a parameter's memory, so is this.
    pub(crate) fn aliasing(mut self, source: &Self) -> Self {
        if source.in_variable {
            (self.in_variable, self.trail) = (true, None);
        }
        self
    }

    /// Creates a parameter whose memory changes between uses, so that no copy of it may be cached.
    pub(crate) fn parameter(local: Tensor, spec: Spec) -> Self {
        Self { trail: None, in_variable: true, ..Self::leaf(local, spec.shared()) }
    }

    /// Creates a view of this tensor that is varying on `varying`, and shares the cache of views.
    pub(crate) fn viewed(&self, local: Tensor, varying: Axes) -> Self {
        let (spec, trail, in_variable) = (self.spec.clone(), self.trail.clone(), self.in_variable);
        Self { local, spec, varying, trail, leaf: false, in_variable, made_of: None }
    }

    /// Creates a copy of this variable for one use that is varying on `varying`.
    pub(crate) fn used(&self, local: Tensor, varying: Axes, used: (Origin, Vec<ProcessGroup>)) -> Self {
        let trail = Some(Arc::new(Trail { used: Some(used), ..Trail::default() }));
        Self { local, spec: self.spec.clone(), varying, trail, leaf: false, in_variable: false, made_of: None }
    }

    /// Marks this tensor as made by a local op from `source`, in the same layout.
    pub(crate) fn made_locally_of(mut self, source: &Self) -> Self {
        if source.in_variable && source.tracked() {
            let itself = || source.local.is_variable().then(|| source.local.clone());
            self.made_of = source.made_of.clone().or_else(itself);
        }
        self
    }

    /// Returns the variable that this is, or from which local ops made it without a copy that may be cached.
    pub(crate) fn origin(&self) -> Option<Origin> {
        if !self.in_variable || self.trail.is_some() {
            return None;
        }
        if self.local.is_variable() {
            return Some(Origin { variable: self.local.clone(), view: None });
        }
        self.made_of.clone().map(|variable| Origin { variable, view: Some(self.local.clone()) })
    }

    /// Returns whether this was given or made by a factory, not the result of an op.
    pub(crate) fn is_leaf(&self) -> bool {
        self.leaf
    }

    /// Returns whether the memory is that of a parameter.
    pub(crate) fn is_in_variable(&self) -> bool {
        self.in_variable
    }

    /// Marks this tensor, which owns its memory, as made by a factory.
    pub(crate) fn into_made(self) -> Self {
        Self { leaf: true, ..self }
    }

    pub(crate) fn gathered_from(mut self, source: &DTensor, axis: usize) -> Self {
        if self.trail.is_some() {
            self.trail = Some(Arc::new(Trail { gathered: Some((source.clone(), axis)), ..Trail::default() }));
        }
        self
    }

    /// Replaces the shard by another of the same shape, with the same layout and gradient state. The dtype is the new
    /// shard's.
    pub(crate) fn with_local(&self, local: Tensor) -> Result<Self> {
        if local.id() == self.local.id() {
            return Ok(self.clone());
        }
        check_reductions(&self.spec, local.track_op())?;
        if local.dims() != self.local.dims() {
            let (got, want) = (local.dims(), self.local.dims());
            return Err(Error::Layout(format!("a shard {got:?}, expected {want:?} of {}", self.spec)));
        }
        let spec = match local.dtype() == self.dtype() {
            true => self.spec.clone(),
            false => Spec::clone(&self.spec).with_dtype(local.dtype()).shared(),
        };
        let made = Self { leaf: self.leaf, ..Self::assemble(local, spec, self.varying) };
        Ok(made)
    }

    /// Uses this rank's tensor as a shard of the tensor that `spec` describes. Nothing is communicated.
    ///
    /// # Errors
    /// If the local shape or dtype does not match `spec` on this rank, `spec` mixes reductions whose order matters, or
    /// it has a reduction other than the sum for a tensor with a gradient.
    pub fn from_local_with_spec(local: Tensor, spec: Spec) -> Result<Self> {
        check_reductions(&spec, local.track_op())?;
        if local.dims() != spec.local_shape().as_slice() || local.dtype() != spec.dtype() {
            let (got, dtype, want) = (local.dims(), local.dtype().as_str(), spec.local_shape());
            let at = spec.mesh().coordinate();
            return Err(Error::Layout(format!(
                "a local tensor {dtype}{got:?} at {at:?} for {spec}, which holds {:?} there; give that piece, or have the \
                 sizes exchanged by from_local_ragged",
                want.as_slice()
            )));
        }
        Ok(Self::leaf(local, spec.shared()))
    }

    /// Uses this rank's tensor as a shard, of the default size, of a tensor of the global `shape`.
    ///
    /// Nothing is communicated. For shards of other sizes use [`from_local_ragged`](Self::from_local_ragged).
    ///
    /// # Errors
    /// If the local shape or dtype is not that of this rank's shard. Only a rank that passed a wrong tensor sees that;
    /// if its error ends its part of the world, all other ranks get a group failure that quotes it.
    pub fn from_local(
        local: Tensor,
        mesh: &DeviceMesh,
        placements: &[Placement],
        shape: impl Into<Shape>,
    ) -> Result<Self> {
        let spec = Spec::new(mesh, placements, shape, local.dtype())?;
        Self::from_local_with_spec(local, spec)
    }

    /// Distributes a tensor that is equal on every rank over the mesh. Nothing is communicated.
    ///
    /// The result is a leaf without gradient. `Partial` placements are refused, since only ops produce them. Under
    /// [`compare_operands`](crate::compare_operands) the ranks' tensors are compared.
    ///
    /// # Errors
    /// If the placements do not fit the tensor, or it has a gradient, which would be lost.
    pub fn distribute(tensor: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<Self> {
        untracked("distribute", tensor)?;
        let spec = placed(mesh, placements, tensor.shape(), tensor.dtype())?;
        alike("distribute", tensor, mesh)?;
        Self::cut_out(tensor, spec)
    }

    /// Cuts this rank's shard out of a whole tensor.
    pub(crate) fn cut_out(tensor: &Tensor, spec: Spec) -> Result<Self> {
        let mut local = tensor.detach();
        for (dim, range) in spec.local_block().iter().enumerate() {
            local = local.narrow(dim, range.start, range.len())?;
        }
        // A shard must not keep the whole tensor alive, nor alias a variable.
        Ok(Self::leaf(local.force_contiguous()?, spec.shared()))
    }

    /// Distributes the tensor of rank `source` of the mesh. The tensors of other ranks only define shape and dtype.
    pub fn distribute_from(
        tensor: &Tensor,
        source: usize,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        untracked("distribute_from", tensor)?;
        let spec = placed(mesh, placements, tensor.shape(), tensor.dtype())?;
        Self::cut_out(&mesh.group()?.broadcast(tensor, source)?, spec)
    }

    /// Converts to a trainable leaf: the local tensor becomes a [`Var`].
    pub fn to_var(&self) -> Result<(Self, Var)> {
        if let Some(p) = self.placements().iter().find(|p| p.is_partial()) {
            return Err(Error::Layout(format!("a parameter cannot be {p}; redistribute it first")));
        }
        let var = Var::from_tensor(&self.local.detach())?;
        let varying = self.varying;
        Ok((Self { varying, ..Self::leaf(var.as_tensor().clone(), self.spec.clone()) }, var))
    }

    /// Leaves the gradient of this leaf on `axis` as a partial sum, to be reduced later with others in one call.
    ///
    /// The tensor must be `Replicate` on the axis. See [`nn::Parameters::reduce`](crate::nn::Parameters::reduce).
    ///
    /// # Errors
    /// If it is not replicated there, or is the result of an op with a gradient: the op's gradient would be mistaken
    /// for the whole one.
    pub fn varying_on(mut self, axis: usize) -> Result<Self> {
        if self.tracked() && !self.leaf {
            return Err(Error::Layout(format!(
                "{} is the result of an op, so its gradient on axis {axis} is what the op takes it for; let the leaves \
                 that it is made of vary",
                self.spec
            )));
        }
        if self.placements().get(axis) != Some(&Replicate) {
            return Err(Error::Layout(format!(
                "{} is not replicated on axis {axis}, so cannot vary there; redistribute it first",
                self.spec
            )));
        }
        self.varying |= 1 << axis;
        Ok(self)
    }

    /// Returns whether the gradient on a replicated axis is a partial sum.
    pub fn is_varying(&self, axis: usize) -> bool {
        1u32.checked_shl(axis as u32).is_some_and(|bit| self.varying & bit != 0)
    }

    pub(crate) fn varying(&self) -> Axes {
        if self.tracked() { self.varying } else { 0 }
    }

    pub(crate) fn tracked(&self) -> bool {
        self.local.track_op()
    }

    pub(crate) fn trail(&self) -> Option<&Trail> {
        self.trail.as_deref()
    }

    /// Returns a cached view that is varying on exactly these axes, or makes one.
    pub(crate) fn view(&self, axes: Axes, make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        let Some(trail) = &self.trail else { return make() };
        let mut views = trail.views.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, view)) = views.iter().find(|(a, _)| *a == axes) {
            return Ok(view.clone());
        }
        let view = make()?;
        views.push((axes, view.clone()));
        Ok(view)
    }

    /// Returns the result of an earlier step to default sizes, or makes one and caches it.
    ///
    /// `make` must not return a tensor whose trail refers to this one: the two would keep each other alive.
    pub(crate) fn kept_step(
        &self,
        (axes, to, varying): (Axes, Placement, Axes),
        make: impl FnOnce() -> Result<Self>,
    ) -> Result<Self> {
        let Some(trail) = &self.trail else { return make() };
        let mut steps = trail.steps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((.., made)) = steps.iter().find(|(a, p, v, _)| (*a, *p, *v) == (axes, to, varying)) {
            return Ok(made.clone());
        }
        let made = make()?;
        steps.push((axes, to, varying, made.clone()));
        Ok(made)
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

    /// Returns the whole tensor on every rank. A gradient that enters through it must be the same on every rank.
    ///
    /// For a parameter it is a copy: an optimizer's step does not change it.
    pub fn full_tensor(&self) -> Result<Tensor> {
        let mut whole = self.redistribute(&vec![Replicate; self.mesh().ndim()])?;
        if whole.in_variable {
            whole.local = whole.local.copy()?;
        }
        let varying = (0..self.mesh().ndim()).filter(|&axis| whole.tracked() && whole.is_varying(axis));
        varying.into_iter().try_fold(whole.local.clone(), |local, axis| {
            Ok(Exchange::to_invariant().apply(&local, self.mesh().axis_group(axis)?)?)
        })
    }

    /// Returns the only element, the same on every rank. Shards are gathered and partial results reduced first.
    ///
    /// # Errors
    /// If the tensor does not have exactly one element, or not the dtype `S`.
    pub fn to_scalar<S: WithDType>(&self) -> Result<S> {
        if self.elem_count() != 1 || self.dtype() != S::DTYPE {
            let want = S::DTYPE.as_str();
            return Error::op(
                "to_scalar",
                format!("{} is not a single {want}; reduce or convert it first", self.spec()),
            );
        }
        Ok(self.detach().full_tensor()?.reshape(())?.to_scalar()?)
    }

    /// Returns the gradients of this scalar with respect to every variable, as local tensors laid out like the
    /// variables.
    ///
    /// The number of ranks never scales a gradient. Every rank calls it.
    ///
    /// # Errors
    /// If the tensor has more than one element.
    pub fn backward(&self) -> Result<GradStore> {
        if self.elem_count() != 1 || self.placements().iter().any(|p| p.shard_dim().is_some()) {
            return Error::op("backward", format!("{} is not a scalar; reduce it with sum_all or mean_all", self.spec));
        }
        let linear = |p: &Placement| matches!(p, Replicate | Partial(ReduceOp::Sum));
        if !self.placements().iter().all(linear) {
            let whole = self.redistribute(&vec![Replicate; self.mesh().ndim()])?;
            return whole.backward();
        }
        let _step = crate::explain::open("backward");
        // A varying loss is the same number on every rank; each rank's loss stands for a part of it.
        let varies = |&axis: &usize| self.placements()[axis] == Replicate && self.is_varying(axis);
        let varies: SmallVec<[usize; 3]> = (0..self.mesh().ndim()).filter(varies).collect();
        if varies.is_empty() {
            return crate::autograd::backward(&self.local);
        }
        // The part of one rank is the whole, since 1/n could be rounded. Not `affine`, which cuts the graph at zero.
        let first = varies.iter().all(|&axis| self.mesh().coordinate()[axis] == 0);
        let share = Tensor::full(f64::from(u8::from(first)), self.local.shape(), self.device())?;
        crate::autograd::backward(&(&self.local * share.to_dtype(self.dtype())?)?)
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

/// Refuses a tensor whose gradient would be lost.
fn untracked(op: &'static str, tensor: &Tensor) -> Result<()> {
    if !tensor.track_op() {
        return Ok(());
    }
    let fix = "detach it, or keep the gradient with DTensor::replicated and redistribute";
    Error::op(op, format!("a tensor {:?} with a gradient, which would be lost; {fix}", tensor.dims()))
}

/// Refuses different reductions on several axes, such as maxima of sums, which are not sums of maxima. Sums and
/// averages may be mixed, since their order does not matter. With a gradient only sums are allowed.
fn check_reductions(spec: &Spec, tracked: bool) -> Result<()> {
    if let Some(p) = spec.placements().iter().find(|p| tracked && p.is_partial() && **p != Placement::PARTIAL_SUM) {
        return Err(Error::Layout(format!(
            "a local tensor with a gradient for {spec}: {p} carries none; detach it, or give operands of a sum"
        )));
    }
    let linear = |p: &Placement| matches!(p, Partial(ReduceOp::Sum | ReduceOp::Avg));
    let mut partial = spec.placements().iter().filter(|p| p.is_partial());
    let Some(first) = partial.next() else { return Ok(()) };
    match partial.find(|p| *p != first && !(linear(p) && linear(first))) {
        None => Ok(()),
        Some(other) => Err(Error::Layout(format!(
            "a local tensor for {spec}: the order of {first} and {other} would matter; reduce over one axis first"
        ))),
    }
}

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
