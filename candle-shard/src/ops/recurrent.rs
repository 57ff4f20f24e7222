//! Layers that keep a state of a sequence: short convolutions, the gated delta rule, and the scan of Mamba 2.
use super::attention::Documents;
use crate::layout::{Placement, Replicate, Shard, Spec};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result, kernels};
use candle_core::{DType, Tensor};
use smallvec::smallvec;
use std::sync::Arc;

const SUM: Placement = Placement::PARTIAL_SUM;

/// The dim of channels in `[batch, tokens, channels]`, and of heads in `[batch, tokens, heads, ..]`.
const CHANNELS: usize = 2;

/// The dim of the heads of a group in `[batch, tokens, groups, heads, ..]`.
const HEADS: usize = 3;

impl DTensor {
    /// The causal convolution of each channel of `[batch, tokens + taps - 1, channels]` with its own row of `[channels, taps]`: `[batch,
    /// tokens, channels]`.
    ///
    /// The first `taps - 1` inputs are those before the first token: zeros, or the last ones of the tokens before. With `documents`, a
    /// token sees no inputs of other documents. The batch or the channels may be sharded, with shards of any sizes, and nothing is sent.
    /// The kernel is [`kernels::short_conv`].
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Replicate, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let x = Tensor::new(&[[[1f32, 10.], [2., 20.], [3., 30.]]], &Device::Cpu)?;
    ///     let x = DTensor::distribute(&x, &mesh, &[Shard(2)])?.pad_with_zeros(1, 1, 0)?; // 2 taps see one token before
    ///     let taps = DTensor::ones((2, 2), DType::F32, &Device::Cpu, &mesh, &[Shard(0)])?;
    ///     let sums = x.short_conv(&taps, None)?;
    ///     assert_eq!(sums.placements(), [Shard(2)]);
    ///     assert_eq!(sums.to_vec3::<f32>()?, [[[1., 10.], [3., 30.], [5., 50.]]]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, there are less than `taps - 1` inputs, or the documents do not fit the tokens.
    #[track_caller]
    pub fn short_conv(&self, weight: &Self, documents: Option<&Documents>) -> Result<Self> {
        let (&[batch, inputs, channels], &[rows, taps]) = (self.dims(), weight.dims()) else {
            return self.refuse_taps(weight);
        };
        let tokens = (inputs + 1).checked_sub(taps).filter(|_| rows == channels && taps > 0);
        let Some(tokens) = tokens.filter(|_| weight.dtype() == self.dtype()) else {
            return self.refuse_taps(weight);
        };
        if let Some(documents) = documents {
            documents.check("short_conv", batch, tokens)?;
        }
        let signature = || {
            self.check_float("short_conv")?;
            let rows = ShardingRules::from_iter([
                ShardingRule::new(Shard(0), &[Shard(0), Replicate]),
                ShardingRule::new(Shard(CHANNELS), &[Shard(CHANNELS), Shard(0)]),
                ShardingRule::new(SUM, &[SUM, Replicate]),
                ShardingRule::new(SUM, &[Replicate, SUM]),
            ]);
            Ok(Signature::new(rows, &[batch, tokens, channels], self.dtype()))
        };
        rules::run("short_conv", &[], &[self, weight], signature, |x, out| {
            let history = history(documents, out);
            Ok(kernels::short_conv(x[0].to_local(), x[1].to_local(), history)?)
        })
    }

    #[track_caller]
    fn refuse_taps(&self, weight: &Self) -> Result<Self> {
        let what = format!("{} with taps {}", self.spec(), weight.spec());
        let want = "expected [batch, tokens + taps - 1, channels] and [channels, taps] of one dtype";
        Error::op("short_conv", format!("{what}: {want}"))
    }

