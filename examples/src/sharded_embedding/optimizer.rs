//! The optimizers of the tables behind one interface.

use candle_nn::ParamsAdamW;
use candle_shard::Result;
use candle_shard::sparse::{ParamsAdagrad, ParamsSgd, RowVar, SparseAdagrad, SparseAdamW, SparseSgd};

use super::args::{Args, OptimizerName};

/// The epsilon of optimizers that divide a gradient by its size. It keeps them from amplifying the rounding error of a
/// tiny gradient, which differs between runs. Gradients of a mean over a batch are around 1e-5.
const EPS: f64 = 1e-5;

/// The optimizer that the command line names.
pub enum TableOptimizer {
    /// Gradient descent.
    Sgd(SparseSgd),
    /// Adagrad.
    Adagrad(SparseAdagrad),
    /// Lazy AdamW.
    AdamW(SparseAdamW),
}

impl TableOptimizer {
    /// Creates the optimizer of `rows`.
    ///
    /// # Errors
    /// If its options are invalid.
    pub fn new(rows: Vec<RowVar>, args: &Args) -> Result<Self> {
        let lr = args.lr();
        Ok(match args.optimizer {
            OptimizerName::Sgd => Self::Sgd(SparseSgd::new(rows, ParamsSgd { lr, ..ParamsSgd::default() })?),
            OptimizerName::Adagrad => Self::Adagrad(SparseAdagrad::new(
                rows,
                ParamsAdagrad { lr, eps: EPS, ..ParamsAdagrad::default() },
            )?),
            OptimizerName::AdamW => {
                let params = ParamsAdamW { lr, eps: EPS, weight_decay: 0.0, ..ParamsAdamW::default() };
                Self::AdamW(SparseAdamW::new(rows, params)?)
            }
        })
    }

    /// Updates the rows that have a gradient.
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
