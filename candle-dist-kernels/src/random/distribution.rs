//! What numbers are drawn.
use candle_core::{Result, bail};

/// The distribution of the numbers of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// Uniform over `[lo, up)`; rounding to a narrow dtype may yield `up` itself.
    Uniform {
        /// The lower bound.
        lo: f64,
        /// The upper bound.
        up: f64,
    },
    /// The normal distribution.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation, at least 0.
        stdev: f64,
    },
    /// 1 with probability `p`, else 0.
    Bernoulli {
        /// The probability of a 1, in `[0, 1]`.
        p: f64,
    },
}

impl Distribution {
    pub(super) fn check(self) -> Result<()> {
        match self {
            Self::Uniform { lo, up } if !((up - lo).is_finite() && lo <= up) => {
                bail!("a uniform distribution needs finite bounds with lo <= up, got lo {lo} and up {up}")
            }
            Self::Normal { mean, stdev } if !(mean.is_finite() && stdev.is_finite() && stdev >= 0.0) => {
                bail!(
                    "a normal distribution needs a finite mean and a stdev >= 0, got mean {mean} and stdev {stdev}"
                )
            }
            Self::Bernoulli { p } if !(0.0..=1.0).contains(&p) => {
                bail!("a Bernoulli distribution needs a probability in [0, 1], got {p}")
            }
            _ => Ok(()),
        }
    }
}
