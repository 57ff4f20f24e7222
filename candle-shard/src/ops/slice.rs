//! Slices of a dim. Each rank keeps the rows that it holds, and nothing is communicated.
//!
//! A slice of a sharded dim has explicit sizes. If several axes shard the dim, the inner ones are gathered.
use crate::layout::{Partial, Replicate, Shard, Spec};
use crate::redistribute::{Target, Targets};
use crate::rules::{self, OpSpec, check_meshes};
use crate::{DTensor, Error, Result};
use candle_core::shape::Dim;
use candle_core::{Shape, Tensor};
use candle_dist::ReduceOp;
use candle_dist::backend::Dims;
use smallvec::smallvec;
use std::ops::{Bound, Range, RangeBounds};

impl DTensor {
    /// The slice `start..start + len` of a dim.
    ///
    /// Nothing is communicated if one axis shards the dim: each rank keeps its rows of the slice, which may be none.
    /// [`redistribute`](Self::redistribute) balances them.
    #[track_caller]
    pub fn narrow(&self, dim: impl Dim, start: usize, len: usize) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "narrow")?;
        let part = self.check_part("narrow", dim, start, len)?;
        if len == self.dims()[dim] {
            return Ok(self.clone());
        }
        self.resized("narrow", [dim, start, len], &|sizes| overlaps(sizes, &part), &|x, _| {
            let held = &x.spec().local_block()[dim];
            Ok(local_part(x.to_local(), dim, &within(held, &part))?)
        })
    }

    /// Pads a dim with `left` zeros before and `right` zeros after its elements.
    ///
    /// Nothing is communicated if one axis shards the dim: its first and last rank hold the zeros.
    #[track_caller]
    pub fn pad_with_zeros(&self, dim: impl Dim, left: usize, right: usize) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "pad_with_zeros")?;
        if left == 0 && right == 0 {
            return Ok(self.clone());
        }
        let pad = |sizes: &[usize]| {
            let mut sizes = Dims::from_slice(sizes);
            let last = sizes.len() - 1;
            sizes[0] += left;
            sizes[last] += right;
            sizes
        };
        self.resized("pad_with_zeros", [dim, left, right], &pad, &|x, out| {
            let to = &out.local_block()[dim];
            let left = if to.start == 0 { left } else { 0 };
            let right = to.len() - left - x.to_local().dim(dim)?;
            Ok(x.to_local().pad_with_zeros(dim, left, right)?)
        })
    }

    /// Splits a dim into at most `chunks` parts. If the size does not divide, the first parts have one element more.
    #[track_caller]
    pub fn chunk(&self, chunks: usize, dim: impl Dim) -> Result<Vec<Self>> {
        let dim = dim.to_index(&Shape::from(self.dims()), "chunk")?;
        let size = self.dims()[dim];
        if chunks == 0 {
            return Error::op(
                "chunk",
                format!("no chunks of dim {dim} of {}; ask for at least 1", self.spec()),
            );
        }
        let count = chunks.min(size.max(1));
        let start = |i: usize| i * (size / count) + i.min(size % count);
        (0..count).map(|i| self.narrow(dim, start(i), start(i + 1) - start(i))).collect()
    }

    /// The elements at `index` of the first dim, which goes away.
    #[track_caller]
    pub fn get(&self, index: usize) -> Result<Self> {
        if self.rank() == 0 { Ok(self.clone()) } else { self.get_on_dim(0, index) }
    }

    /// The elements at `index` of a dim, which goes away. If it is sharded, they are gathered from their rank.
    #[track_caller]
    pub fn get_on_dim(&self, dim: impl Dim, index: usize) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "get_on_dim")?;
        self.check_part("get_on_dim", dim, index, 1)?;
        self.narrow(dim, index, 1)?.squeeze(dim)
    }

    /// Returns a copy with `src` written into a dim from `start` on.
    ///
    /// The shard of the dim stays. A replicated `src` is cut without communication; a sharded one is sent to the ranks
    /// that hold the range.
    #[track_caller]
    pub fn slice_scatter(&self, src: &Self, dim: impl Dim, start: usize) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "slice_scatter")?;
        let len = src.dims().get(dim).copied().unwrap_or(0);
        let part = start..start.saturating_add(len);
        let op_spec = || self.slice_scatter_op_spec(src, dim, &part);
        let mut made = rules::run_with("slice_scatter", &[dim, start], &[self, src], &op_spec, &|x, _| {
            let held = &x[0].spec().local_block()[dim];
            let (base, src) = (x[0].to_local(), x[1].to_local());
            let own = within(held, &part);
            let before = local_part(base, dim, &(0..own.start))?;
            let after = local_part(base, dim, &(own.end..held.len()))?;
            Ok(smallvec![Tensor::cat(&[&before, src, &after], dim)?])
        })?;
        Ok(made.remove(0))
    }

    /// Returns a copy with `src` written to `ranges`, one range per dim: the form of `x[ranges] = src`.
    ///
    /// The cost is that of [`slice_scatter`](Self::slice_scatter) for each range that is not the whole dim.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Replicate, Result, Shard};
    ///
    /// let sums = World::threads(2).run(|ctx| -> Result<f32> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let x = DTensor::zeros((4, 3), DType::F32, &Device::Cpu, &mesh, &[Shard(0)])?;
    ///     let row = DTensor::ones((1, 3), DType::F32, &Device::Cpu, &mesh, &[Replicate])?;
    ///     let x = x.slice_assign(&[0..1, 0..3], &row)?; // x[0] = 1
    ///     Ok(x.sum_all()?.full_tensor()?.to_scalar::<f32>()?)
    /// })?;
    /// assert_eq!(sums, [3.0, 3.0]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn slice_assign(&self, ranges: &[impl RangeBounds<usize>], src: &Self) -> Result<Self> {
        if ranges.len() != self.rank() || src.rank() != self.rank() {
            let reason =
                format!("{} ranges of {} for {}: name every dim once", ranges.len(), self.spec(), src.spec());
            return Error::op("slice_assign", reason);
        }
        let mut starts = Dims::new();
        for (dim, range) in ranges.iter().enumerate() {
            let (start, end) = bounds(range, self.dims()[dim]);
            self.check_part("slice_assign", dim, start, end.saturating_sub(start))?;
            if end.saturating_sub(start) != src.dims()[dim] {
                let reason = format!("{start}..{end} of dim {dim} of {} for {}", self.spec(), src.spec());
                return Error::op(
                    "slice_assign",
                    format!("{reason}; the range must have the size of the source"),
                );
            }
            starts.push(start);
        }
        self.assign_from(0, &starts, src)
    }

    /// Assigns in dim `dim` and later; the dims before are whole.
    #[track_caller]
    fn assign_from(&self, dim: usize, starts: &[usize], src: &Self) -> Result<Self> {
        let mut partial = (dim..self.rank()).filter(|&d| src.dims()[d] != self.dims()[d]);
        let Some(dim) = partial.next() else {
            return if self.rank() == 0 { Ok(src.clone()) } else { self.slice_scatter(src, 0, 0) };
        };
        if partial.next().is_none() {
            return self.slice_scatter(src, dim, starts[dim]);
        }
        let part = self.narrow(dim, starts[dim], src.dims()[dim])?.assign_from(dim + 1, starts, src)?;
        self.slice_scatter(&part, dim, starts[dim])
    }

    #[track_caller]
    fn slice_scatter_op_spec(&self, src: &Self, dim: usize, part: &Range<usize>) -> Result<OpSpec> {
        check_meshes("slice_scatter", &[self, src])?;
        self.check_fits("slice_scatter", src, dim, part)?;
        let outermost = self.sharded_axes(dim).next();
        let mut base = self.targets();
        let mut piece = Targets::new();
        for (axis, target) in base.iter_mut().enumerate() {
            piece.push(match target.placement {
                Shard(d) if d == dim && Some(axis) == outermost => {
                    Target::shard(dim, &overlaps(&self.spec().cut(axis, dim).sizes, part))
                }
                Shard(d) if d != dim => target.clone(),
                Partial(ReduceOp::Sum) if self.dtype().is_float() => target.clone(),
                _ => {
                    *target = Replicate.into();
                    Replicate.into()
                }
            });
        }
        let out = base.clone();
        OpSpec::laid(&[self, src], [base, piece], &out, &[(Dims::from_slice(self.dims()), self.dtype())])
    }

    /// Runs an op that changes the size of dim `attributes[0]`. Shards stay on their ranks.
    ///
    /// `sizes` returns the new sizes of the shards of the dim.
    fn resized(
        &self,
        op: &'static str,
        attributes: [usize; 3],
        sizes: &dyn Fn(&[usize]) -> Dims,
        local: &dyn Fn(&DTensor, &Spec) -> Result<Tensor>,
    ) -> Result<Self> {
        let dim = attributes[0];
        let op_spec = || {
            let mut targets = self.targets();
            let mut out = self.targets();
            for (i, axis) in self.sharded_axes(dim).enumerate() {
                if i == 0 {
                    out[axis] = Target::shard(dim, &sizes(&self.spec().cut(axis, dim).sizes));
                } else {
                    (targets[axis], out[axis]) = (Replicate.into(), Replicate.into());
                }
            }
            let mut shape = Dims::from_slice(self.dims());
            shape[dim] = sizes(&[self.dims()[dim]])[0];
            OpSpec::laid(&[self], [targets], &out, &[(shape, self.dtype())])
        };
        let mut made = rules::run_with(op, &attributes, &[self], &op_spec, &|x, outs| {
            Ok(smallvec![local(&x[0], &outs[0])?])
        })?;
        // Some ranks return their shard unchanged, others a slice of it. Cached views must be alike on all ranks.
        Ok(made.remove(0).aliasing(self))
    }

    /// Refuses a source that is not `part` of a dim of this tensor.
    #[track_caller]
    pub(super) fn check_fits(
        &self,
        op: &'static str,
        src: &Self,
        dim: usize,
        part: &Range<usize>,
    ) -> Result<()> {
        let same = |d: usize| d == dim || src.dims()[d] == self.dims()[d];
        let fits = src.rank() == self.rank() && (0..self.rank()).all(same) && part.end <= self.dims()[dim];
        if fits && src.dtype() == self.dtype() {
            return Ok(());
        }
        let reason = format!("{} at {} of dim {dim} of {}", src.spec(), part.start, self.spec());
        Error::op(
            op,
            format!("{reason}: expected a part inside of the dim, with the other dims and the dtype equal"),
        )
    }

    #[track_caller]
    fn check_part(&self, op: &'static str, dim: usize, start: usize, len: usize) -> Result<Range<usize>> {
        let (end, size) = (start.saturating_add(len), self.dims()[dim]);
        if end > size {
            return Error::op(
                op,
                format!(
                    "{start}..{end} is outside of dim {dim} of {}; expected an end up to {size}",
                    self.spec()
                ),
            );
        }
        Ok(start..end)
    }
}

