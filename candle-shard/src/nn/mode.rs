//! Training or evaluation, for layers that differ.
use crate::random::Stream;

/// Training or evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No dropout.
    Eval,
    /// Dropout with the masks of this step.
    ///
    /// In a node of candle-pipe they are those of the microbatch's rows. Elsewhere they are those of a whole batch: two
    /// microbatches of one step, each with a backward pass of its own, get the same ones. Use
    /// [`TrainRows`](Self::TrainRows) for microbatches.
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

    /// Returns the training step.
    pub(super) fn step(self) -> Option<u64> {
        match self {
            Self::Eval => None,
            Self::Train { step } | Self::TrainRows { step, .. } => Some(step),
        }
    }
}
