use candle_core::{DType, Result, Tensor, bail};

use super::compute_dtype;

/// The window that a pool slides over `[.., h, w]`, without padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Rows and columns of the window.
    pub size: [usize; 2],
    /// The steps down and to the right.
    pub stride: [usize; 2],
}

impl Pool {
    /// Creates windows of this size without overlap.
    pub const fn tiles(size: [usize; 2]) -> Self {
        Self { size, stride: size }
    }

    /// Returns the output shape `[b, c, oh, ow]` for `[b, c, h, w]`; `None` if no window fits.
    #[doc(hidden)]
    pub fn out_shape(&self, dims: &[usize]) -> Option<[usize; 4]> {
        let &[b, c, h, w] = dims else { return None };
        let places = |len: usize, i: usize| {
            (self.size[i] > 0 && self.stride[i] > 0).then_some(())?;
            Some(len.checked_sub(self.size[i])? / self.stride[i] + 1)
        };
        Some([b, c, places(h, 0)?, places(w, 1)?])
    }

    fn checked(&self, op: &'static str, x: &Tensor) -> Result<[usize; 4]> {
        compute_dtype(op, x)?;
        match self.out_shape(x.dims()) {
            Some(shape) => Ok(shape),
            None => bail!(
                "{op}: input {:?} with {self:?}: expected [b, c, h, w] with room for a window",
                x.shape()
            ),
        }
    }
}

/// Returns the largest element of each window: `[b, c, h, w]` to `[b, c, oh, ow]`.
///
/// Windows may overlap. The gradient goes to the first of the largest elements, as in PyTorch; NaN is larger than any
/// number. candle's own `max_pool2d` scales gradients by the size of the window. Fails on shapes smaller than a window
/// and on dtypes other than floats.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_dist_kernels::{Pool, max_pool2d};
/// let x = candle_core::Tensor::arange(0f32, 9., &candle_core::Device::Cpu)?.reshape((1, 1, 3, 3))?;
/// let y = max_pool2d(&x, Pool { size: [2, 2], stride: [1, 1] })?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [4., 5., 7., 8.]);
/// # Ok(())
/// # }
/// ```
pub fn max_pool2d(x: &Tensor, pool: Pool) -> Result<Tensor> {
    let shape @ [b, c, oh, ow] = pool.checked("max_pool2d", x)?;
    let (_, _, h, w) = x.dims4()?;
    let values = x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    let mut largest = Vec::with_capacity(shape.iter().product());
    for image in values.chunks_exact(h * w) {
        for (i, j) in (0..oh).flat_map(|i| (0..ow).map(move |j| (i, j))) {
            let corner = i * pool.stride[0] * w + j * pool.stride[1];
            let mut best = corner;
            for at in (0..pool.size[0]).flat_map(|di| (0..pool.size[1]).map(move |dj| corner + di * w + dj)) {
                if image[at] > image[best] || image[at].is_nan() && !image[best].is_nan() {
                    best = at;
                }
            }
            largest.push(best as u32);
        }
    }
    let largest = Tensor::from_vec(largest, (b * c, oh * ow), x.device())?;
    x.contiguous()?.reshape((b * c, h * w))?.gather(&largest, 1)?.reshape(&shape)
}

/// Returns the mean of each window: `[b, c, h, w]` to `[b, c, oh, ow]`.
///
/// Windows may overlap, unlike those that candle can differentiate. Fails on shapes smaller than a window and on dtypes
/// other than floats.
pub fn avg_pool2d(x: &Tensor, pool: Pool) -> Result<Tensor> {
    let [.., oh, ow] = pool.checked("avg_pool2d", x)?;
    let sums = |x: Tensor, dim: usize, places: usize| {
        let row = |i: usize| {
            let at = (0..places).map(|o| (o * pool.stride[dim - 2] + i) as u32);
            x.contiguous()?.index_select(&Tensor::from_iter(at, x.device())?, dim)
        };
        (1..pool.size[dim - 2]).try_fold(row(0)?, |sum, i| sum + row(i)?)
    };
    sums(sums(x.clone(), 2, oh)?, 3, ow)? / (pool.size[0] * pool.size[1]) as f64
}

/// Resizes an image to the nearest elements: `[b, c, h, w]` to `[b, c, oh, ow]`.
///
/// Element `(i, j)` is `(⌊i·(h/oh)⌋, ⌊j·(w/ow)⌋)` of the input, computed in single precision as PyTorch does for all
/// dtypes; candle computes in double precision. Unlike candle's version, it is differentiable for any sizes. Fails
/// unless there are four dims and at least one input element.
pub fn upsample_nearest2d(x: &Tensor, [oh, ow]: [usize; 2]) -> Result<Tensor> {
    let (_, _, h, w) = x.dims4()?;
    if h * w == 0 {
        bail!("upsample_nearest2d: input {:?} has no elements", x.shape());
    }
    let nearest = |x: &Tensor, dim: usize, from: usize, to: usize| {
        let scale = from as f32 / to as f32;
        let at = (0..to).map(|i| ((i as f32 * scale) as usize).min(from - 1) as u32);
        x.contiguous()?.index_select(&Tensor::from_iter(at, x.device())?, dim)
    };
    nearest(&nearest(x, 2, h, oh)?, 3, w, ow)
}

/// Resizes images with bilinear interpolation: `[b, c, h, w]` to `[b, c, oh, ow]`, with the numbers of candle and
/// PyTorch.
///
/// With `align_corners` the centers of the outermost pixels stay in place, otherwise their outer edges. Unlike candle's
/// version, it is differentiable. Fails unless there are four dims and at least one input element.
pub fn upsample_bilinear2d(x: &Tensor, size: [usize; 2], align_corners: bool) -> Result<Tensor> {
    let (_, _, h, w) = x.dims4()?;
    upsample_bilinear2d_scaled(x, size, [size[0] as f64 / h as f64, size[1] as f64 / w as f64], align_corners)
}

/// Like [`upsample_bilinear2d`] to a size that is that of the image times `scales`, rounded down: pixels lie where the
/// scales put them, not where the rounded size would.
pub fn upsample_bilinear2d_scaled(
    x: &Tensor,
    [oh, ow]: [usize; 2],
    scales: [f64; 2],
    align_corners: bool,
) -> Result<Tensor> {
    let (_, _, h, w) = x.dims4()?;
    if h * w == 0 {
        bail!("upsample_bilinear2d: input {:?} has no elements", x.shape());
    }
    if (h, w) == (oh, ow) {
        return Ok(x.clone());
    }
    let between = |x: &Tensor, dim: usize, from: usize, to: usize| {
        // The position of each new pixel among the old ones.
        let place = |i: usize| match align_corners {
            true => i as f64 * (from - 1) as f64 / (to.max(2) - 1) as f64,
            false => ((i as f64 + 0.5) / scales[dim - 2] - 0.5).max(0.0),
        };
        let before = |i: usize| (place(i) as usize).min(from - 1);
        let at = |further: usize| {
            let at = (0..to).map(|i| (before(i) + further).min(from - 1) as u32);
            x.contiguous()?.index_select(&Tensor::from_iter(at, x.device())?, dim)
        };
        let mut column = [1; 4];
        column[dim] = to;
        let share = Tensor::from_iter((0..to).map(|i| place(i) - before(i) as f64), x.device())?;
        let share = share.reshape(&column)?.to_dtype(x.dtype())?;
        let (first, second) = (at(0)?, at(1)?);
        &first + (second - &first)?.broadcast_mul(&share)?
    };
    between(&between(x, 2, h, oh)?, 3, w, ow)
}