    /// The gated delta rule: a state that each token decays by `e^g`, corrects towards its value by the share `beta`, and reads with its
    /// query.
    ///
    /// The query (`self`) and the key are `[batch, tokens, heads, key]`, the value is `[batch, tokens, heads, values · width]`, and `beta`
    /// and `g` are `[batch, tokens, heads, values]`: each key head has so many value heads. Returns the results, in the shape of the value,
    /// and the states behind the last token `[batch, key, heads, values · width]`, in f32 for 16-bit floats. They begin as `state`, with
    /// that dtype, or as zeros; states have no gradient. With `documents`, the first token of each document begins with zeros. The batch
    /// or the heads may be sharded, with shards of any sizes, and nothing is sent. The kernel is [`kernels::gated_delta_rule`], which has
    /// the formulas.
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, or the documents do not fit the tokens.
    #[track_caller]
    pub fn gated_delta_rule(
        &self,
        [key, value]: [&Self; 2],
        [beta, g]: [&Self; 2],
        state: Option<&Self>,
        documents: Option<&Documents>,
    ) -> Result<[Self; 2]> {
        const OP: &str = "gated_delta_rule";
        let inputs = [self, key, value, beta, g];
        let wide = wide(self.dtype());
        let refuse = || {
            let specs: Vec<String> = inputs.into_iter().chain(state).map(|x| x.spec().to_string()).collect();
            let want = "expected a query and a key [batch, tokens, heads, key], a value [batch, tokens, heads, values · width], beta and \
                        g [batch, tokens, heads, values], and perhaps a state";
            let want = format!("{want} [batch, key, heads, values · width] of {}", wide.as_str());
            Error::op(OP, format!("{}: {want}", specs.join(", ")))
        };
        let (&[batch, tokens, heads, dim], &[.., values]) = (self.dims(), beta.dims()) else {
            return refuse();
        };
        let width = value.dims().last().copied().unwrap_or(0);
        let kept = [batch, dim, heads, width];
        let fits = key.dims() == self.dims()
            && value.dims() == [batch, tokens, heads, width]
            && width.is_multiple_of(values.max(1))
            && [beta, g].iter().all(|x| x.dims() == [batch, tokens, heads, values])
            && (values > 0 || width == 0)
            && inputs.iter().all(|x| x.dtype() == self.dtype())
            && state.is_none_or(|state| state.dims() == kept && state.dtype() == wide);
        if !fits {
            return refuse();
        }
        if let Some(documents) = documents {
            documents.check(OP, batch, tokens)?;
        }
        let inputs: smallvec::SmallVec<[&Self; 6]> = inputs.into_iter().chain(state).collect();
        let signature = || {
            self.check_float(OP)?;
            let all = |at| ShardingRule { out: Shard(at), ins: inputs.iter().map(|_| Shard(at)).collect() };
            let rows = ShardingRules::from_iter([all(0), all(CHANNELS)]);
            Ok(Signature::new(rows, value.dims(), self.dtype()).and(&kept, wide))
        };
        let mut made = rules::run_all(OP, &[], &inputs, &signature, &|x, outs| {
            let history = history(documents, &outs[0]);
            let local = |at: usize| x[at].to_local();
            let state = x.get(5).map(DTensor::to_local);
            let (qkv, gates) = ([local(0), local(1), local(2)], [local(3), local(4)]);
            let (made, state) = kernels::gated_delta_rule(qkv, gates, state, history)?;
            Ok(smallvec![made, state])
        })?;
        let state = made.remove(1);
        Ok([made.remove(0), state])
    }

