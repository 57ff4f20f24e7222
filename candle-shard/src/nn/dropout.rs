//! Dropout with a mask that is the same on every mesh.
use crate::nn::ShardedVarBuilder;
use crate::nn::draws::Uses;
use crate::random::Stream;
use crate::{DTensor, Result};

/// Training or evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No dropout.
    Eval,
    /// Dropout with the masks of this step.
    Train {
        /// The training step, which is folded into every dropout stream.
        step: u64,
    },
    /// Dropout with the masks of some rows of a larger batch, such as a microbatch.
    TrainRows {
        /// The training step.
        step: u64,
        /// The index of the first row in the larger batch, along dim 0.
        first_row: usize,
    },
}

impl Mode {
    /// Returns the stream of a dropout mask of shape `dims`, derived from the stream of its layer; `None` in
    /// evaluation.
    pub fn stream(self, layer: Stream, dims: &[usize]) -> Option<Stream> {
        match self {
            Self::Eval => None,
            Self::Train { step } => Some(layer.fold(step)),
            Self::TrainRows { step, first_row } => {
                let row: usize = dims.iter().skip(1).product();
                Some(layer.fold(step).skip(first_row as u64 * row as u64))
            }
        }
    }
}

/// Zeroes elements with probability `p` in training and divides the others by `1 - p` (Srivastava et al. 2014).
///
/// The mask depends on the seed, the layer's path, the step, the use and the global index of the element. Each use in a
/// pass has its own mask. A pass is everything that runs on a thread in one [`Mode`] up to the next backward pass. When
/// [`checkpoint`](crate::nn::checkpoint) recomputes a segment, the masks are the same; other code uses
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
