//! Units that are sharded over two axes, and units that other axes replicate.
use crate::fsdp::harness::*;
use candle_core::DType;
use candle_dist::{Op, comm};
use candle_nn::ParamsAdamW;
use candle_nn::rnn::LSTMConfig;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{AdamW, LSTM, Linear, MeshVarBuilder, RNN};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Result, Shard};
use std::path::Path;
use test_utils::{Scratch, has_ranks, on_ranks, world};

#[test]
fn training_over_two_axes_equals_one_device() {
    let meshes: [&[(&str, usize)]; 7] = [
        &[("dp", 2), ("cp", 2), ("tp", 1)],
        &[("dp", 1), ("cp", 2), ("tp", 2)],
        &[("dp", 2), ("cp", 1), ("tp", 1)],
        &[("dp", 2), ("cp", 3), ("tp", 1)],
        &[("cp", 2), ("dp", 2), ("tp", 1)],
        &[("dp", 2), ("tp", 2), ("cp", 2)],
        &[("tp", 2), ("dp", 2), ("cp", 2)],
    ];
    for (recompute, shared) in
        [(None, false), (Some(Recompute::Within), true), (Some(Recompute::Around), true)]
    {
        let case = Case { clip: Some(0.1), recompute, shared, ..Case::default() };
        compare(&meshes, case, 1e-9);
    }
}

#[test]
fn each_rank_of_both_axes_holds_its_own_piece() {
    on_ranks(4, "pieces", |ctx| -> Result<()> {
        for (rows, want) in [(8, [2, 2, 2, 2]), (5, [2, 1, 1, 1]), (3, [1, 1, 1, 0]), (1, [1, 0, 0, 0])] {
            let mesh = ctx.mesh(&[("dp", 2), ("cp", 2), ("tp", 1)])?;
            let vb = MeshVarBuilder::fresh(7, &mesh, Plan::new("tp"), DType::F32, ctx.device())?;
            let vb = fully_shard(&vb, FullyShardOptions::default())?;
            FullyShard::new(&vb, |vb| Linear::new(3, rows, false, vb))?;
            let parameters = vb.finish()?;
            let weight = parameters.iter().next().unwrap();
            assert_eq!(weight.tensor.placements()[..2], [Shard(0), Shard(0)]);
            assert_eq!(weight.var.dims(), [want[ctx.rank()], 3], "{rows} rows");
            assert_eq!(parameters.elem_count(), rows * 3);
        }
        Ok(())
    });
}

#[test]
fn training_over_two_axes_goes_on_from_a_checkpoint_on_any_other_mesh() {
    let meshes: [&[(&str, usize)]; 4] = [
        &[("dp", 1), ("tp", 1)],
        &[("dp", 2), ("cp", 2), ("tp", 1)],
        &[("dp", 4), ("tp", 1)],
        &[("cp", 2), ("tp", 2)],
    ];
    if !has_ranks(4) {
        return;
    }
    let dir = Scratch::of_ranks("fsdp-two-axes");
    let run = |axes: &[(&str, usize)], from: Option<&Path>, to: Option<&Path>| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let losses = world(ranks).run(|ctx| -> Result<Vec<f64>> {
            let mesh = ctx.mesh(axes)?;
            let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
            let vb = fully_shard(&vb, FullyShardOptions::default())?;
            let model = Model::new(&vb)?;
            let parameters = vb.finish()?;
            let mut optimizer = AdamW::new(&parameters, ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() })?;
            if let Some(from) = from {
                parameters.load(from)?;
                optimizer.load(from)?;
            }
            let mut losses = Vec::new();
            for step in 0..2 {
                let x = batch(step)?.to_device(ctx.device())?;
                let loss = model.loss(&DTensor::distribute(&x, &mesh, &by_rows(&mesh))?, Case::default())?;
                optimizer.step(&parameters.backward(&loss)?)?;
                losses.push(loss.to_scalar::<f64>()?);
            }
            if let Some(to) = to {
                let state = [parameters.named_tensors(), optimizer.state()?].concat();
                candle_shard::checkpoint::save(to, &mesh, &state)?;
            }
            Ok(losses)
        });
        losses.unwrap().remove(0)
    };
    let saved = dir.path("alone");
    run(meshes[0], None, Some(&saved));
    let want = run(meshes[0], Some(&saved), None);
    for (i, axes) in meshes.into_iter().enumerate() {
        let path = dir.path(i.to_string());
        run(axes, None, Some(&path));
        for next in meshes {
            assert_close(&run(next, Some(&path), None), &want, 1e-9, &format!("{axes:?} then {next:?}"));
        }
    }
}

