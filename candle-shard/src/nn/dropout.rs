//! Dropout with a mask that is the same on every mesh.
use crate::nn::draws::Uses;
use crate::nn::{Mode, ShardedVarBuilder};
use crate::random::Stream;
use crate::{DTensor, Result};

/// Zeroes elements with probability `p` in training and divides the others by `1 - p` (Srivastava et al. 2014).
///
/// The mask depends on the seed, the layer's path, the step, the use and the global index of the element. Each use in a
/// pass has its own mask. A pass is everything that runs on a thread in one [`Mode`] up to the next backward pass. When
/// [`recompute`](crate::nn::recompute) runs a segment again, the masks are the same; other code uses
/// [`Draws`](crate::nn::Draws) for that.
#[derive(Clone, Debug)]
pub struct Dropout {
    p: f64,
    stream: Stream,
    uses: Uses,
}

impl Dropout {
    /// Builds a layer at the builder's path. Its stream is named `<path>.dropout`.
    pub fn new(p: f64, vb: &ShardedVarBuilder) -> Self {
        Self { p, stream: Stream::new(vb.seed(), &vb.full_name("dropout")), uses: Uses::default() }
    }

    /// Returns whether nothing is dropped.
    pub fn is_identity(&self, mode: Mode) -> bool {
        mode == Mode::Eval || self.p == 0.0
    }

    /// Drops elements of `x` in training, and returns `x` in evaluation.
    pub fn forward(&self, x: &DTensor, mode: Mode) -> Result<DTensor> {
        match mode.stream(self.stream, x.dims()) {
            Some(stream) => match self.uses.next(mode)? {
                0 => x.dropout(self.p, stream),
                use_number => x.dropout(self.p, stream.fold(use_number)),
            },
            None => Ok(x.clone()),
        }
    }
}
