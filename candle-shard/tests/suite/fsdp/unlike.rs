//! Ranks that run units and layers in unlike orders, or use different parameters of a unit.
use crate::fsdp::harness::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::RankContext;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{Init, Linear, MeshVarBuilder, recompute};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use test_utils::{on_ranks, world};

/// Runs a model that fails on every rank; returns the text of the failure.
fn fails(ranks: usize, f: impl Fn(&RankContext) -> Result<()> + Send + Sync + 'static) -> String {
    world(ranks).run(f).unwrap_err().to_string()
}

#[test]
fn units_that_run_in_unlike_orders_are_an_error_that_names_them() {
    for (prefetch, backward) in [(false, false), (true, false), (false, true), (true, true)] {
        let text = fails(2, move |ctx| {
            let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F32, FullyShardOptions::default().prefetch(prefetch))?;
            let units = linears(3, &vb)?;
            let x = rows(&batch(0)?.to_dtype(DType::F32)?, &mesh)?;
            let run = |i: usize| units[i].run(|layer| layer.forward(&x))?.sum_all();
            // In the forward pass, or only in the backward pass.
            let order = if ctx.rank() == 0 { [0, 1, 2] } else { [0, 2, 1] };
            let [a, b, c] = match backward {
                false => [run(order[0])?, run(order[1])?, run(order[2])?],
                true => {
                    let made = [run(0)?, run(1)?, run(2)?];
                    order.map(|i| made[i].clone())
                }
            };
            a.add(b)?.add(c)?.backward().map(drop)
        });
        assert!(
            text.contains("made different calls") && text.contains("the unit of"),
            "{prefetch} {backward} {text}"
        );
        assert!(text.contains("2.weight and 1 more"), "{prefetch} {backward} {text}");
    }
}

