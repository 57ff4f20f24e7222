//! The functions as graph nodes on the host.
use super::formulas::each;
use super::{Function, off_host};
use crate::convert::convert;
use crate::fused;
use crate::real::Real;
use crate::rows::{new_by_blocks, new_pair_by_blocks};
use crate::{TensorReader, elements};
use candle_core::{CpuStorage, CustomOp1, DType, Error, Layout, Result, Shape, Tensor};
use candle_dist_base::{Fresh, edges};

/// The exact GELU, `x · Φ(x)` with `Φ` the standard normal distribution function.
///
/// `x` has any shape; the result has the same. In f32 `Φ` is accurate to 1.2e-7, and to 5 ulp in the far tail where
/// `1 + erf` cancels. Fails on dtypes other than floats. Source: Hendrycks and Gimpel,
/// <https://arxiv.org/abs/1606.08415>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// let x = candle_core::Tensor::new(&[-1f32, 0., 1.], &candle_core::Device::Cpu)?;
/// let y = candle_dist_kernels::gelu_erf(&x)?.to_vec1::<f32>()?;
/// assert!((y[0] + 0.158655).abs() < 1e-6 && y[1] == 0.0 && (y[2] - 0.841345).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    Function::GeluErf.apply(x)
}

impl Function {
    /// Returns the function of each element.
    ///
    /// # Errors
    /// If the elements are no floats.
    pub fn apply(self, x: &Tensor) -> Result<Tensor> {
        let dtype = match x.dtype() {
            DType::F64 => DType::F64,
            dtype if dtype.is_float() => DType::F32,
            dtype => return Err(Error::UnsupportedDTypeForOp(dtype, self.name()).bt()),
        };
        if fused::computes(&[x]) {
            return fused::function::function(self.name(), self.in_text(), x);
        }
        if !x.device().is_cpu() {
            return off_host::apply(self, x, dtype);
        }
        let input = convert(x, dtype)?.contiguous()?;
        let y = match (edges::has_ticket(&[&input]), dtype) {
            (false, _) => input.apply_op1(self)?,
            (true, DType::F64) => self.with_slope::<f64>(&input)?,
            (true, _) => self.with_slope::<f32>(&input)?,
        };
        convert(&y, x.dtype())
    }

    /// Computes the slope together with the value, at the cost of one of them. The node keeps it in place of the input.
    fn with_slope<T: Real>(self, x: &Tensor) -> Result<Tensor> {
        let reading = TensorReader::new(x);
        let xs = reading.elements::<T>()?;
        let [out, slopes] = new_pair_by_blocks(
            xs.len(),
            #[inline(always)]
            |first, out: &mut [T], slopes: &mut [T]| {
                let slopes = slopes.iter_mut();
                each(
                    self,
                    &xs[first..],
                    out.iter_mut().zip(slopes),
                    #[inline(always)]
                    |(out, to), (value, slope)| {
                        *out = value;
                        *to = slope;
                    },
                );
            },
        );
        drop(reading);
        let slopes = Tensor::from_vec(slopes, x.shape(), x.device())?;
        let made = Fresh::host(T::to_cpu_storage_owned(out), x.shape());
        edges::record(self.name(), &[x], made, move |grad| {
            let (slopes, grad) = (TensorReader::new(&slopes), TensorReader::new(grad));
            let (slopes, grads) = (slopes.elements::<T>()?, grad.elements::<T>()?);
            let (out, _) = new_by_blocks(
                grads.len(),
                1,
                1,
                #[inline(always)]
                |first, out| {
                    let factors = grads[first..].iter().zip(&slopes[first..]);
                    out.iter_mut().zip(factors).for_each(|(out, (&grad, &slope))| *out = grad * slope);
                },
            );
            Ok([Some(grad.like(out)?), None, None])
        })
    }

    fn values<T: Real>(self, x: &[T]) -> CpuStorage {
        let (out, _) = new_by_blocks(
            x.len(),
            1,
            1,
            #[inline(always)]
            |first, out: &mut [T]| {
                each(
                    self,
                    &x[first..],
                    out.iter_mut(),
                    #[inline(always)]
                    |out, (value, _)| *out = value,
                );
            },
        );
        T::to_cpu_storage_owned(out)
    }

    fn grads<T: Real>(self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let (x, grad) = (TensorReader::new(x), TensorReader::new(grad));
        let (xs, gs) = (x.elements::<T>()?, grad.elements::<T>()?);
        let (out, _) = new_by_blocks(
            xs.len(),
            1,
            1,
            #[inline(always)]
            |first, out: &mut [T]| {
                each(
                    self,
                    &xs[first..],
                    out.iter_mut().zip(&gs[first..]),
                    #[inline(always)]
                    |(out, &grad), (_, slope)| *out = grad * slope,
                );
            },
        );
        x.like(out)
    }
}

/// The op where candle walks its own graph.
impl CustomOp1 for Function {
    fn name(&self) -> &'static str {
        Self::name(*self)
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        let values = match s {
            CpuStorage::F64(_) => self.values::<f64>(elements(s, l)?),
            _ => self.values::<f32>(elements(s, l)?),
        };
        Ok((values, l.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        match x.dtype() {
            DType::F64 => self.grads::<f64>(x, &grad),
            _ => self.grads::<f32>(x, &grad),
        }
        .map(Some)
    }
}
