//! Variables that a forward pass changes, under all that a stage may keep.
use crate::graph::common::{assert_close, numbers};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{BatchNorm, ModuleT, VarBuilder, VarMap};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::{
    Ctx, EqualCount, In, Keep, Kwargs, LocalPipe, LossReduction, PipeBuilder, Result, StepOptions, Value, nn,
    sharded_op, stage_op,
};
use candle_shard::nn::{Embedding, MeshVarBuilder, ModuleT as _, batch_norm};
use candle_shard::parallel::{Plan, RowwiseParallel};
use candle_shard::{EmbeddingOptions, Shard};
use std::collections::BTreeMap;
use test_utils::on_ranks;

type Vb = VarBuilder<'static>;
type Numbers = BTreeMap<String, Tensor>;

/// The variables and the gradients after some steps.
fn train(
    declare: impl Fn(&mut PipeBuilder<Vb>),
    keep: Keep,
    chunks: usize,
    is_split: bool,
) -> Result<Numbers> {
    let mut g = PipeBuilder::<Vb>::new();
    declare(&mut g);
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
    let local = LocalPipe::new(&g.finish(EqualCount(2))?, &vb, &Device::Cpu)?;
    for (name, var) in map.data().lock().unwrap().iter() {
        var.set(&numbers(name, var.dims()).abs()?)?;
    }
    let mut all = Numbers::new();
    for step in 0..4 {
        let args = [numbers(&format!("x{step}"), &[6, 4]).into()];
        let batch = split_args_kwargs_into_chunks(&args, &Kwargs::new(), chunks, None, None)?;
        let options = StepOptions::default().step(step).keep(keep).split_backward(is_split);
        let made = local.forward_backward(&batch, &options)?;
        for (name, var) in local.named_vars()? {
            all.insert(format!("{name} after step {step}"), var.copy()?.detach());
            if let Some(grad) = made.grads.get(&var) {
                all.insert(format!("the gradient of {name} in step {step}"), grad.clone());
                var.set(&(var.as_detached_tensor() - (grad * 0.1)?)?)?;
            }
        }
        // What evaluation does to the state is nothing.
        local.evaluate(&batch, &StepOptions::default())?;
    }
    Ok(all)
}

fn same_whatever_is_kept(declare: impl Fn(&mut PipeBuilder<Vb>)) {
    for chunks in [1, 3] {
        let want = train(&declare, Keep::Activations, chunks, false).unwrap();
        for keep in [Keep::Inputs, Keep::InputsUnchecked] {
            for is_split in [false, true] {
                let got = train(&declare, keep, chunks, is_split).unwrap();
                assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
                for (name, got) in &got {
                    assert_close(&format!("{name}, {keep:?}, {chunks} chunks"), got, &want[name]);
                }
            }
        }
    }
}

fn layers(
    g: &mut PipeBuilder<Vb>,
    middle: impl FnOnce(&mut PipeBuilder<Vb>, candle_pipe::graph::ValueId) -> candle_pipe::graph::ValueId,
) {
    let x = g.input("x", In::Arg);
    let h = g.module("up", |vb| Ok(nn::linear(4, 4, vb.clone())?), [x]);
    let h = middle(g, h);
    let y = g.module("down", |vb| Ok(nn::linear(4, 4, vb.clone())?), [h]);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
}

#[test]
fn a_batch_norm_moves_once() {
    same_whatever_is_kept(|g| {
        layers(g, |g, h| g.module("norm", |vb| Ok(candle_nn::batch_norm(4, 1e-5, vb.clone())?), [h]));
    });
}

#[test]
fn a_batch_norm_that_two_nodes_share_moves_once_for_each() {
    same_whatever_is_kept(|g| {
        let norm = g.shared_module("norm", |vb| Ok(candle_nn::batch_norm(4, 1e-5, vb.clone())?));
        layers(g, |g, h| {
            let h = g.call(norm, "norms.0", [h]);
            let forward = |norm: &BatchNorm, xs: &[Value], ctx: &Ctx| {
                Ok(norm.forward_t(xs[0].tensor()?, ctx.training)?.into())
            };
            g.call_with(norm, "norms.1", forward, [h])
        });
    });
}

/// A table that the output depends on, and that then moves towards the inputs; at first for some steps or microbatches it
/// does not move.
fn codebook(from: fn(&Ctx) -> bool) -> impl Fn(&mut PipeBuilder<Vb>) {
    move |g| {
        layers(g, |g, h| {
            let build = move |vb: &Vb| {
                let table = Var::from_tensor(&vb.get(4, "codebook")?)?;
                Ok(stage_op(move |xs, ctx| {
                    let x = xs[0].tensor()?;
                    let y = x.broadcast_mul(&table.as_detached_tensor().copy()?)?;
                    if ctx.training && from(ctx) {
                        let moved = (table.as_detached_tensor() * 0.7)?;
                        table.set(&(moved + (x.detach().mean(0)? * 0.3)?)?)?;
                    }
                    Ok(vec![y.into()])
                }))
            };
            g.module("vq", build, [h])
        });
    }
}

