//! Elementwise functions of one tensor: any dim may be sharded, and what a function keeps of a reduction passes through.
use crate::placement::{Partial, Placement, Shard};
use crate::rules::{self, Row, Rows, Signature};
use crate::{DTensor, Error, Result};
use Order::{Falling, Neither, Rising};
use candle_core::{DType, Tensor};
use candle_dist::ReduceOp;

const SUM: Placement = Placement::PARTIAL_SUM;
const MAX: Placement = Partial(ReduceOp::Max);
const MIN: Placement = Partial(ReduceOp::Min);

/// What a function does to the order of its arguments: the extremes of a rising one are those of its argument.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Order {
    Rising,
    Falling,
    /// Up and down, not a number for some numbers, or a number for what is none: that must reach the extreme.
    Neither,
}

/// Every dim sharded, in and out; partial sums where the function is linear.
pub(super) fn unary_rows(rank: usize, linear: bool) -> Rows {
    let shards = (0..rank).map(|d| Row::new(Shard(d), &[Shard(d)]));
    shards.chain(linear.then(|| Row::new(SUM, &[SUM]))).collect()
}

/// Input `at` of `inputs` may be partial extremes, beside whole others, if the function has an order in it.
///
/// Only without gradient: that of an extreme belongs to the ranks that have it, which none of them knows.
pub(super) fn extreme_rows(order: Order, at: usize, inputs: &[&DTensor]) -> Rows {
    if order == Neither || inputs.iter().any(|x| x.tracked()) {
        return Rows::new();
    }
    let row = |(from, to): (Placement, Placement)| {
        let ins = (0..inputs.len()).map(|i| if i == at { from } else { Placement::Replicate }).collect();
        Row { out: to, ins }
    };
    let pairs = if order == Rising { [(MAX, MAX), (MIN, MIN)] } else { [(MAX, MIN), (MIN, MAX)] };
    pairs.into_iter().map(row).collect()
}

