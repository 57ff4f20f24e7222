use candle_core::{
    CpuStorage, D, DType, Error, Layout, Result, Shape, Storage, Tensor, backend::BackendStorage, bail, op,
};
use candle_dist_base::{Fresh, edges};
use half::bf16;

use super::rms_norm::rms_norm;
use super::{check_dtype, check_vector, element::Element, fused, linear::column_sums, rows::by_blocks};

/// The elementwise sum of two tensors, with broadcasting.
///
/// The result and the errors are those of [`Tensor::broadcast_add`]. The backward pass is cheaper: candle adds the
/// gradient to zeros of the size of each input, while this node passes the gradient on without a copy.
///
/// ```
/// use candle_core::{Device::Cpu, Result, Tensor, Var};
/// let (x, bias) = (Var::new(&[[1f32, 2.], [3., 4.]], &Cpu)?, Var::new(&[10f32, 20.], &Cpu)?);
/// let y = candle_dist_kernels::add(&x, &bias)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[11., 22.], [13., 24.]]);
/// let grads = y.sum_all()?.backward()?;
/// assert_eq!(grads.get(&bias).unwrap().to_vec1::<f32>()?, [2., 2.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let is_supported = match a.dtype() {
        DType::F32 | DType::F64 => true,
        // candle sums the gradients of rows in 16 bits.
        DType::F16 | DType::BF16 => a.shape() == b.shape(),
        _ => false,
    };
    if !is_supported
        || a.dtype() != b.dtype()
        || !edges::has_ticket(&[a, b])
        || !a.device().same_device(b.device())
    {
        return a.broadcast_add(b);
    }
    if !a.device().is_cpu() && (a.shape() != b.shape() || a.elem_count() == 0) {
        return a.broadcast_add(b);
    }
    match (repeats(a.shape(), b.shape()), repeats(b.shape(), a.shape())) {
        (true, _) => add_rows(a, b, [0, 1]),
        (_, true) => add_rows(b, a, [1, 0]),
        _ => a.broadcast_add(b),
    }
}

/// The sum of two tensors, and the [RMS norm](crate::rms_norm()) of the sum: a residual connection before a norm.
///
/// `x` and `more` have one shape `[.., k]` and one dtype; both results have them too. Fails as `rms_norm` does.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let (x, more) = (Tensor::new(&[[1f64, -3.]], &Cpu)?, Tensor::new(&[[1f64, 1.]], &Cpu)?);
/// let [sum, normed] = candle_dist_kernels::add_rms_norm(&x, &more, &Tensor::new(&[1f64, 10.], &Cpu)?, 0.0)?;
/// assert_eq!((sum.to_vec2::<f64>()?, normed.to_vec2::<f64>()?), (vec![vec![2., -2.]], vec![vec![1., -10.]]));
/// # Ok(())
/// # }
/// ```
pub fn add_rms_norm(x: &Tensor, more: &Tensor, weight: &Tensor, eps: f64) -> Result<[Tensor; 2]> {
    check_vector("add_rms_norm", x, "weight", weight, x.dim(D::Minus1)?)?;
    check_dtype("add_rms_norm", x, more)?;
    if x.dims() != more.dims() {
        let (lhs, rhs) = (x.shape().clone(), more.shape().clone());
        return Err(Error::ShapeMismatchBinaryOp { lhs, rhs, op: "add_rms_norm" }.bt());
    }
    if fused::computes(&[x, more, weight]) {
        return fused::norm::norm_of_sum(x, more, weight, eps);
    }
    let sum = add(x, more)?;
    let normed = rms_norm(&sum, weight, eps)?;
    Ok([sum, normed])
}

/// Returns whether the last dims of `whole` are those of `part`, so that `part` is repeated as a row.
fn repeats(whole: &Shape, part: &Shape) -> bool {
    whole.dims().ends_with(part.dims())
}

