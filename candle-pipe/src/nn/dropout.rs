//! Dropout that does not depend on the cut of a batch.
use crate::graph::{Ctx, StageOp};
use crate::{Error, Result, Value};
use candle_core::Tensor;
use candle_dist_kernels::random::{Distribution, RandomLayer};

/// Zeroes elements with probability `p` in training and divides the others by `1 - p` (Srivastava et al. 2014).
///
/// The mask depends on the seed, the layer's name, the place of the use, the step and the row in the batch, so it is the
/// same for any cut of the batch into microbatches and of the model into stages. The place is the node that uses the layer;
/// several uses in one run of a node have a mask each. Outside of nodes all uses have one. The first dim of the input goes
/// along the rows.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    p: f64,
    layer: RandomLayer,
}

impl Dropout {
    /// Creates a layer with the random numbers of `name`, usually its full name.
    ///
    /// Two layers of one name in one node draw the same masks.
    ///
    /// # Errors
    /// If `p` is not in `[0, 1]`.
    pub fn new(p: f64, seed: u64, name: &str) -> Result<Self> {
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::Pipe(format!(
                "dropout with probability {p}: expected at least 0 and at most 1"
            )));
        }
        Ok(Self { p, layer: RandomLayer::new(seed, name) })
    }

    /// Drops elements of `x` in training, and returns `x` in evaluation.
    ///
    /// # Errors
    /// If the first dim of `x` does not go along the rows.
    pub fn forward(&self, x: &Tensor, ctx: &Ctx) -> Result<Tensor> {
        if !ctx.training || self.p == 0.0 {
            return Ok(x.clone());
        }
        // The rows and the step are those of the context, also where a segment is recomputed.
        let stream =
            self.layer.draw((ctx.step, Some(ctx.rows.start)), || 0, |stream, _| Ok(stream.fold(ctx.step)))?;
        let mask = ctx.sample(stream, Distribution::Bernoulli { p: 1.0 - self.p }, x.dims(), x.dtype())?;
        let factor = if self.p < 1.0 { 1.0 / (1.0 - self.p) } else { 0.0 };
        Ok((x * mask.affine(factor, 0.0)?)?)
    }
}

impl StageOp for Dropout {
    fn forward(&self, inputs: &[Value], ctx: &Ctx) -> Result<Vec<Value>> {
        let [x] = inputs else {
            return Err(Error::Pipe(format!("dropout takes one tensor, {} values were given", inputs.len())));
        };
        Ok(vec![self.forward(x.tensor()?, ctx)?.into()])
    }
}
