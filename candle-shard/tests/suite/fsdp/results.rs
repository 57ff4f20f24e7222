//! Units with several results.
use crate::fsdp::harness::*;
use candle_core::{DType, Tensor};
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{Linear, MeshVarBuilder, MoE, MoEConfig, Mode, Module, recompute};
use candle_shard::{DTensor, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use test_utils::{has_ranks, on_ranks, world};

/// The output and the auxiliary loss of a layer.
type Both = (DTensor, Option<DTensor>);
/// What a unit makes of its input, with results by any way.
type UnitRun = fn(&Arc<FullyShard<Arc<Layer>>>, &DTensor) -> Result<Both>;

fn both(layer: &Layer, x: &DTensor) -> Result<Both> {
    let hidden = layer.up.forward(&layer.norm.forward(x)?)?.gelu()?;
    let aux = hidden.sqr()?.mean_all()?;
    Ok((x.add(&layer.down.forward(&hidden)?)?, Some(aux)))
}

const WAYS: [(&str, UnitRun); 4] = [
    ("a tuple", |unit, x| unit.run(|layer| both(layer, x))),
    ("a list with other values", |unit, x| {
        let (mut list, _) = unit.run(|layer| both(layer, x).map(|(y, aux)| (vec![aux.unwrap(), y], 3)))?;
        let y = list.pop().unwrap();
        Ok((y, list.pop()))
    }),
    ("a map", |unit, x| {
        let made = unit.run(|layer| {
            let (y, aux) = both(layer, x)?;
            Ok(BTreeMap::from([("aux", aux.unwrap()), ("y", y)]))
        })?;
        Ok((made["y"].clone(), Some(made["aux"].clone())))
    }),
    ("a recomputed part", |unit, x| {
        unit.run(|layer| {
            let inner = layer.clone();
            let y = recompute(x, move |x| Ok(both(&inner, x)?.0))?;
            Ok((y, both(layer, x)?.1))
        })
    }),
];

/// The loss and the gradients, of the output, of the auxiliary losses, or of both.
fn run(
    axes: &[(&str, usize)],
    way: UnitRun,
    options: FullyShardOptions,
    of: [bool; 2],
) -> Vec<(f64, Values)> {
    let ranks = axes.iter().map(|(_, size)| size).product();
    let results = world(ranks).run(|ctx| -> Result<_> {
        let mesh = ctx.mesh(axes)?;
        let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
        let vb = fully_shard(&vb, options)?;
        let unit = |i: usize| {
            FullyShard::new(&vb.pp("layers").pp(i), |vb| Ok(Arc::new(Layer::new(vb)?))).map(Arc::new)
        };
        let units = (0..3).map(unit).collect::<Result<Vec<_>>>()?;
        let parameters = vb.finish()?;
        let x = batch(0)?.to_device(ctx.device())?;
        let x = Tensor::cat(&[&x, &x.narrow(1, 0, 1)?], 1)?;
        let (mut x, _) = DTensor::distribute(&x, &mesh, &by_rows(&mesh))?.to_var()?;
        let mut aux = None;
        for unit in &units {
            let (y, more) = way(unit, &x)?;
            x = y;
            aux = match (aux, more) {
                (Some(sum), Some(more)) => Some(DTensor::add(&sum, &more)?),
                (sum, more) => sum.or(more),
            };
        }
        let output = x.sqr()?.mean_all()?;
        let aux = aux.unwrap();
        let loss = match of {
            [true, true] => output.add(&aux)?,
            [true, false] => output,
            _ => aux,
        };
        let grads = parameters.backward(&loss)?;
        let mut all = Values::new();
        for p in parameters.iter() {
            if let Some(grad) = p.grad(&grads)? {
                all.insert(p.name.clone(), whole(&grad)?);
            }
        }
        Ok((loss.to_scalar::<f64>()?, all))
    });
    results.unwrap()
}

#[test]
fn all_results_of_a_unit_have_the_gradients_of_one_device() {
    let meshes: [&[(&str, usize)]; 5] = [
        &[("dp", 2), ("tp", 1)],
        &[("dp", 3), ("tp", 1)],
        &[("dp", 2), ("tp", 2)],
        &[("dp", 2), ("cp", 2), ("tp", 1)],
        &[("rep", 2), ("dp", 2), ("tp", 1)],
    ];
    for (name, way) in WAYS {
        for of in [[true, true], [true, false], [false, true]] {
            let (loss, grads) = run(&[("dp", 1), ("tp", 1)], way, FullyShardOptions::default(), of).remove(0);
            for axes in meshes.iter().filter(|axes| has_ranks(axes.iter().map(|(_, size)| size).product())) {
                for prefetch in [true, false] {
                    for (got, found) in run(axes, way, FullyShardOptions::default().prefetch(prefetch), of) {
                        assert_close(&[got], &[loss], 1e-9, name);
                        assert!(found.keys().eq(grads.keys()), "{name} {of:?} on {axes:?}");
                        for (key, want) in &grads {
                            assert_close(
                                &found[key],
                                want,
                                1e-9,
                                &format!("{key} of {name} {of:?} on {axes:?}"),
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_layer_of_experts_returns_its_losses_from_a_unit() {
    world(2)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F32, FullyShardOptions::default())?;
            let config = MoEConfig::new(6, 4, 4, 2).balance_weight(0.1);
            let unit = FullyShard::new(&vb, |vb| MoE::new(config.clone(), vb))?;
            let parameters = vb.finish()?;
            let x = batch(0)?.to_dtype(DType::F32)?.narrow(1, 0, 4)?;
            let x = rows(&Tensor::cat(&[&x, &x.narrow(1, 0, 2)?], 1)?, &mesh)?;
            let made = unit.run(|layer| layer.forward(&x, Mode::Train { step: 0 }))?;
            let grads = parameters.backward(&made.loss.unwrap())?;
            assert!(grads.get(&parameters.iter().next().unwrap().var).is_some());
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_tensor_that_leaves_a_unit_by_another_way_is_one_error() {
    let texts = world(2)
        .run(|ctx| -> Result<String> {
            let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
            let units = linears(2, &vb)?;
            let x = rows(&batch(0)?, &mesh)?;
            let mut aux = None;
            let h = units[0].run(|layer| layer.forward(&x))?;
            units[1].run(|layer| {
                let y = layer.forward(&h)?;
                aux = Some(y.sqr()?.mean_all()?);
                Ok(y)
            })?;
            let text = aux.unwrap().backward().unwrap_err().to_string();
            mesh.group()?.barrier()?;
            Ok(text)
        })
        .unwrap();
    // Off the host, candle does not name the dtype by which free memory is known.
    for text in texts.iter().filter(|_| test_utils::device().is_cpu()) {
        assert!(text.contains("has left the unit other than as a result of FullyShard::run"), "{text}");
    }
}

#[test]
fn a_unit_of_a_module_is_one_and_a_pass_may_change_its_part() {
    for ranks in [1, 2, 3, 5] {
        on_ranks(ranks, "parts", |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", ctx.world_size()), ("tp", 1)])?;
            let vb = builder(&mesh, DType::F64, FullyShardOptions::default())?;
            let mut counted = FullyShard::new(&vb.pp("counted"), |vb| {
                Ok((Linear::new(5, 3, true, vb)?, Vec::<usize>::new()))
            })?;
            let plain = FullyShard::new(&vb.again().pp("counted"), |vb| Linear::new(5, 3, true, vb))?;
            let parameters = vb.finish()?;
            let x = rows(&batch(0)?, &mesh)?;
            let grads = |y: DTensor| -> Result<Vec<Vec<f64>>> {
                let grads = parameters.backward(&y.sqr()?.mean_all()?)?;
                parameters.iter().map(|p| whole(&p.grad(&grads)?.unwrap())).collect()
            };
            let want = grads(plain.run(|layer| layer.forward(&x))?)?;
            assert_eq!(grads(Module::forward(&plain, &x)?)?, want);
            for calls in 0..3 {
                let y = counted.run_mut(|(layer, seen)| {
                    assert_eq!(seen.len(), calls);
                    seen.push(calls);
                    layer.forward(&x)
                })?;
                assert_eq!(grads(y)?, want);
            }
            Ok(())
        });
    }
}
