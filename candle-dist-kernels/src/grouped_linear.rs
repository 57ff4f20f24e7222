use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};
use candle_dist_base::{edges, empty};
use itertools::Itertools;
use std::ops::Range;
use std::sync::Arc;

use super::{
    DeferredGradient, WeightSink, compute_dtype,
    convert::to_dtype,
    cpu,
    linear::{forward, narrow},
    parallel::{self, busiest},
    product::product,
    real::Real,
    weight_sink,
};

/// Linear maps of consecutive groups of rows, each with a weight of its own: the products of a mixture of experts.
///
/// `x` is `[n, k]`, `weight` is `[groups, m, k]`, both of one dtype, and `counts` has the number of rows of each group.
/// The result is `[n, m]`: the first `counts[0]` rows are those of `x` times the transpose of `weight[0]`, and so on. A
/// group without rows costs nothing, and its weight gets a gradient of zeros. Fails if shapes, dtypes or counts do not
/// fit.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let (x, weight) = (Tensor::new(&[[1f32], [2.], [3.]], &Cpu)?, Tensor::new(&[[[10f32]], [[7.]], [[100.]]], &Cpu)?);
/// let y = candle_dist_kernels::grouped_linear(&x, &weight, [2, 0, 1])?;
/// assert_eq!(y.to_vec2::<f32>()?, [[10.], [20.], [300.]]);
/// # Ok(())
/// # }
/// ```
pub fn grouped_linear(x: &Tensor, weight: &Tensor, counts: impl Into<Arc<[usize]>>) -> Result<Tensor> {
    let counts = counts.into();
    compute_dtype("grouped_linear", x)?;
    let ((n, k), (groups, m, width)) = (x.dims2()?, weight.dims3()?);
    let sum = counts.iter().try_fold(0usize, |sum, &count| sum.checked_add(count));
    if k != width || counts.len() != groups || sum != Some(n) || x.dtype() != weight.dtype() {
        let (x_type, weight_type) = (x.dtype().as_str(), weight.dtype().as_str());
        bail!(
            "grouped_linear: {x_type}[{n}, {k}] with rows {counts:?} does not fit weights {weight_type}[{groups}, {m}, \
             {width}]"
        );
    }
    if !x.device().is_cpu() {
        return composed(x, weight, &counts);
    }
    let is_tracked = x.track_op() || weight.track_op();
    let op = GroupedLinear { counts, sink: weight_sink(), is_tracked };
    edges::apply2(&edges::contiguous(x)?, &weight.contiguous()?, op)
}

/// Returns each group that has rows, and these rows.
fn groups(counts: &[usize]) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
    let starts = counts.iter().scan(0, |end, &count| {
        *end += count;
        Some(*end - count..*end)
    });
    starts.enumerate().filter(|(_, rows)| !rows.is_empty())
}

/// Multiplies group by group with candle's own operations.
pub(super) fn composed(x: &Tensor, weight: &Tensor, counts: &[usize]) -> Result<Tensor> {
    if x.elem_count() * weight.elem_count() == 0 {
        return empty::zeros_of(&[x, weight], (x.dim(0)?, weight.dim(1)?), x.dtype());
    }
    let (rows, weights) = (x.contiguous()?, weight.contiguous()?);
    let of_group = |(group, of): (usize, Range<usize>)| {
        rows.narrow(0, of.start, of.len())?.matmul(&weights.get(group)?.t()?)
    };
    Tensor::cat(&groups(counts).map(of_group).try_collect::<_, Vec<Tensor>, _>()?, 0)
}

struct GroupedLinear {
    counts: Arc<[usize]>,
    /// Takes the gradient of the weight, if there is one.
    sink: Option<Arc<dyn WeightSink>>,
    is_tracked: bool,
}

/// The layout of some rows of a contiguous matrix.
fn rows_of(layout: &Layout, rows: &Range<usize>) -> Layout {
    let width = layout.dims()[1];
    let start = layout.start_offset() + rows.start * width;
    Layout::new(Shape::from((rows.len(), width)), vec![width, 1], start)
}

/// The layout of the weight of a group.
fn weight_of(layout: &Layout, group: usize) -> Layout {
    let &[_, m, k] = layout.dims() else { return layout.clone() };
    Layout::new(Shape::from((m, k)), vec![k, 1], layout.start_offset() + group * m * k)
}

/// A group with rows, its rows, and the memory of its product.
type GroupPart<'a, T> = (usize, Range<usize>, &'a mut [T]);

/// The parts of a result that has a row of `width` elements for each row of the input.
fn parts_of_rows<'a, T>(counts: &[usize], mut out: &'a mut [T], width: usize) -> Vec<GroupPart<'a, T>> {
    let part = |(group, rows): (usize, Range<usize>)| {
        let part = out.split_off_mut(..rows.len() * width).unwrap_or_default();
        (group, rows, part)
    };
    groups(counts).map(part).collect()
}

