use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, CustomOp3, D, DType, Device, Layout, MetalStorage, Result, Shape,
    Storage, Tensor,
    backend::{BackendDevice, BackendStorage},
    bail,
    op::BackpropOp,
};
use candle_dist_base::{edges, empty};

use super::{
    DeferredGradient, TensorReader, WeightSink, check_vector, compute_dtype,
    convert::{converted, to_dtype},
    cpu, elements,
    few_rows::{self, has_rows, is_few},
    product::{product, product_with_weight, rounded_product},
    real::Real,
    rows::{self, add_assign, by_blocks},
    weight_sink,
};

/// The linear map `x · weightᵀ + bias`.
///
/// `x` is `[.., k]`, `weight` is `[n, k]`, `bias` is `[n]`, all of one dtype; the result is `[.., n]`. Transposed
/// weights and inputs narrowed in their last dim are read in place. Fails if shapes, dtypes or devices do not agree.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let (x, weight) = (Tensor::new(&[[1f32, 2.]], &Cpu)?, Tensor::new(&[[1f32, 1.], [3., 0.], [0., 5.]], &Cpu)?);
/// let y = candle_dist_kernels::linear(&x, &weight, Some(&Tensor::new(&[0f32, 0., 1.], &Cpu)?))?;
/// assert_eq!(y.to_vec2::<f32>()?, [[3., 3., 11.]]);
/// # Ok(())
/// # }
/// ```
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    compute_dtype("linear", x)?;
    let [n, k] = *weight.dims() else {
        bail!("linear: expected a weight of shape [n, k], got {:?}", weight.shape());
    };
    if x.dim(D::Minus1)? != k || x.dtype() != weight.dtype() {
        let (x_type, weight_type) = (x.dtype().as_str(), weight.dtype().as_str());
        bail!("linear: {x_type}{:?} does not fit a weight {weight_type}[{n}, {k}]", x.dims());
    }
    if let Some(bias) = bias {
        check_vector("linear", x, "bias", bias, n)?;
    }
    if !x.device().is_cpu() {
        return composed(x, weight, bias);
    }
    let input = if as_rows(x.layout()).is_some() { x.clone() } else { edges::contiguous(x)? };
    let op = LinearOp { sink: weight_sink(), is_tracked: x.track_op() || weight.track_op() };
    match bias {
        Some(bias) => edges::apply3(&input, weight, &bias.contiguous()?, op),
        None => edges::apply2(&input, weight, op),
    }
}