macro_rules! unary_ops {
    ($($(#[$doc:meta])* $name:ident, $order:expr, $local:expr;)*) => {
        impl DTensor {
            $($(#[$doc])* pub fn $name(&self) -> Result<Self> {
                self.unary(stringify!($name), $order, $local)
            })*
        }
    };
}

unary_ops! {
    /// The larger of each element and zero.
    relu, Neither, Tensor::relu;
    /// Each element held in `0..=6`.
    relu6, Neither, |x| x.clamp(0f64, 6f64);
    /// The exact Gaussian error linear unit, `x · Φ(x)`.
    gelu_erf, Neither, crate::kernels::gelu_erf;
    /// The approximation of the Gaussian error linear unit with tanh, as candle's `gelu`; the exact one is
    /// [`gelu_erf`](Self::gelu_erf).
    gelu, Neither, Tensor::gelu;
    /// `x · sigmoid(x)`.
    silu, Neither, Tensor::silu;
    /// `x · tanh(log(1 + exp(x)))`.
    mish, Neither, candle_nn::ops::mish;
    /// The logistic function.
    sigmoid, Rising, candle_nn::ops::sigmoid;
    /// `(x + 3) / 6`, held in `0..=1`.
    hard_sigmoid, Neither, candle_nn::ops::hard_sigmoid;
    /// `x · hard_sigmoid(x)`.
    hard_swish, Neither, |x| x * candle_nn::ops::hard_sigmoid(x)?;
    /// The hyperbolic tangent.
    tanh, Rising, Tensor::tanh;
    /// The error function.
    erf, Rising, Tensor::erf;
    /// The exponential.
    exp, Rising, Tensor::exp;
    /// The natural logarithm.
    log, Neither, Tensor::log;
    /// The square root.
    sqrt, Neither, Tensor::sqrt;
    /// One divided by the square root.
    rsqrt, Neither, |x| x.sqrt()?.recip();
    /// The square.
    sqr, Neither, Tensor::sqr;
    /// The sine.
    sin, Neither, Tensor::sin;
    /// The cosine.
    cos, Neither, Tensor::cos;
    /// One divided by each element.
    recip, Neither, Tensor::recip;
}

/// Functions that are flat between their steps. candle ends the graph at them; it must end alike on ranks without
/// elements, so they are taken of the detached tensor.
macro_rules! step_functions {
    ($($(#[$doc:meta])* $name:ident, $order:expr, $local:expr;)*) => {
        impl DTensor {
            $($(#[$doc])* ///
            /// The result carries no gradient, as candle's does not.
            #[track_caller]
            pub fn $name(&self) -> Result<Self> {
                self.detach().unary(stringify!($name), $order, $local)
            })*
        }
    };
}

step_functions! {
    /// The largest whole number that is not above each element.
    floor, Rising, Tensor::floor;
    /// The smallest whole number that is not below each element.
    ceil, Rising, Tensor::ceil;
    /// The nearest whole number, halves away from zero.
    round, Rising, Tensor::round;
    /// 1, 0 or -1, the sign of each element.
    sign, Neither, Tensor::sign;
}

impl DTensor {
    #[track_caller]
    fn unary(
        &self,
        op: &'static str,
        order: Order,
        local: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let signature = || {
            self.check_float(op)?;
            let mut rows = unary_rows(self.rank(), false);
            rows.extend(extreme_rows(order, 0, &[self]));
            Ok(Signature::new(rows, self.dims(), self.dtype()))
        };
        rules::run(op, &[order as usize], &[self], signature, |x, _| Ok(local(x[0].to_local())?))
    }

    /// Each element rounded to so many digits behind the point, or before it where `decimals` is negative.
    ///
    /// The result carries no gradient, as candle's does not.
    #[track_caller]
    pub fn round_to(&self, decimals: i32) -> Result<Self> {
        self.detach().unary("round_to", Rising, |x| x.round_to(decimals))
    }

    /// `x` where it is positive, else `alpha · (exp(x) - 1)`.
    #[track_caller]
    pub fn elu(&self, alpha: f64) -> Result<Self> {
        self.unary("elu", if alpha >= 0.0 { Rising } else { Neither }, |x| x.elu(alpha))
    }

    /// `x` where it is positive, else `slope · x`.
    #[track_caller]
    pub fn leaky_relu(&self, slope: f64) -> Result<Self> {
        self.unary("leaky_relu", Neither, |x| candle_nn::ops::leaky_relu(x, slope))
    }

    /// Each element to the power of `e`.
    #[track_caller]
    pub fn powf(&self, e: f64) -> Result<Self> {
        self.unary("powf", Neither, |x| x.powf(e))
    }

    /// Each element with its sign changed; the least whole number of its dtype has no other.
    ///
    /// # Errors
    /// If the elements are whole numbers without a sign.
    #[track_caller]
    pub fn neg(&self) -> Result<Self> {
        let is_int = self.dtype().is_int();
        let signature = || {
            if matches!(self.dtype(), DType::U8 | DType::U32) {
                let reason = format!("{} holds no negative numbers; convert it with to_dtype", self.spec());
                return Error::op("neg", reason);
            }
            let mut rows = unary_rows(self.rank(), true);
            // Whole numbers wrap around.
            rows.extend(extreme_rows(if is_int { Neither } else { Falling }, 0, &[self]));
            Ok(Signature::new(rows, self.dims(), self.dtype()))
        };
        rules::run("neg", &[], &[self], signature, |x, _| Ok(negated(x[0].to_local())?))
    }

    /// The absolute value of each element, whole numbers too.
    #[track_caller]
    pub fn abs(&self) -> Result<Self> {
        match self.dtype() {
            DType::U8 | DType::U32 => Ok(self.clone()),
            dtype if dtype.is_int() => {
                let signature = || Ok(Signature::new(unary_rows(self.rank(), false), self.dims(), dtype));
                rules::run("abs", &[], &[self], signature, |x, _| {
                    let x = x[0].to_local();
                    Ok(x.maximum(&negated(x)?)?)
                })
            }
            _ => self.unary("abs", Neither, Tensor::abs),
        }
    }

    /// `x · mul + add`; partial sums stay partial where `add` is zero.
    #[track_caller]
    pub fn affine(&self, mul: f64, add: f64) -> Result<Self> {
        let linear = add == 0.0;
        let order = match mul {
            // Whole numbers wrap around.
            _ if self.dtype().is_int() => Neither,
            _ if mul >= 0.0 => Rising,
            _ if mul < 0.0 => Falling,
            _ => Neither,
        };
        // candle ends the graph at a factor of zero; it must end alike on ranks without elements.
        let x = if mul == 0.0 { &self.detach() } else { self };
        let signature = || {
            let mut rows = unary_rows(x.rank(), linear);
            rows.extend(extreme_rows(order, 0, &[x]));
            Ok(Signature::new(rows, x.dims(), x.dtype()))
        };
        let attributes = [usize::from(linear), order as usize];
        rules::run("affine", &attributes, &[x], signature, |x, _| Ok(x[0].to_local().affine(mul, add)?))
    }

    /// The same values in another dtype; partial sums are added up in the present one first.
    ///
    /// Whole numbers carry no gradient.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        let x = if dtype.is_int() { &self.detach() } else { self };
        let order = if dtype.is_float() && x.dtype().is_float() { Rising } else { Neither };
        let signature = || {
            let mut rows = unary_rows(x.rank(), false);
            rows.extend(extreme_rows(order, 0, &[x]));
            Ok(Signature::new(rows, x.dims(), dtype))
        };
        rules::run("to_dtype", &[dtype as usize], &[x], signature, |x, _| Ok(x[0].to_local().to_dtype(dtype)?))
    }

    /// The tensor cut off from the graph.
    pub fn detach(&self) -> Self {
        let detached = DTensor::assemble(self.to_local().detach(), self.shared_spec().clone(), 0);
        detached.aliasing(self)
    }
}

/// candle has no functions of whole numbers, but differences.
fn negated(x: &Tensor) -> candle_core::Result<Tensor> {
    if x.dtype().is_int() { x.zeros_like()?.sub(x) } else { x.neg() }
}
