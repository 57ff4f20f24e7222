//! Elementwise functions of one tensor. Any dim may be sharded; partial placements pass through where the function
//! allows it.
use crate::kernels::{Function, convert, converts};
use crate::layout::{Partial, Placement, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use Monotonicity::{Falling, Neither, Rising};
use candle_core::{DType, Tensor};
use candle_dist::ReduceOp;

const SUM: Placement = Placement::PARTIAL_SUM;
const MAX: Placement = Partial(ReduceOp::Max);
const MIN: Placement = Partial(ReduceOp::Min);

/// The monotonicity of a function: a rising one maps the extreme of its arguments to the extreme of its results.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Monotonicity {
    Rising,
    Falling,
    /// Not monotonic; or maps some numbers to NaN, or NaN to a number (NaN must reach the extreme).
    Neither,
}

/// Rows for each dim, sharded in input and output, and for partial sums if the function is linear.
pub(super) fn unary_rows(rank: usize, linear: bool) -> ShardingRules {
    let shards = (0..rank).map(|d| ShardingRule::new(Shard(d), &[Shard(d)]));
    shards.chain(linear.then(|| ShardingRule::new(SUM, &[SUM]))).collect()
}

/// Rows in which input `at` of `inputs` is a partial extreme and the others are replicated, if the function is
/// monotonic in it.
///
/// Only without gradients: the gradient of an extreme belongs to the ranks that hold it, and no rank knows which these
/// are.
pub(super) fn extreme_rows(order: Monotonicity, at: usize, inputs: &[&DTensor]) -> ShardingRules {
    if order == Neither || inputs.iter().any(|x| x.tracked()) {
        return ShardingRules::new();
    }
    let row = |(from, to): (Placement, Placement)| {
        let ins = (0..inputs.len()).map(|i| if i == at { from } else { Placement::Replicate }).collect();
        ShardingRule { out: to, ins }
    };
    let pairs = if order == Rising { [(MAX, MAX), (MIN, MIN)] } else { [(MAX, MIN), (MIN, MAX)] };
    pairs.into_iter().map(row).collect()
}