/// The number of elements of `part` in each of the shards of a dim.
pub(super) fn overlaps(sizes: &[usize], part: &Range<usize>) -> Dims {
    let piece = |start: &mut usize, size: &usize| {
        *start += size;
        Some(within(&(*start - size..*start), part).len())
    };
    sizes.iter().scan(0, piece).collect()
}

/// The range of `part` that lies in `held`, relative to the start of `held`.
pub(super) fn within(held: &Range<usize>, part: &Range<usize>) -> Range<usize> {
    let inside = |at: usize| at.clamp(held.start, held.end) - held.start;
    inside(part.start)..inside(part.end)
}

/// A slice of a local dim. candle panics on empty views that begin behind their memory.
fn local_part(x: &Tensor, dim: usize, part: &Range<usize>) -> candle_core::Result<Tensor> {
    x.narrow(dim, if part.is_empty() { 0 } else { part.start }, part.len())
}

/// Start and end of a range of indices below `size`.
pub(super) fn bounds(range: &impl RangeBounds<usize>, size: usize) -> (usize, usize) {
    let start = match range.start_bound() {
        Bound::Included(&at) => at,
        Bound::Excluded(&at) => at.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&at) => at.saturating_add(1),
        Bound::Excluded(&at) => at,
        Bound::Unbounded => size,
    };
    (start, end)
}
