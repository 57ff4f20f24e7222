//! A backward pass and a step in one call.
use crate::common::*;
use candle_core::{DType, Tensor};
use candle_dist::RankContext;
use candle_shard::nn::{
    AdamW, LayerNorm, Linear, MeshVarBuilder, Muon, Optimizer, Parameters, ParamsMuon, ParamsSgd, Sgd,
};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, SequenceParallel};
use candle_shard::{DTensor, Result, Shard};
use test_utils::on_ranks;

/// Returns an optimizer of these parameters.
type Make = fn(&Parameters) -> Result<Box<dyn Optimizer>>;

/// Trains a norm, whose gradient each rank has a part of, and two layers. Returns the parameters.
fn train(ctx: &RankContext, make: Make, at_once: bool) -> Result<Vec<Tensor>> {
    let plan = Plan::new("a")
        .with("norm", SequenceParallel::default().dim(0))
        .with("up", ColwiseParallel::default())
        .with("down", RowwiseParallel::default().output(Shard(0)));
    let mesh = ctx.mesh(&[("a", ctx.world_size())])?;
    let vb = MeshVarBuilder::fresh(3, &mesh, plan, DType::F64, &device())?;
    let norm = LayerNorm::new(4, 1e-5, &vb.pp("norm"))?;
    let (up, down) = (Linear::new(4, 6, true, &vb.pp("up"))?, Linear::new(6, 4, true, &vb.pp("down"))?);
    let parameters = vb.finish()?;
    let mut optimizer = make(&parameters)?;
    let trained: Vec<String> = optimizer.parameters().iter().map(|p| p.name.clone()).collect();
    assert!(
        trained.len() == parameters.len() && parameters.iter().all(|p| trained.contains(&p.name)),
        "{trained:?}"
    );
    let x = Tensor::arange(0f64, 20., &device())?.sin()?.reshape((5, 4))?;
    let x = DTensor::distribute(&x, &mesh, &[Shard(0)])?;
    for _ in 0..3 {
        let loss = down.forward(&up.forward(&norm.forward(&x)?)?.gelu()?)?.sub(&x)?.sqr()?.mean_all()?;
        match at_once {
            true => optimizer.backward_step(&loss)?,
            false => optimizer.step(&parameters.backward(&loss)?)?,
        }
    }
    parameters.iter().map(|p| Ok(p.tensor.full_tensor()?.detach().copy()?)).collect()
}

fn distance(a: &[Tensor], b: &[Tensor]) -> Result<f64> {
    let off = a.iter().zip(b).map(|(a, b)| Ok((a - b)?.abs()?.max_all()?.to_scalar::<f64>()?));
    Ok(off.collect::<Result<Vec<_>>>()?.into_iter().fold(0.0, f64::max))
}

#[test]
fn the_gradients_are_complete_and_all_parameters_move_as_on_one_device() {
    let sgd: Make =
        |parameters| Ok(Box::new(Sgd::new(parameters, ParamsSgd { lr: 0.5, ..Default::default() })?));
    let muon: Make = |parameters| {
        let (matrices, others) = parameters.partition(|p| p.tensor.rank() == 2);
        let others = AdamW::new(&others, candle_nn::ParamsAdamW::default())?;
        Ok(Box::new(Muon::new(&matrices, ParamsMuon::default())?.with_adam_w(others)?))
    };
    for make in [sgd, muon] {
        let want = on_ranks(1, "alone", move |ctx| train(ctx, make, true)).swap_remove(0);
        for ranks in [1, 2, 3] {
            let want = want.iter().map(Tensor::copy).collect::<candle_core::Result<Vec<_>>>().unwrap();
            on_ranks(ranks, "backward", move |ctx| -> Result<()> {
                let got = train(ctx, make, true)?;
                assert_eq!(distance(&got, &train(ctx, make, false)?)?, 0.0, "the two calls are the same");
                let off = distance(&got, &want)?;
                assert!(off < 1e-9, "off by {off:e} on {ranks} ranks");
                Ok(())
            });
        }
    }
}
