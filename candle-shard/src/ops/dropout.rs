//! Dropout with a mask that depends on the global index of an element, not on the mesh.
use super::unary::unary_rows;
use crate::random::{Distribution, Stream, sample};
use crate::rules::{self, Signature};
use crate::{DTensor, Error, Result};

impl DTensor {
    /// Zeroes each element with probability `p` and divides the others by `1 - p`. With `p = 1` all elements are 0.
    ///
    /// The mask is that of `stream` over the global shape, so it is the same on every mesh.
    ///
    /// # Errors
    /// If `p` is not in `[0, 1]`.
    #[track_caller]
    pub fn dropout(&self, p: f64, stream: Stream) -> Result<Self> {
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
            let keep = Distribution::Bernoulli { p: 1.0 - p };
            let mask = sample(stream, keep, out.dims(), &out.local_block(), out.dtype(), self.device())?;
            Ok((x[0].to_local() * mask.affine(if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 }, 0.0)?)?)
        })
    }
}