#[test]
fn axes_that_do_not_fit_are_refused() {
    world(1)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 1), ("cp", 1), ("tp", 1)])?;
            let plain = MeshVarBuilder::fresh(7, &mesh, Plan::new("tp"), DType::F32, ctx.device())?;
            let options = FullyShardOptions::default();
            let vb = plain.fully_shard("dp", options)?;
            let refused = |made: Result<MeshVarBuilder>| made.err().unwrap().to_string();
            let twice = refused(vb.fully_shard("dp", options));
            assert!(twice.contains("over \"dp\" twice"), "{twice}");
            let unlike = refused(vb.fully_shard("cp", options.param_dtype(DType::BF16)));
            assert!(
                unlike.contains("param_dtype: Some(BF16)") && unlike.contains("the same options"),
                "{unlike}"
            );
            let vb = plain.fully_shard("dp", options.param_dtype(DType::BF16))?;
            FullyShard::new(&vb.pp("unit"), |vb| {
                let within = refused(vb.fully_shard("cp", options.param_dtype(DType::BF16)));
                assert!(within.contains("within the unit of \"unit\""), "{within}");
                Ok(())
            })?;
            Ok(())
        })
        .unwrap();
}

#[test]
fn training_of_replicas_equals_one_device() {
    let meshes: [&[(&str, usize)]; 6] = [
        &[("rep", 2), ("dp", 2), ("tp", 1)],
        &[("dp", 2), ("rep", 2), ("tp", 1)],
        &[("rep", 2), ("dp", 1), ("tp", 2)],
        &[("rep", 3), ("dp", 2), ("tp", 1)],
        &[("rep", 2), ("tp", 2), ("dp", 2)],
        &[("rep", 2), ("dp", 2), ("cp", 2), ("tp", 1)],
    ];
    for (recompute, shared) in
        [(None, false), (Some(Recompute::Within), true), (Some(Recompute::Around), true)]
    {
        compare(&meshes, Case { clip: Some(0.1), recompute, shared, ..Case::default() }, 1e-9);
    }
}

#[test]
fn replicas_sum_the_gradients_of_their_pieces_once_a_pass() {
    on_ranks(4, "replicas", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("rep", 2), ("dp", 2), ("tp", 1)])?;
        for units in [1, 3] {
            let vb = MeshVarBuilder::fresh(7, &mesh, Plan::new("tp"), DType::F64, ctx.device())?;
            let vb = fully_shard(&vb, FullyShardOptions::default())?;
            let layer =
                |i: usize| FullyShard::new(&vb.pp(i), |vb| LSTM::new(4, 4, LSTMConfig::default(), vb));
            let layers = (0..units).map(layer).collect::<Result<Vec<_>>>()?;
            let parameters = vb.finish()?;
            let x = batch(0)?.narrow(1, 0, 4)?.unsqueeze(1)?.repeat((1, 8, 1))?;
            let mut x = DTensor::distribute(&x.to_device(ctx.device())?, &mesh, &by_rows(&mesh))?;
            for layer in &layers {
                x = layer.run(|layer| layer.states_to_tensor(&layer.seq(&x)?))?;
            }
            let (grads, counts) = comm::record(|| parameters.backward(&x.sqr()?.sum_all()?));
            assert!(parameters.iter().all(|p| grads.as_ref().unwrap().get(&p.var).is_some()));
            let sums = counts.get(Op::AllReduce);
            let pieces = 8 * parameters.local_elem_count();
            assert_eq!(sums.count, 1, "{counts}");
            // With one number for each parameter.
            assert_eq!(sums.bytes, pieces + 8 * (parameters.len() + 1), "{counts}");
            assert_eq!(counts.get(Op::ReduceScatter).count, units);
        }
        Ok(())
    });
}