/// Computes the product of each group: one thread each where that cuts the work evenly, else one after the other. A row costs
/// `row_cost` multiplications.
fn compute_all<T: Real>(
    parts: Vec<GroupPart<'_, T>>,
    row_cost: usize,
    compute: impl Fn(usize, &Range<usize>) -> Result<CpuStorage> + Sync,
) -> Result<()> {
    let costs: Vec<usize> = parts.iter().map(|(_, rows, _)| rows.len()).collect();
    let (threads, all) = (parallel::threads(), costs.iter().sum::<usize>());
    // At most an eighth of the time is lost to threads that wait for the last group.
    let is_even = busiest(&costs, threads) * threads <= all + all / 8;
    let compute_one = |(group, rows, out): GroupPart<'_, T>| {
        out.copy_from_slice(T::cpu_storage_as_slice(&compute(group, &rows)?)?);
        Ok(())
    };
    if threads > 1 && is_even && all * row_cost >= parallel::PRODUCT {
        let made = parallel::map(true, parts.into_iter(), |_, part| parallel::alone(|| compute_one(part)));
        return made.into_iter().collect();
    }
    parts.into_iter().try_for_each(compute_one)
}

fn forward_all<T: Real>(
    counts: &[usize],
    [x, weight]: [&CpuStorage; 2],
    [x_l, weight_l]: [&Layout; 2],
    is_tracked: bool,
) -> Result<CpuStorage> {
    let (m, k) = (weight_l.dims()[1], weight_l.dims()[2]);
    let mut out = vec![T::zero(); x_l.dims()[0] * m];
    compute_all(parts_of_rows(counts, &mut out, m), m * k, |group, rows| {
        let (x_l, weight_l) = (rows_of(x_l, rows), weight_of(weight_l, group));
        Ok(forward((x, &x_l), (weight, &weight_l), is_tracked)?.0)
    })?;
    Ok(T::to_cpu_storage_owned(out))
}

/// The gradient of the rows.
fn gradient_of_rows<T: Real>(counts: &[usize], x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (m, k) = (weight.dim(1)?, weight.dim(2)?);
    let mut out = vec![T::zero(); x.elem_count()];
    let [(grad_s, grad_l), (weight_s, weight_l)] = [grad, weight].map(Tensor::storage_and_layout);
    let (grad_s, weight_s) = (cpu(&grad_s)?, cpu(&weight_s)?);
    compute_all(parts_of_rows(counts, &mut out, k), m * k, |group, rows| {
        product(grad_s, &rows_of(grad_l, rows), weight_s, &weight_of(weight_l, group))
    })?;
    tensor(out, x)
}

/// The gradients of the weights; zeros for groups without rows.
fn gradient_of_weights<T: Real>(
    counts: &[usize],
    x: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
) -> Result<Tensor> {
    let (_, m, k) = weight.dims3()?;
    let mut out = vec![T::zero(); weight.elem_count()];
    let mut of_groups: Vec<_> = out.chunks_mut((m * k).max(1)).map(Some).collect();
    let mut part = |group: usize| of_groups.get_mut(group).and_then(Option::take).unwrap_or_default();
    let parts = groups(counts).map(|(group, rows)| (group, rows, part(group))).collect();
    let [(grad_s, grad_l), (x_s, x_l)] = [grad, x].map(Tensor::storage_and_layout);
    let (grad_s, x_s) = (cpu(&grad_s)?, cpu(&x_s)?);
    compute_all(parts, m * k, |_, rows| {
        product(grad_s, &rows_of(grad_l, rows).transpose(0, 1)?, x_s, &rows_of(x_l, rows))
    })?;
    tensor(out, weight)
}

fn tensor<T: Real>(data: Vec<T>, like: &Tensor) -> Result<Tensor> {
    to_dtype(&Tensor::from_vec(data, like.shape(), like.device())?, like.dtype())
}

/// Calls a function for the compute type of an operand.
macro_rules! in_compute_type {
    ($x:expr, $f:ident($($arg:expr),*)) => {
        if $x.dtype() == DType::F64 { $f::<f64>($($arg),*) } else { $f::<f32>($($arg),*) }
    };
}

