//! Trainings by each optimizer, with fully sharded units and cut layers, against one device; from and onto every mesh.
use crate::fsdp::harness::{Case, Model, assert_close, batch, rows};
use candle_core::DType;
use candle_dist::comm;
use candle_nn::ParamsAdamW;
use candle_shard::fsdp::FullyShardOptions;
use candle_shard::nn::{
    Adagrad, AdamW, MeshVarBuilder, Muon, Optimizer, ParamGroup, Parameters, ParamsAdagrad, ParamsMuon,
    ParamsSgd, Sgd,
};
use candle_shard::{Result, checkpoint};
use std::path::Path;
use test_utils::{Scratch, world};

const MESHES: [&[(&str, usize)]; 7] = [
    &[("dp", 1), ("tp", 1)],
    &[("dp", 2), ("tp", 1)],
    &[("dp", 3), ("tp", 1)],
    &[("dp", 4), ("tp", 1)], // ranks without elements
    &[("dp", 1), ("tp", 3)],
    &[("dp", 1), ("tp", 4)],
    &[("dp", 2), ("tp", 2)],
];

type Make = fn(&Parameters) -> Result<Box<dyn Optimizer>>;

const OPTIMIZERS: [(&str, Make); 4] = [
    ("sgd", |parameters| {
        let (decay, rest) = parameters.split_decay();
        let params = ParamsSgd { lr: 0.05, momentum: 0.9, nesterov: true, ..ParamsSgd::default() };
        let decayed = ParamsSgd { weight_decay: 0.1, ..params.clone() };
        Ok(Box::new(Sgd::from_groups([ParamGroup::new(&decay, decayed), ParamGroup::new(&rest, params)])?))
    }),
    ("adagrad", |parameters| {
        let params =
            ParamsAdagrad { lr: 0.05, lr_decay: 0.1, initial_accumulator_value: 0.1, ..Default::default() };
        Ok(Box::new(Adagrad::new(parameters, params)?))
    }),
    ("adam_w", |parameters| {
        Ok(Box::new(AdamW::new(parameters, ParamsAdamW { lr: 0.05, eps: 1e-4, ..Default::default() })?))
    }),
    ("muon", |parameters| {
        let (matrices, others) = parameters.partition(|parameter| parameter.tensor.rank() == 2);
        let params = ParamsMuon { lr: 0.05, dtype: DType::F64, ..ParamsMuon::default() };
        let others = AdamW::new(&others, ParamsAdamW { lr: 0.01, eps: 1e-4, ..Default::default() })?;
        Ok(Box::new(Muon::new(&matrices, params)?.with_adam_w(others)?))
    }),
];

/// Losses of three steps, the learning rate of the last halved, and the all_to_alls of a step.
fn run(axes: &[(&str, usize)], make: Make, from: Option<&Path>, to: Option<&Path>) -> (Vec<f64>, usize) {
    let ranks = axes.iter().map(|(_, size)| size).product();
    let runs = world(ranks).run(|ctx| -> Result<(Vec<f64>, usize)> {
        let mesh = ctx.mesh(axes)?;
        let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
        let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
        let model = Model::new(&vb)?;
        let parameters = vb.finish()?;
        let mut optimizer = make(&parameters)?;
        if let Some(from) = from {
            parameters.load(from)?;
            optimizer.load(from)?;
        }
        let (mut losses, mut calls) = (Vec::new(), 0);
        for step in 0..3 {
            if step == 2 {
                let halves: Vec<f64> = optimizer.learning_rates().iter().map(|lr| lr / 2.0).collect();
                optimizer.set_learning_rates(&halves)?;
            }
            let loss = model.loss(&rows(&batch(step)?, &mesh)?, Case::default())?;
            let grads = parameters.backward(&loss)?;
            let (stepped, sent) = comm::record(|| optimizer.step(&grads));
            stepped?;
            calls = sent.total();
            losses.push(loss.to_scalar::<f64>()?);
        }
        if let Some(to) = to {
            checkpoint::save(to, &mesh, &[parameters.named_tensors(), optimizer.state()?].concat())?;
        }
        Ok((losses, calls))
    });
    runs.unwrap().remove(0)
}

#[test]
fn every_optimizer_trains_alike_from_and_onto_every_mesh() {
    for (name, make) in OPTIMIZERS {
        let folder = Scratch::of_ranks(&format!("optimizer-{name}"));
        let alone = folder.path("alone");
        let (first, _) = run(MESHES[0], make, None, Some(&alone));
        let (then, _) = run(MESHES[0], make, Some(&alone), None);
        assert!(first[2] < first[0], "{name} learns: {first:?}");
        for (i, axes) in MESHES.into_iter().enumerate() {
            let path = folder.path(i.to_string());
            let (losses, calls) = run(axes, make, None, Some(&path));
            let what = format!("{name} on {axes:?}");
            assert_close(&losses, &first, 1e-8, &what);
            let exchanges = if name == "muon" && i > 0 { 2 } else { 0 };
            assert_eq!(calls, exchanges, "{what}");
            let onto = MESHES[(i + 3) % MESHES.len()];
            let (losses, _) = run(onto, make, Some(&path), None);
            assert_close(&losses, &then, 1e-7, &format!("{what}, then on {onto:?}"));
        }
    }
}