/// Returns the sum of `a` and the repeated row `b`, which have these places among the operands.
fn add_rows(a: &Tensor, b: &Tensor, [of_a, of_b]: [usize; 2]) -> Result<Tensor> {
    let storage = {
        let ((a_s, a_l), (b_s, b_l)) = (a.storage_and_layout(), b.storage_and_layout());
        match (&*a_s, &*b_s) {
            (Storage::Cpu(a_s), Storage::Cpu(b_s)) => {
                Storage::Cpu(sum(a_s, a_l, b_s, &b_l.broadcast_as(a.shape())?)?)
            }
            (Storage::Cuda(a_s), Storage::Cuda(b_s)) => {
                Storage::Cuda(a_s.binary_impl::<op::Add>(b_s, a_l, b_l)?)
            }
            _ => bail!("add: expected tensors on the CPU or on one CUDA device"),
        }
    };
    let made = Fresh { storage, shape: a.shape().clone() };
    // The order of the operands decides the order of the backward pass, which must be the same on ranks whose shards are
    // empty, and for which nothing is added.
    let mut inputs = [a; 2];
    inputs[of_b] = b;
    let row = b.shape().clone();
    edges::record("add", &inputs, made, move |grad| {
        let of_row = match grad.shape() == &row {
            true => grad.clone(),
            false => match grad.dtype() {
                DType::F64 => column_sums::<f64>(grad, &row)?,
                _ => column_sums::<f32>(grad, &row)?,
            },
        };
        let mut grads = edges::Grads::default();
        grads[of_a] = Some(grad.clone());
        grads[of_b] = Some(of_row);
        Ok(grads)
    })
}

fn sum(a: &CpuStorage, a_l: &Layout, b: &CpuStorage, b_l: &Layout) -> Result<CpuStorage> {
    match (a, b, a_l.contiguous_offsets(), b_l.contiguous_offsets()) {
        // candle's sum of bf16 calls a function for each 16 elements.
        (CpuStorage::BF16(a), CpuStorage::BF16(b), Some((a_from, a_to)), Some((b_from, b_to))) => {
            Ok(CpuStorage::BF16(sum_of_bf16(&a[a_from..a_to], &b[b_from..b_to])))
        }
        _ => a.binary_impl::<op::Add>(b, a_l, b_l),
    }
}

fn sum_of_bf16(a: &[bf16], b: &[bf16]) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; a.len()];
    by_blocks(
        &mut out,
        1,
        1,
        #[inline(always)]
        |first, out| {
            let operands = a[first..].iter().zip(&b[first..]);
            out.iter_mut().zip(operands).for_each(|(out, (&a, &b))| *out = bf16::store(a.load() + b.load()));
        },
    );
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::add;
    use crate::waves::waves;
    use candle_core::{DType, Tensor};

    #[test]
    fn sums_and_gradients_are_those_of_candle() {
        let shapes: [[&[usize]; 2]; 6] = [
            [&[2, 3], &[2, 3]],
            [&[4, 2, 3], &[3]],
            [&[3], &[4, 2, 3]],
            [&[2, 1], &[1, 3]],
            [&[2, 3], &[]],
            [&[5], &[1]],
        ];
        for ([of_a, of_b], dtype) in itertools::iproduct!(shapes, [DType::F32, DType::F64, DType::BF16]) {
            let (a, b) = (waves(of_a, dtype), waves(of_b, dtype));
            let run = |sum: &dyn Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>| {
                // Each operand is a variable once and an intermediate result once.
                let y = sum(&a, &b).unwrap();
                let z = sum(&y, &sum(&b, &y).unwrap()).unwrap();
                let grads = z.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                [z, grads.get(&a).unwrap().clone(), grads.get(&b).unwrap().clone()]
            };
            let (got, want) = (run(&add), run(&|a, b| a.broadcast_add(b)));
            for (got, want) in got.iter().zip(&want) {
                assert_eq!(
                    (got.dims(), got.dtype()),
                    (want.dims(), want.dtype()),
                    "{of_a:?} + {of_b:?} {dtype:?}"
                );
                let [got, want] = [got, want].map(|x| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap());
                let (got, want) = (got.to_vec1::<f64>().unwrap(), want.to_vec1::<f64>().unwrap());
                for (got, want) in got.iter().zip(&want) {
                    assert!(
                        (got - want).abs() <= 1e-5 * want.abs(),
                        "{of_a:?} + {of_b:?} {dtype:?}: {got} for {want}"
                    );
                }
            }
        }
    }

    #[test]
    fn operands_with_strides_and_one_operand_twice() {
        let x = waves(&[3, 2], DType::F64);
        let y = add(&x, &x).unwrap();
        let turned = add(&y.t().unwrap(), &x.t().unwrap()).unwrap();
        let want = (x.t().unwrap() * 3.0).unwrap();
        let off =
            (turned.detach() - want).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap();
        assert!(off < 1e-12, "{off}");
        let grads = turned.sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(&x).unwrap().to_vec2::<f64>().unwrap(), [[3.0; 2]; 3]);
        let (none, row) = (waves(&[0, 3], DType::F64), waves(&[3], DType::F64));
        let grads = add(&none, &row).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(&row).unwrap().to_vec1::<f64>().unwrap(), [0.0; 3]); // candle gives no gradient
        assert!(add(&x, &row).is_err());
        assert!(add(&x, &waves(&[3, 2], DType::F32)).is_err());
    }
}