pub(super) fn composed(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (k, shape) = (weight.dim(1)?, out_shape(x.layout(), weight.layout()));
    let sink = weight_sink().filter(|_| weight.track_op());
    let is_node =
        sink.is_some() || edges::has_ticket(&[x, weight]) && x.elem_count() * weight.elem_count() > 0;
    if !is_node && x.elem_count() * weight.elem_count() == 0 {
        let nothing = empty::zeros_of(&[x, weight], shape.clone(), x.dtype())?;
        return match bias {
            Some(bias) if !shape.contains(&0) => nothing.broadcast_add(bias),
            Some(bias) => empty::zeros_of(&[x, weight, bias], shape, x.dtype()),
            None => Ok(nothing),
        };
    }
    let rows = edges::reshape(x, (rows_of(x), k))?;
    let y = match is_node {
        true => edges::apply2(&dense(&rows)?, &dense(weight)?, ProductOp(sink))?,
        false => dense(&rows)?.matmul(&dense(weight)?.t()?)?,
    };
    let y = edges::reshape(&y, &shape[..])?;
    match bias {
        Some(bias) if shape.contains(&0) => empty::zeros_of(&[&y, bias], shape, x.dtype()),
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// Returns a matrix that cuBLAS takes: contiguous, or the transpose of one that is.
fn dense(x: &Tensor) -> Result<Tensor> {
    if x.layout().transpose(0, 1)?.is_contiguous() { Ok(x.clone()) } else { x.contiguous() }
}

/// The product of `x [rows, k]` and the transpose of `weight [n, k]` on any device, with the sink for the gradient of
/// the weight if there is one.
struct ProductOp(Option<Arc<dyn WeightSink>>);

fn transposed_product<S>(x: &S, x_l: &Layout, w: &S, w_l: &Layout) -> Result<(S, Shape)>
where
    S: BackendStorage,
    S::Device: BackendDevice<Storage = S>,
{
    let ((rows, k), (n, _)) = (x_l.shape().dims2()?, w_l.shape().dims2()?);
    let shape = Shape::from((rows, n));
    let y = match rows * n * k {
        0 => w.device().zeros_impl(&shape, w.dtype())?,
        _ => x.matmul(w, (1, rows, n, k), x_l, &w_l.transpose(0, 1)?)?,
    };
    Ok((y, shape))
}

impl CustomOp2 for ProductOp {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_l: &Layout,
        w: &CpuStorage,
        w_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        transposed_product(x, x_l, w, w_l)
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_l: &Layout,
        w: &CudaStorage,
        w_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        transposed_product(x, x_l, w, w_l)
    }

    fn metal_fwd(
        &self,
        x: &MetalStorage,
        x_l: &Layout,
        w: &MetalStorage,
        w_l: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        transposed_product(x, x_l, w, w_l)
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.detach().contiguous()?;
        let dx = x.track_op().then(|| match grad.elem_count() {
            0 => x.zeros_like(),
            _ => grad.matmul(&dense(&w.detach())?),
        });
        let dx = dx.transpose()?.map(|dx| edges::keep(x, dx)).transpose()?.flatten();
        let of_weight = || deferred_product(w, x, &grad);
        let dw = match &self.0 {
            Some(sink) => sink.take(w, of_weight()?)?,
            None if w.track_op() => edges::keep(w, of_weight()?()?)?,
            None => None,
        };
        Ok((dx, dw))
    }
}

/// The linear map.
struct LinearOp {
    /// Takes the gradient of the weight, if there is one.
    sink: Option<Arc<dyn WeightSink>>,
    is_tracked: bool,
}

/// Returns the number of rows of a tensor `[.., last]`.
fn rows_of(x: &Tensor) -> usize {
    x.dims()[..x.rank() - 1].iter().product()
}

/// Returns the layout of a tensor of any rank as `[rows, last]`; `None` if that needs a copy.
fn as_rows(layout: &Layout) -> Option<Layout> {
    let (&last, lead) = layout.dims().split_last()?;
    let (&last_stride, lead_strides) = layout.stride().split_last()?;
    let mut rows = 1;
    let mut row_stride = None;
    for (&dim, &stride) in lead.iter().zip(lead_strides).rev() {
        if dim != 1 && *row_stride.get_or_insert(stride) * rows != stride {
            return None;
        }
        rows *= dim;
    }
    let stride = vec![row_stride.unwrap_or(last), last_stride];
    Some(Layout::new(Shape::from((rows, last)), stride, layout.start_offset()))
}

fn out_shape(x: &Layout, weight: &Layout) -> Vec<usize> {
    [&x.dims()[..x.dims().len() - 1], &weight.dims()[..1]].concat()
}

/// Returns the operand itself, or an f32 copy of a 16-bit operand.
fn wide<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<(Cow<'a, CpuStorage>, Layout)> {
    Ok(match storage.dtype() {
        DType::F16 | DType::BF16 => {
            (Cow::Owned(converted(storage, layout, DType::F32)?), Layout::contiguous(layout.shape()))
        }
        _ => (Cow::Borrowed(storage), layout.clone()),
    })
}

/// Converts a dense result to the dtype of the operands.
pub(super) fn narrow(storage: CpuStorage, shape: &Shape, dtype: DType) -> Result<CpuStorage> {
    if storage.dtype() == dtype {
        Ok(storage)
    } else {
        converted(&storage, &Layout::contiguous(shape), dtype)
    }
}

/// Computes the map without a bias, in the compute dtype.
pub(super) fn forward(
    (x, x_l): (&CpuStorage, &Layout),
    (weight, weight_l): (&CpuStorage, &Layout),
    is_tracked: bool,
) -> Result<(CpuStorage, Shape)> {
    if x.dtype() != weight.dtype() {
        let (x, weight) = (x.dtype().as_str(), weight.dtype().as_str());
        bail!("linear: expected one dtype, got an input of dtype {x} and a weight of dtype {weight}");
    }
    let Some(rows) = as_rows(x_l) else { bail!("linear: the rows of the input are not evenly spaced") };
    let shape = Shape::from(out_shape(x_l, weight_l));
    let (m, k) = rows.shape().dims2()?;
    let is_dense = rows.is_contiguous() || matches!(x.dtype(), DType::F16 | DType::BF16);
    if !is_few(m, k, is_tracked) || !has_rows(weight_l) || !is_dense {
        // The bits of a step's numbers must not depend on the number of rows.
        let made = match is_tracked {
            true => product(x, &rows, weight, &weight_l.transpose(0, 1)?)?,
            false => product_with_weight(x, &rows, weight, weight_l)?,
        };
        return Ok((made, shape));
    }
    let (x, rows) = wide(x, &rows)?;
    let out = match (&*x, weight) {
        (CpuStorage::F64(_), CpuStorage::F64(weight)) => {
            CpuStorage::F64(few_rows::product(m, elements(&x, &rows)?, weight, weight_l)?)
        }
        (CpuStorage::F32(_), weight) => {
            CpuStorage::F32(few_rows::widening(m, elements(&x, &rows)?, weight, weight_l)?)
        }
        (x, _) => bail!("linear: unexpected dtypes {:?} and {:?}", x.dtype(), weight.dtype()),
    };
    Ok((out, shape))
}

fn add_bias<T: Real>(out: &mut [T], bias: &[T]) {
    by_blocks(
        out,
        bias.len(),
        bias.len(),
        #[inline(always)]
        |_, out| {
            for out in out.chunks_exact_mut(bias.len()) {
                add_assign(out, bias);
            }
        },
    );
}

impl LinearOp {
    /// Returns the gradients of `x` and `weight`, each only if it is required and not left to the sink.
    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        match self.sink.as_ref().filter(|_| weight.track_op()) {
            None => backward(x, weight, grad, weight.track_op()),
            Some(sink) => {
                let (dx, _) = backward(x, weight, grad, false)?;
                Ok((dx, sink.take(weight, deferred_product(weight, x, grad)?)?))
            }
        }
    }
}

