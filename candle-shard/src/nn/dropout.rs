//! Dropout with a mask that is the same on every mesh.
use crate::autograd::counts::passes;
use crate::nn::{MeshVarBuilder, Mode};
use crate::random::{RandomLayer, Stream};
use crate::{DTensor, Result, TokenOrder};
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::ops::Range;

/// Zeroes elements with probability `p` in training and divides the others by `1 - p` (Srivastava et al. 2014).
///
/// The mask depends on the seed, the layer's path, the place of the use, the step and the global index of the element.
/// When [`recompute`](crate::nn::recompute) runs a segment again, the masks are the same; other code uses
/// [`Draws`](crate::nn::Draws) for that.
///
/// In a node of candle-pipe the place is the node, and each use in one run of the node has its own mask. In
/// [`Mode::Train`], dim 0 of `x` goes along the rows of the microbatch, with one or several entries for each. The mask is
/// that of these rows in the batch, whatever the cut, the schedule and the number of earlier passes. Elsewhere the uses of a pass count. A pass is everything that runs on a thread in one
/// [`Mode`] up to the next backward pass. So two microbatches whose forward passes both run before a backward pass need
/// modes with their own rows, or a place each ([`Draws::at`](crate::nn::Draws::at)).
///
/// A tensor in a node may have the rows of several replicas of its mesh, one replica's behind another's. Then use [`Mode::TrainRows`] with
/// the row of the batch at which the whole tensor would begin: this rank's first row, less the index of its shard along dim 0.
#[derive(Clone, Debug)]
pub struct Dropout {
    p: f64,
    layer: RandomLayer,
}

impl Dropout {
    /// Builds a layer at the builder's path. Its stream is named `<path>.dropout`.
    ///
    /// Two layers at one path draw the same masks, so give each a path of its own.
    pub fn new(p: f64, vb: &MeshVarBuilder) -> Self {
        Self { p, layer: RandomLayer::new(vb.seed(), &vb.full_name("dropout")) }
    }

    /// Returns whether nothing is dropped.
    pub fn is_identity(&self, mode: Mode) -> bool {
        mode == Mode::Eval || self.p == 0.0
    }

    /// Drops elements of `x` in training, and returns `x` in evaluation.
    ///
    /// # Errors
    /// If `p` is not in `[0, 1]`, and in a node of a pipeline if dim 0 of `x` is not a multiple of the rows.
    pub fn forward(&self, x: &DTensor, mode: Mode) -> Result<DTensor> {
        self.forward_in_order(x, mode, None)
    }

    /// The same for `x` `[rows, tokens, ..]` whose tokens lie in an order: each drops out as at its position.
    pub(crate) fn forward_in_order(
        &self,
        x: &DTensor,
        mode: Mode,
        order: Option<&TokenOrder>,
    ) -> Result<DTensor> {
        let (step, first_row) = match mode {
            Mode::Eval => return Ok(x.clone()),
            Mode::Train { step } => (step, None),
            Mode::TrainRows { step, first_row } => (step, Some(first_row)),
        };
        let of = |stream: Stream, rows: Option<Range<usize>>| match (first_row, rows) {
            (None, Some(rows)) => stream.fold(step).of_rows(rows.start, Some(rows.len()), x.dims()),
            (first_row, _) => stream.fold(step).of_rows(first_row.unwrap_or(0), None, x.dims()),
        };
        x.dropout_in_order(self.p, self.layer.draw((step, first_row), || self.earlier(mode), of)?, order)
    }

    /// Returns the number of earlier uses in the present pass of this thread, outside of places.
    fn earlier(&self, mode: Mode) -> u64 {
        thread_local! {
            static USES: RefCell<Uses> = RefCell::default();
        }
        USES.with_borrow_mut(|uses| uses.next(self.layer.id(), mode))
    }
}

/// The uses of layers since the last backward pass of a thread.
#[derive(Default)]
struct Uses {
    pass: u64,
    layers: FxHashMap<u64, LayerUses>,
}

/// The uses of one layer in its last step.
#[derive(Default)]
struct LayerUses {
    step: Option<u64>,
    /// The number of the last use in each mode.
    modes: Vec<(Mode, u64)>,
}

impl Uses {
    /// Counts a use and returns the number of earlier ones.
    fn next(&mut self, layer: u64, mode: Mode) -> u64 {
        if self.pass != passes() {
            *self = Self { pass: passes(), layers: FxHashMap::default() };
        }
        let uses = self.layers.entry(layer).or_default();
        if uses.step != mode.step() {
            *uses = LayerUses { step: mode.step(), modes: Vec::new() };
        }
        match uses.modes.iter_mut().find(|(known, _)| *known == mode) {
            Some((_, last)) => {
                *last += 1;
                *last
            }
            None => {
                uses.modes.push((mode, 0));
                0
            }
        }
    }
}