macro_rules! unary_ops {
    ($($(#[$doc:meta])* $name:ident, $order:expr, $local:expr;)*) => {
        impl DTensor {
            $($(#[$doc])* pub fn $name(&self) -> Result<Self> {
                self.unary(stringify!($name), $order, &$local)
            })*
        }
    };
}

unary_ops! {
    /// The larger of each element and zero.
    relu, Neither, Tensor::relu;
    /// Clamps each element to `0..=6`.
    relu6, Neither, |x| crate::kernels::clamp(x, 0.0, 6.0);
    /// The exact Gaussian error linear unit, `x · Φ(x)`.
    gelu_erf, Neither, |x| Function::GeluErf.apply(x);
    /// The approximation of the Gaussian error linear unit with tanh, as candle's `gelu`; the exact one is
    /// [`gelu_erf`](Self::gelu_erf).
    gelu, Neither, |x| Function::Gelu.apply(x);
    /// `x · sigmoid(x)`.
    silu, Neither, |x| Function::Silu.apply(x);
    /// `x · tanh(log(1 + exp(x)))`.
    mish, Neither, |x| Function::Mish.apply(x);
    /// The logistic function.
    sigmoid, Rising, |x| Function::Sigmoid.apply(x);
    /// `(x + 3) / 6`, clamped to `0..=1`.
    hard_sigmoid, Neither, candle_nn::ops::hard_sigmoid;
    /// `x · hard_sigmoid(x)`.
    hard_swish, Neither, |x| Function::HardSwish.apply(x);
    /// The hyperbolic tangent.
    tanh, Rising, |x| Function::Tanh.apply(x);
    /// The error function.
    erf, Rising, |x| Function::Erf.apply(x);
    /// The exponential.
    exp, Rising, Tensor::exp;
    /// The natural logarithm.
    log, Neither, Tensor::log;
    /// The square root.
    sqrt, Neither, Tensor::sqrt;
    /// One divided by the square root.
    rsqrt, Neither, |x| Function::Rsqrt.apply(x);
    /// The square.
    sqr, Neither, Tensor::sqr;
    /// The sine.
    sin, Neither, Tensor::sin;
    /// The cosine.
    cos, Neither, Tensor::cos;
    /// One divided by each element.
    recip, Neither, |x| Function::Recip.apply(x);
}

/// Step functions. candle cuts the graph at them. The graph must be cut alike on ranks without elements, so they are
/// applied to the detached tensor.
macro_rules! step_functions {
    ($($(#[$doc:meta])* $name:ident, $order:expr, $local:expr;)*) => {
        impl DTensor {
            $($(#[$doc])* ///
            /// The result has no gradient, as in candle.
            #[track_caller]
            pub fn $name(&self) -> Result<Self> {
                self.detach().unary(stringify!($name), $order, &$local)
            })*
        }
    };
}

step_functions! {
    /// Rounds each element down.
    floor, Rising, Tensor::floor;
    /// Rounds each element up.
    ceil, Rising, Tensor::ceil;
    /// Rounds each element to the nearest integer, halves away from zero.
    round, Rising, Tensor::round;
    /// 1, 0 or -1, the sign of each element.
    sign, Neither, Tensor::sign;
}

impl DTensor {
    #[track_caller]
    fn unary(
        &self,
        op: &'static str,
        order: Monotonicity,
        local: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let signature = || {
            self.check_float(op)?;
            let mut rows = unary_rows(self.rank(), false);
            rows.extend(extreme_rows(order, 0, &[self]));
            Ok(Signature::new(rows, self.dims(), self.dtype()))
        };
        rules::run(op, &[order as usize], &[self], signature, |x, _| Ok(local(x[0].to_local())?))
    }

    /// Rounds each element to `decimals` digits behind the point, or before it if `decimals` is negative.
    ///
    /// The result has no gradient, as in candle.
    #[track_caller]
    pub fn round_to(&self, decimals: i32) -> Result<Self> {
        self.detach().unary("round_to", Rising, &|x| x.round_to(decimals))
    }

    /// `x` where it is positive, else `alpha · (exp(x) - 1)`.
    #[track_caller]
    pub fn elu(&self, alpha: f64) -> Result<Self> {
        self.unary("elu", if alpha >= 0.0 { Rising } else { Neither }, &|x| Function::Elu(alpha).apply(x))
    }

    /// `x` where it is positive, else `slope · x`.
    #[track_caller]
    pub fn leaky_relu(&self, slope: f64) -> Result<Self> {
        self.unary("leaky_relu", Neither, &|x| Function::LeakyRelu(slope).apply(x))
    }

    /// Each element to the power of `e`.
    #[track_caller]
    pub fn powf(&self, e: f64) -> Result<Self> {
        self.unary("powf", Neither, &|x| Function::Power(e).apply(x))
    }

    /// Negates each element. The least value of a signed integer dtype maps to itself.
    ///
    /// # Errors
    /// If the elements are unsigned integers.
    #[track_caller]
    pub fn neg(&self) -> Result<Self> {
        let is_int = self.dtype().is_int();
        let signature = || {
            if matches!(self.dtype(), DType::U8 | DType::U32) {
                let reason = format!("{} holds no negative numbers; convert it with to_dtype", self.spec());
                return Error::op("neg", reason);
            }
            let mut rows = unary_rows(self.rank(), true);
            // Integers wrap around.
            rows.extend(extreme_rows(if is_int { Neither } else { Falling }, 0, &[self]));
            Ok(Signature::new(rows, self.dims(), self.dtype()))
        };
        rules::run("neg", &[], &[self], signature, |x, _| Ok(negated(x[0].to_local())?))
    }

    /// The absolute value of each element, also of integers.
    #[track_caller]
    pub fn abs(&self) -> Result<Self> {
        match self.dtype() {
            DType::U8 | DType::U32 => Ok(self.clone()),
            dtype if dtype.is_int() => {
                let signature = || Ok(Signature::new(unary_rows(self.rank(), false), self.dims(), dtype));
                rules::run("abs", &[], &[self], signature, |x, _| {
                    let x = x[0].to_local();
                    Ok(x.broadcast_maximum(&negated(x)?)?)
                })
            }
            _ => self.unary("abs", Neither, &Tensor::abs),
        }
    }

    /// `x · mul + add`; partial sums stay partial where `add` is zero.
    #[track_caller]
    pub fn affine(&self, mul: f64, add: f64) -> Result<Self> {
        let linear = add == 0.0;
        let order = match mul {
            // Integers wrap around.
            _ if self.dtype().is_int() => Neither,
            _ if mul >= 0.0 => Rising,
            _ if mul < 0.0 => Falling,
            _ => Neither,
        };
        // candle cuts the graph at a factor of zero. It must be cut alike on ranks without elements.
        let x = if mul == 0.0 { &self.detach() } else { self };
        let signature = || {
            let mut rows = unary_rows(x.rank(), linear);
            rows.extend(extreme_rows(order, 0, &[x]));
            Ok(Signature::new(rows, x.dims(), x.dtype()))
        };
        let attributes = [usize::from(linear), order as usize];
        rules::run("affine", &attributes, &[x], signature, |x, _| Ok(x[0].to_local().affine(mul, add)?))
    }

    /// Converts to another dtype; partial sums are summed in the present dtype first.
    ///
    /// Integers have no gradient.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        if !converts(self.dtype(), dtype, self.device()) {
            let reason = "candle has no such conversion on this device; convert on the host";
            return Error::op(
                "to_dtype",
                format!("{} to {dtype:?} on {:?}: {reason}", self.spec(), self.device()),
            );
        }
        let x = if dtype.is_int() { &self.detach() } else { self };
        let order = if dtype.is_float() && x.dtype().is_float() { Rising } else { Neither };
        let signature = || {
            let mut rows = unary_rows(x.rank(), false);
            rows.extend(extreme_rows(order, 0, &[x]));
            Ok(Signature::new(rows, x.dims(), dtype))
        };
        rules::run("to_dtype", &[dtype as usize], &[x], signature, |x, _| {
            Ok(convert(x[0].to_local(), dtype)?)
        })
    }
}

/// Negates a tensor. candle cannot negate integers, but can subtract them.
fn negated(x: &Tensor) -> candle_core::Result<Tensor> {
    if x.dtype().is_int() { x.zeros_like()?.sub(x) } else { x.neg() }
}
