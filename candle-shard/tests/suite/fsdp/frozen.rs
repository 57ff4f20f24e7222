//! Units of which some parameters are frozen: adapters, heads on a frozen base, frozen units between others.
use crate::fsdp::harness::*;
use candle_core::{DType, Tensor};
use candle_dist::RankContext;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{Linear, MeshVarBuilder, recompute};
use candle_shard::{DTensor, Result};
use std::sync::Arc;
use test_utils::{has_ranks, world};

/// A frozen linear map with a trainable one beside it and one behind it.
struct Adapted {
    base: Linear,
    a: Linear,
    b: Linear,
    _unused: Linear,
}

type Unit = FullyShard<Arc<Adapted>>;

impl Adapted {
    fn new(vb: &MeshVarBuilder) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            base: Linear::new(DIM, DIM, true, &vb.frozen().pp("base"))?,
            a: Linear::new(DIM, 2, true, &vb.pp("a"))?,
            b: Linear::new(2, DIM, true, &vb.pp("b"))?,
            _unused: Linear::new(3, 3, false, &vb.pp("unused"))?,
        }))
    }

    fn low_rank(&self, x: &DTensor) -> Result<DTensor> {
        self.b.forward(&self.a.forward(x)?)
    }
}

fn plain(unit: &Adapted, x: &DTensor) -> Result<DTensor> {
    unit.base.forward(x)?.add(&unit.low_rank(x)?)?.gelu()
}

/// What one unit makes of its own input and of what came before all units.
type Way = fn(&Arc<Unit>, &DTensor, &DTensor) -> Result<DTensor>;

const WAYS: [(&str, Way); 9] = [
    ("an adapter beside a base", |unit, x, _| unit.run(|unit| plain(unit, x))),
    ("an adapter first", |unit, x, _| unit.run(|unit| unit.low_rank(x)?.add(&unit.base.forward(x)?))),
    ("a head on a base", |unit, x, _| unit.run(|unit| unit.low_rank(&unit.base.forward(x)?))),
    ("a base on a head", |unit, x, _| unit.run(|unit| unit.base.forward(&unit.low_rank(x)?))),
    ("a base alone", |unit, x, _| unit.run(|unit| unit.base.forward(x)?.gelu())),
    // candle comes to the base's use of the first tensor when it has gone through all units before.
    ("a base that skips", |unit, x, first| {
        unit.run(|unit| {
            unit.base.forward(first)?.gelu()?.add(&unit.low_rank(x)?)?.add(&unit.base.forward(x)?)
        })
    }),
    ("a recomputed part that skips", |unit, x, first| {
        unit.run(|unit| {
            let inner = unit.clone();
            let skipping = recompute(first, move |first| plain(&inner, first))?;
            skipping.add(&unit.low_rank(x)?)
        })
    }),
    ("a unit of recomputed parts", |unit, x, _| {
        unit.run(|unit| {
            let [one, two] = [unit.clone(), unit.clone()];
            let x = recompute(x, move |x| plain(&one, x))?;
            recompute(&x, move |x| plain(&two, x))
        })
    }),
    ("a recomputed unit", |unit, x, _| {
        let unit = unit.clone();
        recompute(x, move |x| unit.run(|unit| plain(unit, &unit.base.forward(x)?)))
    }),
];

fn gradients(
    ctx: &RankContext,
    axes: &[(&str, usize)],
    options: FullyShardOptions,
    way: Way,
) -> Result<Values> {
    let mesh = ctx.mesh(axes)?;
    let vb = builder(&mesh, DType::F64, options)?;
    let embed = Linear::new(5, DIM, true, &vb.pp("embed"))?;
    let unit = |i: usize| FullyShard::new(&vb.pp(i), Adapted::new).map(Arc::new);
    let units = (0..3).map(unit).collect::<Result<Vec<_>>>()?;
    let parameters = vb.finish()?;
    let mut found = Values::new();
    for step in 0..2 {
        let first = embed.forward(&rows(&batch(step)?, &mesh)?)?;
        let y = units.iter().try_fold(first.clone(), |x, unit| way(unit, &x, &first))?;
        let grads = parameters.backward(&y.sqr()?.mean_all()?)?;
        for p in parameters.iter() {
            assert_eq!(p.is_frozen(), p.name.contains("base"));
            if let Some(grad) = p.grad(&grads)? {
                found.insert(format!("{} in step {step}", p.name), whole(&grad)?);
            }
        }
    }
    Ok(found)
}

