//! Keys and values that are made of latents.
use crate::nn::lora::AdapterScope;
use crate::nn::{Linear, MeshVarBuilder, Width};
use crate::{DTensor, Error, Placements, Replicate, Result};
use candle_core::Tensor;

const OP: &str = "latent_projection";

/// The heads of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentHeads {
    /// Their number.
    pub count: usize,
    /// The part of a key that each head has of its own.
    pub key: usize,
    /// The width of a value.
    pub value: usize,
}

/// The up-projection of multi-head latent attention (DeepSeek-AI 2024): keys and values of all heads, from one latent a
/// token.
///
/// `weight` `[heads · (key + value), latent]` has for each head the rows of its key, then those of its value. Behind its own
/// part a key has one that all heads have in common: the part that is turned by the position. Under
/// [`ColwiseParallel`](crate::parallel::ColwiseParallel) each rank has whole heads, for any number of heads, and latents and
/// common parts are whole on each.
///
/// Attention has two forms with equal results. In the expanded form, queries meet the keys of [`expand`](Self::expand). In
/// the absorbed form, queries that went through [`absorb`](Self::absorb) meet latents and common parts as one key head for all queries, and
/// the mixtures of latents become values by [`values`](Self::values). So a cache has one latent a token.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::nn::{LatentHeads, LatentProjection, MeshVarBuilder};
/// use candle_shard::parallel::{ColwiseParallel, Plan};
/// use candle_shard::{Attention, DTensor, Replicate, Result, Shard};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let plan = Plan::new("tp").with("up", ColwiseParallel::default());
///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?;
///     let up = LatentProjection::new(8, LatentHeads { count: 3, key: 6, value: 5 }, 1, &vb.pp("up"))?;
///     let of = |shape: &[usize], at| DTensor::distribute(&Tensor::ones(shape, DType::F32, &Device::Cpu)?, &mesh, &[at]);
///     let (latents, common) = (of(&[1, 4, 8], Replicate)?, of(&[1, 1, 4, 2], Replicate)?);
///     let [keys, values] = up.expand(&latents, &common)?;
///     assert_eq!((keys.dims(), keys.placements()), (&[1, 3, 4, 8][..], &[Shard(1)][..]));
///     assert_eq!(values.dims(), [1, 3, 4, 5]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone)]
pub struct LatentProjection {
    up: Linear,
    heads: LatentHeads,
    latent: usize,
}

impl LatentProjection {
    /// Builds a layer at the builder's path for latents of this width. On each rank the number of heads is a multiple of
    /// `together`, which divides it.
    ///
    /// # Errors
    /// If a size is 0, or `together` does not divide the heads; if an adapter of the layer has a bias.
    pub fn new(latent: usize, heads: LatentHeads, together: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let LatentHeads { count, key, value } = heads;
        if [latent, count, key, value, together].contains(&0) || !count.is_multiple_of(together) {
            let reason = format!(
                "{count} heads with keys of {key} and values of {value} of latents of {latent}, {together} heads together: expected \
                 positive numbers, and heads a multiple of those that are together"
            );
            return Error::op(OP, reason);
        }
        let rows = Width::new(count / together, together * (key + value));
        let up = Linear::new(latent, rows, false, vb)?;
        if up.has_adapter_biases() {
            let reason = format!(
                "{}: an adapter has a bias, and the weight of latents is used without one: leave out `bias` of this layer",
                vb.path.join(".")
            );
            return Error::op(OP, reason);
        }
        Ok(Self { up, heads, latent })
    }

    /// Returns the keys `[batch, heads, tokens, key + common]` and the values `[batch, heads, tokens, value]` of latents
    /// `[batch, tokens, latent]` and the common parts `[batch, 1, tokens, common]` of the keys.
    ///
    /// # Errors
    /// If shapes do not agree.
    #[track_caller]
    pub fn expand(&self, latents: &DTensor, common: &DTensor) -> Result<[DTensor; 2]> {
        let LatentHeads { key, value, .. } = self.heads;
        let fits = match (latents.dims(), common.dims()) {
            (&[b, t, width], &[of, 1, tokens, _]) => (b, t, width) == (of, tokens, self.latent),
            _ => false,
        };
        if !fits {
            let (latents, common, width) = (latents.spec(), common.spec(), self.latent);
            let want = format!("expected [batch, tokens, {width}] and [batch, 1, tokens, common]");
            return Error::op(OP, format!("latents {latents}, common parts {common}: {want}"));
        }
        let made = self.up.forward(latents)?.split_units(2, key + value)?.transpose(1, 2)?;
        // A sum, and not a join: the gradient of the common part is summed over the heads of a rank before ranks exchange it.
        let own = made.narrow(3, 0, key)?.pad_with_zeros(3, 0, common.dims()[3])?;
        Ok([own.add(&common.pad_with_zeros(3, key, 0)?)?, made.narrow(3, key, value)?])
    }

    /// Returns the queries `[batch, heads, tokens, latent]` that meet latents as queries `[batch, heads, tokens, key]` meet the own
    /// parts of keys.
    ///
    /// # Errors
    /// If shapes do not agree.
    #[track_caller]
    pub fn absorb(&self, query: &DTensor) -> Result<DTensor> {
        AdapterScope::by_rows([query], 2, |[query]| {
            let keys = self.of_heads()?.narrow(1, 0, self.heads.key)?;
            DTensor::einsum("bhtk,hkc->bhtc", &[query, &keys])
        })
    }

    /// Returns the values `[batch, tokens, heads, value]` of mixtures `[batch, tokens, heads, latent]` of latents.
    ///
    /// # Errors
    /// If shapes do not agree.
    #[track_caller]
    pub fn values(&self, mixed: &DTensor) -> Result<DTensor> {
        let LatentHeads { key, value, .. } = self.heads;
        AdapterScope::by_rows([mixed], 1, |[mixed]| {
            DTensor::einsum("bthc,hvc->bthv", &[mixed, &self.of_heads()?.narrow(1, key, value)?])
        })
    }

    /// The weight `[heads, key + value, latent]`, with what running adapters change.
    fn of_heads(&self) -> Result<DTensor> {
        let LatentHeads { key, value, .. } = self.heads;
        let weight = match self.up.is_adapted() {
            false => self.up.weight().clone(),
            true => {
                let weight = self.up.weight();
                let one = Tensor::eye(self.latent, weight.dtype(), weight.device())?;
                let whole = Placements::from_elem(Replicate, weight.mesh().ndim());
                self.up.forward(&DTensor::distribute(&one, weight.mesh(), &whole)?)?.t()?
            }
        };
        weight.split_units(0, key + value)
    }

    /// Returns the weight `[heads · (key + value), latent]`.
    pub fn weight(&self) -> &DTensor {
        self.up.weight()
    }
}
