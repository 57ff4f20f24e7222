//! The ops of a [`DTensor`](crate::DTensor), one family a file, each a table of rows and a local computation.
mod activation;
mod aliases;
pub(crate) mod attention;
mod compare;
mod conv;
pub(crate) mod cross_entropy;
pub(crate) mod dropout;
mod embedding;
mod extreme;
pub(crate) mod fallback;
mod grid;
mod group_norm;
mod in_place;
pub(crate) mod index;
mod join;
mod lookup;
pub(crate) mod loss;
mod matmul;
pub(crate) mod operand;
mod operators;
mod order;
mod pixels;
mod pointwise;
mod pool;
mod reduce;
mod reshape;
mod rowwise;
mod scan;
mod scatter;
mod slice;
mod softmax;
mod unary;
mod view;

use crate::{DTensor, Result};
use candle_core::{DType, Tensor};

/// Zeros in the place of a sum over `inputs` without elements on this rank.
///
/// They stay connected to the inputs, so that every rank's backward pass has the same communication.
fn neutral(inputs: &[DTensor], shape: &[usize], dtype: DType) -> Result<Tensor> {
    let mut zero = Tensor::zeros((), dtype, inputs[0].device())?;
    for input in inputs.iter().filter(|input| input.tracked()) {
        let nothing = input.to_local().flatten_all()?.narrow(0, 0, 0)?.sum_all()?;
        zero = (zero + nothing.to_dtype(dtype)?)?;
    }
    Ok(zero.broadcast_as(shape)?.contiguous()?)
}