/// Returns the deferred gradient `[n, k]` of a weight, from the input `[.., k]` and the gradient `[.., n]` of the
/// output.
fn deferred_product(weight: &Tensor, x: &Tensor, grad: &Tensor) -> Result<DeferredGradient> {
    let (n, k) = weight.dims2()?;
    let rows = rows_of(x);
    let (x, grad, weight) =
        (x.detach().reshape((rows, k))?, grad.detach().reshape((rows, n))?, weight.detach());
    Ok(Box::new(move || match x.elem_count() * grad.elem_count() {
        0 => weight.zeros_like(),
        _ if x.device().is_cpu() => gradient_of_weight(&weight, &x, &grad),
        // cuBLAS adds up 16-bit numbers in f32.
        _ if x.device().is_cuda() => grad.t()?.matmul(&x),
        _ => {
            let dtype = compute_dtype("linear", &x)?;
            grad.to_dtype(dtype)?.t()?.matmul(&x.to_dtype(dtype)?)?.to_dtype(weight.dtype())
        }
    }))
}

/// Returns the gradient `[n, k]` of a weight on the CPU, from the input `[.., k]` and the gradient `[.., n]` of the output.
fn gradient_of_weight(weight: &Tensor, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let [x_s, grad_s] = [x, grad].map(|t| t.storage_and_layout().0);
    let (x_l, grad_l) = (evenly_spaced(x)?, evenly_spaced(grad)?);
    let made = rounded_product(cpu(&grad_s)?, &grad_l.transpose(0, 1)?, cpu(&x_s)?, &x_l)?;
    Ok(Tensor::from_storage(Storage::Cpu(made), weight.shape(), BackpropOp::none(), false))
}

/// Returns the layout of a tensor as `[rows, last]`.
fn evenly_spaced(x: &Tensor) -> Result<Layout> {
    match as_rows(x.layout()) {
        Some(rows) => Ok(rows),
        None => bail!("linear: the rows of an operand are not evenly spaced"),
    }
}

/// Returns the gradients of `x` and, if it is required, of `weight`.
fn backward(
    x: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
    of_weight: bool,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let of_x = || {
        let [weight_s, grad_s] = [weight, grad].map(|t| t.storage_and_layout().0);
        let made = rounded_product(cpu(&grad_s)?, &evenly_spaced(grad)?, cpu(&weight_s)?, weight.layout())?;
        Ok::<_, candle_core::Error>(Tensor::from_storage(
            Storage::Cpu(made),
            x.shape(),
            BackpropOp::none(),
            false,
        ))
    };
    let dx = if x.track_op() { edges::keep(x, of_x()?)? } else { None };
    let dw = if of_weight { edges::keep(weight, gradient_of_weight(weight, x, grad)?)? } else { None };
    Ok((dx, dw))
}

