//! Phi, ported from candle-transformers under its names, trained with data and tensor parallelism on 2 × 2 ranks. They learn what one
//! rank does.

use anyhow::ensure;
use candle_core::{DType, Tensor};
use candle_nn::ParamsAdamW;
use candle_shard::kernels::RopePairs;
use candle_shard::nn::{AdamW, Linear, Width, embedding, layer_norm, linear, seq};
use candle_shard::prelude::*;
use candle_shard::{Attention, Result};

/// A layer with four attention heads of width 8 and a parallel MLP. Rotary positions apply to one half of each head.
fn layer(vb: MeshVarBuilder, angles: &Tensor) -> Result<impl Module + Send + Sync + use<>> {
    let (norm, heads) = (layer_norm(32, 1e-5, vb.pp("input_layernorm"))?, Width::new(4, 8));
    let to_heads = |name: &str| Linear::new(32, heads, true, &vb.pp("self_attn").pp(name));
    let (q, k, v) = (to_heads("q_proj")?, to_heads("k_proj")?, to_heads("v_proj")?);
    let dense = Linear::new(heads, 32, true, &vb.pp("self_attn.dense"))?;
    let (fc1, fc2) = (linear(32, 128, vb.pp("mlp.fc1"))?, linear(128, 32, vb.pp("mlp.fc2"))?);
    let (cos, sin) = (angles.cos()?.on(vb.mesh(), [])?, angles.sin()?.on(vb.mesh(), [])?);
    let rotary = move |x: DTensor| {
        let x = x.transpose(1, 2)?;
        let turned = x.narrow(3, 0, 4)?.rope(&cos, &sin, 0, RopePairs::Halves)?;
        DTensor::cat(&[&turned, &x.narrow(3, 4, 4)?], 3)?.transpose(1, 2)
    };
    Ok(move |x: &DTensor| {
        let y = norm.forward(x)?;
        let heads = |layer: &Linear| layer.forward(&y)?.reshape((y.dims()[0], y.dims()[1], 4, 8));
        let mixed = Attention::default().causal(true).of(&rotary(heads(&q)?)?, &rotary(heads(&k)?)?, &heads(&v)?)?;
        x.add(&mixed.reshape(y.dims())?.apply(&dense)?)?.add(&y.apply(&fc1)?.gelu()?.apply(&fc2)?)
    })
}

/// Returns the loss after some steps on a mesh of `dp` × `tp` ranks.
fn train(ctx: &RankContext, dp: usize, tp: usize) -> Result<f32> {
    let (up, down) = (ColwiseParallel::default(), RowwiseParallel::default());
    let plan = Plan::new("tp").with("model.layers.*.self_attn.?_proj", up).with("model.layers.*.self_attn.dense", down);
    let plan = plan.with("model.layers.*.mlp.fc1", up).with("model.layers.*.mlp.fc2", down);
    let vb = MeshVarBuilder::fresh(42, &ctx.mesh(&[("dp", dp), ("tp", tp)])?, plan, DType::F32, ctx.device())?;
    let angles = Tensor::from_vec((0..16).flat_map(|i| [i as f32, 0.01 * i as f32]).collect(), (16, 2), ctx.device())?;
    let mut model = seq().add(embedding(50, 32, vb.pp("model.embed_tokens"))?);
    for i in 0..2 {
        model = model.add(layer(vb.pp("model.layers").pp(i), &angles)?);
    }
    let model = model.add(layer_norm(32, 1e-5, vb.pp("model.final_layernorm"))?).add(linear(32, 50, vb.pp("lm_head"))?);
    let mut optimizer = AdamW::new(&vb.finish()?, ParamsAdamW::default())?;
    let text = Tensor::from_iter((0..102u32).map(|i| i * i % 50), ctx.device())?.reshape((6, 17))?;
    let cut = |first| text.narrow(1, first, 16)?.on(vb.mesh(), [("dp", Shard(0))]);
    let (ids, next) = (cut(0)?, cut(1)?);
    let loss = || model.forward(&ids)?.cross_entropy(&next);
    (0..20).try_for_each(|_| optimizer.backward_step(&loss()?))?;
    loss()?.to_scalar()
}

fn main() -> anyhow::Result<()> {
    let one = World::threads(1).run(|ctx| train(ctx, 1, 1))?[0];
    let four = World::threads(4).run(|ctx| train(ctx, 2, 2))?[0];
    println!("loss {four:.6} on 2 x 2 ranks, {one:.6} on one");
    ensure!((one - four).abs() < 1e-5 && four < 3.0, "the ranks do not learn what one rank does");
    Ok(())
}
