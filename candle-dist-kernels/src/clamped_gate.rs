use candle_core::{Error, Result, Shape, Tensor};
use candle_dist_base::{edges, empty};

use super::float_op::{FloatNode, FloatOp};
use super::function::{Function, logistic, weighted};
use super::silu_gate::zip;
use super::{check_dtype, compute_dtype, fused, real::Real};

/// The gated activation of gpt-oss, `g · sigmoid(alpha · g) · (u + 1)`, where `g` is `x` and at most `limit`, and `u` is `gate` from
/// `-limit` to `limit`. `alpha` is positive.
///
/// `x` and `gate` have the same dtype and the same shape, which is that of the result. Elements beyond the limits have no gradients. Fails
/// if shapes or dtypes do not match and on dtypes other than floats.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let (x, gate) = (Tensor::new(&[0f64, 1e4], &Cpu)?, Tensor::new(&[7f64, 1e4], &Cpu)?);
/// assert_eq!(candle_dist_kernels::clamped_gate(&x, &gate, 100.0, 7.0)?.to_vec1::<f64>()?, [0.0, 7.0 * 8.0]);
/// # Ok(())
/// # }
/// ```
pub fn clamped_gate(x: &Tensor, gate: &Tensor, alpha: f64, limit: f64) -> Result<Tensor> {
    compute_dtype("clamped_gate", x)?;
    check_dtype("clamped_gate", x, gate)?;
    if x.dims() != gate.dims() {
        let (lhs, rhs) = (x.shape().clone(), gate.shape().clone());
        return Err(Error::ShapeMismatchBinaryOp { lhs, rhs, op: "clamped_gate" }.bt());
    }
    // A limit of 0 is none in the kernels, and they get it as f32.
    if limit as f32 > 0.0 && fused::computes(&[x, gate]) {
        return fused::function::gate("clamped_gate", x, gate, Some([alpha, limit]));
    }
    if !x.device().is_cpu() {
        return composed(x, gate, alpha, limit);
    }
    edges::apply2(&edges::contiguous(x)?, &edges::contiguous(gate)?, FloatNode(ClampedGate { alpha, limit }))
}

fn composed(x: &Tensor, gate: &Tensor, alpha: f64, limit: f64) -> Result<Tensor> {
    // candle returns the left side of a product without elements, and forgets the right one.
    if x.elem_count() == 0 {
        return empty::zeros_of(&[x, gate], x.shape(), x.dtype());
    }
    // candle gives half of a gradient to each of two equal sides of a minimum, and a mask gives all or nothing.
    let within = |x: &Tensor, low: f64| {
        let is_within = (x.le(limit)? * x.ge(low)?)?;
        let clamped = x.detach().clamp(low, limit)?;
        is_within.where_cond(x, &clamped)
    };
    let (x, gate) = (within(x, f64::NEG_INFINITY)?, within(gate, -limit)?);
    (Function::Silu.apply(&(x * alpha)?)? / alpha)? * (gate + 1.0)?
}

struct ClampedGate {
    alpha: f64,
    limit: f64,
}

impl FloatOp<2> for ClampedGate {
    const NAME: &'static str = "clamped_gate";

    fn forward<T: Real>(&self, [x, gate]: [&[T]; 2], shapes: [&Shape; 2]) -> Result<(Vec<T>, Shape)> {
        let [alpha, limit, low] = [self.alpha, self.limit, -self.limit].map(T::from_f64);
        let out = zip(
            x,
            gate,
            x,
            #[inline(always)]
            |x, gate, _| {
                let (x, gate) = (at_most(x, limit), at_least(at_most(gate, limit), low));
                weighted(x, logistic(alpha * x).0) * (gate + T::one())
            },
        );
        Ok((out, shapes[0].clone()))
    }

