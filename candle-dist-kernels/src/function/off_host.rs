//! The same functions off the host, by candle's operations.
use super::Function;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, MetalStorage, Result, Shape, Tensor};
use candle_dist_base::{Fresh, Ready};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// From here on all of these functions have their limits.
const FAR: f64 = 1000.0;

/// Returns the function of each element; `dtype` is that of the computation.
pub(super) fn apply(function: Function, x: &Tensor, dtype: DType) -> Result<Tensor> {
    let input = x.detach().to_dtype(dtype)?;
    let value = with_nan_of(&input, &value(function, &input)?)?.to_dtype(x.dtype())?;
    if !x.track_op() {
        return Ok(value);
    }
    x.apply_op1(FunctionNode { function, value: Ready::new(Fresh::copy_of(&value)?), dtype })
}

/// Returns `made`, and NaN where `x` is NaN: on a GPU the maximum of NaN and a number is the number.
fn with_nan_of(x: &Tensor, made: &Tensor) -> Result<Tensor> {
    x.ne(x)?.where_cond(x, made)
}

/// A node with a known result. Its backward pass computes the slope from the argument.
struct FunctionNode {
    function: Function,
    value: Ready,
    /// The dtype of the computation.
    dtype: DType,
}

impl CustomOp1 for FunctionNode {
    fn name(&self) -> &'static str {
        self.function.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.value.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.value.cuda()
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        self.value.metal()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let input = x.detach().to_dtype(self.dtype)?;
        let slope = with_nan_of(&input, &slope(self.function, &input)?)?;
        (grad.to_dtype(self.dtype)? * slope)?.to_dtype(x.dtype()).map(Some)
    }
}

/// Returns `x`, or the ends of the range beyond which functions have their limits.
fn near(x: &Tensor) -> Result<Tensor> {
    x.clamp(-FAR, FAR)
}

/// Returns `x · weight` for a weight that vanishes far below 0, also there.
fn weighted(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.maximum(-FAR)? * weight
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    // The exponential may be infinite, whose reciprocal is 0.
    (x.neg()?.exp()? + 1.0)?.recip()
}

/// Returns the argument of the logistic function in the GELU.
fn gelu_argument(t: &Tensor) -> Result<Tensor> {
    (t * ((t.sqr()? * 0.044715)? + 1.0)?)? * (FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * 2.0)
}

fn cdf(t: &Tensor) -> Result<Tensor> {
    ((t * FRAC_1_SQRT_2)?.erf()? + 1.0)? * 0.5
}

/// Returns `tanh(log(1 + exp(x)))`, and 1 less that.
fn mish_weight(t: &Tensor) -> Result<(Tensor, Tensor)> {
    // With e = exp(-|x|), as on the host.
    let e = t.abs()?.neg()?.exp()?;
    let square = (e.sqr()? * 2.0)?;
    let above = ((&e * 2.0)? + 1.0)?;
    let above_all = (&above + &square)?;
    let below = (&e * (&e + 2.0)?)?;
    let below_all = (&below + 2.0)?;
    let is_above = t.gt(0.0)?;
    let weight = is_above.where_cond(&(above / &above_all)?, &(below / &below_all)?)?;
    let rest = is_above.where_cond(&(square / above_all)?, &(below_all.recip()? * 2.0)?)?;
    Ok((weight, rest))
}

fn hard_weight(t: &Tensor) -> Result<Tensor> {
    ((t + 3.0)? / 6.0)?.clamp(0.0, 1.0)
}

fn value(function: Function, x: &Tensor) -> Result<Tensor> {
    match function {
        Function::Gelu => weighted(x, &sigmoid(&gelu_argument(&near(x)?)?)?),
        Function::GeluErf => weighted(x, &cdf(&near(x)?)?),
        Function::Silu => weighted(x, &sigmoid(x)?),
        Function::Mish => weighted(x, &mish_weight(x)?.0),
        Function::Sigmoid => sigmoid(x),
        Function::Tanh => x.tanh(),
        Function::Erf => x.erf(),
        Function::HardSwish => weighted(x, &hard_weight(&near(x)?)?),
        Function::Elu(alpha) => x.elu(alpha),
        Function::LeakyRelu(0.0) => x.maximum(0.0),
        Function::LeakyRelu(factor) => x.maximum(0.0)? + (x.minimum(0.0)? * factor)?,
        Function::Power(e) => x.powf(e),
        Function::Recip => x.recip(),
        Function::Rsqrt => x.sqrt()?.recip(),
    }
}

