//! Ops without a rule of their own: on the whole tensors, by every rank, and never unnoticed.
use crate::rules::{self, Rows, Signature};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};

impl DTensor {
    /// Any op of candle on the whole inputs, which are gathered where they are not replicated; gradient included.
    ///
    /// For what has no rule of its own: correct on every layout, and as costly as on one device. `f` gets the whole
    /// tensors and must give one of the `out` shape and dtype, the same on every rank. A gather is logged as a warning,
    /// and an error within [`strict`](crate::strict()).
    ///
    /// # Errors
    /// Those of `f`, and one if its result has another shape or dtype.
    #[track_caller]
    pub fn on_whole(
        op: &'static str,
        inputs: &[&Self],
        (shape, dtype): (&[usize], DType),
        f: impl FnOnce(&[Tensor]) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        if inputs.is_empty() {
            return Error::op(op, "no inputs; give at least one");
        }
        // The name is the caller's: the first attribute keeps its plans apart from those of an op of the same name.
        let attributes: Vec<usize> = [usize::MAX, dtype as usize].into_iter().chain(shape.iter().copied()).collect();
        let signature = || Ok(Signature::new(Rows::new(), shape, dtype));
        rules::run(op, &attributes, inputs, signature, |x, _| {
            let wholes: Vec<Tensor> = x.iter().map(|x| x.to_local().clone()).collect();
            let out = f(&wholes)?;
            if out.dims() != shape || out.dtype() != dtype {
                let (got, kind) = (out.dims(), out.dtype().as_str());
                let announced = dtype.as_str();
                let fix = "announce what it gives; a shape that depends on the elements cannot be announced";
                return Error::op(op, format!("gave {kind}{got:?} where {announced}{shape:?} was announced: {fix}"));
            }
            Ok(out)
        })
    }
}
