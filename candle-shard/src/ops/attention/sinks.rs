//! Attention sinks: a logit for each head that takes a share of the softmax, and gives nothing.
use crate::{DTensor, Error, Result};
use candle_core::DType;

impl DTensor {
    /// Gives sinks a share of a softmax: of an attention's result with [log sums](crate::Attention::log_sums), `[batch, q, heads, v +
    /// 1]`, and a logit for each head, `sinks` `[heads]`, makes the result `[batch, q, heads, v]` in the dtype `dtype`.
    ///
    /// The weight of a key is then `exp(score) / (exp(sink) + Σ exp(score))`, as in gpt-oss. The sum over keys is known, however keys and
    /// queries are sharded, so a sink counts once. Sinks that are sharded as the heads are need no communication.
    ///
    /// # Errors
    /// If the shapes do not agree, or the dtype is no float.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{Attention, DTensor, Replicate, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let x = Tensor::ones((1, 3, 2, 4), DType::F32, &Device::Cpu)?;
    ///     let x = DTensor::distribute(&x, &mesh, &[Shard(2)])?;
    ///     // As large as the sum over three equal scores of 2.
    ///     let sinks = Tensor::full(2.0 + 3f32.ln(), 2, &Device::Cpu)?;
    ///     let sinks = DTensor::distribute(&sinks, &mesh, &[Shard(0)])?;
    ///     let y = Attention::default().log_sums(true).of(&x, &x, &x)?.with_sinks(&sinks, DType::F32)?;
    ///     assert!((y.mean_all()?.full_tensor()?.to_scalar::<f32>()? - 0.5).abs() < 1e-6);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn with_sinks(&self, sinks: &Self, dtype: DType) -> Result<Self> {
        let (&[_, _, heads, columns @ (1..)], &[count]) = (self.dims(), sinks.dims()) else {
            return refuse(self, sinks);
        };
        if heads != count {
            return refuse(self, sinks);
        }
        self.check_float(OP)?;
        let (values, log_sums) = (self.narrow(3, 0, columns - 1)?, self.narrow(3, columns - 1, 1)?);
        let sinks = sinks.to_dtype(self.dtype())?.unsqueeze(1)?;
        values.mul(&log_sums.sub(&sinks)?.sigmoid()?)?.to_dtype(dtype)
    }
}

const OP: &str = "with_sinks";

fn refuse(of: &DTensor, sinks: &DTensor) -> Result<DTensor> {
    let (of, sinks) = (of.spec(), sinks.spec());
    Error::op(
        OP,
        format!("a result {of} and sinks {sinks}: expected [b, q, h, v + 1] with log sums, and [h]"),
    )
}
