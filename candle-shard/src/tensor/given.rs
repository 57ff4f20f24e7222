//! Tensors that are given, not made by an op: from local tensors, or cut out of whole ones.
use super::dtensor::{DTensor, Variable};
use crate::agreement::{Frequency, alike};
use crate::layout::{Partial, Placement, Replicate, Spec};
use crate::lookup::check_label;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor, Var};
use candle_dist::{DeviceMesh, ReduceOp, ShardedVar};
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

impl DTensor {
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
        Ok(made.moved_from(self, 0))
    }

    /// Uses this rank's tensor as a shard of the tensor that `spec` describes. Nothing is communicated.
    ///
    /// # Errors
    /// If the local shape or dtype does not match `spec` on this rank, `spec` mixes reductions whose order matters, or
    /// it has a reduction other than the sum for a tensor with a gradient; if the tensor is rows of a
    /// [`ShardedTensor`](crate::ShardedTensor) that several ranks looked up, and `spec` replicates it over them.
    pub fn from_local_with_spec(local: Tensor, spec: Spec) -> Result<Self> {
        check_reductions(&spec, local.track_op())?;
        check_label(&local, &spec)?;
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
    /// No element is sent. For shards of other sizes use [`from_local_ragged`](Self::from_local_ragged). If all axes replicate the
    /// tensor, and it has no gradient, the ranks compare hashes of it on the first use of each line of source.
    ///
    /// # Errors
    /// If the local shape or dtype is not that of this rank's shard. Only a rank that passed a wrong tensor sees that;
    /// if its error ends its part of the world, all other ranks get a group failure that quotes it.
    #[track_caller]
    pub fn from_local(
        local: Tensor,
        mesh: &DeviceMesh,
        placements: &[Placement],
        shape: impl Into<Shape>,
    ) -> Result<Self> {
        let spec = Spec::new(mesh, placements, shape, local.dtype())?;
        if placements.iter().all(|&at| at == Replicate) {
            alike("from_local", "", Frequency::PerLine, &local, mesh)?;
        }
        Self::from_local_with_spec(local, spec)
    }

    /// Distributes a tensor that is equal on every rank over the mesh: each rank keeps its part. No element is sent.
    ///
    /// The result is a leaf without gradient. `Partial` placements are refused, since only ops produce them.
    ///
    /// All ranks of the mesh call it. They compare hashes of their tensors on the first use of each line of source with each shape
    /// and dtype, and in debug builds at each use: a check of 8 bytes per rank. See [`compare_operands`](crate::compare_operands).
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("dp", 2)])?;
    ///     let mine = Tensor::rand(0f32, 1., (4, 3), &Device::Cpu)?; // a batch that each rank draws itself
    ///     let error = DTensor::distribute(&mine, &mesh, &[Shard(0)]).unwrap_err().to_string();
    ///     assert!(error.contains("all ranks must give the same tensor"), "{error}");
    ///     let of_rank_0 = DTensor::distribute_from(&mine, 0, &mesh, &[Shard(0)])?; // 2 of its rows on each rank
    ///     assert_eq!(of_rank_0.dims(), [4, 3]);
    ///     let joined = DTensor::from_local(mine, &mesh, &[Shard(0)], (8, 3))?; // 4 own rows on each rank
    ///     assert_eq!(joined.dims(), [8, 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If the placements do not fit the tensor, it has a gradient, which would be lost, or the ranks' tensors differ where they are
    /// compared.
    #[track_caller]
    pub fn distribute(tensor: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<Self> {
        Self::distribute_named("", tensor, mesh, placements)
    }

    /// Like [`distribute`](Self::distribute), of a tensor with a name.
    #[track_caller]
    pub(super) fn distribute_named(
        name: &str,
        tensor: &Tensor,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        untracked("distribute", tensor)?;
        let spec = placed(mesh, placements, tensor.shape(), tensor.dtype())?;
        alike("distribute", name, Frequency::PerShape, tensor, mesh)?;
        Self::cut_out(tensor, spec)
    }

    /// Cuts this rank's shard out of a whole tensor.
    pub(crate) fn cut_out(tensor: &Tensor, spec: Spec) -> Result<Self> {
        let local = block_of(&tensor.detach(), &spec.local_block())?;
        // A shard must not keep the whole tensor alive, nor alias a variable.
        Ok(Self::leaf(local.force_contiguous()?, spec.shared()))
    }

    /// Distributes the tensor of rank `source` of the mesh, which is broadcast. The tensors of other ranks only define shape and dtype.
    #[track_caller]
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
    ///
    /// All ranks of the mesh make the variables of a layout in one order: the backward pass compares their numbers, and
    /// returns an error if it would sum gradients of different variables.
    pub fn to_var(&self) -> Result<(Self, Var)> {
        let (mut made, var) = self.to_parameter()?;
        let (tensor, ordinal) = (var.as_tensor().clone(), Some(next_ordinal(&self.spec)));
        made.made_of = Some(Arc::new(Variable { tensor, name: None, ordinal }));
        Ok((made, var))
    }

    /// Like [`to_var`](Self::to_var), for a variable that gets a name, so needs no number.
    pub(crate) fn to_parameter(&self) -> Result<(Self, Var)> {
        self.check_memory("to_var")?;
        if let Some(p) = self.placements().iter().find(|p| p.is_partial()) {
            return Err(Error::Layout(format!("a parameter cannot be {p}; redistribute it first")));
        }
        let var = Var::from_tensor(&self.local.detach())?;
        Ok((Self { varying: self.varying, ..self.parameter_of(&var) }, var))
    }

    /// Returns the parameter in this layout whose part on this rank is `var`.
    pub(crate) fn parameter_of(&self, var: &Var) -> Self {
        let placements = self.placements();
        let axes = (0..placements.len()).filter(|&axis| placements[axis].shard_dim().is_some());
        let shard = Some(ShardedVar::new(var, self.mesh(), axes));
        Self { shard, ..Self::leaf(var.as_tensor().clone(), self.spec.clone()) }
    }
}

/// Returns a view of a block of a tensor.
pub(crate) fn block_of(tensor: &Tensor, block: &[Range<usize>]) -> candle_core::Result<Tensor> {
    let mut ranges = block.iter().enumerate();
    ranges.try_fold(tensor.clone(), |part, (dim, range)| part.narrow(dim, range.start, range.len()))
}

/// Returns the number of the next variable in this layout on this thread, from 1.
///
/// Each layout counts for itself, since a rank may have variables on meshes that other ranks are not part of.
fn next_ordinal(spec: &Spec) -> u64 {
    thread_local! {
        static COUNTS: RefCell<FxHashMap<String, u64>> = RefCell::default();
    }
    COUNTS.with_borrow_mut(|counts| {
        let count = counts.entry(format!("{spec} on {:?}", spec.mesh().ranks())).or_default();
        *count += 1;
        *count
    })
}

/// Creates a layout for a new tensor; refuses partial placements, which only ops produce.
pub(super) fn placed(
    mesh: &DeviceMesh,
    placements: &[Placement],
    shape: impl Into<Shape>,
    dtype: DType,
) -> Result<Spec> {
    let spec = Spec::new(mesh, placements, shape, dtype)?;
    match placements.iter().find(|p| p.is_partial()) {
        Some(p) => Err(Error::Layout(format!("cannot make or distribute a tensor as {p}; use a shard or R"))),
        None => Ok(spec),
    }
}

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
    if let Some(p) =
        spec.placements().iter().find(|p| tracked && p.is_partial() && **p != Placement::PARTIAL_SUM)
    {
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
