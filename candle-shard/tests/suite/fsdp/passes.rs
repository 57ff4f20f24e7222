//! Single passes: what they communicate, what they read, and which parts of a model they go through.
use crate::fsdp::harness::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::{Op, RankContext, comm};
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{Embedding, Linear, MeshVarBuilder, recompute};
use candle_shard::{DTensor, EmbeddingOptions, Result, Shard};
use std::sync::Arc;
use test_utils::{Scratch, has_ranks, world};

#[test]
fn each_way_through_a_unit_is_one_collective() {
    if !has_ranks(2) {
        return;
    }
    world(2)
        .run(|ctx| -> Result<()> {
            let ways = [(true, false, true), (true, true, true), (false, true, true), (true, true, false)];
            for (reshard_after_forward, prefetch, foreign_writes) in ways {
                let options = FullyShardOptions::default()
                    .reshard_after_forward(reshard_after_forward)
                    .prefetch(prefetch)
                    .foreign_writes(foreign_writes);
                let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
                let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
                let vb = vb.fully_shard("dp", options)?;
                let model = Model::new(&vb)?;
                let parameters = vb.finish()?;
                let x = rows(&batch(0)?, &mesh)?;
                let case = Case { options, ..Case::default() };
                let (loss, forward) = comm::record(|| model.loss(&x, case));
                let (grads, backward) = comm::record(|| parameters.backward(&loss?));
                grads?;
                let units = LAYERS + 1;
                assert_eq!(
                    (forward.get(Op::AllGather).count, forward.get(Op::ReduceScatter).count),
                    (units, 0)
                );
                let ahead = if prefetch && foreign_writes { units - 1 } else { 0 };
                assert_eq!(
                    forward.get(Op::AllReduce).count,
                    ahead,
                    "whether what was gathered ahead is still true"
                );
                assert_eq!(forward.get(Op::AllReduce).bytes, 4 * ahead);
                let again = if reshard_after_forward { units } else { 0 };
                assert_eq!(
                    (backward.get(Op::AllGather).count, backward.get(Op::ReduceScatter).count),
                    (again, units)
                );
                assert_eq!(backward.get(Op::AllReduce).count, 1, "the parameters that are in no unit");
                for p in parameters.iter().filter(|p| !p.name.starts_with("embed")) {
                    assert_eq!(p.tensor.placements()[0], Shard(0), "{}", p.name);
                    let dims = p.tensor.dims();
                    let most = dims[0].div_ceil(2) * dims[1..].iter().product::<usize>();
                    assert!(p.var.elem_count() <= most, "{}: {:?} of {dims:?}", p.name, p.var.dims());
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_parameter_that_changes_between_runs_is_never_stale() {
    if !has_ranks(2) {
        return;
    }
    // What is loaded is known, whoever else may write.
    let options = |(reshard_after_forward, foreign_writes)| {
        let options = FullyShardOptions::default().reshard_after_forward(reshard_after_forward);
        options.foreign_writes(foreign_writes)
    };
    let dir = Scratch::of_ranks("fsdp-stale");
    for case in [(false, true), (true, true), (true, false)] {
        let path = dir.path(format!("{case:?}"));
        world(2)
            .run(|ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
                let vb = builder(&mesh, DType::F64, options(case))?;
                let layers = linears(3, &vb)?;
                let parameters = vb.finish()?;
                let x = rows(&batch(0)?, &mesh)?;
                let through = |count: usize| -> Result<DTensor> {
                    layers[..count]
                        .iter()
                        .try_fold(x.clone(), |x, layer| layer.run(|layer| layer.forward(&x)))
                };
                // The first layer alone has the second one asked for; nobody differentiates this.
                drop(through(3)?);
                drop(through(1)?);
                let doubled = parameters.iter().map(|p| Ok((p.name.clone(), (p.var.as_tensor() * 2.0)?)));
                let doubled: Vec<(String, Tensor)> = doubled.collect::<Result<_>>()?;
                let spec = |i: usize| parameters.iter().nth(i).unwrap().tensor.spec().clone();
                let saved = doubled.iter().enumerate().map(|(i, (name, value))| {
                    Ok((name.clone(), DTensor::from_local_with_spec(value.clone(), spec(i))?))
                });
                candle_shard::checkpoint::save(&path, &mesh, &saved.collect::<Result<Vec<_>>>()?)?;
                parameters.load(&path)?;
                let weights: Vec<Tensor> =
                    parameters.iter().map(|p| on_host(&p.tensor)).collect::<Result<_>>()?;
                let linear =
                    |x: Tensor, i: usize| x.matmul(&weights[2 * i].t()?)?.broadcast_add(&weights[2 * i + 1]);
                let second = layers[1].run(|layer| layer.forward(&x))?;
                assert_close(
                    &whole(&second)?,
                    &linear(batch(0)?, 1)?.flatten_all()?.to_vec1()?,
                    1e-12,
                    "the second",
                );
                let want = (0..3).try_fold(batch(0)?, linear)?;
                assert_close(&whole(&through(3)?)?, &want.flatten_all()?.to_vec1()?, 1e-12, "all");
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn what_any_optimizer_changes_between_runs_is_never_stale() {
    if !has_ranks(4) {
        return;
    }
    use candle_nn::{AdamW, Optimizer, SGD};
    type Change = fn(&[candle_core::Var], &candle_core::backprop::GradStore) -> candle_core::Result<()>;
    let changes: [Change; 4] = [
        |vars, grads| SGD::new(vars.to_vec(), 0.5)?.step(grads),
        |vars, grads| AdamW::new(vars.to_vec(), candle_nn::ParamsAdamW::default())?.step(grads),
        |vars, _| vars.iter().try_for_each(|var| var.set(&(var.as_detached_tensor() * 3.0)?)),
        // On one rank alone.
        |vars, _| vars.iter().filter(|var| var.dims()[0] == 1).try_for_each(|var| var.set(&var.ones_like()?)),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        world(4)
            .run(|ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("dp", 4), ("tp", 1)])?;
                let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
                let layers = linears(3, &vb)?; // of 5 rows: pieces of 2, 2, 1 and none
                let parameters = vb.finish()?;
                let x = rows(&batch(0)?, &mesh)?;
                let run = |i: usize, x: &DTensor| layers[i].run(|layer| layer.forward(x));
                let grads = parameters.backward(&run(2, &run(1, &run(0, &x)?)?)?.sqr()?.sum_all()?)?;
                let h = run(0, &x)?; // which gathers the second ahead
                change(&parameters.vars(), &grads)?;
                let got = whole(&run(1, &h)?)?;
                let of = |name: &str| {
                    let p = parameters.iter().find(|p| p.name == name).unwrap();
                    on_host(&p.tensor)
                };
                let h = on_host(&h)?;
                let want = h.matmul(&of("1.weight")?.t()?)?.broadcast_add(&of("1.bias")?)?;
                assert_close(&got, &want.flatten_all()?.to_vec1()?, 1e-12, &format!("change {i}"));
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn parameters_may_be_frozen_unused_or_in_units_within_units() {
    if !has_ranks(3) {
        return;
    }
    world(3)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 3), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
            let frozen = FullyShard::new(&vb.frozen().pp("frozen"), |vb| Linear::new(5, 5, true, vb))?;
            let outer = FullyShard::new(&vb.pp("outer"), |vb| {
                let inner = FullyShard::new(&vb.pp("inner"), |vb| Linear::new(5, 4, true, vb))?;
                Ok((
                    inner,
                    Linear::new(4, 3, true, &vb.pp("used"))?,
                    Linear::new(4, 3, true, &vb.pp("unused"))?,
                ))
            })?;
            let parameters = vb.finish()?;
            let x = rows(&batch(0)?, &mesh)?;
            for _ in 0..2 {
                let h = frozen.run(|layer| layer.forward(&x))?;
                let y = outer.run(|(inner, used, _)| used.forward(&inner.run(|inner| inner.forward(&h))?))?;
                let grads = parameters.backward(&y.sqr()?.sum_all()?)?;
                let value = |name: &str| -> Result<Tensor> {
                    let found = parameters.iter().find(|p| p.name == name).unwrap();
                    on_host(&found.tensor)
                };
                let linear = |x: &Tensor, name: &str| -> Result<Tensor> {
                    let y = x.matmul(&value(&format!("{name}.weight"))?.t()?)?;
                    Ok(y.broadcast_add(&value(&format!("{name}.bias"))?)?)
                };
                let h = linear(&linear(&batch(0)?, "frozen")?, "outer.inner")?;
                let y = linear(&h, "outer.used")?;
                let want = (y.t()?.matmul(&h)? * 2.0)?.flatten_all()?.to_vec1()?;
                for p in parameters.iter() {
                    let grad = p.grad(&grads)?;
                    let takes_part = p.name.starts_with("outer.inner") || p.name.starts_with("outer.used");
                    assert_eq!(grad.is_some(), takes_part, "{}", p.name);
                    if p.name == "outer.used.weight" {
                        assert_close(&whole(&grad.unwrap())?, &want, 1e-12, "gradient");
                    }
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn parts_of_a_unit_may_be_recomputed_beside_each_other() {
    // Two segments of the same weights in one run; one beside a direct use; and one around a run within a run.
    type Way = fn(&FullyShard<Arc<Layer>>, &DTensor) -> Result<DTensor>;
    fn segment(layer: &Arc<Layer>, x: &DTensor) -> Result<DTensor> {
        let layer = layer.clone();
        recompute(x, move |x| layer.forward(x))
    }
    let ways: [Way; 3] = [
        |unit, x| unit.run(|layer| segment(layer, &segment(layer, x)?)),
        |unit, x| unit.run(|layer| layer.forward(x)?.add(&segment(layer, x)?)),
        |unit, x| {
            unit.run(|_| unit.run(|layer| segment(layer, x))?.add(&unit.run(|layer| layer.forward(x))?))
        },
    ];
    for (i, way) in ways.into_iter().enumerate() {
        let train = |ctx: &RankContext| -> Result<(Values, Values)> {
            let mesh = ctx.mesh(&[("dp", ctx.world_size()), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
            let embed = FullyShard::new(&vb.pp("embed"), |vb| Linear::new(5, DIM, true, vb))?;
            let layer = |i: usize| FullyShard::new(&vb.pp(i), |vb| Ok(Arc::new(Layer::new(vb)?)));
            let layers = (0..3).map(layer).collect::<Result<Vec<_>>>()?;
            let parameters = vb.finish()?;
            let x = rows(&batch(0)?, &mesh)?;
            let mut grads = [Values::new(), Values::new()];
            for found in &mut grads {
                let h = embed.run(|embed| embed.forward(&x))?;
                let y = layers.iter().try_fold(h, |h, layer| way(layer, &h))?;
                let made = parameters.backward(&y.sqr()?.mean_all()?)?;
                for p in parameters.iter() {
                    found.insert(p.name.clone(), whole(&p.grad(&made)?.unwrap())?);
                }
            }
            let [first, second] = grads;
            Ok((first, second))
        };
        let (want, _) = world(1).run(train).unwrap().remove(0);
        for ranks in [2, 3].into_iter().filter(|&ranks| has_ranks(ranks)) {
            for (first, second) in world(ranks).run(train).unwrap() {
                for (name, want) in &want {
                    assert_close(&first[name], want, 1e-9, &format!("way {i}, {name}"));
                    assert_close(&second[name], want, 1e-9, &format!("way {i}, {name}, again"));
                }
            }
        }
    }
}

#[test]
fn a_fresh_table_with_a_padding_row_is_built_in_a_unit() {
    let run = |ranks: usize, padding_idx: i64| {
        let made = world(ranks).run(|ctx| -> Result<(Vec<f64>, Vec<f64>, Vec<f64>)> {
            let mesh = ctx.mesh(&[("dp", ctx.world_size()), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
            let options = EmbeddingOptions::default().padding_idx(padding_idx);
            let table =
                FullyShard::new(&vb.pp("table"), |vb| Embedding::with_options(5, 3, 1.0, options, vb))?;
            let parameters = vb.finish()?;
            let ids = rows(&Tensor::new(&[[0u32, 4], [3, 4], [4, 1], [2, 0]], &Device::Cpu)?, &mesh)?;
            let found = table.run(|table| table.forward(&ids))?;
            let grads = parameters.backward(&found.sqr()?.sum_all()?)?;
            let p = parameters.iter().next().unwrap();
            Ok((whole(&p.tensor)?, whole(&found)?, whole(&p.grad(&grads)?.unwrap())?))
        });
        made.unwrap()
    };
    for padding_idx in [0, -1, 2] {
        let want = run(1, padding_idx).remove(0);
        let row = padding_idx.rem_euclid(5) as usize * 3;
        assert!(want.0[row..row + 3].iter().chain(&want.2[row..row + 3]).all(|x| *x == 0.0));
        for ranks in (2..=4).filter(|&ranks| has_ranks(ranks)) {
            assert!(
                run(ranks, padding_idx).iter().all(|got| *got == want),
                "padding row {padding_idx} on {ranks}"
            );
        }
    }
    if !has_ranks(2) {
        return;
    }
    world(2)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
            let options = EmbeddingOptions::default().max_norm(1.0);
            let table =
                FullyShard::new(&vb.pp("table"), |vb| Embedding::with_options(5, 3, 1.0, options, vb));
            let error = table.err().unwrap().to_string();
            assert!(error.contains("max_norm changes a table in place"), "{error}");
            Ok(())
        })
        .unwrap();
}