#[test]
fn ranks_that_use_different_parameters_of_a_unit_get_the_gradients_of_one_device() {
    for n in 1..=4 {
        on_ranks(n, "parts of a unit", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", n), ("tp", 1)])?;
            for (dtype, options) in [
                (DType::F64, FullyShardOptions::default()),
                (DType::F32, FullyShardOptions::default().param_dtype(DType::BF16)),
            ] {
                let vb = builder(&mesh, dtype, options)?;
                let unit = FullyShard::new(&vb, |vb| {
                    (0..3).map(|i| Linear::new(5, 5, false, &vb.pp(i))).collect::<Result<Vec<_>>>()
                })?;
                let parameters = vb.finish()?;
                let all = batch(0)?;
                let x = rows(&all.to_dtype(options.param_dtype.unwrap_or(dtype))?, &mesh)?;
                for used in [|rank: usize| rank % 2, |rank: usize| 2 - rank % 2] {
                    let mine = used(ctx.rank());
                    let loss = unit.run(|layers| layers[mine].forward(&x))?.sum_all()?;
                    let grads = parameters.backward(&loss)?;
                    for (i, p) in parameters.iter().enumerate() {
                        let users: Vec<usize> = (0..n).filter(|&rank| used(rank) == i).collect();
                        let Some(grad) = p.grad(&grads)? else {
                            assert!(users.is_empty(), "{}", p.name);
                            continue;
                        };
                        assert!(!users.is_empty(), "{}", p.name);
                        let size = 7usize.div_ceil(n);
                        let mut want = Tensor::zeros((5, 5), DType::F64, &Device::Cpu)?;
                        for rank in users {
                            let (start, end) = ((rank * size).min(7), ((rank + 1) * size).min(7));
                            let sum = all.narrow(0, start, end - start)?.sum_keepdim(0)?;
                            want = (want + sum.broadcast_as((5, 5))?)?;
                        }
                        let most = if dtype == DType::F64 { 1e-11 } else { 0.05 };
                        assert_close(&whole(&grad)?, &want.flatten_all()?.to_vec1()?, most, &p.name);
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn sharded_layers_that_run_in_unlike_orders_are_an_error_that_names_a_parameter() {
    for backward in [false, true] {
        for columns in [false, true] {
            let text = fails(2, move |ctx| {
                let mesh = ctx.mesh(&[("tp", 2)])?;
                let plan = match columns {
                    true => Plan::new("tp").with("*", ColwiseParallel::default().output(Replicate)),
                    false => Plan::new("tp").with("*", RowwiseParallel::default().output(Replicate)),
                };
                let vb = MeshVarBuilder::fresh(7, &mesh, plan, DType::F32, ctx.device())?;
                let layers =
                    (0..2).map(|i| Linear::new(4, 4, false, &vb.pp(i))).collect::<Result<Vec<_>>>()?;
                let x = DTensor::distribute(
                    &Tensor::ones((3, 4), DType::F32, ctx.device())?,
                    &mesh,
                    &[Replicate],
                )?;
                let order = if ctx.rank() == 0 { [0, 1] } else { [1, 0] };
                if !backward {
                    return order.iter().try_for_each(|&i| layers[i].forward(&x).map(drop));
                }
                // The forward pass is in one order, the backward pass is not.
                let [a, b] = [layers[0].forward(&x)?, layers[1].forward(&x)?];
                let made = [layers[1].forward(&a)?.sum_all()?, layers[1].forward(&b)?.sum_all()?];
                made[order[0]].add(&made[order[1]])?.backward().map(drop)
            });
            assert!(text.contains("description differs"), "{columns} {backward} {text}");
            assert!(text.contains(".weight"), "{columns} {backward} {text}");
        }
    }
}

#[test]
fn sums_of_sharded_layers_may_be_in_any_order_and_of_layers_by_data() {
    on_ranks(4, "sums", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
        let plan = Plan::new("tp").with("*", ColwiseParallel::default());
        let vb = MeshVarBuilder::fresh(7, &mesh, plan, DType::F64, ctx.device())?;
        let layers = (0..3).map(|i| Linear::new(5, 4, false, &vb.pp(i))).collect::<Result<Vec<_>>>()?;
        let x = rows(&batch(0)?, &mesh)?;
        // Columns of a sum, gathered, whatever was added first.
        let order = if ctx.rank() % 2 == 0 { [0, 1] } else { [1, 0] };
        let sum = layers[order[0]].forward(&x)?.add(layers[order[1]].forward(&x)?)?;
        let want = layers[0].forward(&x)?.add(layers[1].forward(&x)?)?;
        assert_close(&whole(&sum)?, &whole(&want)?, 1e-12, "in any order");
        // Another layer on each half of the batch.
        let made = layers[ctx.rank() / 2].forward(&x)?.tanh()?;
        let of_layer = |i: usize| -> Result<Vec<f64>> { whole(&layers[i].forward(&x)?.tanh()?) };
        let (first, second) = (of_layer(0)?, of_layer(1)?);
        let want: Vec<f64> = first[..16].iter().chain(&second[16..]).copied().collect();
        assert_close(&whole(&made)?, &want, 1e-12, "by data");
        let total = made.sum_all()?;
        assert_close(&[total.to_scalar::<f64>()?], &[want.iter().sum()], 1e-12, "sum by data");
        Ok(())
    });
}

#[test]
fn local_steps_and_ops_with_exchanges_name_the_parameters_of_their_inputs() {
    /// What is made of a weight and of the same input on all ranks.
    type Step = fn(&DTensor, &DTensor) -> Result<DTensor>;
    let steps: [(&str, Placement, Step); 7] = [
        ("contiguous", Shard(1), |w, x| x.linear(w, None)?.contiguous()?.redistribute(&[Replicate])),
        ("copy", Shard(1), |w, x| x.linear(w, None)?.copy()?.redistribute(&[Replicate])),
        ("recompute", Shard(1), |w, x| {
            recompute(&x.linear(w, None)?, DTensor::neg)?.redistribute(&[Replicate])
        }),
        ("cross_entropy", Shard(0), |w, x| {
            let targets = Tensor::zeros(3, DType::U32, w.device())?;
            x.linear(w, None)?.cross_entropy(&DTensor::distribute(&targets, w.mesh(), &[Replicate])?)
        }),
        ("shift", Shard(0), |w, x| x.linear(w, None)?.shift(1, 1)),
        ("embedding_renorm", Shard(1), |w, _| {
            let ids = Tensor::zeros(3, DType::U32, w.device())?;
            w.embedding_renorm(&DTensor::distribute(&ids, w.mesh(), &[Replicate])?, 0.1, 2.0)?;
            Ok(w.clone())
        }),
        ("flash_attn", Shard(0), |w, _| {
            let keys = w.reshape((1, 4, 2, 2))?;
            keys.flash_attn(&keys, &keys, 1.0, false)
        }),
    ];
    for (name, placement, step) in steps {
        for in_one_order in [true, false] {
            let made = world(2).run(move |ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("tp", 2)])?;
                let vb = MeshVarBuilder::fresh(7, &mesh, Plan::new("tp"), DType::F32, ctx.device())?;
                let get = |i: usize| vb.pp(i).get((4, 4), "weight", Init::Const(0.5), placement, false);
                let weights = [get(0)?, get(1)?];
                let x = DTensor::distribute(
                    &Tensor::ones((3, 4), DType::F32, ctx.device())?,
                    &mesh,
                    &[Replicate],
                )?;
                let order = if in_one_order || ctx.rank() == 0 { [0, 1] } else { [1, 0] };
                order.iter().try_for_each(|&i| step(&weights[i], &x).map(drop))
            });
            match made {
                Ok(_) => assert!(in_one_order, "{name}"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(!in_one_order && text.contains("description differs"), "{name} {text}");
                    assert!(text.contains(".weight"), "{name} {text}");
                }
            }
        }
    }
}
