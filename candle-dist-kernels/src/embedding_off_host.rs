//! Lookups in tables that are not on the host.
use super::row_order::NOWHERE;
use super::row_put::put_rows;
use super::{device_rows, rows_off_host};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Result, Shape, Tensor};
use candle_dist_base::{Ready, empty};
use std::sync::Arc;

/// Returns the rows of `table` at `ids`, and rows of `fill` for the id [`NOWHERE`]; the row `still` gets no gradient.
///
/// All other ids must be rows of the table. The gradient adds rows that occur several times in pairs, and then the sums in pairs. The
/// host adds them one after another, so the last bits may differ.
pub(super) fn rows_or(table: &Tensor, ids: Arc<[u32]>, fill: f64, still: Option<u32>) -> Result<Tensor> {
    let table = table.contiguous()?;
    let made = device_rows::take(&table, &Tensor::new(&ids[..], table.device())?, fill)?;
    if !table.track_op() {
        return Ok(made.into_tensor());
    }
    table.apply_op1(LookupNode { ids, still, made: Ready::new(made) })
}

/// The graph node of a lookup.
struct LookupNode {
    ids: Arc<[u32]>,
    still: Option<u32>,
    made: Ready,
}

impl CustomOp1 for LookupNode {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.made.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.made.cuda()
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        self.made.metal()
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let moves = |id: u32| id != NOWHERE && Some(id) != self.still;
        let moved = self.ids.iter().copied().zip(0..).filter(|&(id, _)| moves(id));
        let (rows, places): (Vec<u32>, Vec<u32>) = moved.unzip();
        let grad = grad.detach();
        let grad =
            if places.len() == self.ids.len() { grad } else { empty::index_select(&grad, &places, 0)? };
        let (rows, sums) = rows_off_host::sum_rows(&rows, &grad)?;
        let dense = Tensor::zeros(table.shape(), table.dtype(), table.device())?;
        put_rows(&dense, &rows, &sums)?;
        Ok(Some(dense))
    }
}
