//! Backward passes whose gradients stay on their ranks until a later pass sums them.
use crate::fsdp::errors::Broken;
use crate::fsdp::harness::*;
use candle_core::backprop::GradStore;
use candle_core::{DType, Var};
use candle_dist::{GradAccumulator, Op, comm};
use candle_shard::fsdp::{FullyShardOptions, discard_grads, no_sync};
use candle_shard::nn::{MeshVarBuilder, Parameters};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Replicate, Result};
use test_utils::{has_ranks, world};

fn compare(parameters: &Parameters, got: &GradStore, want: &GradStore, label: &str) -> Result<()> {
    for p in parameters.iter() {
        let [got, want] = [got, want].map(|grads| p.grad(grads));
        match (got?, want?) {
            (Some(got), Some(want)) => {
                assert_close(&whole(&got)?, &whole(&want)?, 1e-12, &format!("{label} {}", p.name));
            }
            (got, want) => assert_eq!(got.is_some(), want.is_some(), "{label} {}", p.name),
        }
    }
    Ok(())
}

#[test]
fn only_the_last_pass_sums_the_gradients_of_all_over_the_ranks() {
    if !has_ranks(4) {
        return;
    }
    for (axes, recompute, prefetch) in [
        ([("dp", 4), ("tp", 1)], None, true),
        ([("dp", 2), ("tp", 2)], None, false),
        ([("dp", 2), ("tp", 2)], Some(Recompute::Within), true),
        ([("dp", 4), ("tp", 1)], Some(Recompute::Around), false),
    ] {
        world(4)
            .run(|ctx| -> Result<()> {
                let mesh = ctx.mesh(&axes)?;
                let options = FullyShardOptions::default().prefetch(prefetch);
                let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
                let model = Model::new(&vb.fully_shard("dp", options)?)?;
                let parameters = vb.finish()?;
                let case = Case { options, recompute, ..Case::default() };
                let pass = |i: usize| model.loss(&rows(&batch(i)?, &mesh)?, case)?.backward();
                let (mut each, mut last) = (GradAccumulator::new(&parameters.vars()), None);
                for i in 0..3 {
                    each.add(&pass(i)?)?;
                }
                let mut want = each.mean()?;
                parameters.reduce(&mut want)?;
                // Twice: nothing is left of the first time.
                for time in 0..2 {
                    let mut sum = GradAccumulator::new(&parameters.vars());
                    for i in 0..3 {
                        let (grads, counts) =
                            comm::record(|| if i < 2 { no_sync(|| pass(i)) } else { pass(i) });
                        sum.add(&grads?)?;
                        assert_eq!(
                            counts.get(Op::ReduceScatter).count,
                            if i < 2 { 0 } else { LAYERS + 1 },
                            "pass {i}"
                        );
                    }
                    let mut grads = sum.mean()?;
                    parameters.reduce(&mut grads)?;
                    compare(&parameters, &grads, &want, &format!("{axes:?} {recompute:?} {time}"))?;
                    last = Some(grads);
                }
                assert!(last.is_some());
                Ok(())
            })
            .unwrap();
    }
}

/// The last pass reaches other units than those before, also on one rank alone.
#[test]
fn units_of_earlier_passes_alone_are_summed_too() {
    if !has_ranks(2) {
        return;
    }
    for prefetch in [false, true] {
        world(2)
            .run(|ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
                let vb = MeshVarBuilder::fresh(7, &mesh, Plan::none(), DType::F64, ctx.device())?;
                let vb = vb.fully_shard("dp", FullyShardOptions::default().prefetch(prefetch))?;
                let layers = linears(3, &vb)?;
                let parameters = vb.finish()?;
                let x = rows(&batch(0)?, &mesh)?;
                let through = |some: &[usize]| -> Result<GradStore> {
                    let end = some
                        .iter()
                        .try_fold(x.clone(), |x: DTensor, &i| layers[i].run(|layer| layer.forward(&x)));
                    end?.sqr()?.mean_all()?.backward()
                };
                let (mut each, mut sum) =
                    (GradAccumulator::new(&parameters.vars()), GradAccumulator::new(&parameters.vars()));
                let passes: [&[usize]; 3] = [&[0, 1], &[1], &[2]];
                for some in passes {
                    each.add(&through(some)?)?;
                }
                for (i, some) in passes.into_iter().enumerate() {
                    sum.add(&if i < 2 { no_sync(|| through(some))? } else { through(some)? })?;
                }
                compare(&parameters, &sum.mean()?, &each.mean()?, &format!("prefetch {prefetch}"))
            })
            .unwrap();
    }
}

