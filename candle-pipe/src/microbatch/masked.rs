//! The rows of a batch's masked microbatches.
use super::Microbatches;
use crate::Result;
use crate::graph::{Graph, GraphSignature, MaskedRows};

impl MaskedRows {
    /// Returns one for each microbatch of a masked batch, and `None` for each of another batch.
    pub(crate) fn of(
        batch: &Microbatches,
        first: usize,
        graph: &Graph,
        signature: &GraphSignature,
    ) -> Result<Vec<Option<Self>>> {
        if !batch.is_masked() {
            return Ok(vec![None; batch.len()]);
        }
        let (args, kwargs) = batch.dims();
        let inputs = signature.places(args, kwargs, <[_]>::concat)?;
        Ok(Self::of_rows(batch.rows(), first, inputs, graph).into_iter().map(Some).collect())
    }
}
