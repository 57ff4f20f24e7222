//! What many tests use: leaves and their errors from `test-utils`, and the shapes of this suite.
use candle_core::Tensor;
use candle_shard::Placement;
pub(crate) use test_utils::{
    Lay, Leaf, block, device, distance, distribute, lays, mesh, on_axes, on_device, tolerance, value_error,
    values,
};

pub(crate) const SUM: Placement = Placement::PARTIAL_SUM;

/// Shapes that divide by few ranks, by none, that leave ranks without elements, and that have none.
pub(crate) const SHAPES: [[usize; 2]; 5] = [[4, 6], [5, 3], [1, 7], [2, 1], [0, 3]];

/// candle's GELU. Its own backward pass has constants of six digits.
pub(crate) fn exact_gelu(x: &Tensor) -> candle_core::Result<Tensor> {
    let inner = ((x * ((x.sqr()? * 0.044715)? + 1.0)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
    (x * (inner.tanh()? + 1.0)?)? * 0.5
}