impl CustomOp2 for GroupedLinear {
    fn name(&self) -> &'static str {
        "grouped_linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_l: &Layout,
        w: &CpuStorage,
        w_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let shape = Shape::from((x_l.dims()[0], w_l.dims()[1]));
        let out = in_compute_type!(x, forward_all(&self.counts, [x, w], [x_l, w_l], self.is_tracked))?;
        Ok((narrow(out, &shape, x.dtype())?, shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.detach().contiguous()?;
        let dx = x
            .track_op()
            .then(|| in_compute_type!(x, gradient_of_rows(&self.counts, x, w, &grad)))
            .transpose()?;
        if !w.track_op() {
            return Ok((dx, None));
        }
        let (x, weight, counts) = (x.detach(), w.detach(), self.counts.clone());
        let later: DeferredGradient =
            Box::new(move || in_compute_type!(x, gradient_of_weights(&counts, &x, &weight, &grad)));
        let dw = match &self.sink {
            Some(sink) => sink.take(w, later)?,
            None => edges::keep(w, later()?)?,
        };
        Ok((dx, dw))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{composed, grouped_linear};
    use crate::waves::waves;
    use candle_core::{DType, Result, Tensor, Var};

    type Map = fn(&Tensor, &Tensor, &[usize]) -> Result<Tensor>;

    fn plain(x: &Tensor, weight: &Tensor, counts: &[usize]) -> Result<Tensor> {
        let group = |row: usize| (0..counts.len()).find(|&g| row < counts[..=g].iter().sum()).unwrap();
        let groups: Vec<u32> = (0..x.dim(0)?).map(|row| group(row) as u32).collect();
        let weights = weight.index_select(&Tensor::new(groups, x.device())?, 0)?;
        weights.matmul(&x.unsqueeze(2)?)?.squeeze(2)
    }

    fn all(map: Map, counts: &[usize], dtype: DType) -> Vec<Tensor> {
        let (x, weight) = (waves(&[counts.iter().sum(), 5], dtype), waves(&[counts.len(), 3, 5], dtype));
        let y = map(&x, &weight, counts).unwrap();
        let up = waves(y.dims(), dtype);
        let grads = (&y * &*up).unwrap().sum_all().unwrap().backward().unwrap();
        let grad = |var: &Var| grads.get(var).unwrap_or_else(|| panic!("no gradient for {counts:?}")).clone();
        let made = [y, grad(&x), grad(&weight)];
        made.into_iter().map(|t| t.to_dtype(DType::F64).unwrap()).collect()
    }

    #[test]
    fn each_group_has_its_own_product_and_gradients() {
        let fused: Map = |x, weight, counts| grouped_linear(x, weight, counts);
        for counts in [&[2, 0, 9, 1, 4, 0][..], &[7], &[0, 3], &[20, 20]] {
            for (map, dtype, most) in [
                (fused, DType::F64, 1e-13),
                (composed, DType::F64, 1e-13),
                (fused, DType::F32, 1e-5),
                (fused, DType::BF16, 0.05),
            ] {
                // Sixteen-bit operands are compared in f64 with the same rounded numbers.
                let want = all(plain, counts, if dtype == DType::BF16 { DType::F32 } else { dtype });
                for (got, want) in all(map, counts, dtype).iter().zip(&want) {
                    assert_eq!(got.dims(), want.dims());
                    let off =
                        (got - want).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap();
                    let size = want.abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap().max(1.0);
                    assert!(off <= most * size, "{counts:?} {dtype:?}: {off:e}");
                }
            }
        }
    }

    #[test]
    fn groups_without_rows_get_gradients_of_zeros() {
        let fused: Map = |x, weight, counts| grouped_linear(x, weight, counts);
        for map in [fused, composed] {
            for groups in [0, 3] {
                let (x, weight) = (waves(&[0, 5], DType::F32), waves(&[groups, 4, 5], DType::F32));
                let y = map(&x, &weight, &vec![0; groups]).unwrap();
                assert!(y.dims() == [0, 4] && y.track_op());
                let grads = y.sum_all().unwrap().backward().unwrap();
                let grad = grads.get(&weight).unwrap();
                assert_eq!(
                    (grad.dims(), grad.sum_all().unwrap().to_scalar::<f32>().unwrap()),
                    (weight.dims(), 0.0)
                );
                assert_eq!(grads.get(&x).unwrap().dims(), [0, 5]);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (x, weight) = (waves(&[3, 5], DType::F32), waves(&[2, 4, 5], DType::F32));
        for counts in [&[1, 1][..], &[3], &[usize::MAX, 4]] {
            let text = grouped_linear(&x, &weight, counts).unwrap_err().to_string();
            assert!(text.contains("f32[3, 5]") && text.contains("f32[2, 4, 5]"), "{text}");
        }
        assert!(grouped_linear(&x, &waves(&[1, 4, 6], DType::F32), [3]).is_err());
        assert!(grouped_linear(&x, &waves(&[1, 4, 5], DType::F64), [3]).is_err());
    }

    #[test]
    fn threads_that_take_whole_groups_change_no_bits() {
        // Groups are even, so a thread takes a whole one; one group has almost all rows; some groups have none.
        for counts in [vec![64; 8], vec![1, 500, 2, 9], vec![0, 200, 0, 210, 205, 0]] {
            let x = waves(&[counts.iter().sum(), 128], DType::F32);
            let weight = waves(&[counts.len(), 96, 128], DType::F32);
            let run = |map: Map| {
                let y = map(&x, &weight, &counts).unwrap();
                let grads = (&y * &y).unwrap().sum_all().unwrap().backward().unwrap();
                let list = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                (list(&y), list(grads.get(&weight).unwrap()), list(grads.get(&x).unwrap()))
            };
            let alone = run(|x, weight, counts| crate::parallel::alone(|| grouped_linear(x, weight, counts)));
            let made = run(|x, weight, counts| grouped_linear(x, weight, counts));
            assert!(made.0 == alone.0, "{counts:?}");
            let off = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            let want = run(composed);
            for (got, want) in [(&made.0, &want.0), (&made.1, &want.1), (&made.2, &want.2)] {
                assert!(off(got, want) <= 1e-4 * want.iter().fold(1f32, |most, x| most.max(x.abs())));
            }
        }
    }
}