    /// The scan of Mamba 2: a state that each token decays by `e^g`, writes as the product of `b` and its input `x`, and reads with `c`.
    ///
    /// `c` (`self`) and `b` are `[batch, tokens, groups, state]`, `x` is `[batch, tokens, groups, heads, width]`, and `g` is `[batch, tokens,
    /// groups, heads]`: each group has so many heads. Returns the results, in the shape of `x`, and the states behind the last token
    /// `[batch, state, groups, heads, width]`, in f32 for 16-bit floats. They begin as `first`, with that dtype, or as zeros; states have
    /// no gradient. With `documents`, the first token of each document begins with zeros. The batch, the groups, or the heads of groups
    /// may be sharded, with shards of any sizes; in the last case all ranks have `c` and `b`. Nothing is sent. The kernel is
    /// [`kernels::state_space_scan`], which has the formulas.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Replicate, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let of = |values: &[f32], shape: &[usize], placement| {
    ///         DTensor::distribute(&Tensor::from_slice(values, shape, &Device::Cpu)?, &mesh, &[placement])
    ///     };
    ///     let one = of(&[1., 1.], &[1, 2, 1, 1], Replicate)?; // two tokens write and read one number
    ///     let x = of(&[1., 10., 2., 20.], &[1, 2, 1, 2, 1], Shard(3))?; // each rank has one of two heads
    ///     let g = of(&[0., 0., 0.5f32.ln(), 0.], &[1, 2, 1, 2], Shard(3))?;
    ///     let [y, _] = one.state_space_scan([&one, &x], &g, None, None)?;
    ///     assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1., 10., 2.5, 30.]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, or the documents do not fit the tokens.
    #[track_caller]
    pub fn state_space_scan(
        &self,
        [b, x]: [&Self; 2],
        g: &Self,
        first: Option<&Self>,
        documents: Option<&Documents>,
    ) -> Result<[Self; 2]> {
        const OP: &str = "state_space_scan";
        let inputs = [self, b, x, g];
        let wide = wide(self.dtype());
        let refuse = || {
            let specs: Vec<String> = inputs.into_iter().chain(first).map(|x| x.spec().to_string()).collect();
            let want = "expected c and b [batch, tokens, groups, state], x [batch, tokens, groups, heads, width], g [batch, tokens, \
                        groups, heads], and perhaps states";
            let want = format!("{want} [batch, state, groups, heads, width] of {}", wide.as_str());
            Error::op(OP, format!("{}: {want}", specs.join(", ")))
        };
        let (&[batch, tokens, groups, size], &[.., heads, width]) = (self.dims(), x.dims()) else {
            return refuse();
        };
        let kept = [batch, size, groups, heads, width];
        let fits = b.dims() == self.dims()
            && x.dims() == [batch, tokens, groups, heads, width]
            && g.dims() == [batch, tokens, groups, heads]
            && inputs.iter().all(|x| x.dtype() == self.dtype())
            && first.is_none_or(|state| state.dims() == kept && state.dtype() == wide);
        if !fits {
            return refuse();
        }
        if let Some(documents) = documents {
            documents.check(OP, batch, tokens)?;
        }
        let inputs: smallvec::SmallVec<[&Self; 6]> = inputs.into_iter().chain(first).collect();
        let signature = || {
            self.check_float(OP)?;
            let all = |at| ShardingRule { out: Shard(at), ins: inputs.iter().map(|_| Shard(at)).collect() };
            let mut of_heads = all(HEADS);
            (of_heads.ins[0], of_heads.ins[1]) = (Replicate, Replicate);
            let rows = ShardingRules::from_iter([all(0), all(CHANNELS), of_heads]);
            Ok(Signature::new(rows, x.dims(), self.dtype()).and(&kept, wide))
        };
        let mut made = rules::run_all(OP, &[], &inputs, &signature, &|x, outs| {
            let history = history(documents, &outs[0]);
            let joined = |x: &DTensor| x.to_local().flatten_from(HEADS);
            let state = x.get(4).map(joined).transpose()?;
            let cbx = [x[0].to_local(), x[1].to_local(), &joined(&x[2])?];
            let (made, state) = kernels::state_space_scan(cbx, x[3].to_local(), state.as_ref(), history)?;
            let apart = |made: Tensor, at: usize| made.reshape(&outs[at].local_shape()[..]);
            Ok(smallvec![apart(made, 0)?, apart(state, 1)?])
        })?;
        let state = made.remove(1);
        Ok([made.remove(0), state])
    }
}

/// What sums over tokens have, for inputs of a dtype.
fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// How many tokens of its document are before each token of this rank's part of `out` `[batch, tokens, ..]`.
fn history(documents: Option<&Documents>, out: &Spec) -> Option<Arc<[u32]>> {
    let block = out.local_block();
    documents.map(|documents| documents.history(block[0].clone(), out.dims()[1]))
}
