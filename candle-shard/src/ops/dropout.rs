//! Dropout with a mask that depends on the global index of an element, not on the mesh.
use super::unary::unary_rows;
use crate::kernels::dropout;
use crate::random::{Distribution, Stream, sample};
use crate::rules::{self, Signature};
use crate::{DTensor, Error, Result, TokenOrder};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

impl DTensor {
    /// Zeroes each element with probability `p` and divides the others by `1 - p`. With `p = 1` all elements are 0.
    ///
    /// The mask is that of `stream` over the global shape, so it is the same on every mesh.
    ///
    /// # Errors
    /// If `p` is not in `[0, 1]`.
    #[track_caller]
    pub fn dropout(&self, p: f64, stream: Stream) -> Result<Self> {
        self.dropout_in_order(p, stream, None)
    }

    /// The same, of a tensor `[rows, tokens, ..]` whose tokens lie in an order: each element drops out as at its position.
    #[track_caller]
    pub(crate) fn dropout_in_order(
        &self,
        p: f64,
        stream: Stream,
        order: Option<&TokenOrder>,
    ) -> Result<Self> {
        if !(0.0..=1.0).contains(&p) {
            return Error::op("dropout", format!("probability {p}: expected at least 0 and at most 1"));
        }
        let signature = || {
            self.check_float("dropout")?;
            // The mask is a factor, so partial sums stay partial.
            Ok(Signature::new(unary_rows(self.rank(), true), self.dims(), self.dtype()))
        };
        if p == 0.0 {
            return Ok(self.clone());
        }
        rules::run("dropout", &[], &[self], signature, |x, out| {
            let factor = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
            let block = out.local_block();
            if order.is_none()
                && let Some(y) = dropout(x[0].to_local(), stream, [1.0 - p, factor], out.dims(), &block)?
            {
                return Ok(y);
            }
            let keep = Distribution::Bernoulli { p: 1.0 - p };
            let of = (stream, keep, out.dims());
            let mask = match order {
                Some(order) => sample_in_order(of, &block, order, out.dtype(), self.device())?,
                None => sample(stream, keep, out.dims(), &block, out.dtype(), self.device())?,
            };
            Ok((x[0].to_local() * mask.affine(factor, 0.0)?)?)
        })
    }
}

/// The dim of the tokens.
const TOKENS: usize = 1;

/// The numbers of a block of tokens in an order, each that of its position.
fn sample_in_order(
    (stream, distribution, dims): (Stream, Distribution, &[usize]),
    block: &[Range<usize>],
    order: &TokenOrder,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let positions = order.positions();
    let whole = block.get(TOKENS).filter(|_| dims[TOKENS] == positions.len());
    let Some(tokens) = whole else {
        let (shape, count) = (dims.to_vec(), positions.len());
        return Error::op("dropout", format!("{shape:?} has no dim {TOKENS} of {count} tokens in an order"));
    };
    let runs = positions[tokens.clone()].chunk_by(|a, b| a + 1 == *b);
    let parts = runs.map(|run| {
        let mut block = block.to_vec();
        block[TOKENS] = run[0]..run[0] + run.len();
        Ok(sample(stream, distribution, dims, &block, dtype, device)?)
    });
    match parts.collect::<Result<Vec<Tensor>>>()? {
        // Without tokens there are no runs.
        parts if parts.is_empty() => {
            let mut block = block.to_vec();
            block[TOKENS] = 0..0;
            Ok(sample(stream, distribution, dims, &block, dtype, device)?)
        }
        parts => Ok(Tensor::cat(&parts, TOKENS)?),
    }
}