    fn backward<T: Real>(
        &self,
        [x, gate]: [&[T]; 2],
        _: [&Shape; 2],
        [for_x, for_gate]: [bool; 2],
        grad: &[T],
    ) -> Result<[Option<Vec<T>>; 2]> {
        let [alpha, limit, low] = [self.alpha, self.limit, -self.limit].map(T::from_f64);
        let slope = || {
            zip(
                x,
                gate,
                grad,
                #[inline(always)]
                |x, gate, grad| {
                    if x > limit {
                        return T::zero();
                    }
                    let (share, rest) = logistic(alpha * x);
                    let gate = at_least(at_most(gate, limit), low);
                    // Far below, the share is 0 and its slope too.
                    let slope = share + weighted(alpha * x, share) * rest;
                    slope * (gate + T::one()) * grad
                },
            )
        };
        let value = || {
            zip(
                x,
                gate,
                grad,
                #[inline(always)]
                |x, gate, grad| {
                    if gate > limit || gate < low {
                        return T::zero();
                    }
                    let x = at_most(x, limit);
                    grad * weighted(x, logistic(alpha * x).0)
                },
            )
        };
        Ok([for_x.then(slope), for_gate.then(value)])
    }
}

/// `x`, or the limit if it is more. NaN stays NaN.
#[inline(always)]
fn at_most<T: Real>(x: T, limit: T) -> T {
    if x > limit { limit } else { x }
}

/// `x`, or the limit if it is less. NaN stays NaN.
#[inline(always)]
fn at_least<T: Real>(x: T, limit: T) -> T {
    if x < limit { limit } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device::Cpu, Var};

    #[test]
    fn values_and_gradients_on_both_sides_of_the_limits_equal_the_composed_form() -> Result<()> {
        let at = [-1e9, -20., -7.1, -7., -6.9, -1.3, 0., 0.4, 6.9, 7., 7.1, 30., 1e9];
        let pairs: Vec<[f64; 2]> = at.iter().flat_map(|&x| at.map(|gate| [x, gate])).collect();
        let side = |i: usize| {
            Var::from_tensor(&Tensor::new(pairs.iter().map(|pair| pair[i]).collect::<Vec<_>>(), &Cpu)?)
        };
        let (x, gate) = (side(0)?, side(1)?);
        let up = Tensor::arange(1f64, 1.0 + pairs.len() as f64, &Cpu)?;
        let run = |made: Tensor| -> Result<[Vec<f64>; 3]> {
            let grads = (&made * &up)?.sum_all()?.backward()?;
            let of = |var: &Var| {
                grads
                    .get(var)
                    .map_or_else(|| vec![0.0; pairs.len()], |grad| grad.to_vec1().unwrap_or_default())
            };
            Ok([made.to_vec1()?, of(&x), of(&gate)])
        };
        let got = run(clamped_gate(&x, &gate, 1.702, 7.0)?)?;
        let want = run(composed(&x, &gate, 1.702, 7.0)?)?;
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((got - want).abs() <= 1e-12 * want.abs().max(1.0), "{got} instead of {want}");
        }
        assert!(got.iter().all(|list| list.iter().all(|value| value.is_finite())));
        // By differences, away from the limits.
        let at = |x: f64, gate: f64| -> Result<f64> {
            let [x, gate] = [x, gate].map(|value| Tensor::new(&[value], &Cpu));
            Ok(clamped_gate(&x?, &gate?, 1.702, 7.0)?.to_vec1::<f64>()?[0])
        };
        for (i, &[x, gate]) in
            pairs.iter().enumerate().filter(|(_, pair)| pair.iter().all(|x| x.abs() < 6.95))
        {
            let of_x = (at(x + 1e-5, gate)? - at(x - 1e-5, gate)?) / 2e-5;
            let of_gate = (at(x, gate + 1e-5)? - at(x, gate - 1e-5)?) / 2e-5;
            let factor = (i + 1) as f64;
            assert!((got[1][i] - factor * of_x).abs() < 1e-6 * factor, "{x} {gate}: {} {of_x}", got[1][i]);
            assert!(
                (got[2][i] - factor * of_gate).abs() < 1e-6 * factor,
                "{x} {gate}: {} {of_gate}",
                got[2][i]
            );
        }
        Ok(())
    }

    #[test]
    fn without_elements_both_sides_stay_in_the_graph() -> Result<()> {
        let (x, gate) = (Var::zeros((0, 3), DType::F32, &Cpu)?, Var::zeros((0, 3), DType::F32, &Cpu)?);
        let grads = clamped_gate(&x, &gate, 1.702, 7.0)?.sum_all()?.backward()?;
        assert!(grads.get(&x).is_some() && grads.get(&gate).is_some());
        assert!(clamped_gate(&x, &Tensor::zeros((1, 3), DType::F32, &Cpu)?, 1.0, 7.0).is_err());
        Ok(())
    }
}
