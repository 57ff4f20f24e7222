//! Ops that only reorder or repeat dims. Shards and partial sums move along.
use super::pointwise::{broadcast, broadcast_rows};
use crate::layout::{Placement, Replicate, Shard, Spec};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result, kernels};
use candle_core::shape::{Dim, Dims as DimList};
use candle_core::{Shape, Tensor};
use candle_dist::backend::Dims;
use candle_dist::edges;

const SUM: Placement = Placement::PARTIAL_SUM;

impl DTensor {
    /// Permutes the dims: dim `i` of the result is dim `dims[i]`.
    #[track_caller]
    pub fn permute(&self, dims: impl DimList) -> Result<Self> {
        let dims = dims.to_indexes(&Shape::from(self.dims()), "permute")?;
        if dims.len() != self.rank() {
            return Error::op("permute", format!("dims {dims:?} for {}: name each dim once", self.spec()));
        }
        let signature = || {
            let shape: Dims = dims.iter().map(|&d| self.dims()[d]).collect();
            Ok((
                dims.iter()
                    .enumerate()
                    .map(|(to, &from)| ShardingRule::new(Shard(to), &[Shard(from)]))
                    .collect(),
                shape,
            ))
        };
        self.linear_view("permute", &dims, &signature, &|x, _| kernels::permute(x, &dims[..]))
    }

    /// Swaps two dims.
    #[track_caller]
    pub fn transpose(&self, a: impl Dim, b: impl Dim) -> Result<Self> {
        let shape = Shape::from(self.dims());
        let (a, b) = (a.to_index(&shape, "transpose")?, b.to_index(&shape, "transpose")?);
        let mut dims: Vec<usize> = (0..self.rank()).collect();
        dims.swap(a, b);
        self.permute(dims)
    }

    /// Swaps the last two dims.
    #[track_caller]
    pub fn t(&self) -> Result<Self> {
        if self.rank() < 2 {
            return Error::op("t", format!("{} has fewer than 2 dims; expected [.., m, n]", self.spec()));
        }
        self.transpose(self.rank() - 2, self.rank() - 1)
    }

    /// Removes `dim` if its size is 1, and otherwise changes nothing.
    #[track_caller]
    pub fn squeeze(&self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "squeeze")?;
        if self.dims()[dim] != 1 {
            return Ok(self.clone());
        }
        let mut shape = Dims::from_slice(self.dims());
        shape.remove(dim);
        self.reshape(shape.as_slice())
    }

    /// Inserts a new dim of size 1 as dim `dim`.
    #[track_caller]
    pub fn unsqueeze(&self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index_plus_one(&Shape::from(self.dims()), "unsqueeze")?;
        let mut shape = Dims::from_slice(self.dims());
        shape.insert(dim, 1);
        self.reshape(shape.as_slice())
    }

    /// Merges the dims `first..=last` into one.
    #[track_caller]
    pub fn flatten(&self, first: impl Dim, last: impl Dim) -> Result<Self> {
        let shape = Shape::from(self.dims());
        let (first, last) = (first.to_index(&shape, "flatten")?, last.to_index(&shape, "flatten")?);
        if first >= last {
            return Ok(self.clone());
        }
        let (outer, inner) = (&self.dims()[..first], &self.dims()[last + 1..]);
        let merged = self.dims()[first..=last].iter().product();
        self.reshape([outer, &[merged], inner].concat())
    }

    /// Merges the dims up to and including `last` into one.
    #[track_caller]
    pub fn flatten_to(&self, last: impl Dim) -> Result<Self> {
        if self.rank() == 0 { self.reshape(1) } else { self.flatten(0, last) }
    }

    /// Merges the dims from `first` on into one.
    #[track_caller]
    pub fn flatten_from(&self, first: impl Dim) -> Result<Self> {
        if self.rank() == 0 { self.reshape(1) } else { self.flatten(first, self.rank() - 1) }
    }

    /// Merges all dims into one, in row-major order.
    #[track_caller]
    pub fn flatten_all(&self) -> Result<Self> {
        self.reshape(self.elem_count())
    }

    /// Repeats the tensor, without a copy, along new dims on the left and dims of size 1, as candle's `broadcast_as`.
    ///
    /// Dims that are not repeated keep their shard. A shard of a repeated dim, which has one element, is gathered.
    #[track_caller]
    pub fn broadcast_as(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let to = shape.dims();
        let signature = || {
            if broadcast("broadcast_as", self.dims(), to)? != to {
                return Error::op("broadcast_as", format!("{} cannot be repeated to {to:?}", self.spec()));
            }
            let mut rows = broadcast_rows(to, &[self.dims()]);
            rows.retain(|row| row.ins[0] != Replicate); // shards of repeated dims are not requested
            Ok((rows, Dims::from_slice(to)))
        };
        self.linear_view("broadcast_as", to, &signature, &|x, out| {
            x.broadcast_as(out.local_shape().as_slice())
        })
    }

    /// [`broadcast_as`](Self::broadcast_as), under candle's other name.
    #[track_caller]
    pub fn expand(&self, shape: impl Into<Shape>) -> Result<Self> {
        self.broadcast_as(shape)
    }

    /// Repeats the tensor, without a copy, along new dims on the left.
    #[track_caller]
    pub fn broadcast_left(&self, left: impl Into<Shape>) -> Result<Self> {
        self.broadcast_as([left.into().dims(), self.dims()].concat())
    }

    /// Brings every shard into row-major order in memory.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Self> {
        self.check_memory("contiguous")?;
        // Returns a new tensor on all ranks, even where no copy is needed: cached views must be alike on all ranks.
        let local = edges::contiguous(self.to_local())?;
        let from = std::slice::from_ref(self);
        let made = DTensor::computed(local, self.shared_spec().clone(), self.varying(), from);
        Ok(made.made_locally_of(self).aliasing(self))
    }

    #[track_caller]
    fn linear_view(
        &self,
        op: &'static str,
        attributes: &[usize],
        rows_and_shape: &dyn Fn() -> Result<(ShardingRules, Dims)>,
        local: &dyn Fn(&Tensor, &Spec) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let signature = || {
            let (mut rows, shape) = rows_and_shape()?;
            rows.push(ShardingRule::new(SUM, &[SUM]));
            Ok(Signature::new(rows, &shape, self.dtype()))
        };
        let view = rules::run(op, attributes, &[self], signature, |x, out| Ok(local(x[0].to_local(), out)?))?;
        Ok(view.aliasing(self))
    }
}
