//! Elementwise comparisons, and selection between two tensors.
use super::operand::{Operand, Side};
use super::pointwise::{broadcast, broadcast_rows};
use crate::layout::{Placement, Replicate};
use crate::rules::{self, ShardingRule, Signature};
use crate::{DTensor, Error, Result};
use candle_core::op::CmpOp;
use candle_core::{DType, Tensor};

const SUM: Placement = Placement::PARTIAL_SUM;

macro_rules! comparisons {
    ($($(#[$doc:meta])* $name:ident, $local:ident;)*) => {
        impl DTensor {
            $($(#[$doc])* /// The result is u8, 1 where it is so; shapes broadcast as NumPy's.
            #[track_caller]
            pub fn $name(&self, rhs: impl Operand) -> Result<Self> {
                self.compare(stringify!($name), rhs.side()?, &Tensor::$local)
            })*
        }
    };
}

comparisons! {
    /// 1 where elements are equal, else 0.
    eq, broadcast_eq;
    /// 1 where elements differ, else 0.
    ne, broadcast_ne;
    /// 1 where elements are less than those of `rhs`, else 0.
    lt, broadcast_lt;
    /// 1 where elements are less than or equal to those of `rhs`, else 0.
    le, broadcast_le;
    /// 1 where elements are greater than those of `rhs`, else 0.
    gt, broadcast_gt;
    /// 1 where elements are greater than or equal to those of `rhs`, else 0.
    ge, broadcast_ge;
}

impl DTensor {
    /// Applies the comparison `op`: [`eq`](Self::eq), [`ne`](Self::ne), [`lt`](Self::lt), [`le`](Self::le),
    /// [`gt`](Self::gt) or [`ge`](Self::ge).
    #[track_caller]
    pub fn cmp(&self, rhs: impl Operand, op: CmpOp) -> Result<Self> {
        match op {
            CmpOp::Eq => self.eq(rhs),
            CmpOp::Ne => self.ne(rhs),
            CmpOp::Lt => self.lt(rhs),
            CmpOp::Le => self.le(rhs),
            CmpOp::Gt => self.gt(rhs),
            CmpOp::Ge => self.ge(rhs),
        }
    }

    #[track_caller]
    fn compare(
        &self,
        op: &'static str,
        rhs: Side<'_>,
        local: &dyn Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let (lhs, rhs) = (&self.detach(), &self.beside(rhs, self.dtype())?.detach());
        let signature = || {
            let shape = lhs.check_pair(op, rhs)?;
            Ok(Signature::new(broadcast_rows(&shape, &[lhs.dims(), rhs.dims()]), &shape, DType::U8))
        };
        rules::run(op, &[], &[lhs, rhs], signature, |x, _| Ok(local(x[0].to_local(), x[1].to_local())?))
    }

    /// Selects elements of `on_true` where this condition (u8, u32 or i64) is not 0, else of `on_false`.
    ///
    /// Shapes broadcast as in NumPy. If both sides are partial sums, the result is partial too.
    ///
    /// # Errors
    /// If the condition has another dtype, the dtypes of the two sides differ, both sides are numbers, or the shapes do
    /// not broadcast.
    #[track_caller]
    pub fn where_cond(&self, on_true: impl Operand, on_false: impl Operand) -> Result<Self> {
        const OP: &str = "where_cond";
        let (on_true, on_false) = (on_true.side()?, on_false.side()?);
        let Some(dtype) = on_true.dtype().or(on_false.dtype()) else {
            return Error::op(OP, "two numbers, which have no dtype; give one of them as a tensor");
        };
        let (cond, on_true, on_false) =
            (&self.detach(), &self.beside(on_true, dtype)?, &self.beside(on_false, dtype)?);
        let signature = || {
            if !matches!(cond.dtype(), DType::U8 | DType::U32 | DType::I64) {
                return Error::op(OP, format!("a condition {}: expected u8, u32 or i64", cond.spec()));
            }
            let shape = broadcast(OP, cond.dims(), &on_true.check_pair(OP, on_false)?)?;
            let mut rows = broadcast_rows(&shape, &[cond.dims(), on_true.dims(), on_false.dims()]);
            rows.push(ShardingRule::new(SUM, &[Replicate, SUM, SUM]));
            Ok(Signature::new(rows, &shape, dtype))
        };
        rules::run(OP, &[], &[cond, on_true, on_false], signature, |x, out| {
            let shape = out.local_shape();
            let local = |i: usize| x[i].to_local().broadcast_as(shape.as_slice());
            Ok(local(0)?.where_cond(&local(1)?, &local(2)?)?)
        })
    }
}
