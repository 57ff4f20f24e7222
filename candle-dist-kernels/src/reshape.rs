use candle_core::shape::ShapeWithOneHole;
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

/// The elements of `x` with dim `i` of the result being dim `dims[i]` of `x`, without a copy.
///
/// The result and the errors are those of [`Tensor::permute`]. If `x` is a result of this crate, the backward pass does not add
/// the gradient to zeros.
///
/// ```
/// use candle_core::{Device::Cpu, Result, Tensor};
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Cpu)?;
/// assert_eq!(candle_dist_kernels::permute(&x, &[1, 0])?.to_vec2::<f32>()?, [[1., 3.], [2., 4.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn permute(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    edges::permute(x, dims)
}
