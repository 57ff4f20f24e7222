//! candle's initial values on a mesh.
use crate::nn::Init;
use crate::random::Distribution;
use candle_core::Shape;
use candle_nn::init::{self, NormalOrUniform};

/// Returns the initial values of a parameter of this shape, with candle's distribution.
pub(super) fn init_of(init: candle_nn::Init, shape: &[usize]) -> Init {
    match init {
        candle_nn::Init::Const(value) => Init::Const(value),
        candle_nn::Init::Randn { mean, stdev } => Init::Random(Distribution::Normal { mean, stdev }),
        candle_nn::Init::Uniform { lo, up } => Init::Random(Distribution::Uniform { lo, up }),
        candle_nn::Init::Kaiming { dist, fan, non_linearity } => {
            let stdev = non_linearity.gain() / (fan.for_shape(&Shape::from(shape)) as f64).sqrt();
            Init::Random(match dist {
                NormalOrUniform::Normal => Distribution::Normal { mean: 0.0, stdev },
                NormalOrUniform::Uniform => even(3f64.sqrt() * stdev),
            })
        }
    }
}

/// The initial values of convolution filters.
pub(super) const FILTERS: candle_nn::Init = init::DEFAULT_KAIMING_NORMAL;

/// Uniform in ±`bound`.
pub(super) fn even(bound: f64) -> Distribution {
    Distribution::Uniform { lo: -bound, up: bound }
}
