//! Elementwise ops: any dim may be sharded, and linear ones pass partial sums through.
use crate::placement::{Placement, Replicate, Shard};
use crate::rules::{self, Row, Rows, Signature};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};

const SUM: Placement = Placement::PARTIAL_SUM;

/// Every dim sharded, in and out.
pub(super) fn unary_rows(rank: usize, linear: bool) -> Rows {
    let shards = (0..rank).map(|d| Row::new(Shard(d), &[Shard(d)]));
    shards.chain(linear.then(|| Row::new(SUM, &[SUM]))).collect()
}

macro_rules! unary_ops {
    ($($(#[$doc:meta])* $name:ident, $local:expr;)*) => {
        impl DTensor {
            $($(#[$doc])* pub fn $name(&self) -> Result<Self> {
                self.unary(stringify!($name), false, $local)
            })*
        }
    };
}

unary_ops! {
    /// The larger of each element and zero.
    relu, Tensor::relu;
    /// The exact Gaussian error linear unit, `x · Φ(x)`.
    gelu, crate::kernels::gelu;
    /// `x · sigmoid(x)`.
    silu, Tensor::silu;
    /// The logistic function.
    sigmoid, candle_nn::ops::sigmoid;
    /// The hyperbolic tangent.
    tanh, Tensor::tanh;
    /// The exponential.
    exp, Tensor::exp;
    /// The natural logarithm.
    log, Tensor::log;
    /// The square root.
    sqrt, Tensor::sqrt;
    /// The square.
    sqr, Tensor::sqr;
    /// The absolute value.
    abs, Tensor::abs;
    /// The sine.
    sin, Tensor::sin;
    /// The cosine.
    cos, Tensor::cos;
    /// One divided by each element.
    recip, Tensor::recip;
}

impl DTensor {
    fn unary(
        &self,
        op: &'static str,
        linear: bool,
        local: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let signature = || {
            self.check_float(op)?;
            Ok(Signature::new(unary_rows(self.rank(), linear), self.dims(), self.dtype()))
        };
        rules::run(op, &[], &[self], signature, |x, _| Ok(local(x[0].to_local())?))
    }

    /// Each element with its sign changed.
    pub fn neg(&self) -> Result<Self> {
        self.unary("neg", true, Tensor::neg)
    }

    /// `x · mul + add`; partial sums stay partial where `add` is zero.
    pub fn affine(&self, mul: f64, add: f64) -> Result<Self> {
        let linear = add == 0.0;
        let signature = || Ok(Signature::new(unary_rows(self.rank(), linear), self.dims(), self.dtype()));
        rules::run("affine", &[usize::from(linear)], &[self], signature, |x, _| Ok(x[0].to_local().affine(mul, add)?))
    }

    /// The same values in another dtype; partial sums are added up in the present one first.
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        let signature = || Ok(Signature::new(unary_rows(self.rank(), false), self.dims(), dtype));
        rules::run("to_dtype", &[dtype as usize], &[self], signature, |x, _| Ok(x[0].to_local().to_dtype(dtype)?))
    }

    /// The tensor cut off from the graph.
    pub fn detach(&self) -> Self {
        DTensor::assemble(self.to_local().detach(), self.shared_spec().clone(), 0)
    }

    /// The elementwise sum, shapes broadcast as NumPy's.
    pub fn add(&self, rhs: &Self) -> Result<Self> {
        self.binary("add", rhs, &[Row::new(SUM, &[SUM, SUM])], |a, b| a.broadcast_add(b))
    }

    /// The elementwise difference, shapes broadcast as NumPy's.
    pub fn sub(&self, rhs: &Self) -> Result<Self> {
        self.binary("sub", rhs, &[Row::new(SUM, &[SUM, SUM])], |a, b| a.broadcast_sub(b))
    }

    /// The elementwise product, shapes broadcast as NumPy's.
    pub fn mul(&self, rhs: &Self) -> Result<Self> {
        let linear = [Row::new(SUM, &[SUM, Replicate]), Row::new(SUM, &[Replicate, SUM])];
        self.binary("mul", rhs, &linear, |a, b| a.broadcast_mul(b))
    }

    /// The elementwise quotient, shapes broadcast as NumPy's.
    pub fn div(&self, rhs: &Self) -> Result<Self> {
        self.binary("div", rhs, &[Row::new(SUM, &[SUM, Replicate])], |a, b| a.broadcast_div(b))
    }

    /// The gated SiLU `x · sigmoid(x) · gate` of two tensors of one shape, the activation of SwiGLU.
    pub fn silu_gate(&self, gate: &Self) -> Result<Self> {
        self.check_float("silu_gate")?;
        if self.dims() != gate.dims() {
            let reason = format!("{} with a gate {}: want one shape", self.spec(), gate.spec());
            return Error::op("silu_gate", reason);
        }
        self.binary("silu_gate", gate, &[Row::new(SUM, &[Replicate, SUM])], crate::kernels::silu_gate)
    }

    fn binary(
        &self,
        op: &'static str,
        rhs: &Self,
        linear: &[Row],
        local: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let signature = || {
            if self.dtype() != rhs.dtype() {
                let (a, b) = (self.dtype().as_str(), rhs.dtype().as_str());
                return Error::op(op, format!("dtypes {a} and {b} differ; convert one with to_dtype"));
            }
            let shape = broadcast(op, self.dims(), rhs.dims())?;
            let mut rows = broadcast_rows(&shape, &[self.dims(), rhs.dims()]);
            rows.extend(linear.iter().cloned());
            Ok(Signature::new(rows, &shape, self.dtype()))
        };
        rules::run(op, &[], &[self, rhs], signature, |x, _| Ok(local(x[0].to_local(), x[1].to_local())?))
    }
}

/// The shape that two shapes broadcast to.
pub(super) fn broadcast(op: &'static str, a: &[usize], b: &[usize]) -> Result<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |s: &[usize], i: usize| (i + s.len()).checked_sub(rank).map_or(1, |i| s[i]);
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y || y == 1 => Ok(x),
            (1, y) => Ok(y),
            _ => Error::op(op, format!("shapes {a:?} and {b:?} do not broadcast: dim {i} differs and neither is 1")),
        })
        .collect()
}

/// One row for each dim of `shape`: inputs that have the dim are sharded on it, others are whole.
pub(super) fn broadcast_rows(shape: &[usize], inputs: &[&[usize]]) -> Rows {
    let lies = |dims: &[usize], d: usize| match (d + dims.len()).checked_sub(shape.len()) {
        Some(own) if dims[own] == shape[d] => Shard(own),
        _ => Replicate,
    };
    (0..shape.len()).map(|d| Row { out: Shard(d), ins: inputs.iter().map(|dims| lies(dims, d)).collect() }).collect()
}

macro_rules! operator {
    ($trait:ident, $method:ident) => {
        impl std::ops::$trait<&DTensor> for &DTensor {
            type Output = Result<DTensor>;
            fn $method(self, rhs: &DTensor) -> Result<DTensor> {
                DTensor::$method(self, rhs)
            }
        }
    };
}
operator!(Add, add);
operator!(Sub, sub);
operator!(Mul, mul);
operator!(Div, div);

impl std::ops::Mul<f64> for &DTensor {
    type Output = Result<DTensor>;
    fn mul(self, rhs: f64) -> Result<DTensor> {
        self.affine(rhs, 0.0)
    }
}

impl std::ops::Add<f64> for &DTensor {
    type Output = Result<DTensor>;
    fn add(self, rhs: f64) -> Result<DTensor> {
        self.affine(1.0, rhs)
    }
}
