use candle_core::shape::{Dims, ShapeWithOneHole};
use candle_core::{Result, Tensor};
use candle_dist_base::edges;

/// The elements of `x`, in row-major order, in another shape of the same size.
///
/// The result and the errors are those of [`Tensor::reshape`]. If `x` is a result of this crate, the backward pass does
/// not copy the gradient.
///
/// ```
/// use candle_core::{Device::Cpu, Result, Tensor};
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Cpu)?;
/// assert_eq!(candle_dist_kernels::reshape(&x, ((), 1))?.dims(), [4, 1]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reshape(x: &Tensor, shape: impl ShapeWithOneHole) -> Result<Tensor> {
    edges::reshape(x, shape.into_shape(x.elem_count())?)
}

/// The dims of `x` in another order: dim `i` of the result is dim `dims[i]`.
///
/// The result and the errors are those of [`Tensor::permute`]. If `x` is a result of this crate, the backward pass does
/// not copy the gradient.
///
/// ```
/// use candle_core::{Device::Cpu, Result, Tensor};
/// let x = Tensor::new(&[[1f32, 2., 3.]], &Cpu)?;
/// assert_eq!(candle_dist_kernels::permute(&x, (1, 0))?.dims(), [3, 1]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn permute(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    edges::permute(x, &dims.to_indexes(x.shape(), "permute")?)
}
