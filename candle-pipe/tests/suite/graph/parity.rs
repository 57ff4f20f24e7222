//! Loss, outputs and all gradients of cut models equal those of the uncut ones.
use crate::graph::common::{Builder, Vb, build, numbers};
use crate::graph::models::{
    blocks, kinds, kinds_args, plain_blocks, plain_kinds, plain_skips, plain_tied, skips, skips_args, tied,
    tied_args,
};
use candle_core::{DType, Device, Tensor, Var};
use candle_pipe::microbatch::{Splitter, split_args_kwargs_into_chunks};
use candle_pipe::{
    Ctx, EqualCount, In, Keep, Kwargs, LossReduction, Pipe, Share, SplitPoint, SplitSpec, StepOptions, Value,
    nn,
};
use candle_shard::random::{Distribution, Stream, sample_full};

/// A model cut before any two of its nodes, and everywhere.
fn cuts(declare: impl Fn() -> Builder) -> Vec<Pipe<Vb>> {
    let nodes = declare().graph().nodes.iter().filter(|node| !node.is_replicated()).count();
    [1, 2, 3, nodes].iter().map(|&stages| declare().finish(EqualCount(stages)).unwrap()).collect()
}

#[test]
fn skips_kwargs_and_tuples() {
    for pipe in cuts(skips) {
        build(&pipe).check(&skips_args(7), plain_skips);
    }
    let pipe = skips().finish(EqualCount(5)).unwrap();
    assert!(pipe.info().skip_edges().any(|edge| edge.to.len() > 1), "{pipe}");
}

#[test]
fn shared_weights_both_ways() {
    for share in [Share::Replicate, Share::Transmit] {
        for pipe in cuts(|| tied(share)) {
            build(&pipe).check(&tied_args(5), plain_tied);
        }
        let pipe = tied(share).finish(EqualCount(3)).unwrap();
        let [group] = pipe.shares() else { panic!("{:?}", pipe.shares()) };
        assert_eq!(
            (group.name.as_str(), group.share, group.stages.as_slice()),
            ("tok.weight", share, &[0, 1, 2][..])
        );
    }
}

#[test]
fn values_of_all_kinds() {
    for pipe in cuts(kinds) {
        build(&pipe).check(&kinds_args(6), plain_kinds);
    }
}

#[test]
fn nested_modules_cut_inside() {
    let inside = [
        ("blocks.0.down", SplitPoint::Beginning),
        ("blocks.1.act", SplitPoint::End),
        ("blocks.1", SplitPoint::End),
    ];
    let pipe = blocks(3).finish(SplitSpec::at(inside)).unwrap();
    assert_eq!(pipe.num_stages(), 4);
    build(&pipe).check(&kinds_args(5), plain_blocks(3));
}

#[test]
fn gradients_reach_what_inputs_were_computed_from() -> candle_pipe::Result<()> {
    let mut g = Builder::new();
    let (x, y) = (g.input("x", In::Arg), g.input("y", In::Arg));
    let h = g.func("square", |xs, _| Ok(xs[0].tensor()?.sqr()?.into()), [x]);
    let h = g.func("product", |xs, _| Ok((xs[0].tensor()? * xs[1].tensor()?)?.into()), [h, y]);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sum_all()?), [h], LossReduction::Sum);
    let local = build(&g.finish(EqualCount(3))?).local;
    let x = Var::new(&[1f64, 2., 3., 4., 5.], &Device::Cpu)?;
    let doubled = (x.as_tensor() * 2.0)?;
    let args = [Value::from(&doubled), x.as_tensor().into()];
    let batch = split_args_kwargs_into_chunks(&args, &Kwargs::new(), 2, None, None)?;
    let step = local.forward_backward(&batch, &StepOptions::default())?;
    // The loss is the sum of 4x³.
    let want = [12., 48., 108., 192., 300.];
    assert_eq!(step.grads.get(&x).map(Tensor::to_vec1::<f64>).transpose()?, Some(want.to_vec()));
    Ok(())
}

#[test]
fn dropout_is_that_of_the_uncut_model() -> candle_pipe::Result<()> {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let mut h = x;
    for name in ["a", "b"] {
        let build = move |vb: &Vb| {
            let (scale, dropout) = (vb.get(3, "scale")?, nn::Dropout::new(0.4, 11, name)?);
            Ok(candle_pipe::stage_op(move |xs, ctx: &Ctx| {
                Ok(vec![dropout.forward(&xs[0].tensor()?.broadcast_mul(&scale)?, ctx)?.into()])
            }))
        };
        h = g.module(name, build, [h]);
    }
    g.output("y", h);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sum_all()?), [h], LossReduction::Sum);
    let built = build(&g.finish(EqualCount(2))?);
    let x = numbers("x", &[7, 2, 3]);
    let mut want = x.clone();
    for name in ["a", "b"] {
        let keep = Distribution::Bernoulli { p: 0.6 };
        let mask = sample_full(Stream::new(11, name).fold(9), keep, &[7, 2, 3], DType::F64, &Device::Cpu)?;
        want =
            (want.broadcast_mul(&numbers(&format!("{name}.scale"), &[3]))? * mask.affine(1.0 / 0.6, 0.0)?)?;
    }
    let options = StepOptions::default().step(9);
    let masked = Splitter::new(3).masked().split(&[(&x).into()], &Kwargs::new(), None, None)?;
    let step = built.local.forward_backward(&masked, &options)?;
    assert!(masked.merge(&step.outputs, None)?.get("y")?.same(&(&want).into())?);
    for chunks in 1..=5 {
        let batch = split_args_kwargs_into_chunks(&[(&x).into()], &Kwargs::new(), chunks, None, None)?;
        let step = built.local.forward_backward(&batch, &options)?;
        assert!(batch.merge(&step.outputs, None)?.get("y")?.same(&(&want).into())?, "{chunks} chunks");
        let again = built.local.forward_backward(&batch, &options.clone().keep(Keep::Inputs))?;
        assert_eq!(built.bits(&step), built.bits(&again));
        let other = built.local.forward_backward(&batch, &options.clone().step(8))?;
        assert_ne!(built.bits(&step), built.bits(&other));
        let evaluated = built.local.evaluate(&batch, &StepOptions::default())?;
        assert!(!batch.merge(&evaluated.outputs, None)?.get("y")?.same(&(&want).into())?);
    }
    Ok(())
}

#[test]
fn weights_may_be_given() -> candle_pipe::Result<()> {
    let built = build(&blocks(2).finish(EqualCount(2))?);
    let args = kinds_args(5);
    let ones = built.step(&args, 2, &StepOptions::default());
    let twos = built.step(&args, 2, &StepOptions::default().weights(vec![2.0, 2.0]));
    assert_eq!(twos.loss()?.to_scalar::<f64>()?, 2.0 * ones.loss()?.to_scalar::<f64>()?);
    let wrong = StepOptions::default().weights(vec![1.0]);
    let error = built.local.forward_backward(&args.split(2), &wrong).unwrap_err().to_string();
    assert_eq!(error, "pipe: 1 weights for 2 microbatches; give one for each");
    Ok(())
}
