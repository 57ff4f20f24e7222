//! Indexing as in candle: a number, a range or a list of indices for each of the first dims.
use super::slice::bounds;
use crate::{DTensor, Error, Result};
use candle_core::shape::Dim;
use candle_core::{Shape, Tensor, TensorIndexer};
use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

/// An argument of [`DTensor::i`]: a number, a range, indices (`&[u32]` or a plain `Tensor`), or a tuple of these.
pub trait Index {
    /// Returns the index for each of the first dims.
    fn indexers(self) -> Vec<TensorIndexer>;
}

macro_rules! single_indexes {
    ($($t:ty)*) => {
        $(impl Index for $t {
            fn indexers(self) -> Vec<TensorIndexer> {
                vec![self.into()]
            }
        })*
    };
}
single_indexes! {
    usize Range<usize> RangeFrom<usize> RangeFull RangeInclusive<usize> RangeTo<usize> RangeToInclusive<usize>
    &[u32] Vec<u32> &Tensor
}

macro_rules! tuples_of_indexes {
    ($($($t:ident)*;)*) => {
        $(impl<$($t: Index),*> Index for ($($t,)*) {
            #[allow(non_snake_case)] // values are named as their types
            fn indexers(self) -> Vec<TensorIndexer> {
                let ($($t,)*) = self;
                [$($t.indexers()),*].into_iter().flatten().collect()
            }
        })*
    };
}
tuples_of_indexes! { A; A B; A B C; A B C D; A B C D E; A B C D E F; }

impl DTensor {
    /// Indexes the first dims, as candle's `i`: by a number, which removes the dim, by a range, or by indices.
    ///
    /// The cost is that of [`get_on_dim`](Self::get_on_dim), [`narrow`](Self::narrow) and
    /// [`index_select`](Self::index_select).
    ///
    /// ```
    /// use candle_core::Device;
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Result, Shard};
    ///
    /// let parts = World::threads(2).run(|ctx| -> Result<Vec<f32>> {
    ///     let x = DTensor::arange(0f32, 12., &Device::Cpu, &ctx.mesh(&[("tp", 2)])?, &[Shard(0)])?;
    ///     let x = x.reshape((4, 3))?;
    ///     Ok(x.i((2, 1..))?.full_tensor()?.to_vec1()?)
    /// })?;
    /// assert_eq!(parts, [[7., 8.], [7., 8.]]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If there are more indexes than dims, or one is out of bounds.
    #[track_caller]
    pub fn i(&self, index: impl Index) -> Result<Self> {
        let indexers = index.indexers();
        if indexers.len() > self.rank() {
            let reason =
                format!("{} indexes for {}: give at most {}", indexers.len(), self.spec(), self.rank());
            return Error::op("i", reason);
        }
        let (mut x, mut dim) = (self.clone(), 0);
        for indexer in indexers {
            let gone = matches!(indexer, TensorIndexer::Select(_));
            x = match indexer {
                TensorIndexer::Select(at) => x.get_on_dim(dim, at)?,
                TensorIndexer::Narrow(start, end) => {
                    let (start, end) = bounds(&(start, end), x.dims()[dim]);
                    x.narrow(dim, start, end.saturating_sub(start))?
                }
                TensorIndexer::IndexSelect(places) => {
                    let places = Self::replicated(&places.to_device(x.device())?, x.mesh())?;
                    x.index_select(&places, dim)?
                }
                TensorIndexer::Err(error) => return Err(error.into()),
            };
            dim += usize::from(!gone);
        }
        Ok(x)
    }

    /// All windows of `size` elements of a dim, at steps of `step`. The dim then counts the windows, and a new last dim
    /// holds their elements.
    ///
    /// # Errors
    /// If no window fits into the dim, or size or step are 0.
    #[track_caller]
    pub fn unfold(&self, dim: impl Dim, size: usize, step: usize) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "unfold")?;
        let room = self.dims()[dim].checked_sub(size);
        let Some(room) = room.filter(|_| size > 0 && step > 0) else {
            let reason = format!("windows of {size} at steps of {step} on dim {dim} of {}", self.spec());
            return Error::op("unfold", format!("{reason}: expected sizes above 0 that fit into the dim"));
        };
        let windows = room / step + 1;
        let places = (0..windows).flat_map(|window| (0..size).map(move |i| (window * step + i) as u32));
        let places = Self::replicated(&Tensor::from_iter(places, self.device())?, self.mesh())?;
        let mut shape = self.dims().to_vec();
        shape.splice(dim..=dim, [windows, size]);
        let split = self.index_select(&places, dim)?.reshape(shape)?;
        let order: Vec<usize> = (0..=self.rank()).filter(|&d| d != dim + 1).chain([dim + 1]).collect();
        split.permute(order)
    }
}
