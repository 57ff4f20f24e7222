use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, bail};
use std::sync::Arc;

use super::{Reading, compute_dtype, elements, real::Real, rows::add_assign};

/// candle's mark for no element, too: it is read as zero, nothing is written to it, and a bag leaves it out.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// The rows of `table` at `ids`, `[n, width]`; the row `still` gets no gradient.
///
/// `table` is `[rows, width]`. candle's `index_select` has no row without gradient, and sums 16-bit gradients in 16
/// bits. Fails on ids that are no rows, and on dtypes that are no floats. Source of the row without gradient: the
/// `padding_idx` of <https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.embedding.html>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Var};
/// let table = Var::new(&[[1f32], [2.], [3.]], &Cpu)?;
/// let found = candle_shard::kernels::embedding(&table, [2, 0, 2], Some(0))?;
/// assert_eq!(found.to_vec2::<f32>()?, [[3.], [1.], [3.]]);
/// let grads = found.sum_all()?.backward()?;
/// assert_eq!(grads.get(&table).unwrap().to_vec2::<f32>()?, [[0.], [0.], [2.]]);
/// # Ok(())
/// # }
/// ```
pub fn embedding(table: &Tensor, ids: impl Into<Arc<[u32]>>, still: Option<u32>) -> Result<Tensor> {
    let ids: Arc<[u32]> = ids.into();
    let (dtype, (rows, _)) = (compute_dtype("embedding", table)?, table.dims2()?);
    check_ids("embedding", rows, ids.iter().copied())?;
    if !table.device().is_cpu() {
        let find =
            |table: &Tensor, ids: &[u32]| table.index_select(&Tensor::from_slice(ids, ids.len(), table.device())?, 0);
        let Some(still) = still.filter(|still| ids.contains(still)) else { return find(&table.contiguous()?, &ids) };
        // What is detached has no gradient: each id is found in one of two tables.
        let both = Tensor::cat(&[table, &table.detach()], 0)?;
        let ids: Vec<u32> = ids.iter().map(|&id| if id == still { id + rows as u32 } else { id }).collect();
        return find(&both, &ids);
    }
    table.to_dtype(dtype)?.contiguous()?.apply_op1(Embedding { ids, still })?.to_dtype(table.dtype())
}

pub(super) fn check_ids(op: &'static str, rows: usize, mut ids: impl Iterator<Item = u32>) -> Result<()> {
    match ids.find(|&id| id as usize >= rows) {
        Some(id) => bail!("{op}: id {id} is no row of a table of {rows} rows"),
        None => Ok(()),
    }
}

struct Embedding {
    ids: Arc<[u32]>,
    still: Option<u32>,
}

/// The row `id` of a matrix.
#[inline(always)]
pub(super) fn row<T>(matrix: &[T], id: u32, width: usize) -> &[T] {
    &matrix[id as usize * width..][..width]
}

impl Embedding {
    fn forward<T: Real>(&self, table: &[T], width: usize) -> CpuStorage {
        let mut out = Vec::with_capacity(self.ids.len() * width);
        self.ids.iter().for_each(|&id| out.extend_from_slice(row(table, id, width)));
        T::to_cpu_storage_owned(out)
    }

    fn backward<T: Real>(&self, table: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let ((rows, width), grad) = (table.dims2()?, Reading::new(grad));
        let grads = grad.elements::<T>()?;
        let mut sums = vec![T::zero(); rows * width];
        for (i, &id) in self.ids.iter().enumerate().filter(|(_, id)| Some(**id) != self.still) {
            add_assign(&mut sums[id as usize * width..][..width], &grads[i * width..][..width]);
        }
        Tensor::from_vec(sums, (rows, width), &Device::Cpu)
    }
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, table: &CpuStorage, table_l: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = table_l.dims()[1];
        let found = match table {
            CpuStorage::F64(_) => self.forward::<f64>(elements(table, table_l)?, width),
            _ => self.forward::<f32>(elements(table, table_l)?, width),
        };
        Ok((found, (self.ids.len(), width).into()))
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        Ok(Some(match table.dtype() {
            DType::F64 => self.backward::<f64>(table, &grad)?,
            _ => self.backward::<f32>(table, &grad)?,
        }))
    }
}
