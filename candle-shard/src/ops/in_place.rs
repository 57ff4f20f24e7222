//! Changes in place. They are allowed on tensors that were given or made by a factory, not on results of ops.
use super::slice::{overlaps, within};
use crate::autograd::counts::parameters_change;
use crate::layout::{Replicate, Shard};
use crate::redistribute::{Target, Targets};
use crate::rules::{self, OpSpec, check_meshes};
use crate::{DTensor, Error, Result};
use candle_core::scalar::Scalar;
use candle_core::shape::Dim;
use candle_core::{Shape, Tensor};
use candle_dist::backend::Dims;
use smallvec::smallvec;
use std::ops::Range;

impl DTensor {
    /// Sets every element to `value` in place; nothing is communicated.
    ///
    /// # Errors
    /// As for [`slice_set`](Self::slice_set), and if `value` has another dtype.
    pub fn const_set(&self, value: Scalar) -> Result<()> {
        self.fill("const_set", value)
    }

    /// Sets every element to zero in place; nothing is communicated.
    ///
    /// # Errors
    /// As for [`slice_set`](Self::slice_set).
    pub fn zero_set(&self) -> Result<()> {
        self.fill("zero_set", Scalar::zero(self.dtype()))
    }

    /// Sets every element to one in place; nothing is communicated.
    ///
    /// # Errors
    /// As for [`slice_set`](Self::slice_set).
    pub fn one_set(&self) -> Result<()> {
        self.fill("one_set", Scalar::one(self.dtype()))
    }

    fn fill(&self, op: &'static str, value: Scalar) -> Result<()> {
        self.check_writable(op)?;
        if value.dtype() != self.dtype() {
            let (value, own) = (value.dtype().as_str(), self.spec());
            return Error::op(op, format!("a value {value} for {own}; give one of the tensor's dtype"));
        }
        self.written();
        Ok(self.to_local().const_set(value)?)
    }

    /// Writes `src` into a dim from `offset` on, in place and without a gradient.
    ///
    /// A replicated `src` is cut without communication. A sharded one is sent to the ranks that hold the range. `src`
    /// is copied once, so it may share memory with this tensor.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Replicate, Result, Shard};
    ///
    /// let sums = World::threads(2).run(|ctx| -> Result<f32> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let cache = DTensor::zeros((4, 3), DType::F32, &Device::Cpu, &mesh, &[Shard(0)])?;
    ///     cache.slice_set(&DTensor::ones((2, 3), DType::F32, &Device::Cpu, &mesh, &[Replicate])?, 0, 1)?;
    ///     cache.sum_all()?.to_scalar() // each rank wrote one row
    /// })?;
    /// assert_eq!(sums, [6.0, 6.0]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If the range is not inside the dim; if the other dims or the dtypes differ; if this tensor is partial, or has a
    /// gradient and is not a parameter; if it is the result of an op, which shares memory with other tensors on some
    /// layouts and not on others; or if the memory of this rank's shard has gaps.
    #[track_caller]
    pub fn slice_set(&self, src: &Self, dim: impl Dim, offset: usize) -> Result<()> {
        const OP: &str = "slice_set";
        let dim = dim.to_index(&Shape::from(self.dims()), OP)?;
        self.check_writable(OP)?;
        let part = offset..offset.saturating_add(src.dims().get(dim).copied().unwrap_or(0));
        let (target, src) = (self.detach(), src.detach());
        let op_spec = || target.slice_set_op_spec(&src, dim, &part);
        self.written();
        rules::run_with(OP, &[dim, offset], &[&target, &src], &op_spec, &|x, _| {
            let (memory, src) = (x[0].to_local(), x[1].to_local());
            let held = &x[0].spec().local_block()[dim];
            let own = within(held, &part);
            // A source that arrived whole is cut here.
            let came_cut = src.dim(dim)? == own.len();
            let first = if came_cut { 0 } else { (held.start + own.start).saturating_sub(part.start) };
            if !own.is_empty() && src.elem_count() > 0 {
                memory.slice_set(&src.narrow(dim, first, own.len())?.force_contiguous()?, dim, own.start)?;
            }
            Ok(smallvec![memory.clone()])
        })?;
        Ok(())
    }

    fn slice_set_op_spec(&self, src: &Self, dim: usize, part: &Range<usize>) -> Result<OpSpec> {
        check_meshes("slice_set", &[self, src])?;
        self.check_fits("slice_set", src, dim, part)?;
        let base = self.targets();
        let sole = (self.sharded_axes(dim).count() == 1).then(|| self.sharded_axes(dim).next()).flatten();
        let piece: Targets = base
            .iter()
            .enumerate()
            .map(|(axis, target)| match target.placement {
                Shard(d) if d == dim && Some(axis) == sole => {
                    Target::shard(dim, &overlaps(&self.spec().cut(axis, dim).sizes, part))
                }
                // Sizes of shards of shards cannot be expressed, so each rank cuts its rows from the whole source.
                Shard(d) if d == dim => Replicate.into(),
                _ => target.clone(),
            })
            .collect();
        OpSpec::laid(
            &[self, src],
            [base.clone(), piece],
            &base,
            &[(Dims::from_slice(self.dims()), self.dtype())],
        )
    }