/// Returns the gradient of a row of this shape that was added to each row: the sum of the rows of `grad`.
pub(super) fn column_sums<T: Real>(grad: &Tensor, row: &Shape) -> Result<Tensor> {
    let (grad, n) = (TensorReader::new(grad), row.elem_count());
    let gs = grad.elements::<T>()?;
    let mut sums = vec![T::zero(); n];
    if n == 1 {
        // In lanes: one sum over millions of elements would lose them in f32.
        sums[0] = rows::sum(gs, |x| x);
    } else if n > 0 {
        for row in gs.chunks_exact(n) {
            add_assign(&mut sums, row);
        }
    }
    Tensor::from_vec(sums, row, &Device::Cpu)
}

impl CustomOp2 for LinearOp {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_l: &Layout,
        w: &CpuStorage,
        w_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (out, shape) = forward((x, x_l), (w, w_l), self.is_tracked)?;
        Ok((narrow(out, &shape, x.dtype())?, shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.backward(x, w, &grad.contiguous()?)
    }
}

impl CustomOp3 for LinearOp {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_l: &Layout,
        w: &CpuStorage,
        w_l: &Layout,
        bias: &CpuStorage,
        bias_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (mut out, shape) = forward((x, x_l), (w, w_l), self.is_tracked)?;
        let (bias, bias_l) = wide(bias, bias_l)?;
        match &mut out {
            CpuStorage::F64(out) => add_bias(out, elements(&bias, &bias_l)?),
            CpuStorage::F32(out) => add_bias(out, elements(&bias, &bias_l)?),
            other => bail!("linear: unexpected dtype {:?}", other.dtype()),
        }
        Ok((narrow(out, &shape, x.dtype())?, shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let (dx, dw) = self.backward(x, w, &grad)?;
        let db = match grad.dtype() {
            DType::F64 => column_sums::<f64>(&grad, bias.shape())?,
            _ => column_sums::<f32>(&to_dtype(&grad, DType::F32)?, bias.shape())?.to_dtype(bias.dtype())?,
        };
        Ok((dx, dw, edges::keep(bias, db)?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{composed, linear};
    use crate::{DeferredGradient, WeightSink, waves::waves, with_weight_sink};
    use candle_core::{DType, Result, Tensor};
    use std::sync::{Arc, Mutex};

    /// Keeps all gradients of weights for later.
    #[derive(Default)]
    struct Later(Mutex<Vec<DeferredGradient>>);

    impl WeightSink for Later {
        fn take(&self, _: &Tensor, gradient: DeferredGradient) -> Result<Option<Tensor>> {
            self.0.lock().unwrap().push(gradient);
            Ok(None)
        }
    }

    type Map = fn(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>;

    #[test]
    fn weights_wait_in_16_bits_and_where_the_map_is_composed() {
        for (map, dtype) in
            [(linear as Map, DType::BF16), (linear, DType::F16), (linear, DType::F32), (composed, DType::F32)]
        {
            for rows in [0, 1, 5, 40] {
                let (x, w, b) = (waves(&[rows, 6], dtype), waves(&[3, 6], dtype), waves(&[3], dtype));
                let loss = || map(&x, &w, Some(&b)).unwrap().sqr().unwrap().sum_all().unwrap();
                let want = loss().backward().unwrap();
                let later = Arc::new(Later::default());
                let got = with_weight_sink(later.clone(), loss).backward().unwrap();
                assert!(got.get(&w).is_none(), "{dtype:?} with {rows} rows");
                let waiting = std::mem::take(&mut *later.0.lock().unwrap());
                assert_eq!(waiting.len(), 1, "{dtype:?} with {rows} rows");
                for late in waiting {
                    let (late, want) = (late().unwrap(), want.get(&w).unwrap());
                    assert_eq!((late.dtype(), late.dims()), (dtype, want.dims()));
                    let off =
                        (late.to_dtype(DType::F32).unwrap() - want.to_dtype(DType::F32).unwrap()).unwrap();
                    let off = off.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
                    let size = want.to_dtype(DType::F32).unwrap().abs().unwrap().max_all().unwrap();
                    assert!(
                        off <= 0.01 * size.to_scalar::<f32>().unwrap(),
                        "{dtype:?} with {rows} rows: off by {off}"
                    );
                }
                for var in [&x, &b] {
                    let (got, want) = (got.get(var).unwrap(), want.get(var).unwrap());
                    assert!(
                        candle_dist_base::bits::same_bits(got, want).unwrap(),
                        "{dtype:?} with {rows} rows"
                    );
                }
            }
        }
    }
}
