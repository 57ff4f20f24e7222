//! Pixel shuffle and padding of images. Batch and channels may be sharded.
use crate::{DTensor, Error, Result};

impl DTensor {
    /// Moves channels into larger images: `[b, c · f², h, w]` to `[b, c, h · f, w · f]` (Shi et al. 2016).
    ///
    /// # Errors
    /// If there are not four dims, or the channels do not divide by `f²`.
    #[track_caller]
    pub fn pixel_shuffle(&self, factor: usize) -> Result<Self> {
        let square = factor.checked_mul(factor).filter(|&square| square > 0);
        match (self.dims(), square) {
            (&[b, c, h, w], Some(square)) if c.is_multiple_of(square) => {
                let c = c / square;
                let apart = self.reshape((b, c, factor, factor, h, w))?;
                apart.permute((0, 1, 4, 2, 5, 3))?.reshape((b, c, h * factor, w * factor))
            }
            _ => {
                let reason = format!(
                    "{} by {factor}: expected [b, c, h, w] with channels that divide by",
                    self.spec()
                );
                Error::op("pixel_shuffle", format!("{reason} the square of a factor above 0"))
            }
        }
    }

    /// The inverse of [`pixel_shuffle`](Self::pixel_shuffle): `[b, c, h · f, w · f]` to `[b, c · f², h, w]`.
    ///
    /// # Errors
    /// If there are not four dims, or height or width do not divide by `f`.
    #[track_caller]
    pub fn pixel_unshuffle(&self, factor: usize) -> Result<Self> {
        match *self.dims() {
            [b, c, h, w] if factor > 0 && h.is_multiple_of(factor) && w.is_multiple_of(factor) => {
                let (h, w) = (h / factor, w / factor);
                let apart = self.reshape((b, c, h, factor, w, factor))?;
                apart.permute((0, 1, 3, 5, 2, 4))?.reshape((b, c * factor * factor, h, w))
            }
            _ => {
                let reason =
                    format!("{} by {factor}: expected [b, c, h, w] with images that divide by", self.spec());
                Error::op("pixel_unshuffle", format!("{reason} a factor above 0"))
            }
        }
    }

    /// Pads the images of `[b, c, h, w]` with `pad` copies of their outermost pixels on each side.
    ///
    /// # Errors
    /// If there are not four dims, or the images are empty.
    #[track_caller]
    pub fn replication_pad2d(&self, pad: usize) -> Result<Self> {
        if self.rank() != 4 {
            return Error::op("replication_pad2d", format!("{}: expected [b, c, h, w]", self.spec()));
        }
        self.pad_with_same(2, pad, pad)?.pad_with_same(3, pad, pad)
    }
}
