use candle_core::{CpuStorage, CustomOp2, DType, Device, Layout, Result, Shape, Tensor, bail};
use candle_dist_base::{edges, empty};
use std::sync::Arc;

use super::embedding::{check_ids, embedding, row};
use super::embedding_off_host::rows_or;
use super::{
    TensorReader, check_dtype, compute_dtype, elements,
    real::Real,
    row_order::{NOWHERE, unique_rows},
    rows::by_blocks,
};

/// How a bag of rows is reduced to one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BagMode {
    /// The sum.
    Sum,
    /// The sum divided by the number of rows.
    #[default]
    Mean,
    /// The largest element of each column; the gradient goes to the first of equal ones.
    Max,
}

/// Ids in consecutive bags.
#[derive(Debug, Clone)]
pub struct Bags {
    /// The ids of all bags; a bag skips `u32::MAX`.
    ids: Arc<[u32]>,
    /// The start of each bag, and the end of the last one.
    bounds: Arc<[usize]>,
}

impl Bags {
    /// Creates bags; each extends from one of `bounds` to the next.
    ///
    /// # Errors
    /// If the bounds do not rise from 0 to the number of ids.
    pub fn new(ids: impl Into<Arc<[u32]>>, bounds: impl Into<Arc<[usize]>>) -> Result<Self> {
        let (ids, bounds) = (ids.into(), bounds.into());
        if bounds.first() != Some(&0) || bounds.last() != Some(&ids.len()) || !bounds.is_sorted() {
            bail!("bounds of bags must rise from 0 to the number of ids, {}", ids.len());
        }
        Ok(Self { ids, bounds })
    }

    fn len(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Returns the indices in `ids` of a bag's ids, without the skipped ones.
    fn bag(&self, bag: usize) -> impl Iterator<Item = usize> + Clone + '_ {
        (self.bounds[bag]..self.bounds[bag + 1]).filter(|&i| self.ids[i] != NOWHERE)
    }
}

/// Returns one row for each bag of rows of `table`, `[bags, width]`.
///
/// `table` is `[rows, width]`; `weights`, one per id, multiply the rows of a sum and also have a gradient. A bag
/// without ids yields zeros. Fails on ids outside the table, on weights in another mode than [`Sum`](BagMode::Sum), and
/// on dtypes other than floats. Source:
/// <https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.embedding_bag.html>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// use candle_dist_kernels::{BagMode, Bags, embedding_bag};
/// let table = Tensor::new(&[[1f32, 8.], [2., 7.], [3., 9.]], &Cpu)?;
/// let bags = Bags::new([0, 2, 1], [0, 2, 2, 3])?;
/// let means = embedding_bag(&table, &bags, BagMode::Mean, None)?;
/// assert_eq!(means.to_vec2::<f32>()?, [[2.0, 8.5], [0.0, 0.0], [2.0, 7.0]]);
/// # Ok(())
/// # }
/// ```
pub fn embedding_bag(table: &Tensor, bags: &Bags, mode: BagMode, weights: Option<&Tensor>) -> Result<Tensor> {
    empty::compute(&wide_embedding_bag(table, bags, mode, weights)?, |rows| rows.to_dtype(table.dtype()))
}

