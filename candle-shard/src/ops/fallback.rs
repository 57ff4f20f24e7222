//! Ops without a rule of their own: on the whole tensors, by every rank, and never unnoticed.
use crate::rules::{self, Rows, Signature};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};
use std::cell::Cell;

thread_local! {
    static STRICT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`, in which [`DTensor::on_whole`] is an error where it would have to gather.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, Shard, strict};
///
/// World::local(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let x = Tensor::ones((4, 6), DType::F32, &Device::Cpu)?;
///     let x = DTensor::distribute(&x, &mesh, &[Shard(0)])?;
///     let flip = || DTensor::on_whole("flip", &[&x], (&[4, 6], DType::F32), |x| x[0].flip(&[0]));
///     assert!(strict(flip).unwrap_err().to_string().contains("flip"));
///     assert_eq!(flip()?.dims(), [4, 6]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn strict<R>(f: impl FnOnce() -> R) -> R {
    struct Outer(bool);
    impl Drop for Outer {
        fn drop(&mut self) {
            STRICT.set(self.0);
        }
    }
    let _outer = Outer(STRICT.replace(true));
    f()
}

impl DTensor {
    /// Any op of candle on the whole inputs, which are gathered where they are not replicated; gradient included.
    ///
    /// For what has no rule of its own: correct on every layout, and as costly as on one device. `f` gets the whole
    /// tensors and must give one of the `out` shape and dtype, the same on every rank. A gather is logged as a warning,
    /// and an error within [`strict`].
    ///
    /// # Errors
    /// Those of `f`, and one if its result has another shape or dtype.
    pub fn on_whole(
        op: &'static str,
        inputs: &[&Self],
        (shape, dtype): (&[usize], DType),
        f: impl FnOnce(&[Tensor]) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let Some(first) = inputs.first() else { return Error::op(op, "no inputs; give at least one") };
        if let Some(input) = inputs.iter().find(|input| !input.is_replicated()) {
            let what = format!("{} has no rule for {op} and is gathered whole on every rank", input.spec());
            if STRICT.get() {
                return Error::op(op, format!("{what}; redistribute it first, or leave strict"));
            }
            if first.mesh().coordinate().iter().all(|&at| at == 0) {
                log::warn!("{what}");
            }
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
