//! Pooling and resizing of images. Batch and channels may be sharded.
use crate::kernels::{self, Pool};
use crate::layout::{Placement, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::Tensor;

impl DTensor {
    /// The largest element of each window: `[b, c, h, w]` to `[b, c, oh, ow]`. See [`kernels::max_pool2d`].
    ///
    /// # Errors
    /// If no window fits into the global shape.
    #[track_caller]
    pub fn max_pool2d(&self, pool: Pool) -> Result<Self> {
        self.pooled("max_pool2d", pool, false, kernels::max_pool2d)
    }

    /// The mean of each window: `[b, c, h, w]` to `[b, c, oh, ow]`. See [`kernels::avg_pool2d`].
    ///
    /// # Errors
    /// If no window fits into the global shape.
    #[track_caller]
    pub fn avg_pool2d(&self, pool: Pool) -> Result<Self> {
        self.pooled("avg_pool2d", pool, true, kernels::avg_pool2d)
    }

    #[track_caller]
    fn pooled(
        &self,
        op: &'static str,
        pool: Pool,
        linear: bool,
        local: fn(&Tensor, Pool) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let attributes = [pool.size, pool.stride].concat();
        let signature = || {
            self.check_float(op)?;
            let Some(shape) = pool.out_shape(self.dims()) else {
                let want = "expected [b, c, h, w] with room for a window";
                return Error::op(op, format!("{} with {pool:?}: {want}", self.spec()));
            };
            Ok(Signature::new(image_rows(linear), &shape, self.dtype()))
        };
        rules::run(op, &attributes, &[self], signature, |x, _| Ok(local(x[0].to_local(), pool)?))
    }

    /// Resizes images to `size` by the nearest pixel: `[b, c, h, w]` to `[b, c, size[0], size[1]]`.
    ///
    /// # Errors
    /// If there are not four dims, or the image is empty.
    #[track_caller]
    pub fn upsample_nearest2d(&self, size: [usize; 2]) -> Result<Self> {
        let op = "upsample_nearest2d";
        let signature = || self.resized_images(op, size);
        rules::run(op, &size, &[self], signature, |x, _| {
            Ok(kernels::upsample_nearest2d(x[0].to_local(), size)?)
        })
    }

    /// Resizes lines to `size` by the nearest element: `[b, c, l]` to `[b, c, size]`.
    ///
    /// # Errors
    /// If there are not three dims, or the line is empty.
    #[track_caller]
    pub fn upsample_nearest1d(&self, size: usize) -> Result<Self> {
        match *self.dims() {
            [_, _, l] if l > 0 => self.unsqueeze(2)?.upsample_nearest2d([1, size])?.squeeze(2),
            _ => Error::op(
                "upsample_nearest1d",
                format!("{}: expected [b, c, l] with an element in each line", self.spec()),
            ),
        }
    }

    /// Resizes images to `size` bilinearly: `[b, c, h, w]` to `[b, c, size[0], size[1]]`. See
    /// [`kernels::upsample_bilinear2d`].
    ///
    /// # Errors
    /// If there are not four dims, or the image is empty.
    #[track_caller]
    pub fn upsample_bilinear2d(&self, size: [usize; 2], align_corners: bool) -> Result<Self> {
        let op = "upsample_bilinear2d";
        let signature = || {
            self.check_float(op)?;
            self.resized_images(op, size)
        };
        rules::run(op, &size, &[self], signature, |x, _| {
            Ok(kernels::upsample_bilinear2d(x[0].to_local(), size, align_corners)?)
        })
    }

    /// Scales images by these factors, bilinearly: `[b, c, h, w]` to `[b, c, ⌊h · scale_h⌋, ⌊w · scale_w⌋]`, as
    /// candle's and PyTorch's with a `scale_factor`.
    ///
    /// # Errors
    /// If there are not four dims, the image is empty, or a factor is not finite and positive.
    #[track_caller]
    pub fn upsample_bilinear2d_with_scale(
        &self,
        scale_h: f64,
        scale_w: f64,
        align_corners: bool,
    ) -> Result<Self> {
        let op = "upsample_bilinear2d_with_scale";
        let scales = [scale_h, scale_w];
        let &[_, _, h, w] = self.dims() else {
            return Error::op(op, format!("{}: expected [b, c, h, w]", self.spec()));
        };
        if !scales.iter().all(|scale| scale.is_finite() && *scale > 0.0) {
            return Error::op(op, format!("factors {scales:?}: expected finite numbers above 0"));
        }
        let size = [(h as f64 * scale_h).floor() as usize, (w as f64 * scale_w).floor() as usize];
        let signature = || {
            self.check_float(op)?;
            self.resized_images(op, size)
        };
        rules::run(op, &size, &[self], signature, |x, _| {
            Ok(kernels::upsample_bilinear2d_scaled(x[0].to_local(), size, scales, align_corners)?)
        })
    }

    #[track_caller]
    fn resized_images(&self, op: &'static str, size: [usize; 2]) -> Result<Signature> {
        match *self.dims() {
            [b, c, h, w] if h * w > 0 => {
                Ok(Signature::new(image_rows(true), &[b, c, size[0], size[1]], self.dtype()))
            }
            _ => {
                Error::op(op, format!("{}: expected [b, c, h, w] with an element in each image", self.spec()))
            }
        }
    }
}

/// Rows for a sharded batch or sharded channels.
fn image_rows(linear: bool) -> ShardingRules {
    let sums = linear.then(|| ShardingRule::new(Placement::PARTIAL_SUM, &[Placement::PARTIAL_SUM]));
    [0, 1].map(|d| ShardingRule::new(Shard(d), &[Shard(d)])).into_iter().chain(sums).collect()
}
