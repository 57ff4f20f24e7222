//! Values and slopes at large numbers, in each dtype, against formulas in f64 with their limits.
use crate::common::*;
use candle_core::cpu::erf::{erf_f64, erfc_f64};
use candle_core::{DType, Device, Tensor};
use candle_shard::{DTensor, Replicate, Result, Shard};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, PI};
use test_utils::on_ranks;

/// The value and the slope at a number.
type Truth = fn(f64) -> (f64, f64);

struct Case {
    name: &'static str,
    op: fn(&DTensor) -> Result<DTensor>,
    truth: Truth,
    domain: Domain,
}

/// The numbers for which a function has a value.
#[derive(Clone, Copy, PartialEq)]
enum Domain {
    All,
    Positive,
}

fn logistic(x: f64) -> f64 {
    if x > 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) }
}

/// A function of the size of `x` above 0 that vanishes below.
fn gated(x: f64, inside: Truth) -> (f64, f64) {
    match x {
        _ if x > 800.0 => (x, 1.0),
        _ if x < -800.0 => (0.0, 0.0),
        _ => inside(x),
    }
}

fn gelu(x: f64) -> (f64, f64) {
    gated(x, |x| {
        let c = 2.0 * (2.0 / PI).sqrt();
        let u = c * (x + 0.044715 * x * x * x);
        let s = logistic(u);
        (x * s, s + x * s * logistic(-u) * c * (1.0 + 3.0 * 0.044715 * x * x))
    })
}

fn gelu_erf(x: f64) -> (f64, f64) {
    gated(x, |x| {
        let cdf = 0.5 * erfc_f64(-x * FRAC_1_SQRT_2);
        (x * cdf, cdf + x * (-0.5 * x * x).exp() / (2.0 * PI).sqrt())
    })
}

fn silu(x: f64) -> (f64, f64) {
    gated(x, |x| (x * logistic(x), logistic(x) * (1.0 + x * logistic(-x))))
}

fn mish(x: f64) -> (f64, f64) {
    gated(x, |x| {
        let soft = if x > 30.0 { x + (-x).exp() } else { x.exp().ln_1p() };
        let w = soft.tanh();
        let slope = 1.0 / soft.cosh().powi(2);
        (x * w, w + x * slope * logistic(x))
    })
}

fn hard_swish(x: f64) -> (f64, f64) {
    match x {
        _ if x > 3.0 => (x, 1.0),
        _ if x < -3.0 => (0.0, 0.0),
        _ => (x * (x + 3.0) / 6.0, (2.0 * x + 3.0) / 6.0),
    }
}

fn elu(x: f64, alpha: f64) -> (f64, f64) {
    if x > 0.0 { (x, 1.0) } else { (alpha * x.exp_m1(), alpha * x.exp()) }
}

/// Zero times the other, also if that is infinite.
fn part(by: f64, x: f64) -> f64 {
    if by == 0.0 { 0.0 } else { by * x }
}

const fn case(name: &'static str, op: fn(&DTensor) -> Result<DTensor>, truth: Truth) -> Case {
    Case { name, op, truth, domain: Domain::All }
}

const fn above(name: &'static str, op: fn(&DTensor) -> Result<DTensor>, truth: Truth) -> Case {
    Case { name, op, truth, domain: Domain::Positive }
}

const CASES: [Case; 34] = [
    case("relu", DTensor::relu, |x| (x.max(0.0), f64::from(u8::from(x > 0.0)))),
    case("relu6", DTensor::relu6, |x| (x.clamp(0.0, 6.0), f64::from(u8::from(x > 0.0 && x < 6.0)))),
    case("gelu", DTensor::gelu, gelu),
    case("gelu_erf", DTensor::gelu_erf, gelu_erf),
    case("silu", DTensor::silu, silu),
    case("mish", DTensor::mish, mish),
    case("sigmoid", DTensor::sigmoid, |x| (logistic(x), logistic(x) * logistic(-x))),
    case("hard_sigmoid", DTensor::hard_sigmoid, |x| {
        (((x + 3.0) / 6.0).clamp(0.0, 1.0), f64::from(u8::from(x.abs() < 3.0)) / 6.0)
    }),
    case("hard_swish", DTensor::hard_swish, hard_swish),
    case("tanh", DTensor::tanh, |x| (x.tanh(), 4.0 * logistic(2.0 * x) * logistic(-2.0 * x))),
    case("erf", DTensor::erf, |x| (erf_f64(x), FRAC_2_SQRT_PI * (-x * x).exp())),
    case("exp", DTensor::exp, |x| (x.exp(), x.exp())),
    above("log", DTensor::log, |x| (x.ln(), 1.0 / x)),
    above("sqrt", DTensor::sqrt, |x| (x.sqrt(), 0.5 / x.sqrt())),
    above("rsqrt", DTensor::rsqrt, |x| (1.0 / x.sqrt(), -0.5 / x.sqrt() / x)),
    case("sqr", DTensor::sqr, |x| (x * x, 2.0 * x)),
    case("recip", DTensor::recip, |x| (1.0 / x, -1.0 / x / x)),
    case("abs", DTensor::abs, |x| (x.abs(), x.signum())),
    case("neg", DTensor::neg, |x| (-x, -1.0)),
    case("affine", |x| x.affine(0.5, 2.0), |x| (x * 0.5 + 2.0, 0.5)),
    case("elu", |x| x.elu(0.5), |x| elu(x, 0.5)),
    case("elu without a bound", |x| x.elu(0.0), |x| elu(x, 0.0)),
    case(
        "selu",
        |x| x.selu(1.5, 0.5),
        |x| {
            let (value, slope) = elu(x, 1.5);
            (value * 0.5, slope * 0.5)
        },
    ),
    case("leaky_relu", |x| x.leaky_relu(0.25), |x| if x > 0.0 { (x, 1.0) } else { (0.25 * x, 0.25) }),
    case("leaky_relu of 0", |x| x.leaky_relu(0.0), |x| (x.max(0.0), f64::from(u8::from(x > 0.0)))),
    case("clamp", |x| x.clamp(-2.0, 2.0), |x| (x.clamp(-2.0, 2.0), f64::from(u8::from(x.abs() < 2.0)))),
    above("powf 1.5", |x| x.powf(1.5), |x| (x.powf(1.5), 1.5 * x.sqrt())),
    above("powf -1", |x| x.powf(-1.0), |x| (1.0 / x, -1.0 / x / x)),
    case("powf 3", |x| x.powf(3.0), |x| (x.powi(3), 3.0 * x * x)),
    case("powf 0", |x| x.powf(0.0), |_| (1.0, 0.0)),
    case("2 / x", |x| 2.0 / x, |x| (2.0 / x, -2.0 / x / x)),
    case("1 / x of tensors", |x| x.ones_like()?.div(x), |x| (1.0 / x, -1.0 / x / x)),
    case(
        "silu_gate",
        |x| x.silu_gate(&x.ones_like()?.affine(2.0, 0.0)?),
        |x| (2.0 * silu(x).0, 2.0 * silu(x).1),
    ),
    case(
        "prelu",
        |x| x.prelu(&x.ones_like()?.affine(0.25, 0.0)?),
        |x| {
            if x > 0.0 { (x, 1.0) } else { (part(0.25, x), 0.25) }
        },
    ),
];