    /// Sets the elements at `indexes` of a dim to those of `src` in place, without a gradient; see
    /// [`scatter`](Self::scatter).
    ///
    /// The new elements are computed as in [`scatter`](Self::scatter), in new memory, and then written.
    ///
    /// # Errors
    /// Those of [`scatter`](Self::scatter), and of [`slice_set`](Self::slice_set) for this tensor.
    #[track_caller]
    pub fn scatter_set(&self, indexes: &Self, src: &Self, dim: impl Dim) -> Result<()> {
        self.check_writable("scatter_set")?;
        self.overwrite(&self.detach().scatter(indexes, &src.detach(), dim)?)
    }

    /// Adds `src` to the elements at `indexes` of a dim in place, without a gradient; see
    /// [`scatter_add`](Self::scatter_add).
    ///
    /// The new elements are computed as in [`scatter_add`](Self::scatter_add), in new memory, and then written.
    ///
    /// # Errors
    /// Those of [`scatter_add`](Self::scatter_add), and of [`slice_set`](Self::slice_set) for this tensor.
    #[track_caller]
    pub fn scatter_add_set(&self, indexes: &Self, src: &Self, dim: impl Dim) -> Result<()> {
        self.check_writable("scatter_add_set")?;
        self.overwrite(&self.detach().scatter_add(indexes, &src.detach(), dim)?)
    }

    /// Redistributes `value` to the layout of this tensor and writes it into this tensor's memory.
    pub(crate) fn overwrite(&self, value: &Self) -> Result<()> {
        let value = value.detach().to_targets(&self.targets(), 0)?;
        let memory = self.to_local();
        if memory.elem_count() == 0 {
            return Ok(());
        }
        self.written();
        // Adds a dim, since a scalar has no dim to begin at.
        Ok(memory.unsqueeze(0)?.slice_set(&value.to_local().force_contiguous()?.unsqueeze(0)?, 0, 0)?)
    }

    /// Records that a parameter changed, since copies of it may be cached.
    fn written(&self) {
        if self.to_local().is_variable() {
            parameters_change();
        }
    }

    /// Refuses memory that other tensors share, or that a backward pass still needs.
    fn check_writable(&self, op: &'static str) -> Result<()> {
        let is_variable = self.to_local().is_variable();
        let (why, fix) = match () {
            _ if self.placements().iter().any(|p| p.is_partial()) => {
                ("is partial, so no rank holds its elements", "redistribute and copy it first")
            }
            _ if !self.is_leaf() => (
                "is the result of an op, which shares memory with other tensors on some layouts and not on others",
                "change what was given or made by a factory, or a detached copy",
            ),
            _ if self.tracked() && !is_variable => {
                ("has a gradient, for which its present elements are needed", "change a detached copy")
            }
            _ if self.is_in_variable() && !is_variable => (
                "is a parameter that a fully sharded unit gathers",
                "change the unit's pieces through Parameters",
            ),
            _ => return Ok(()),
        };
        Error::op(op, format!("{} {why}; {fix}", self.spec()))
    }

    /// Copies the elements to new memory in row-major order. The copy may be changed in place if it has no gradient.
    pub fn copy(&self) -> Result<Self> {
        self.check_memory("copy")?;
        let local = self.to_local().force_contiguous()?;
        let copy =
            Self::computed(local, self.shared_spec().clone(), self.varying(), std::slice::from_ref(self));
        Ok(if copy.tracked() { copy } else { copy.into_made() })
    }

    /// [`copy`](Self::copy), under candle's other name.
    pub fn force_contiguous(&self) -> Result<Self> {
        self.copy()
    }

    /// Returns whether this rank's shard lies in memory in row-major order without gaps. Ranks may differ.
    pub fn is_contiguous(&self) -> bool {
        self.to_local().is_contiguous()
    }

    /// Moves this rank's shard to `device`; every rank gives its own device.
    ///
    /// Nothing is communicated. The group's backend must support the device before the next op that communicates.
    pub fn to_device(&self, device: &candle_core::Device) -> Result<Self> {
        if self.device().same_device(device) {
            return Ok(self.clone());
        }
        self.check_memory("to_device")?;
        let local: Tensor = self.to_local().to_device(device)?;
        Ok(Self::computed(local, self.shared_spec().clone(), self.varying(), std::slice::from_ref(self)))
    }
}
