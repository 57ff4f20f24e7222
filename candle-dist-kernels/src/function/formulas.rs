//! The formulas, for one number at a time. Each returns the value and the slope.
use super::Function;
use crate::real::Real;

/// From here on all of these functions have their limits, and polynomials of it are finite in f32.
const FAR: f64 = 1000.0;

const SQRT_2_BY_PI: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

/// Calls `take` with each place of `to` and the value and slope for the element of `xs` at that place.
#[inline(always)]
pub(super) fn each<T: Real, P>(
    function: Function,
    xs: &[T],
    to: impl Iterator<Item = P>,
    take: impl Fn(P, (T, T)),
) {
    /// A loop for each function, so that each is vectorized.
    macro_rules! loops {
        ($($pattern:pat, $x:ident => $made:expr;)*) => {
            match function {
                $($pattern => to.zip(xs).for_each(
                    #[inline(always)]
                    |(place, &$x)| take(place, $made),
                ),)*
            }
        };
    }
    loops! {
        Function::Gelu, x => gelu(x);
        Function::GeluErf, x => gelu_erf(x);
        Function::Silu, x => silu(x);
        Function::Mish, x => mish(x);
        Function::Sigmoid, x => sigmoid(x);
        Function::Tanh, x => tanh(x);
        Function::Erf, x => erf(x);
        Function::HardSwish, x => hard_swish(x);
        Function::Elu(alpha), x => elu(x, T::from_f64(alpha));
        Function::LeakyRelu(factor), x => leaky_relu(x, T::from_f64(factor));
        Function::Power(e), x => power(x, e);
        Function::Recip, x => recip(x);
        Function::Rsqrt, x => rsqrt(x);
    }
}

/// Returns `sigmoid(x)` and `1 - sigmoid(x)`, both without cancellation.
#[inline(always)]
pub(crate) fn logistic<T: Real>(x: T) -> (T, T) {
    let zero = T::zero();
    let e = (if x > zero { zero - x } else { x }).exp_neg(zero);
    let near = T::one() / (T::one() + e);
    if x > zero { (near, e * near) } else { (e * near, near) }
}

/// Returns `x · weight` for a weight that vanishes far below 0, also there.
#[inline(always)]
pub(crate) fn weighted<T: Real>(x: T, weight: T) -> T {
    let least = T::from_f64(-FAR);
    (if x < least { least } else { x }) * weight
}

/// Returns `x`, or the end of the range beyond which functions have their limits.
#[inline(always)]
pub(crate) fn near<T: Real>(x: T) -> T {
    let far = T::from_f64(FAR);
    let least = T::zero() - far;
    let x = if x < least { least } else { x };
    if x > far { far } else { x }
}

#[inline(always)]
fn gelu<T: Real>(x: T) -> (T, T) {
    let (t, one, two) = (near(x), T::one(), T::from_f64(2.0));
    let square = t * t;
    let scale = two * T::from_f64(SQRT_2_BY_PI);
    // (1 + tanh(u)) / 2 = sigmoid(2u)
    let (s, rest) = logistic(scale * t * (one + T::from_f64(CUBIC) * square));
    let inner = scale * (one + T::from_f64(3.0 * CUBIC) * square);
    (weighted(x, s), s + t * s * rest * inner)
}

#[inline(always)]
fn gelu_erf<T: Real>(x: T) -> (T, T) {
    let t = near(x);
    let (cdf, density) = t.normal();
    (weighted(x, cdf), cdf + t * density)
}

#[inline(always)]
fn silu<T: Real>(x: T) -> (T, T) {
    let (s, rest) = logistic(x);
    (weighted(x, s), s * (T::one() + near(x) * rest))
}

#[inline(always)]
fn mish<T: Real>(x: T) -> (T, T) {
    let (zero, one, two) = (T::zero(), T::one(), T::from_f64(2.0));
    let e = (if x > zero { zero - x } else { x }).exp_neg(zero);
    // With n = exp(x): tanh(log(1 + n)) = n (n + 2) / (n (n + 2) + 2). Above 0, e = 1 / n.
    let (weight, rest) = if x > zero {
        let below = one + two * e + two * e * e;
        ((one + two * e) / below, two * e * e / below)
    } else {
        let below = e * (e + two) + two;
        (e * (e + two) / below, two / below)
    };
    (weighted(x, weight), weight + near(x) * rest * (one + weight) * logistic(x).0)
}

#[inline(always)]
fn sigmoid<T: Real>(x: T) -> (T, T) {
    let (s, rest) = logistic(x);
    (s, s * rest)
}

#[inline(always)]
fn tanh<T: Real>(x: T) -> (T, T) {
    let (s, rest) = logistic(x + x);
    (x.tanh(), T::from_f64(4.0) * s * rest)
}

#[inline(always)]
fn erf<T: Real>(x: T) -> (T, T) {
    let t = near(x);
    (x.erf(), T::from_f64(std::f64::consts::FRAC_2_SQRT_PI) * (T::zero() - t * t).exp_neg(T::zero()))
}

/// The slopes at the two corners are those of candle's clamp, the means of both sides.
#[inline(always)]
fn hard_swish<T: Real>(x: T) -> (T, T) {
    let (zero, one, three) = (T::zero(), T::one(), T::from_f64(3.0));
    let sixth = T::from_f64(1.0 / 6.0);
    let weight = (near(x) + three) * sixth;
    let weight = if weight < zero { zero } else { weight };
    let weight = if weight > one { one } else { weight };
    let size = if x < zero { zero - x } else { x };
    let share = if size < three {
        one
    } else if size > three {
        zero
    } else {
        T::from_f64(0.5)
    };
    let slope = weight + near(x) * sixth * share;
    (weighted(x, weight), if x.partial_cmp(&x).is_none() { x } else { slope })
}

#[inline(always)]
fn elu<T: Real>(x: T, alpha: T) -> (T, T) {
    if x > T::zero() {
        return (x, T::one());
    }
    (alpha * x.exp_m1(), alpha * x.exp_neg(T::zero()))
}

#[inline(always)]
fn leaky_relu<T: Real>(x: T, factor: T) -> (T, T) {
    let (zero, one) = (T::zero(), T::one());
    if x > zero {
        (x, one)
    } else if x < zero {
        // A factor of 0 makes 0 of -∞, too.
        (if factor == zero { zero } else { factor * x }, factor)
    } else {
        (x, (one + factor) * T::from_f64(0.5))
    }
}

#[inline(always)]
fn power<T: Real>(x: T, e: f64) -> (T, T) {
    let slope = if e == 0.0 { T::zero() } else { T::from_f64(e) * x.powf(T::from_f64(e - 1.0)) };
    (x.powf(T::from_f64(e)), slope)
}

#[inline(always)]
fn recip<T: Real>(x: T) -> (T, T) {
    let value = T::one() / x;
    (value, T::zero() - value * value)
}

#[inline(always)]
fn rsqrt<T: Real>(x: T) -> (T, T) {
    let value = T::one() / x.sqrt();
    (value, T::from_f64(-0.5) * value * (value * value))
}