/// Like [`embedding_bag`], with the bags of 16-bit rows in f32, in which they are summed.
pub fn wide_embedding_bag(
    table: &Tensor,
    bags: &Bags,
    mode: BagMode,
    weights: Option<&Tensor>,
) -> Result<Tensor> {
    const OP: &str = "embedding_bag";
    let (dtype, (rows, _)) = (compute_dtype(OP, table)?, table.dims2()?);
    check_ids(OP, rows, &bags.ids)?;
    if let Some(weights) = weights {
        check_dtype(OP, table, weights)?;
        if weights.dims() != [bags.ids.len()] || mode != BagMode::Sum {
            bail!(
                "{OP}: weights {:?} for the {mode:?} of {} ids: expected one each, for a sum",
                weights.dims(),
                bags.ids.len()
            );
        }
    }
    if dtype != table.dtype() {
        // Only the rows in the bags are widened, so that the graph holds no f32 copy of the whole table.
        let used = unique_rows(&bags.ids.iter().copied().filter(|&id| id != NOWHERE).collect::<Vec<_>>());
        let place = |&id: &u32| used.binary_search(&id).map_or(NOWHERE, |place| place as u32);
        let bags = Bags { ids: bags.ids.iter().map(place).collect(), bounds: bags.bounds.clone() };
        let weights = weights.map(|weights| empty::compute(weights, |x| x.to_dtype(dtype))).transpose()?;
        let rows = empty::compute(&embedding(table, used, None)?, |rows| rows.to_dtype(dtype))?;
        return wide_embedding_bag(&rows, &bags, mode, weights.as_ref());
    }
    if !table.device().is_cpu() {
        return match (bags.len(), empty::is_empty_off_host(table)) {
            (0, false) => {
                let inputs: Vec<&Tensor> = [table].into_iter().chain(weights).collect();
                empty::zeros_of(&inputs, (0, table.dim(1)?), table.dtype())
            }
            (_, true) => {
                let weights = weights.map(empty::to_host).transpose()?;
                wide_embedding_bag(&empty::to_host(table)?, bags, mode, weights.as_ref())?
                    .to_device(table.device())
            }
            _ => composed(table, bags, mode, weights),
        };
    }
    let weights = match weights {
        Some(weights) => weights.contiguous()?,
        None => Tensor::zeros(0, dtype, &Device::Cpu)?,
    };
    let op = EmbeddingBagOp { bags: bags.clone(), mode, weighted: weights.elem_count() > 0 };
    edges::apply2(&table.contiguous()?, &weights, op)
}

/// Reduces bags with candle's own operations: all ids of a bag in one row of a padded matrix.
fn composed(table: &Tensor, bags: &Bags, mode: BagMode, weights: Option<&Tensor>) -> Result<Tensor> {
    let (device, (_, width)) = (table.device(), table.dims2()?);
    let longest = (0..bags.len()).map(|bag| bags.bag(bag).count()).max().unwrap_or(0).max(1);
    let by_bag = |f: &dyn Fn(usize) -> u32| {
        let places = (0..bags.len()).flat_map(|bag| {
            let found: Vec<u32> = bags.bag(bag).map(f).collect();
            let rest = longest - found.len();
            found.into_iter().chain(std::iter::repeat_n(NOWHERE, rest))
        });
        places.collect::<Arc<[u32]>>()
    };
    // The places after a bag's end are filled.
    let filled = |fill: f64| {
        rows_or(table, by_bag(&|i| bags.ids[i]), fill, None)?.reshape((bags.len(), longest, width))
    };
    let counts: Vec<f32> = (0..bags.len()).map(|bag| bags.bag(bag).count() as f32).collect();
    let counts = Tensor::from_vec(counts, (bags.len(), 1), device)?.to_dtype(table.dtype())?;
    match (mode, weights) {
        (BagMode::Max, _) => {
            let empty = counts.eq(0f64)?.broadcast_as((bags.len(), width))?;
            let rows = filled(f64::NEG_INFINITY)?;
            // Selected by index: the gradient of candle's `max` goes to all equal elements.
            let largest = rows.gather(&rows.argmax_keepdim(1)?, 1)?.squeeze(1)?;
            empty.where_cond(&largest.zeros_like()?, &largest)
        }
        (BagMode::Mean, _) => filled(0.0)?.sum(1)?.broadcast_div(&counts.maximum(1f64)?),
        (BagMode::Sum, None) => filled(0.0)?.sum(1),
        (BagMode::Sum, Some(weights)) => {
            let weights = rows_or(&weights.unsqueeze(1)?, by_bag(&|i| i as u32), 0.0, None)?;
            filled(0.0)?.broadcast_mul(&weights.reshape((bags.len(), longest, 1))?)?.sum(1)
        }
    }
}

struct EmbeddingBagOp {
    bags: Bags,
    mode: BagMode,
    weighted: bool,
}

