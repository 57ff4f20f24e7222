//! The result of one run, for reports and comparisons.

use candle_core::Tensor;

use super::metrics::Quality;
use crate::comm::CommStat;

/// One way to train the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunName {
    /// One rank with all tables and the whole batch.
    OneDevice,
    /// Tables cut by rows.
    RowWise,
    /// Tables cut by columns.
    ColumnWise,
}

impl RunName {
    /// All runs, in order.
    pub const ALL: [Self; 3] = [Self::OneDevice, Self::RowWise, Self::ColumnWise];

    /// Returns the name in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OneDevice => "one device",
            Self::RowWise => "row-wise",
            Self::ColumnWise => "column-wise",
        }
    }

    /// Returns the dim of the tables that is cut.
    pub fn sharded_dim(self) -> isize {
        isize::from(self == Self::ColumnWise)
    }
}

/// The result of training the model once.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// Which run this was.
    pub name: RunName,
    /// Number of ranks.
    pub world: usize,
    /// The mean loss over the whole batch, of every step.
    pub losses: Vec<f64>,
    /// Median time of a step in milliseconds.
    pub ms_per_step: f64,
    /// The trained tables, each whole.
    pub tables: Vec<Tensor>,
    /// The quality of the trained model on held-out samples.
    pub quality: Quality,
    /// The collectives of a step on rank 0, as means over all steps.
    pub comm_per_step: Vec<CommStat>,
}
