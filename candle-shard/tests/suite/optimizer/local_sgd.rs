//! Replicas that train apart, each cut over other axes of the mesh.
use crate::fsdp::harness::{Case, DIM, Model, Values, batch, by_rows, whole};
use candle_core::{DType, Tensor};
use candle_dist::bits::same_bits;
use candle_dist::{LocalSgd, LocalSgdOptions, RankContext};
use candle_nn::ParamsAdamW;
use candle_shard::fsdp::FullyShardOptions;
use candle_shard::nn::{AdamW, Linear, MeshVarBuilder, Optimizer, Parameters, ParamsSgd, Sgd};
use candle_shard::{DTensor, Result};
use test_utils::on_ranks;

const REPLICAS: usize = 2;

type Make = fn(&Parameters) -> Result<Box<dyn Optimizer>>;

const ADAM_W: Make = |parameters| {
    Ok(Box::new(AdamW::new(parameters, ParamsAdamW { lr: 0.05, eps: 1e-4, ..Default::default() })?))
};
const RATE: ParamsSgd =
    ParamsSgd { lr: 0.05, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false };
const SGD: Make = |parameters| Ok(Box::new(Sgd::new(parameters, RATE)?));
const SGD_ON_MASTERS: Make = |parameters| Ok(Box::new(Sgd::with_master_weights(parameters, RATE)?));

/// Trains replicas on `[fully sharded, tensor-parallel]` ranks each, and returns the whole parameters, and the whole master weights
/// or parameters that were brought together.
fn train(ctx: &RankContext, [dp, tp]: [usize; 2], dtype: DType, make: Make) -> Result<(Values, Values)> {
    let all = ctx.mesh(&[("replica", REPLICAS), ("dp", dp), ("tp", tp)])?;
    let (replicas, mesh) = (all.axis_group("replica")?, all.axes(&["dp", "tp"])?);
    let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), dtype, ctx.device())?;
    let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
    let base = Linear::new(5, 5, false, &vb.frozen().pp("base"))?;
    let model = Model::new(&vb)?;
    let parameters = vb.finish()?;
    let mut optimizer = make(&parameters)?;
    let masters = optimizer.master_weights();
    let (trained, frozen) = parameters.partition(|parameter| !parameter.is_frozen());
    let before: Vec<Tensor> = frozen.iter().map(|of| of.var.copy()).collect::<candle_core::Result<_>>()?;
    assert_eq!(masters.len(), if dtype == DType::BF16 { trained.iter().count() } else { 0 });
    let options = LocalSgdOptions::default().sync_every(3).fragments(2).delay(1).lr(0.5);
    let outer = LocalSgd::new(replicas, &trained.named_vars(), &options)?;
    let mut outer = outer.with_master_weights(&masters)?;
    for step in 0..7 {
        let x = batch(step * REPLICAS + replicas.rank())?.to_device(ctx.device())?.to_dtype(dtype)?;
        let x = base.forward(&DTensor::distribute(&x, &mesh, &by_rows(&mesh))?)?;
        optimizer.step(&parameters.backward(&model.loss(&x, Case::default())?)?)?;
        outer.step()?;
    }
    outer.synchronize()?;
    let together = trained.named_vars().into_iter().chain(masters.iter().cloned());
    for (name, var) in together.filter(|(_, var)| var.elem_count() > 0) {
        let all = replicas.all_gather(&var.detach().unsqueeze(0)?, 0)?;
        assert!(same_bits(&all.get(0)?, &all.get(1)?)?, "{name}");
    }
    for (of, before) in frozen.iter().zip(before) {
        assert!(same_bits(&of.var, &before)?, "{}", of.name);
    }
    let named = |(name, tensor): (String, DTensor)| Ok((name, whole(&tensor)?));
    let parameters = trained.named_tensors();
    let wide = match masters.is_empty() {
        true => parameters.clone(),
        false => {
            let of_masters = optimizer.state()?.into_iter();
            let of_masters = of_masters.filter_map(|(name, tensor)| {
                Some((name.strip_prefix("sgd.master_weight.")?.to_string(), tensor))
            });
            of_masters.collect()
        }
    };
    Ok((
        parameters.into_iter().map(named).collect::<Result<_>>()?,
        wide.into_iter().map(named).collect::<Result<_>>()?,
    ))
}

fn largest_difference(got: &Values, want: &Values) -> f64 {
    assert!(got.keys().eq(want.keys()), "{:?}", got.keys());
    let pairs = got.values().flatten().zip(want.values().flatten());
    pairs.map(|(got, want)| (got - want).abs()).fold(0.0, f64::max)
}

#[test]
fn replicas_end_with_one_model_however_each_is_cut() {
    let run = |cut: [usize; 2]| {
        on_ranks(REPLICAS * cut[0] * cut[1], &format!("{cut:?}"), move |ctx| {
            train(ctx, cut, DType::F64, ADAM_W)
        })
        .remove(0)
        .0
    };
    let want = run([1, 1]);
    assert_eq!(want["embed.weight"].len(), 5 * DIM);
    // Some have ranks without elements.
    for cut in [[2, 1], [1, 2], [1, 4], [2, 2], [4, 1]] {
        let off = largest_difference(&run(cut), &want);
        assert!(off < 1e-9, "{cut:?}: off by {off}");
    }
}

#[test]
fn master_weights_of_shards_are_brought_together() {
    let want = on_ranks(REPLICAS, "wide", |ctx| train(ctx, [1, 1], DType::F32, SGD)).remove(0).0;
    for cut in [[1, 1], [2, 1], [1, 2], [2, 2]] {
        let ranks = REPLICAS * cut[0] * cut[1];
        let (rounded, masters) = on_ranks(ranks, &format!("bf16 {cut:?}"), move |ctx| {
            train(ctx, cut, DType::BF16, SGD_ON_MASTERS)
        })
        .remove(0);
        let nearest = |x: &f64| f64::from(half::bf16::from_f64(*x));
        for (name, master) in &masters {
            let of_master: Vec<f64> = master.iter().map(nearest).collect();
            assert_eq!(rounded[name], of_master, "{cut:?}: {name}");
        }
        // What 16 bits of the values in between allow; a fresh model has the same numbers in f32 and rounded.
        let off = largest_difference(&masters, &want);
        assert!(off < 0.02, "{cut:?}: off by {off}");
    }
}
