//! A table `[rows, width]`, cut by rows or by columns.
use crate::kernels;
use crate::lookup::Wrong;
use crate::tables::sparse::RowVar;
use crate::{Result, ShardedTensor};
use candle_core::Tensor;
use candle_dist::{ProcessGroup, empty};
use itertools::Itertools;
use std::ops::Range;

/// A rank's view of a table.
pub(crate) struct Table {
    pub(crate) local: Local,
    /// Whether this rank has a shard, possibly empty.
    holds: bool,
    pub(crate) group: ProcessGroup,
    pub(crate) rows: usize,
    /// The dim that is cut.
    dim: usize,
    /// Each rank's part of that dim; may be empty.
    pub(crate) parts: Vec<Range<usize>>,
}

/// The local part of a table.
pub(crate) enum Local {
    /// A tensor; the gradient of a variable is dense.
    Dense(Tensor),
    /// A variable whose gradient consists of the rows that were looked up.
    ByRows(RowVar),
}

impl Local {
    pub(crate) fn tensor(&self) -> &Tensor {
        match self {
            Self::Dense(tensor) => tensor,
            Self::ByRows(rows) => rows.var(),
        }
    }

    /// Looks up local rows, differentiable; the gradient of the row `still` is not used.
    pub(crate) fn lookup(&self, rows: Vec<u32>, still: Option<u32>) -> Result<Tensor> {
        match self {
            Self::Dense(tensor) => Ok(empty::index_select(tensor, &rows, 0)?),
            Self::ByRows(table) => table.lookup_but(rows, still),
        }
    }
}

impl Table {
    /// Converts a sharded tensor to a table; returns the reason if it is not one.
    pub(crate) fn of(tensor: &ShardedTensor) -> Result<Self, Wrong> {
        let &[rows, width] = tensor.dims() else {
            return Err(format!("a table has 2 dims, [rows, width]; got {:?}", tensor.dims()));
        };
        if !kernels::is_computed(tensor.dtype()) {
            let dtype = tensor.dtype().as_str();
            return Err(format!("a table of {dtype} has no gradient; cast it to a float dtype of 16 bits or more"));
        }
        if rows > u32::MAX as usize {
            return Err(format!("a table of {rows} rows is not supported; use no more than {}", u32::MAX));
        }
        let (dim, parts) = tensor.parts()?;
        let empty = || {
            let dims = if dim == 0 { (0, width) } else { (rows, 0) };
            Tensor::zeros(dims, tensor.dtype(), tensor.device()).map_err(|error| error.to_string())
        };
        // A rank may have empty shards in addition to its shard with elements.
        let held = tensor.local_shards().iter().position(|shard| !shard.metadata.is_empty()).unwrap_or(0);
        let local = match (tensor.row_vars().get(held), tensor.local_shards().get(held)) {
            (Some(rows), _) => Local::ByRows(rows.clone()),
            (None, Some(shard)) => Local::Dense(shard.tensor.clone()),
            (None, None) => Local::Dense(empty()?),
        };
        let holds = !tensor.local_shards().is_empty();
        Ok(Self { local, holds, group: tensor.group().clone(), rows, dim, parts })
    }

    /// Returns whether the local part has a gradient; `None` if there is no local part.
    pub(crate) fn tracked(&self) -> Option<bool> {
        self.holds.then(|| self.local.tensor().track_op())
    }

    /// Returns whether the local part is the result of ops, whose gradients may need its values.
    pub(crate) fn is_result(&self) -> bool {
        let local = self.local.tensor();
        local.track_op() && !local.is_variable()
    }

    pub(crate) fn by_columns(&self) -> bool {
        self.dim == 1
    }

    /// Returns the rows of which `rank` holds a part.
    pub(crate) fn own_rows(&self, rank: usize) -> Range<usize> {
        if self.by_columns() { 0..self.rows } else { self.parts[rank].clone() }
    }

    /// Returns the sizes of the parts in rank order.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        self.parts.iter().map(Range::len).collect()
    }

    /// Returns the ranks in the order of their parts in the table.
    pub(crate) fn order(&self) -> Vec<usize> {
        (0..self.parts.len()).sorted_by_key(|&rank| self.parts[rank].start).collect()
    }
}