/// What a dtype can hold: its largest and its least normal number, and the relative size of its last bit.
fn range(dtype: DType) -> (f64, f64, f64) {
    match dtype {
        DType::F64 => (f64::MAX, f64::MIN_POSITIVE, f64::EPSILON),
        DType::F32 => (f64::from(f32::MAX), f64::from(f32::MIN_POSITIVE), f64::from(f32::EPSILON)),
        DType::BF16 => (3.39e38, f64::from(f32::MIN_POSITIVE), 2f64.powi(-7)),
        _ => (65504.0, 2f64.powi(-14), 2f64.powi(-10)),
    }
}

const SIZES: [f64; 20] = [
    0.01, 0.5, 1.0, 2.5, 4.0, 9.0, 12.0, 20.0, 50.0, 90.0, 104.0, 300.0, 750.0, 5e3, 6e4, 1e8, 3e19, 1e30,
    1e38, 1e200,
];

/// Numbers of both signs that a dtype has, up to its largest one and infinity.
fn numbers(dtype: DType) -> Result<Vec<f64>> {
    let most = range(dtype).0;
    let sizes = SIZES.into_iter().filter(|&x| x < most).chain([most, f64::INFINITY]);
    let all: Vec<f64> = sizes.flat_map(|x| [x, -x]).collect();
    Ok(Tensor::new(&all[..], &Device::Cpu)?.to_dtype(dtype)?.to_dtype(DType::F64)?.to_vec1()?)
}

#[test]
fn values_and_slopes_at_large_numbers_are_those_of_the_functions() {
    on_ranks(2, "limits", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let mut wrong = Vec::new();
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let (most, least, last) = range(dtype);
            let xs = numbers(dtype)?;
            for Case { name, op, truth, domain } in &CASES {
                let is_in = |x: &&f64| match domain {
                    Domain::All => true,
                    Domain::Positive => **x > 0.0,
                };
                let xs: Vec<f64> = xs.iter().filter(is_in).copied().collect();
                let whole = Tensor::new(&xs[..], &Device::Cpu)?.to_dtype(dtype)?;
                for at in [Replicate, Shard(0)] {
                    let leaf = Leaf::new(&whole, &mesh, &[Lay::At(at)])?;
                    let y = op(&leaf.tensor)?;
                    let grads = y.sum_all()?.backward()?;
                    let numbers = |t: &Tensor| t.to_dtype(DType::F64)?.to_vec1::<f64>();
                    let values = numbers(&y.full_tensor()?)?;
                    let grad = grads.get(&leaf.var).unwrap().clone();
                    let slopes =
                        DTensor::from_local_with_spec(grad, leaf.tensor.spec().clone())?.full_tensor()?;
                    let slopes = numbers(&slopes)?;
                    for ((x, value), slope) in xs.iter().zip(values).zip(slopes) {
                        let (want, want_slope) = truth(*x);
                        for (what, got, want) in [("value", value, want), ("slope", slope, want_slope)] {
                            // Near the ends of the range, rounding may cross them.
                            let is_beyond =
                                want.abs() >= most * (1.0 - last) && got.abs() >= most * (1.0 - last);
                            let is_same = is_beyond && got.signum() == want.signum();
                            // The rounding of an exponent counts as often as the exponent is large.
                            let exponent = if want == 0.0 { 0.0 } else { want.abs().ln().abs() };
                            let bound = 100.0 * least + want.abs() * last * (4.0 + 4.0 * exponent);
                            let is_close = want.is_finite() && (got - want).abs() <= bound; // not where one is NaN
                            if !is_same && !is_close {
                                wrong.push(format!(
                                    "{name} {dtype:?} {at}: {what} at {x:e} is {got:e} for {want:e}"
                                ));
                            }
                        }
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
        Ok(())
    });
}
