//! The optimizers of the tables behind one call.

use candle_nn::ParamsAdamW;
use candle_shard::Result;
use candle_shard::sparse::{Adagrad, AdamW, ParamsAdagrad, ParamsSgd, RowVar, Sgd};

use super::args::{Args, OptimizerName};

/// What divides a gradient by its own size must not blow up the rounding error of one that is all but zero, which
/// differs from run to run; gradients of a mean over a batch are around 1e-5.
const EPS: f64 = 1e-5;

/// The optimizer that the command line names.
pub enum TableOptimizer {
    /// Gradient descent.
    Sgd(Sgd),
    /// Adagrad.
    Adagrad(Adagrad),
    /// Lazy AdamW.
    AdamW(AdamW),
}

impl TableOptimizer {
    /// The optimizer of `rows`.
    ///
    /// # Errors
    /// If its parameters do not work.
    pub fn new(rows: Vec<RowVar>, args: &Args) -> Result<Self> {
        let lr = args.lr();
        Ok(match args.optimizer {
            OptimizerName::Sgd => Self::Sgd(Sgd::new(rows, ParamsSgd { lr })?),
            OptimizerName::Adagrad => {
                Self::Adagrad(Adagrad::new(rows, ParamsAdagrad { lr, eps: EPS, ..ParamsAdagrad::default() })?)
            }
            OptimizerName::AdamW => {
                let params = ParamsAdamW { lr, eps: EPS, weight_decay: 0.0, ..ParamsAdamW::default() };
                Self::AdamW(AdamW::new(rows, params)?)
            }
        })
    }

    /// Moves the rows that have a gradient.
    ///
    /// # Errors
    /// The optimizer's.
    pub fn step(&mut self) -> Result<()> {
        match self {
            Self::Sgd(sgd) => sgd.step(),
            Self::Adagrad(adagrad) => adagrad.step(),
            Self::AdamW(adam_w) => adam_w.step(),
        }
    }
}
