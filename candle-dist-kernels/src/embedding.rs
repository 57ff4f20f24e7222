use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor, bail};
use candle_dist_base::{edges, empty};
use std::sync::Arc;

use super::convert::to_dtype;
use super::element::{Element, with_element};
use super::embedding_off_host::rows_or;
use super::prefetch::Prefetch;
use super::row_order::NOWHERE;
use super::{TensorReader, compute_dtype, elements};

/// Returns the rows of `table` at `ids`, `[n, width]`; the row `still` gets no gradient.
///
/// `table` is `[rows, width]`; the id `u32::MAX` yields zeros and is not a row. candle's `index_select` does not
/// support a row without gradient, and sums 16-bit gradients in 16 bits. Fails on other ids outside the table, and on
/// dtypes other than floats. Source of the row without gradient: the `padding_idx` of
/// <https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.embedding.html>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Var};
/// let table = Var::new(&[[1f32], [2.], [3.]], &Cpu)?;
/// let found = candle_dist_kernels::embedding(&table, [2, 0, 2], Some(0))?;
/// assert_eq!(found.to_vec2::<f32>()?, [[3.], [1.], [3.]]);
/// let grads = found.sum_all()?.backward()?;
/// assert_eq!(grads.get(&table).unwrap().to_vec2::<f32>()?, [[0.], [0.], [2.]]);
/// # Ok(())
/// # }
/// ```
pub fn embedding(table: &Tensor, ids: impl Into<Arc<[u32]>>, still: Option<u32>) -> Result<Tensor> {
    let ids: Arc<[u32]> = ids.into();
    let (rows, _) = table.dims2()?;
    compute_dtype("embedding", table)?;
    check_ids("embedding", rows, &ids)?;
    if !table.device().is_cpu() {
        return match (ids.is_empty(), empty::is_empty_off_host(table)) {
            (true, false) => table.narrow(0, 0, 0),
            (_, true) => embedding(&empty::to_host(table)?, ids, still)?.to_device(table.device()),
            _ => rows_or(table, ids, 0.0, still),
        };
    }
    edges::apply1(&table.contiguous()?, EmbeddingOp { ids, still })
}

/// Refuses ids outside a table with `rows` rows.
pub(super) fn check_ids(op: &'static str, rows: usize, ids: &[u32]) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= rows && id != NOWHERE) {
        Some(id) => bail!("{op}: id {id} is out of range for a table of {rows} rows"),
        None => Ok(()),
    }
}

struct EmbeddingOp {
    ids: Arc<[u32]>,
    still: Option<u32>,
}

/// Returns the row `id` of a matrix.
#[inline(always)]
pub(super) fn row<T>(matrix: &[T], id: u32, width: usize) -> &[T] {
    &matrix[id as usize * width..][..width]
}

impl EmbeddingOp {
    fn forward<E: Element>(&self, table: &[E], width: usize) -> CpuStorage {
        let mut out = Vec::with_capacity(self.ids.len() * width);
        let row_of = |at: usize| self.ids[at] as usize;
        Prefetch::along(&[Prefetch::of(table, width)], self.ids.len(), row_of, |at| match self.ids[at] {
            NOWHERE => out.resize(out.len() + width, E::zero()),
            id => out.extend_from_slice(row(table, id, width)),
        });
        E::to_cpu_storage_owned(out)
    }

    fn backward<E: Element>(&self, table: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let ((rows, width), grad) = (table.dims2()?, TensorReader::new(grad));
        let grads = grad.elements::<E>()?;
        let mut sums = vec![E::zero().load(); rows * width];
        let moves = |id: u32| id != NOWHERE && Some(id) != self.still;
        for (i, &id) in self.ids.iter().enumerate().filter(|&(_, &id)| moves(id)) {
            for (sum, &grad) in
                sums[id as usize * width..][..width].iter_mut().zip(row(grads, i as u32, width))
            {
                *sum += grad.load();
            }
        }
        to_dtype(&Tensor::from_vec(sums, (rows, width), &Device::Cpu)?, table.dtype())
    }
}

impl CustomOp1 for EmbeddingOp {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, table: &CpuStorage, table_l: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = table_l.dims()[1];
        let found = with_element!("embedding", table.dtype(), E => Ok(self.forward::<E>(elements(table, table_l)?, width)));
        Ok((found?, (self.ids.len(), width).into()))
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        edges::keep(table, with_element!("embedding", table.dtype(), E => self.backward::<E>(table, &grad))?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{NOWHERE, embedding, rows_or};
    use candle_core::{DType, Device, Tensor, Var};

    #[test]
    fn lookups_off_the_host_are_the_same_in_every_dtype() {
        for (dtype, still) in
            itertools::iproduct!([DType::F64, DType::F32, DType::F16, DType::BF16], [None, Some(3)])
        {
            let table =
                Tensor::arange(0f64, 20., &Device::Cpu).unwrap().reshape((5, 4)).unwrap().to_dtype(dtype);
            let table = Var::from_tensor(&table.unwrap()).unwrap();
            let ids = [3, 1, NOWHERE, 3, 1, 0];
            let [fused, plain] = [embedding(&table, ids, still), rows_or(&table, ids.into(), 0.0, still)]
                .map(|found| {
                    let found = found.unwrap();
                    let grads = (&found * &found).unwrap().sum_all().unwrap().backward().unwrap();
                    [found, grads.get(&table).unwrap().clone()]
                        .map(|x| x.to_dtype(DType::F64).unwrap().to_vec2::<f64>().unwrap())
                });
            assert_eq!(fused, plain, "{dtype:?} {still:?}");
        }
    }

    #[test]
    fn a_lookup_off_the_host_makes_nothing_of_the_size_of_the_table() {
        let table =
            Var::from_tensor(&Tensor::ones((1 << 20, 16), DType::F32, &Device::Cpu).unwrap()).unwrap();
        let ids = [3, NOWHERE, 1 << 19];
        // Every operand of its graph except the table is at most as large as the result.
        let found = rows_or(&table, ids.into(), 0.0, Some(3)).unwrap();
        let large = found.sorted_nodes().iter().filter(|node| node.elem_count() > 3 * 16).count();
        assert_eq!(large, 1, "only the table");
    }

    #[test]
    fn a_lookup_of_no_rows_off_the_host_stays_in_the_graph() {
        let empty = Var::from_tensor(&Tensor::zeros((0, 4), DType::F32, &Device::Cpu).unwrap()).unwrap();
        let nothing = rows_or(&empty, [NOWHERE; 2].into(), 0.0, None).unwrap();
        assert!(nothing.track_op() && nothing.to_vec2::<f32>().unwrap() == [[0.0; 4]; 2]);
    }
}
