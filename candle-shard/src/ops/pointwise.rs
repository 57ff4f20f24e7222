//! Elementwise arithmetic of two tensors, with broadcasting.
use super::operand::{Operand, Side};
use super::unary::Monotonicity::{self, Falling, Neither, Rising};
use super::unary::extreme_rows;
use crate::layout::{Partial, Placement, Replicate, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
use candle_dist::ReduceOp;

const SUM: Placement = Placement::PARTIAL_SUM;
const MAX: Placement = Partial(ReduceOp::Max);
const MIN: Placement = Partial(ReduceOp::Min);

/// Placements of two inputs and the output that may be partial together.
type JointPlacements = [Placement; 3];

/// The partial placements that pass through an op.
struct Passes {
    /// Placements of both inputs, and the output's placement that follows.
    joint: &'static [JointPlacements],
    /// The order in each input.
    order: [Monotonicity; 2],
}

const ADD: Passes = Passes { joint: &[[SUM, SUM, SUM]], order: [Rising, Rising] };
const SUB: Passes = Passes { joint: &[[SUM, SUM, SUM]], order: [Rising, Falling] };
const MUL: Passes =
    Passes { joint: &[[SUM, Replicate, SUM], [Replicate, SUM, SUM]], order: [Neither, Neither] };
const DIV: Passes = Passes { joint: &[[SUM, Replicate, SUM]], order: [Neither, Neither] };
const LINEAR_IN_SECOND: Passes = Passes { joint: &[[Replicate, SUM, SUM]], order: [Neither, Neither] };

/// For integers only: for floats candle returns the other operand where one is NaN, and NaN must reach the extreme.
const MAXIMUM: Passes = Passes { joint: &[[MAX, MAX, MAX]], order: [Rising, Rising] };
const MINIMUM: Passes = Passes { joint: &[[MIN, MIN, MIN]], order: [Rising, Rising] };

/// Integers wrap around, so sums and differences keep no order; and quotients of partial sums are wrong.
const WRAPPING: Passes = Passes { joint: &[[SUM, SUM, SUM]], order: [Neither, Neither] };
const NOTHING: Passes = Passes { joint: &[], order: [Neither, Neither] };

impl DTensor {
    /// The elementwise sum, with NumPy's broadcasting.
    #[track_caller]
    pub fn add(&self, rhs: impl Operand) -> Result<Self> {
        match rhs.side()? {
            Side::Number(rhs) => self.affine(1.0, rhs),
            rhs => self.binary("add", rhs, self.passes(&ADD, &WRAPPING), &crate::kernels::add),
        }
    }

    /// The elementwise difference, with NumPy's broadcasting.
    #[track_caller]
    pub fn sub(&self, rhs: impl Operand) -> Result<Self> {
        match rhs.side()? {
            Side::Number(rhs) => self.affine(1.0, -rhs),
            rhs => self.binary("sub", rhs, self.passes(&SUB, &WRAPPING), &Tensor::broadcast_sub),
        }
    }

    /// The elementwise product, with NumPy's broadcasting.
    #[track_caller]
    pub fn mul(&self, rhs: impl Operand) -> Result<Self> {
        match rhs.side()? {
            Side::Number(rhs) => self.affine(rhs, 0.0),
            // candle makes a view of a smaller operand. As the second one, such as a parameter, a backward pass visits it before all
            // that the larger one comes from, and so on all ranks, with rows or without.
            Side::Spread(larger) if larger.elem_count() > self.elem_count() => {
                larger.binary("mul", Side::Spread(self), &MUL, &Tensor::broadcast_mul)
            }
            rhs => self.binary("mul", rhs, &MUL, &Tensor::broadcast_mul),
        }
    }

    /// The elementwise quotient, with NumPy's broadcasting.
    #[track_caller]
    pub fn div(&self, rhs: impl Operand) -> Result<Self> {
        match rhs.side()? {
            Side::Number(rhs) => self.affine(1.0 / rhs, 0.0),
            rhs => self.binary("div", rhs, self.passes(&DIV, &NOTHING), &crate::kernels::div),
        }
    }

    /// The larger of two elements, with NumPy's broadcasting; equal ones get half of the gradient each.
    #[track_caller]
    pub fn maximum(&self, rhs: impl Operand) -> Result<Self> {
        self.binary("maximum", rhs.side()?, self.passes(&NOTHING, &MAXIMUM), &Tensor::broadcast_maximum)
    }

    /// The smaller of two elements, with NumPy's broadcasting; equal ones get half of the gradient each.
    #[track_caller]
    pub fn minimum(&self, rhs: impl Operand) -> Result<Self> {
        self.binary("minimum", rhs.side()?, self.passes(&NOTHING, &MINIMUM), &Tensor::broadcast_minimum)
    }

    /// Clamps each element to `min..=max`.
    #[track_caller]
    pub fn clamp(&self, min: impl Operand, max: impl Operand) -> Result<Self> {
        self.maximum(min)?.minimum(max)
    }

    /// Each element, which must be positive, to the power of the other, with NumPy's broadcasting.
    ///
    /// If the power is a number, this is [`powf`](Self::powf), for elements of any sign.
    #[track_caller]
    pub fn pow(&self, rhs: impl Operand) -> Result<Self> {
        match rhs.side()? {
            Side::Number(rhs) => self.powf(rhs),
            rhs => self.log()?.mul(&self.beside(rhs, self.dtype())?)?.exp(),
        }
    }

    /// The gated SiLU `x · sigmoid(x) · gate` of two tensors of one shape, the activation of SwiGLU.
    #[track_caller]
    pub fn silu_gate(&self, gate: &Self) -> Result<Self> {
        self.check_float("silu_gate")?;
        if self.dims() != gate.dims() {
            let reason = format!("{} with a gate {}: expected one shape", self.spec(), gate.spec());
            return Error::op("silu_gate", reason);
        }
        self.binary("silu_gate", Side::Spread(gate), &LINEAR_IN_SECOND, &crate::kernels::silu_gate)
    }

    /// Chooses the rule for floats or integers by this tensor's dtype.
    fn passes(&self, of_floats: &'static Passes, of_whole: &'static Passes) -> &'static Passes {
        if self.dtype().is_int() { of_whole } else { of_floats }
    }

    #[track_caller]
    fn binary(
        &self,
        op: &'static str,
        rhs: Side<'_>,
        passes: &Passes,
        local: &dyn Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let rhs = &self.beside(rhs, self.dtype())?;
        let signature = || {
            let shape = self.check_pair(op, rhs)?;
            let mut rows = broadcast_rows(&shape, &[self.dims(), rhs.dims()]);
            // Extremes pass only without gradients; see `extreme_rows`.
            let passing = |row: &&JointPlacements| row[2] == SUM || !self.tracked() && !rhs.tracked();
            rows.extend(
                passes.joint.iter().filter(passing).map(|&[a, b, out]| ShardingRule::new(out, &[a, b])),
            );
            for (at, &order) in passes.order.iter().enumerate() {
                rows.extend(extreme_rows(order, at, &[self, rhs]));
            }
            Ok(Signature::new(rows, &shape, self.dtype()))
        };
        rules::run(op, &[], &[self, rhs], signature, |x, _| Ok(local(x[0].to_local(), x[1].to_local())?))
    }

    /// The shape that two operands of one dtype broadcast to.
    #[track_caller]
    pub(super) fn check_pair(&self, op: &'static str, rhs: &Self) -> Result<Vec<usize>> {
        if self.dtype() != rhs.dtype() {
            let (a, b) = (self.dtype().as_str(), rhs.dtype().as_str());
            return Error::op(op, format!("dtypes {a} and {b} differ; convert one with to_dtype"));
        }
        broadcast(op, self.dims(), rhs.dims())
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
            _ => Error::op(
                op,
                format!("shapes {a:?} and {b:?} do not broadcast: dim {i} differs and neither is 1"),
            ),
        })
        .collect()
}

/// One row for each dim of `shape`: inputs that have the dim are sharded on it, the others are replicated.
pub(super) fn broadcast_rows(shape: &[usize], inputs: &[&[usize]]) -> ShardingRules {
    let lies = |dims: &[usize], d: usize| match (d + dims.len()).checked_sub(shape.len()) {
        Some(own) if dims[own] == shape[d] => Shard(own),
        _ => Replicate,
    };
    (0..shape.len())
        .map(|d| ShardingRule { out: Shard(d), ins: inputs.iter().map(|dims| lies(dims, d)).collect() })
        .collect()
}