#[test]
fn a_codebook_moves_once_from_any_pass_on() {
    same_whatever_is_kept(codebook(|_| true));
    same_whatever_is_kept(codebook(|ctx| ctx.step > 0));
    same_whatever_is_kept(codebook(|ctx| ctx.microbatch > 0));
    same_whatever_is_kept(codebook(|ctx| ctx.step > 1 && ctx.microbatch != 1));
}

#[test]
fn a_weight_that_a_forward_pass_changes_later_changes_once() {
    same_whatever_is_kept(|g| {
        layers(g, |g, h| {
            let build = |vb: &Vb| {
                let weight = Var::from_tensor(&vb.get(4, "weight")?)?;
                Ok(stage_op(move |xs, ctx| {
                    if ctx.training && ctx.step > 1 && ctx.microbatch == 0 {
                        weight.set(&weight.as_detached_tensor().clamp(0.1, 0.5)?)?;
                    }
                    Ok(vec![xs[0].tensor()?.broadcast_mul(&weight)?.into()])
                }))
            };
            g.module("clamped", build, [h])
        });
    });
}

#[test]
fn a_sharded_batch_norm_moves_once() {
    for world in [1, 2] {
        on_ranks(world, "batch norm", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", world)])?;
            let train = |keep: Keep| -> Result<Vec<Vec<f64>>> {
                let mut g = PipeBuilder::<MeshVarBuilder>::new();
                let x = g.input("x", In::Arg);
                let norm = |vb: &MeshVarBuilder| {
                    let (norm, weight) =
                        (batch_norm(4, 1e-5, vb)?, candle_shard::nn::Linear::new(4, 4, true, &vb.pp("in"))?);
                    let mesh = vb.mesh().clone();
                    Ok(stage_op(move |xs, ctx| {
                        let x = weight.forward(&xs[0].on(&mesh)?)?;
                        Ok(vec![norm.forward_t(&x, ctx.training)?.into()])
                    }))
                };
                let h = g.module("norm", norm, [x]);
                let down = |vb: &MeshVarBuilder| {
                    let down = candle_shard::nn::Linear::new(4, 4, true, vb)?;
                    Ok(sharded_op(vb.mesh(), move |x| down.forward(x)?.sqr()))
                };
                let h = g.module("down", down, [h]);
                g.loss_fn(|xs, _| Ok(xs[0].full_tensor()?.mean_all()?), [h], LossReduction::Mean);
                let vb = MeshVarBuilder::fresh(5, &mesh, Plan::new("tp"), DType::F64, &Device::Cpu)?;
                let local = LocalPipe::new(&g.finish(EqualCount(2))?, &vb, &Device::Cpu)?;
                let mut all = Vec::new();
                for step in 0..2 {
                    let args = [numbers(&format!("x{step}"), &[6, 4]).into()];
                    let batch = split_args_kwargs_into_chunks(&args, &Kwargs::new(), 2, None, None)?;
                    let made =
                        local.forward_backward(&batch, &StepOptions::default().step(step).keep(keep))?;
                    for (_, var) in local.named_vars()? {
                        all.push(var.flatten_all()?.to_vec1()?);
                        if let Some(grad) = made.grads.get(&var) {
                            all.push(grad.flatten_all()?.to_vec1()?);
                        }
                    }
                }
                Ok(all)
            };
            assert_eq!(train(Keep::Inputs)?, train(Keep::Activations)?);
            assert_eq!(train(Keep::InputsUnchecked)?, train(Keep::Activations)?);
            Ok(())
        });
    }
}

