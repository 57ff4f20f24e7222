//! Tensor-parallel modules inside stages.
use crate::graph::common::numbers;
use candle_core::{DType, Device, Tensor};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::{
    Activation, EqualCount, Gradient, In, Keep, Kwargs, LocalPipe, LossReduction, PipeBuilder, Result,
    StepOptions, stage_op,
};
use candle_shard::nn::{Linear, MeshVarBuilder, recompute};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate};
use test_utils::world;

type Builder = PipeBuilder<MeshVarBuilder>;

/// Two blocks, each of a column-wise and a row-wise layer, the second one recomputed.
fn declare() -> Builder {
    let mut g = Builder::new();
    let mut h = g.input("x", In::Arg);
    for name in ["first", "second"] {
        let build = move |vb: &MeshVarBuilder| {
            let (up, down) =
                (Linear::new(4, 6, true, &vb.pp("up"))?, Linear::new(6, 4, true, &vb.pp("down"))?);
            let mesh = vb.mesh().clone();
            Ok(stage_op(move |xs, _| {
                let x = xs[0].tensor()?;
                let x = DTensor::from_local(x.clone(), &mesh, &[Replicate], x.shape())?;
                let (up, down) = (up.clone(), down.clone());
                let block = move |x: &DTensor| down.forward(&up.forward(x)?.tanh()?);
                let y = if name == "second" { recompute(&x, block)? } else { block(&x)? };
                Ok(vec![y.full_tensor()?.into()])
            }))
        };
        h = g.module(name, build, [h]);
    }
    g.output("y", h);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
    g
}

/// The loss and the whole gradients by name.
fn step(ranks: usize, stages: usize, keep: Keep, split_backward: bool) -> Vec<(String, Tensor)> {
    let run = world(ranks).run(move |ctx| -> Result<Vec<(String, Tensor)>> {
        let mesh = ctx.mesh(&[("tp", ranks)])?;
        let plan = Plan::new("tp")
            .with("*.up", ColwiseParallel::default())
            .with("*.down", RowwiseParallel::default());
        let vb = MeshVarBuilder::fresh(5, &mesh, plan, DType::F64, &Device::Cpu)?;
        let local = LocalPipe::new(&declare().finish(EqualCount(stages))?, &vb, &Device::Cpu)?;
        let parameters = vb.finish()?;
        let named: Vec<String> = local.parameters().into_keys().map(str::to_owned).collect();
        let mut built: Vec<String> = parameters.iter().map(|p| p.name.clone()).collect();
        built.sort();
        assert_eq!(named, built);
        let x = numbers("x", &[5, 4]);
        let batch = split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 2, None, None)?;
        let mut step = local
            .forward_backward(&batch, &StepOptions::default().keep(keep).split_backward(split_backward))?;
        parameters.reduce(&mut step.grads)?;
        let mut all = vec![("loss".to_owned(), step.loss()?.clone())];
        for p in parameters.iter() {
            let grad = p
                .grad(&step.grads)?
                .ok_or_else(|| candle_pipe::Error::Pipe(format!("no gradient of {}", p.name)))?;
            all.push((p.name.clone(), grad.full_tensor()?));
        }
        Ok(all)
    });
    run.unwrap().swap_remove(0)
}

#[test]
fn stages_of_sharded_layers() {
    let want = step(1, 1, Keep::Activations, false);
    for (ranks, stages, keep) in
        [(1, 3, Keep::Inputs), (2, 1, Keep::Activations), (2, 2, Keep::Activations), (2, 3, Keep::Inputs)]
    {
        for split in [false, true] {
            for ((name, got), (_, want)) in step(ranks, stages, keep, split).iter().zip(&want) {
                crate::graph::common::assert_close(
                    &format!("{name} on {ranks} ranks in {stages} stages"),
                    got,
                    want,
                );
            }
        }
    }
}

#[test]
fn weights_of_sharded_layers_wait() {
    let run = world(2).run(|ctx| -> Result<()> {
        let plan = Plan::new("tp")
            .with("*.up", ColwiseParallel::default())
            .with("*.down", RowwiseParallel::default());
        let vb = MeshVarBuilder::fresh(5, &ctx.mesh(&[("tp", 2)])?, plan, DType::F64, &Device::Cpu)?;
        let stage = declare().finish(EqualCount(1))?.build_stage(0, &vb, &Device::Cpu)?;
        let input = Activation { value: numbers("x", &[5, 4]).into(), tracked: vec![true] };
        let (outputs, tape) = stage.forward(vec![input], &stage.ctx(0..5), Keep::Activations)?;
        let mut seeds = vec![Gradient::default(); outputs.len()];
        let loss = stage.loss_output().expect("the stage has the loss");
        seeds[loss] = Gradient::of_loss(&outputs[loss].value, 1.0)?;
        let (first, late) = tape.backward_inputs(&seeds)?;
        let late = late.backward()?;
        let waits = ["first.up.weight", "first.down.weight", "second.up.weight", "second.down.weight"];
        let all = waits
            .map(|name| (name, true))
            .into_iter()
            .chain([("first.up.bias", false), ("second.up.bias", false)]);
        for (name, waits) in all {
            let parameter = &stage.parameters()[name];
            let found = (first.parameters.get(parameter).is_some(), late.get(parameter).is_some());
            assert_eq!(found, (!waits, waits), "{name}");
        }
        Ok(())
    });
    run.unwrap();
}