/// Two models of a linear unit each, and a layer outside of units.
fn apart(
    ctx: &candle_dist::RankContext,
    run: impl Fn(&[&dyn Fn() -> Result<GradStore>; 3]) -> Result<GradStore>,
) -> Result<[bool; 2]> {
    let mesh = ctx.mesh(&[("dp", 2), ("tp", 1)])?;
    let x = rows(&batch(0)?, &mesh)?;
    let fresh = |seed| MeshVarBuilder::fresh(seed, &mesh, Plan::none(), DType::F64, ctx.device());
    let build = |seed| -> Result<_> {
        let vb = fresh(seed)?.fully_shard("dp", FullyShardOptions::default())?;
        let layer = linears(1, &vb)?.remove(0);
        Ok((layer, vb.finish()?))
    };
    let ((one, of_one), (two, of_two)) = (build(7)?, build(8)?);
    let head = candle_shard::nn::Linear::new(5, 5, false, &fresh(9)?.pp("head"))?;
    let pass = |layer: &candle_shard::fsdp::FullyShard<candle_shard::nn::Linear>| {
        layer.run(|layer| layer.forward(&x))?.sqr()?.mean_all()?.backward()
    };
    let passes: [&dyn Fn() -> Result<GradStore>; 3] =
        [&|| pass(&one), &|| pass(&two), &|| head.forward(&x)?.sqr()?.mean_all()?.backward()];
    let grads = run(&passes)?;
    let mut found = [false; 2];
    for (found, (parameters, pass)) in found.iter_mut().zip([(&of_one, passes[0]), (&of_two, passes[1])]) {
        *found = parameters.iter().any(|p| grads.get(&p.var).is_some());
        if *found {
            // And nothing is left: the next pass has its own gradients alone.
            compare(parameters, &grads, &pass()?, "apart")?;
        }
    }
    Ok(found)
}

#[test]
fn the_last_pass_sums_kept_gradients_of_units_that_it_does_not_reach() {
    if !has_ranks(2) {
        return;
    }
    for last in [1, 2] {
        let found = world(2).run(|ctx| {
            apart(ctx, |passes| {
                no_sync(passes[0])?;
                passes[last]()
            })
        });
        assert_eq!(found.unwrap(), [[true, last == 1]; 2]);
    }
}

#[test]
fn kept_gradients_of_a_skipped_batch_or_of_a_failed_pass_are_dropped() {
    if !has_ranks(2) {
        return;
    }
    for fails in [false, true] {
        let found = world(2).run(|ctx| {
            apart(ctx, |passes| {
                no_sync(passes[0])?;
                if fails {
                    let failing = Var::ones((), DType::F64, ctx.device())?.apply_op1(Broken)?;
                    let failing = DTensor::from_local(failing, &ctx.mesh(&[("dp", 2)])?, &[Replicate], ())?;
                    assert!(failing.backward().unwrap_err().to_string().contains("on purpose"));
                } else {
                    discard_grads();
                }
                passes[1]()
            })
        });
        assert_eq!(found.unwrap(), [[false, true]; 2], "fails {fails}");
    }
}

/// The last pass returns the gradients of units of all passes as one, which no weight could tell apart.
#[test]
fn unlike_weights_of_passes_that_keep_gradients_are_refused() {
    if !has_ranks(2) {
        return;
    }
    let done = world(2).run(|ctx| {
        apart(ctx, |passes| {
            let mut sum = GradAccumulator::new(&[]);
            // A pass that keeps nothing, and one that sums its own.
            sum.add_weighted(&no_sync(passes[2])?, 5.0)?;
            sum.add_weighted(&passes[0]()?, 4.0)?;
            sum.add_weighted(&no_sync(passes[0])?, 2.0)?;
            for refused in [no_sync(passes[0])?, passes[2]()?] {
                let text = sum.add_weighted(&refused, 3.0).unwrap_err().to_string();
                assert!(text.contains("weight 3 for a pass") && text.contains("one of weight 2"), "{text}");
            }
            // Other passes are free of it.
            let mut sum = GradAccumulator::new(&[]);
            sum.add_weighted(&no_sync(passes[0])?, 7.0)?;
            sum.add_weighted(&passes[1]()?, 7.0)?;
            sum.add_weighted(&passes[1]()?, 1.0)?;
            no_sync(passes[0])?;
            passes[1]()
        })
    });
    assert_eq!(done.unwrap(), [[true; 2]; 2]);
}