#[test]
fn a_frozen_base_stays_until_the_pass_has_left_its_unit() {
    let meshes: [&[(&str, usize)]; 4] =
        [&[("dp", 2), ("tp", 1)], &[("dp", 3), ("tp", 1)], &[("dp", 4), ("tp", 1)], &[("dp", 2), ("tp", 2)]];
    for (name, way) in WAYS {
        let alone =
            |ctx: &RankContext| gradients(ctx, &[("dp", 1), ("tp", 1)], FullyShardOptions::default(), way);
        let want = world(1).run(alone).unwrap().remove(0);
        for axes in meshes {
            for reshard_after_forward in [true, false] {
                let options = FullyShardOptions::default().reshard_after_forward(reshard_after_forward);
                let ranks = axes.iter().map(|(_, size)| size).product();
                if !has_ranks(ranks) {
                    continue;
                }
                for got in world(ranks).run(|ctx| gradients(ctx, axes, options, way)).unwrap() {
                    assert!(
                        got.keys().eq(want.keys()),
                        "{name} on {axes:?}: {:?} for {:?}",
                        got.keys(),
                        want.keys()
                    );
                    for (of, want) in &want {
                        assert_close(&got[of], want, 1e-9, &format!("{name} on {axes:?}: {of}"));
                    }
                }
            }
        }
    }
}

#[test]
fn parameters_that_no_rank_used_get_no_gradient_on_any_mesh() {
    let names = |axes: &[(&str, usize)]| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let run = world(ranks).run(|ctx| -> Result<(Vec<String>, usize)> {
            let mesh = ctx.mesh(axes)?;
            let vb = builder(&mesh, DType::F32, FullyShardOptions::default())?;
            let [used, unused] = ["used", "unused"].map(|name| Linear::new(5, 3, true, &vb.pp(name)));
            let (used, _) = (used?, unused?);
            let parameters = vb.finish()?;
            let mut optimizer = candle_shard::nn::AdamW::new(&parameters, Default::default())?;
            let before: Vec<Vec<f64>> = parameters.iter().map(|p| whole(&p.tensor)).collect::<Result<_>>()?;
            let x = rows(&batch(0)?.to_dtype(DType::F32)?, &mesh)?;
            let mut grads = used.forward(&x)?.sqr()?.sum_all()?.backward()?;
            let (reduced, counts) = candle_dist::comm::record(|| parameters.reduce(&mut grads));
            reduced?;
            optimizer.step(&grads)?;
            for (p, before) in parameters.iter().zip(before) {
                assert_eq!(
                    whole(&p.tensor)? == before,
                    p.name.starts_with("unused"),
                    "{} on {axes:?}",
                    p.name
                );
            }
            let with = parameters.iter().filter(|p| grads.get(&p.var).is_some());
            Ok((with.map(|p| p.name.clone()).collect(), counts.total()))
        });
        let run = run.unwrap();
        assert!(run.iter().all(|one| *one == run[0]));
        run.into_iter().next().unwrap()
    };
    let (want, none) = names(&[("dp", 1), ("tp", 1)]);
    assert_eq!((want.len(), none), (2, 0));
    for ranks in (2..5).filter(|&ranks| has_ranks(ranks)) {
        assert_eq!(names(&[("dp", ranks), ("tp", 1)]), (want.clone(), 1));
    }
}

#[test]
fn a_parameter_that_one_rank_used_gets_its_gradient_on_all() {
    if !has_ranks(3) {
        return;
    }
    world(3)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 3), ("tp", 1)])?;
            let vb = builder(&mesh, DType::BF16, FullyShardOptions::default())?;
            let layer = Linear::new(5, 1, false, &vb.pp("layer"))?;
            let parameters = vb.finish()?;
            let var = &parameters.iter().next().unwrap().var;
            let mut grads = candle_core::backprop::GradStore::default();
            if ctx.rank() == 1 {
                grads.insert(var, Tensor::full(0.5f32, (1, 5), var.device())?.to_dtype(DType::BF16)?);
            }
            parameters.reduce(&mut grads)?;
            assert_eq!(grads.get(var).unwrap().to_vec2::<f32>()?, [[0.5; 5]]);
            drop(layer);
            Ok(())
        })
        .unwrap();
}