impl EmbeddingBagOp {
    /// Returns the factor of the row at index `i` of a bag with `count` ids.
    #[inline(always)]
    fn factor<T: Real>(&self, weights: &[T], i: usize, count: usize) -> T {
        match self.mode {
            BagMode::Mean => T::one() / T::from_f64(count as f64),
            _ if self.weighted => weights[i],
            _ => T::one(),
        }
    }

    /// Returns the index in the ids of the first largest element of a column.
    #[inline(always)]
    fn largest<T: Real>(&self, table: &[T], bag: usize, column: usize, width: usize) -> Option<usize> {
        let at = |i: usize| table[self.bags.ids[i] as usize * width + column];
        self.bags.bag(bag).reduce(|best, i| if at(i) > at(best) { i } else { best })
    }

    fn forward<T: Real>(&self, table: &[T], weights: &[T], width: usize) -> CpuStorage {
        let bags = &self.bags;
        let mut out = vec![T::zero(); bags.len() * width];
        let cost = width * bags.ids.len().div_ceil(bags.len().max(1));
        by_blocks(
            &mut out,
            width.max(1),
            cost,
            #[inline(always)]
            |first, out| {
                for (bag, out) in (first..).zip(out.chunks_exact_mut(width)) {
                    if self.mode == BagMode::Max {
                        let mut ids = bags.bag(bag).map(|i| row(table, bags.ids[i], width));
                        ids.next().into_iter().for_each(|first| out.copy_from_slice(first));
                        ids.for_each(|row| {
                            for (out, &x) in out.iter_mut().zip(row) {
                                *out = if x > *out { x } else { *out };
                            }
                        });
                        continue;
                    }
                    for i in bags.bag(bag) {
                        // A mean is divided once, after the sum.
                        let factor = if self.weighted { weights[i] } else { T::one() };
                        for (out, &x) in out.iter_mut().zip(row(table, bags.ids[i], width)) {
                            *out += x * factor;
                        }
                    }
                    let count = if self.mode == BagMode::Mean { bags.bag(bag).count() } else { 1 };
                    let count = T::from_f64(count.max(1) as f64);
                    out.iter_mut().for_each(|out| *out /= count);
                }
            },
        );
        T::to_cpu_storage_owned(out)
    }

    /// Returns the gradients of the table and the weights.
    fn backward<T: Real>(&self, table: &Tensor, weights: &Tensor, grad: &Tensor) -> Result<[Tensor; 2]> {
        let (rows, width) = table.dims2()?;
        let [table, weights, grad] = [table, weights, grad].map(TensorReader::new);
        let (xs, ws, gs) = (table.elements::<T>()?, weights.elements::<T>()?, grad.elements::<T>()?);
        let (mut dx, mut dw) = (vec![T::zero(); rows * width], vec![T::zero(); ws.len()]);
        for bag in 0..self.bags.len() {
            let grad = &gs[bag * width..][..width];
            if self.mode == BagMode::Max {
                for (column, &grad) in grad.iter().enumerate() {
                    let largest = self.largest(xs, bag, column, width);
                    largest.into_iter().for_each(|i| dx[self.bags.ids[i] as usize * width + column] += grad);
                }
                continue;
            }
            let count = self.bags.bag(bag).count();
            for i in self.bags.bag(bag) {
                let (id, factor) = (self.bags.ids[i], self.factor(ws, i, count));
                for (dx, &grad) in dx[id as usize * width..][..width].iter_mut().zip(grad) {
                    *dx += grad * factor;
                }
                if self.weighted {
                    dw[i] = row(xs, id, width)
                        .iter()
                        .zip(grad)
                        .fold(T::zero(), |sum, (&x, &grad)| sum + x * grad);
                }
            }
        }
        Ok([table.like(dx)?, weights.like(dw)?])
    }
}

