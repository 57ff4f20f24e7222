//! Ops without a sharding rule: every rank runs them on the whole tensors, with a warning where data is gathered.
use crate::rules::{self, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};

impl DTensor {
    /// Runs any candle op on the whole inputs. Inputs that are not replicated are gathered. Gradients work.
    ///
    /// For ops without a sharding rule. Correct on every layout, and as costly as on one device. `f` gets the whole
    /// tensors and must return a tensor of the `out` shape and dtype, the same on every rank. A gather is logged as a
    /// warning, and is an error within [`strict`](crate::strict()).
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
        let attributes: Vec<usize> = std::iter::once(dtype as usize).chain(shape.iter().copied()).collect();
        let signature = || Ok(Signature::new(ShardingRules::new(), shape, dtype));
        rules::apply(op, &attributes, inputs, signature, |x, _| {
            let wholes: Vec<Tensor> = x.iter().map(|x| x.to_local().clone()).collect();
            let out = f(&wholes)?;
            if out.dims() != shape || out.dtype() != dtype {
                let (got, kind) = (out.dims(), out.dtype().as_str());
                let announced = dtype.as_str();
                let fix =
                    "announce what it returns; a shape that depends on the elements cannot be announced";
                return Error::op(
                    op,
                    format!("returned {kind}{got:?}, but {announced}{shape:?} was announced: {fix}"),
                );
            }
            Ok(out)
        })
    }
}
