//! Grids of coordinates.
use crate::{DTensor, Error, Result};
use std::borrow::Borrow;

impl DTensor {
    /// The coordinates of a grid. For tensors `[a]`, `[b]`, .. it returns one tensor `[a, b, ..]` each, which varies
    /// along its own dim.
    ///
    /// With `xy_indexing` the dims are in reverse order, as in candle. Each tensor keeps the shard of its own dim.
    ///
    /// # Errors
    /// If there are fewer than two tensors, or one does not have exactly one dim.
    #[track_caller]
    pub fn meshgrid(tensors: &[impl Borrow<Self>], xy_indexing: bool) -> Result<Vec<Self>> {
        let mut axes: Vec<&Self> = tensors.iter().map(Borrow::borrow).collect();
        if axes.len() < 2 {
            return Error::op("meshgrid", format!("{} tensors; give two at least", axes.len()));
        }
        if let Some(other) = axes.iter().find(|x| x.rank() != 1) {
            return Error::op("meshgrid", format!("{}: expected [n]", other.spec()));
        }
        if xy_indexing {
            axes.reverse();
        }
        let shape: Vec<usize> = axes.iter().map(|x| x.dims()[0]).collect();
        let grid = |(at, x): (usize, &&Self)| {
            let mut along = vec![1; shape.len()];
            along[at] = shape[at];
            x.reshape(along)?.broadcast_as(&shape[..])
        };
        let mut grids = axes.iter().enumerate().map(grid).collect::<Result<Vec<_>>>()?;
        if xy_indexing {
            grids.reverse();
        }
        Ok(grids)
    }
}
