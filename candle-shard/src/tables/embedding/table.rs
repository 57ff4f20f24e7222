//! A table `[rows, width]`, cut by rows or by columns.
use crate::kernels;
use crate::lookup::ArgumentError;
use crate::tables::sparse::RowVar;
use crate::{Result, ShardedTensor};
use candle_core::Tensor;
use candle_dist::{ProcessGroup, empty};
use itertools::Itertools;
use std::ops::Range;

/// A rank's view of a table.
pub(super) struct EmbeddingTable {
    /// This rank's part.
    pub(super) local: Tensor,
    /// The part as a variable whose gradient consists of the rows that were looked up, if it is one.
    by_rows: Option<RowVar>,
    /// Whether this rank has a shard, possibly empty.
    holds: bool,
    pub(super) group: ProcessGroup,
    pub(super) rows: usize,
    /// The dim that is cut.
    dim: usize,
    /// Each rank's part of that dim; may be empty.
    pub(super) parts: Vec<Range<usize>>,
}

impl EmbeddingTable {
    /// Converts a sharded tensor to a table; returns the reason if it is not one.
    pub(super) fn of(tensor: &ShardedTensor) -> Result<Self, ArgumentError> {
        let &[rows, width] = tensor.dims() else {
            return Err(format!("a table has 2 dims, [rows, width]; got {:?}", tensor.dims()));
        };
        if !kernels::is_computed(tensor.dtype()) {
            let dtype = tensor.dtype().as_str();
            return Err(format!(
                "a table of {dtype} has no gradient; cast it to a float dtype of 16 bits or more"
            ));
        }
        if rows > u32::MAX as usize {
            return Err(format!("a table of {rows} rows is not supported; use no more than {}", u32::MAX));
        }
        let (dim, parts) = tensor.parts()?;
        // A rank may have empty shards in addition to its shard with elements.
        let shards = tensor.local_shards();
        let held = shards.iter().position(|shard| !shard.metadata.is_empty()).unwrap_or(0);
        let local = match shards.get(held) {
            Some(shard) => shard.tensor.clone(),
            None => {
                let dims = if dim == 0 { (0, width) } else { (rows, 0) };
                Tensor::zeros(dims, tensor.dtype(), tensor.device()).map_err(|error| error.to_string())?
            }
        };
        let (by_rows, holds) = (tensor.row_vars().get(held).cloned(), !shards.is_empty());
        Ok(Self { local, by_rows, holds, group: tensor.group().clone(), rows, dim, parts })
    }

    /// Looks up local rows, differentiable; the gradient of the row `still` is not used.
    pub(super) fn lookup(&self, rows: Vec<u32>, still: Option<u32>) -> Result<Tensor> {
        match &self.by_rows {
            Some(table) => table.lookup_but(rows, still),
            None => Ok(empty::index_select(&self.local, &rows, 0)?),
        }
    }

    /// Returns whether the local part has a gradient; `None` if there is no local part.
    pub(super) fn tracked(&self) -> Option<bool> {
        self.holds.then(|| self.local.track_op())
    }

    /// Returns whether the local part is the result of ops, whose gradients may need its values.
    pub(super) fn is_result(&self) -> bool {
        self.local.track_op() && !self.local.is_variable()
    }

    pub(super) fn by_columns(&self) -> bool {
        self.dim == 1
    }

    /// Returns the rows of which `rank` holds a part.
    pub(super) fn own_rows(&self, rank: usize) -> Range<usize> {
        if self.by_columns() { 0..self.rows } else { self.parts[rank].clone() }
    }

    /// Returns the sizes of the parts in rank order.
    pub(super) fn sizes(&self) -> Vec<usize> {
        self.parts.iter().map(Range::len).collect()
    }

    /// Returns the ranks in the order of their parts in the table.
    pub(super) fn order(&self) -> Vec<usize> {
        (0..self.parts.len()).sorted_by_key(|&rank| self.parts[rank].start).collect()
    }
}