impl CustomOp2 for EmbeddingBagOp {
    fn name(&self) -> &'static str {
        "embedding_bag"
    }

    fn cpu_fwd(
        &self,
        table: &CpuStorage,
        table_l: &Layout,
        weights: &CpuStorage,
        weights_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let width = table_l.dims()[1];
        let out = match table {
            CpuStorage::F64(_) => {
                self.forward::<f64>(elements(table, table_l)?, elements(weights, weights_l)?, width)
            }
            _ => self.forward::<f32>(elements(table, table_l)?, elements(weights, weights_l)?, width),
        };
        Ok((out, (self.bags.len(), width).into()))
    }

    fn bwd(
        &self,
        table: &Tensor,
        weights: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let [dx, dw] = match table.dtype() {
            DType::F64 => self.backward::<f64>(table, weights, &grad)?,
            _ => self.backward::<f32>(table, weights, &grad)?,
        };
        Ok((edges::keep(table, dx)?, Some(dw)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{BagMode, Bags, NOWHERE, composed, embedding_bag};
    use candle_core::{DType, Device, Result, Tensor, Var};

    /// Returns the result and the gradients of the table and the weights.
    fn all(
        make: fn(&Tensor, &Bags, BagMode, Option<&Tensor>) -> Result<Tensor>,
        bags: &Bags,
        mode: BagMode,
        weighted: bool,
    ) -> Result<Vec<Vec<f64>>> {
        let table = Var::from_tensor(&Tensor::arange(0f64, 20., &Device::Cpu)?.sin()?.reshape((5, 4))?)?;
        let weights: Vec<f64> = (0..bags.ids.len()).map(|i| (i as f64).cos()).collect();
        let weights = Var::from_vec(weights, bags.ids.len(), &Device::Cpu)?;
        let found = make(&table, bags, mode, weighted.then_some(&*weights))?;
        let up = Tensor::arange(0f64, found.elem_count() as f64, &Device::Cpu)?.reshape(found.shape())?;
        let grads = (&found * up)?.sum_all()?.backward()?;
        let mut out =
            vec![found.flatten_all()?.to_vec1()?, grads.get(&table).unwrap().flatten_all()?.to_vec1()?];
        if weighted {
            out.push(grads.get(&weights).unwrap().to_vec1()?);
        }
        Ok(out)
    }

    #[test]
    fn candles_own_operations_give_the_same() {
        let ids = [3, 1, 3, NOWHERE, 0, 4, 4, NOWHERE, NOWHERE, 2];
        let cases: [(&[u32], &[usize]); 4] =
            [(&ids, &[0, 3, 3, 7, 9, 10]), (&ids, &[0, 10]), (&ids, &[0, 0, 10, 10]), (&[], &[0, 0, 0])];
        for (ids, bounds) in cases {
            let bags = Bags::new(ids, bounds).unwrap();
            let cases =
                [(BagMode::Sum, false), (BagMode::Sum, true), (BagMode::Mean, false), (BagMode::Max, false)];
            for (mode, weighted) in cases {
                let [fused, plain] =
                    [embedding_bag, composed].map(|make| all(make, &bags, mode, weighted).unwrap());
                let same = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12;
                assert!(
                    fused.iter().flatten().zip(plain.iter().flatten()).all(same),
                    "{mode:?} {fused:?} {plain:?}"
                );
            }
        }
    }

    #[test]
    fn bags_of_candles_own_operations_make_nothing_of_the_size_of_the_table() {
        let table = Var::from_tensor(&Tensor::ones((1 << 20, 8), DType::F32, &Device::Cpu).unwrap()).unwrap();
        let bags = Bags::new([3, NOWHERE, 1 << 19, 7, 7], [0, 2, 2, 5]).unwrap();
        let weights = Var::from_tensor(&Tensor::ones(5, DType::F32, &Device::Cpu).unwrap()).unwrap();
        let cases = [
            (BagMode::Sum, Some(&*weights)),
            (BagMode::Sum, None),
            (BagMode::Mean, None),
            (BagMode::Max, None),
        ];
        for (mode, weights) in cases {
            // Every operand of its graph except the table is at most as large as the padded rows: 3 bags of 3.
            let found = composed(&table, &bags, mode, weights).unwrap();
            let large: Vec<_> =
                found.sorted_nodes().iter().map(|x| x.elem_count()).filter(|&n| n > 9 * 8).collect();
            assert_eq!(large, [8 << 20], "{mode:?}");
        }
    }
}