/// A lookup shortens rows that one rank has. It keeps what the others keep, because a second run would share calls with them.
#[test]
fn rows_that_one_rank_of_a_stage_changes_are_right_under_all_that_it_keeps() {
    for world in [1, 2, 3] {
        on_ranks(world, "rows", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", world)])?;
            let train = |keep: Keep| -> Result<Vec<Vec<f64>>> {
                let mut g = PipeBuilder::<MeshVarBuilder>::new();
                let ids = g.input("ids", In::Arg);
                let table = |vb: &MeshVarBuilder| {
                    let options = EmbeddingOptions::default().max_norm(0.5);
                    let (table, mesh) = (Embedding::with_options(6, 4, 1.0, options, vb)?, vb.mesh().clone());
                    Ok(stage_op(move |xs, _| {
                        let found = table.forward(&xs[0].on(&mesh)?)?;
                        // A call of its own for each run.
                        Ok(vec![found.redistribute(&[Shard(1)])?.sqr()?.into()])
                    }))
                };
                let h = g.module("table", table, [ids]);
                g.loss_fn(|xs, _| Ok(xs[0].full_tensor()?.mean_all()?), [h], LossReduction::Mean);
                let plan = Plan::new("tp").with("*table*", RowwiseParallel::default());
                let vb = MeshVarBuilder::fresh(5, &mesh, plan, DType::F64, &Device::Cpu)?;
                let local = LocalPipe::new(&g.finish(EqualCount(1))?, &vb, &Device::Cpu)?;
                let mut all = Vec::new();
                for step in 0..4 {
                    // Rows of the first rank, then of the last.
                    let ids = Tensor::new(&[[0u32, 1, 0, 1], [5, 4, 5, 0]][step as usize / 2], &Device::Cpu)?;
                    let batch = split_args_kwargs_into_chunks(&[ids.into()], &Kwargs::new(), 2, None, None)?;
                    let made =
                        local.forward_backward(&batch, &StepOptions::default().step(step).keep(keep))?;
                    for p in vb.built().iter() {
                        all.push(p.tensor.full_tensor()?.flatten_all()?.to_vec1()?);
                        let grad = p.grad(&made.grads)?.map(|grad| grad.full_tensor()).transpose()?;
                        all.extend(grad.map(|grad| grad.flatten_all()?.to_vec1()).transpose()?);
                    }
                }
                assert_eq!(all.len(), 8);
                Ok(all)
            };
            let want = train(Keep::Activations)?;
            assert_ne!(want[0], want[6], "lookups have shortened rows");
            assert_eq!(train(Keep::Inputs)?, want);
            assert_eq!(train(Keep::InputsUnchecked)?, want);
            Ok(())
        });
    }
}

#[test]
fn a_list_of_layers_may_be_a_convolutional_network() -> Result<()> {
    let model = |vb: &Vb| -> candle_core::Result<nn::Sequential> {
        let config = candle_nn::Conv2dConfig { padding: 1, ..Default::default() };
        let plain = candle_nn::BatchNormConfig { affine: false, ..Default::default() };
        Ok(nn::seq()
            .add(candle_nn::conv2d(1, 2, 3, config, vb.pp("stem"))?)
            .add(candle_nn::batch_norm(2, 1e-5, vb.pp("norms.0"))?)
            .add_fn(|x| x.relu()?.max_pool2d(2))
            .add(candle_nn::conv2d(2, 2, 3, config, vb.pp("body"))?)
            .add(candle_nn::batch_norm(2, plain, vb.pp("norms.1"))?)
            .add_fn(|x| x.relu()?.flatten_from(1))
            .add(candle_nn::linear(8, 3, vb.pp("head"))?))
    };
    let run = |stages: usize, keep: Keep| -> Result<Numbers> {
        let mut g = PipeBuilder::<Vb>::new();
        let x = g.input("x", In::Arg);
        let example = Tensor::zeros((1, 1, 4, 4), DType::F64, &Device::Cpu)?;
        let y = g.layers("layers", 7, &example, move |vb| Ok(model(vb)?), x);
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
        let local = LocalPipe::new(&g.finish(EqualCount(stages))?, &vb, &Device::Cpu)?;
        if stages == 8 {
            let names = |stage: usize| local.stages()[stage].parameters().keys().cloned().collect::<Vec<_>>();
            assert_eq!(
                names(1),
                ["norms.0.bias", "norms.0.running_mean", "norms.0.running_var", "norms.0.weight"]
            );
            assert_eq!(names(4), ["norms.1.running_mean", "norms.1.running_var"]);
        }
        let mut all = Numbers::new();
        for (name, var) in local.named_vars()? {
            if name.contains("running") {
                let want = if name.ends_with("mean") { 0.0 } else { 1.0 };
                assert!(var.to_vec1::<f64>()?.iter().all(|&x| x == want), "{name} keeps its value");
            } else {
                var.set(&numbers(&name, var.dims()))?;
            }
        }
        for step in 0..2 {
            let args = [numbers(&format!("x{step}"), &[6, 1, 4, 4]).into()];
            let batch = split_args_kwargs_into_chunks(&args, &Kwargs::new(), 2, None, None)?;
            let made = local.forward_backward(&batch, &StepOptions::default().step(step).keep(keep))?;
            for (name, var) in local.named_vars()? {
                all.insert(format!("{name} {step}"), var.copy()?.detach());
                all.extend(
                    made.grads.get(&var).map(|grad| (format!("gradient of {name} {step}"), grad.clone())),
                );
            }
        }
        Ok(all)
    };
    let want = run(1, Keep::Activations)?;
    for stages in [1, 2, 4, 8] {
        for keep in [Keep::Activations, Keep::Inputs] {
            let got = run(stages, keep)?;
            assert_eq!(got.len(), want.len());
            got.iter().for_each(|(name, got)| assert_close(name, got, &want[name]));
        }
    }
    Ok(())
}
