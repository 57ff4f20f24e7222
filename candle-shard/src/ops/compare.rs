//! Comparisons, and the choice between two tensors.
use super::operand::{Operand, Side};
use super::pointwise::{broadcast, broadcast_rows};
use crate::placement::{Placement, Replicate};
use crate::rules::{self, Row, Signature};
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
                self.compare(stringify!($name), rhs.side()?, Tensor::$local)
            })*
        }
    };
}

comparisons! {
    /// Whether elements are equal.
    eq, broadcast_eq;
    /// Whether elements differ.
    ne, broadcast_ne;
    /// Whether elements are less than the other's.
    lt, broadcast_lt;
    /// Whether elements are less than the other's or equal.
    le, broadcast_le;
    /// Whether elements are greater than the other's.
    gt, broadcast_gt;
    /// Whether elements are greater than the other's or equal.
    ge, broadcast_ge;
}

impl DTensor {
    /// The comparison of this name: [`eq`](Self::eq), [`ne`](Self::ne), [`lt`](Self::lt), [`le`](Self::le),
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
        local: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let (lhs, rhs) = (&self.detach(), &self.beside(rhs, self.dtype())?.detach());
        let signature = || {
            let shape = lhs.check_pair(op, rhs)?;
            Ok(Signature::new(broadcast_rows(&shape, &[lhs.dims(), rhs.dims()]), &shape, DType::U8))
        };
        rules::run(op, &[], &[lhs, rhs], signature, |x, _| Ok(local(x[0].to_local(), x[1].to_local())?))
    }

    /// The elements of `on_true` where this condition (u8, u32 or i64) is not 0, else those of `on_false`.
    ///
    /// Shapes broadcast as NumPy's. Partial sums on both sides stay partial.
    ///
    /// # Errors
    /// If the condition is of another dtype, the dtypes of the two sides differ, both are numbers, or the shapes do not
    /// broadcast.
    #[track_caller]
    pub fn where_cond(&self, on_true: impl Operand, on_false: impl Operand) -> Result<Self> {
        const OP: &str = "where_cond";
        let (on_true, on_false) = (on_true.side()?, on_false.side()?);
        let Some(dtype) = on_true.dtype().or(on_false.dtype()) else {
            return Error::op(OP, "two numbers, which have no dtype; give one of them as a tensor");
        };
        let (cond, on_true, on_false) = (&self.detach(), &self.beside(on_true, dtype)?, &self.beside(on_false, dtype)?);
        let signature = || {
            if !matches!(cond.dtype(), DType::U8 | DType::U32 | DType::I64) {
                return Error::op(OP, format!("a condition {}: want u8, u32 or i64", cond.spec()));
            }
            let shape = broadcast(OP, cond.dims(), &on_true.check_pair(OP, on_false)?)?;
            let mut rows = broadcast_rows(&shape, &[cond.dims(), on_true.dims(), on_false.dims()]);
            rows.push(Row::new(SUM, &[Replicate, SUM, SUM]));
            Ok(Signature::new(rows, &shape, dtype))
        };
        rules::run(OP, &[], &[cond, on_true, on_false], signature, |x, out| {
            let shape = out.local_shape();
            let local = |i: usize| x[i].to_local().broadcast_as(shape.as_slice());
            Ok(local(0)?.where_cond(&local(1)?, &local(2)?)?)
        })
    }
}