fn slope(function: Function, x: &Tensor) -> Result<Tensor> {
    let t = near(x)?;
    let logistic_slope = |x: &Tensor| sigmoid(x)? * sigmoid(&x.neg()?)?;
    match function {
        Function::Gelu => {
            let argument = gelu_argument(&t)?;
            let inner = ((t.sqr()? * (3.0 * 0.044715))? + 1.0)?;
            let inner = (inner * (FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * 2.0))?;
            sigmoid(&argument)? + ((&t * logistic_slope(&argument)?)? * inner)?
        }
        Function::GeluErf => {
            let density = ((t.sqr()? * -0.5)?.exp()? * (0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2))?;
            cdf(&t)? + (&t * density)?
        }
        Function::Silu => sigmoid(x)? * ((&t * sigmoid(&x.neg()?)?)? + 1.0)?,
        Function::Mish => {
            let (weight, rest) = mish_weight(x)?;
            &weight + (((t * rest)? * (&weight + 1.0)?)? * sigmoid(x)?)?
        }
        Function::Sigmoid => logistic_slope(x),
        Function::Tanh => logistic_slope(&(x * 2.0)?)? * 4.0,
        Function::Erf => t.sqr()?.neg()?.exp()? * FRAC_2_SQRT_PI,
        Function::HardSwish => {
            let size = x.abs()?;
            let share = (size.lt(3.0)?.to_dtype(x.dtype())? + size.le(3.0)?.to_dtype(x.dtype())?)?;
            hard_weight(&t)? + ((t / 12.0)? * share)?
        }
        Function::Elu(alpha) => {
            let below = (x.minimum(0.0)?.exp()? * alpha)?;
            x.gt(0.0)?.where_cond(&x.ones_like()?, &below)
        }
        Function::LeakyRelu(factor) => {
            let above = (x.gt(0.0)?.to_dtype(x.dtype())? + x.ge(0.0)?.to_dtype(x.dtype())?)?;
            (above * ((1.0 - factor) / 2.0))? + factor
        }
        Function::Power(0.0) => x.zeros_like(),
        Function::Power(e) => x.powf(e - 1.0)? * e,
        Function::Recip => x.recip()?.sqr()?.neg(),
        Function::Rsqrt => {
            let value = x.sqrt()?.recip()?;
            (&value * -0.5)? * value.sqr()?
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device::Cpu, Var};

    const FUNCTIONS: [Function; 14] = [
        Function::Gelu,
        Function::GeluErf,
        Function::Silu,
        Function::Mish,
        Function::Sigmoid,
        Function::Tanh,
        Function::Erf,
        Function::HardSwish,
        Function::Elu(0.7),
        Function::LeakyRelu(0.0),
        Function::LeakyRelu(0.1),
        Function::Power(0.0),
        Function::Recip,
        Function::Rsqrt,
    ];

    #[test]
    fn the_forms_off_the_host_have_the_values_and_slopes_of_those_on_it() -> Result<()> {
        let sizes = [0.3, 1.0, 3.0, 5.0, 12.0, 90.0, 300.0, 6e4, 1e8, 1e19, 1e30, f64::INFINITY];
        let xs: Vec<f64> = sizes.iter().flat_map(|&x| [x, -x]).collect();
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let x = Var::from_tensor(&Tensor::new(&xs[..], &Cpu)?.to_dtype(dtype)?)?;
            for function in FUNCTIONS {
                let both = |y: Tensor| -> Result<Vec<f64>> {
                    let grad = y.sum_all()?.backward()?.remove(&x);
                    let numbers = [y.detach(), grad.unwrap_or(x.zeros_like()?)];
                    Tensor::cat(&numbers, 0)?.to_dtype(DType::F64)?.to_vec1()
                };
                let compute = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
                let (got, want) = (both(apply(function, &x, compute)?)?, both(function.apply(&x)?)?);
                // 1 + erf cancels in the lower tail.
                let tolerance = match dtype {
                    DType::F64 => 1e-12,
                    DType::F32 => 3e-6,
                    DType::F16 => 2e-3,
                    _ => 1e-2,
                };
                for (at, (got, want)) in got.into_iter().zip(want).enumerate() {
                    let is_same = got == want || got.is_nan() && want.is_nan();
                    let is_close = (got - want).abs() <= tolerance * want.abs().max(1.0);
                    let x = xs[at % xs.len()];
                    assert!(is_same || is_close, "{function:?} {dtype:?} at {x}, {at}: {got} for {want}");
                }
            }
        }
        Ok(())
    }
}
