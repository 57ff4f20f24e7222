//! Convolutions with correct gradients in the cases where candle's gradients are wrong.
use candle_core::Tensor;

/// The parameters of a convolution, the same in both dims of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv {
    /// The number of zeros added at each end.
    pub padding: usize,
    /// The distance between two places of the kernel.
    pub stride: usize,
    /// The distance between neighboring elements of the kernel.
    pub dilation: usize,
    /// The number of independent groups of channels.
    pub groups: usize,
}

impl Default for Conv {
    /// Padding 0; stride, dilation and groups 1.
    fn default() -> Self {
        Self { padding: 0, stride: 1, dilation: 1, groups: 1 }
    }
}

impl Conv {
    /// Returns the numbers that a plan depends on.
    #[doc(hidden)]
    pub fn attributes(&self) -> [usize; 4] {
        [self.padding, self.stride, self.dilation, self.groups]
    }

    /// Returns the number of places of the kernel, and the number of unused elements at the end of the input. `None` if
    /// the kernel does not fit.
    #[doc(hidden)]
    pub fn places(&self, len: usize, kernel: usize) -> Option<(usize, usize)> {
        (self.stride > 0 && self.dilation > 0).then_some(())?;
        let reach = self.dilation.checked_mul(kernel.checked_sub(1)?)?.checked_add(1)?;
        let room = len.checked_add(self.padding.checked_mul(2)?)?.checked_sub(reach)?;
        Some((room / self.stride + 1, room % self.stride))
    }

    /// Returns the output size of a transposed convolution; `None` if it is 0 or too large.
    #[doc(hidden)]
    pub fn transposed(&self, len: usize, kernel: usize, output_padding: usize) -> Option<usize> {
        let steps = len.checked_sub(1)?.checked_mul(self.stride)?;
        let reach = kernel.checked_sub(1)?.checked_mul(self.dilation)?.checked_add(output_padding)?;
        let grown = steps.checked_add(reach)?.checked_add(1)?;
        grown
            .checked_sub(self.padding.checked_mul(2)?)
            .filter(|&size| size > 0 && self.stride > 0 && self.dilation > 0)
    }

    /// Pads an input, and removes the elements at its end that the stride does not reach.
    fn trimmed(&self, x: &Tensor, dim: usize, kernel: &Tensor) -> candle_core::Result<Tensor> {
        let (_, left) = self.places(x.dims()[dim], kernel.dims()[dim]).unwrap_or_default();
        let padded = x.pad_with_zeros(dim, self.padding, self.padding)?;
        padded.narrow(dim, 0, padded.dims()[dim] - left)
    }

    /// Convolves images.
    ///
    /// candle's backward pass assumes that the stride leaves equally many rows and columns unused.
    #[doc(hidden)]
    pub fn image(&self, x: &Tensor, kernel: &Tensor) -> candle_core::Result<Tensor> {
        let left = |dim: usize| self.places(x.dims()[dim], kernel.dims()[dim]).map(|(_, left)| left);
        let Self { padding, stride, dilation, groups } = *self;
        if left(2) == left(3) {
            return x.conv2d(kernel, padding, stride, dilation, groups);
        }
        let x = self.trimmed(&self.trimmed(x, 2, kernel)?, 3, kernel)?.contiguous()?;
        x.conv2d(kernel, 0, stride, dilation, groups)
    }

    /// Convolves lines as images of one row, because the gradient of candle's `conv1d` is wrong without padding.
    #[doc(hidden)]
    pub fn line(&self, x: &Tensor, kernel: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.trimmed(x, 2, kernel)?.unsqueeze(2)?.contiguous()?;
        x.conv2d(&kernel.unsqueeze(2)?, 0, self.stride, self.dilation, self.groups)?.squeeze(2)
    }
}
