//! Modules whose inputs and outputs a plan lays out.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{Op, RankContext, comm};
use candle_shard::nn::{LayerNorm, Linear, MeshVarBuilder};
use candle_shard::parallel::{
    ColwiseParallel, ModuleStyle, Plan, PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput,
    Style,
};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use test_utils::on_ranks;

fn builder(ctx: &RankContext, pattern: &str, style: impl Into<Style>) -> Result<MeshVarBuilder> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    MeshVarBuilder::fresh(1, &mesh, Plan::new("tp").with(pattern, style), DType::F64, &device())
}

/// A module with three inputs and two outputs, `a·b + c` and `a·c`.
fn mix(style: &ModuleStyle, x: [&DTensor; 3]) -> Result<[DTensor; 2]> {
    let [a, b, c] = style.inputs(x)?;
    style.outputs([&a.mul(&b)?.add(&c)?, &a.mul(&c)?])
}

#[test]
fn several_inputs_and_outputs_are_laid_out_and_others_left_alone() {
    let both = PrepareModuleInputOutput::new(
        PrepareModuleInput::new([Some(Replicate), None, Some(Shard(1))]),
        PrepareModuleOutput::new([None, Some(Shard(0))]),
    );
    // Where the inputs are only taken as they come, c stays replicated.
    let styles: [(Style, [Placement; 3], [Placement; 2]); 3] = [
        (both.clone().into(), [Replicate, Shard(1), Shard(1)], [Shard(1), Shard(0)]),
        (both.input.clone().into(), [Replicate, Shard(1), Shard(1)], [Shard(1), Shard(1)]),
        (both.output.into(), [Shard(0), Shard(1), Replicate], [Shard(1), Shard(0)]),
    ];
    let whole = [1, 2, 3].map(|seed| values(&[5, 6], seed, DType::F64));
    let vars = whole.each_ref().map(|x| Var::from_tensor(x).unwrap());
    let [a, b, c] = vars.each_ref().map(Var::as_tensor);
    let want = [((a * b).unwrap() + c).unwrap(), (a * c).unwrap()];
    let loss =
        (want[0].sqr().unwrap().sum_all().unwrap() + want[1].exp().unwrap().sum_all().unwrap()).unwrap();
    let grads = loss.backward().unwrap();
    let wants = vars.each_ref().map(|var| grads.get(var).unwrap().clone());
    let want = want.map(|t| t.detach());
    for world in 1..=4 {
        for (style, inputs, outputs) in &styles {
            let (style, inputs, outputs) = (style.clone(), *inputs, *outputs);
            let (whole, want, wants) = (whole.clone(), want.clone(), wants.clone());
            on_ranks(world, "mix", move |ctx| -> Result<()> {
                let vb = builder(ctx, "mix", style.clone())?;
                let style = vb.pp("mix").module_style()?;
                vb.finish()?;
                let lays = [Shard(0), Shard(1), Replicate];
                let leaf = |i: usize| Leaf::new(&whole[i], vb.mesh(), &[Lay::At(lays[i])]);
                let leaves = [leaf(0)?, leaf(1)?, leaf(2)?];
                let x = leaves.each_ref().map(|leaf| &leaf.tensor);
                let laid_out = style.inputs(x)?;
                assert_eq!(laid_out.each_ref().map(|x| x.placements()[0]), inputs);
                let y = mix(&style, x)?;
                if world > 1 {
                    assert_eq!(y[1].placements(), &outputs[1..]);
                }
                for (y, want) in y.iter().zip(&want) {
                    assert!(value_error(y, want)? < 1e-12);
                }
                let grads = y[0].sqr()?.sum_all()?.add(&y[1].exp()?.sum_all()?)?.backward()?;
                for (leaf, want) in leaves.iter().zip(&wants) {
                    assert!(leaf.gradient_error(&grads, want)? < 1e-12);
                }
                Ok(())
            });
        }
    }
}

#[test]
fn an_input_is_gathered_once_for_all_layers_of_a_module() {
    on_ranks(3, "gathered", |ctx| -> Result<()> {
        let vb = builder(ctx, "", PrepareModuleInput::new([Replicate]))?;
        let layers: Vec<Linear> =
            (0..3).map(|i| Linear::new(6, 4, true, &vb.pp(i))).collect::<Result<_>>()?;
        let style = vb.module_style()?; // of the model itself
        vb.finish()?;
        let leaf = Leaf::new(&values(&[5, 6], 1, DType::F64), vb.mesh(), &[Lay::At(Shard(0))])?;
        let (outs, counts) = comm::record(|| {
            let [x] = style.inputs([&leaf.tensor])?;
            layers.iter().map(|layer| layer.forward(&x)).collect::<Result<Vec<_>>>()
        });
        assert!(outs?.iter().all(DTensor::is_replicated));
        assert_eq!((counts.get(Op::AllGather).count, counts.total()), (1, 1), "{counts}");
        Ok(())
    });
}

#[test]
fn layers_follow_prepared_layouts() {
    on_ranks(2, "layers", |ctx| -> Result<()> {
        let style = PrepareModuleInputOutput::new(
            PrepareModuleInput::new([Replicate]),
            PrepareModuleOutput::new([Shard(1)]),
        );
        let vb = builder(ctx, "*", style)?;
        let linear = Linear::new(6, 4, true, &vb.pp("linear"))?;
        let norm = LayerNorm::new(6, 1e-5, &vb.pp("norm"))?;
        let x = distribute(&values(&[5, 6], 1, DType::F64), vb.mesh(), &[Shard(1)])?;
        assert_eq!(linear.forward(&x)?.placements(), [Shard(1)]);
        assert_eq!(norm.forward(&x)?.placements(), [Shard(1)]);
        Ok(())
    });
}

#[test]
fn arguments_that_do_not_fit_a_style_are_refused_alike_before_anything_is_sent() {
    let texts = on_ranks(2, "arguments", |ctx| -> Result<Vec<String>> {
        let style = |desired: &[Option<Placement>]| -> Result<ModuleStyle> {
            let input = PrepareModuleInput::new(desired.iter().copied());
            let output = PrepareModuleOutput::new(desired.iter().copied());
            builder(ctx, "a.mix", PrepareModuleInputOutput::new(input, output))?
                .pp("a")
                .pp("mix")
                .module_style()
        };
        let (one, far) = (style(&[Some(Replicate)])?, style(&[Some(Replicate), Some(Shard(2))])?);
        let x = distribute(
            &Tensor::ones((2, 3), DType::F64, &Device::Cpu)?,
            &ctx.mesh(&[("tp", 2)])?,
            &[Shard(0)],
        )?;
        let (texts, counts) = comm::record(|| {
            [
                one.inputs([&x, &x]).unwrap_err(),
                one.outputs([&x, &x, &x]).unwrap_err(),
                far.inputs([&x, &x]).unwrap_err(),
                far.outputs([&x, &x]).unwrap_err(),
            ]
            .map(|error| error.to_string())
        });
        assert_eq!(counts.total(), 0, "{counts}");
        Ok(texts.to_vec())
    });
    assert_eq!(texts[0], texts[1]);
    assert_eq!(
        texts[0],
        [
            "plan: module \"a.mix\" has 2 inputs, but its style lays out 1; give a layout, or None, for each",
            "plan: module \"a.mix\" has 3 outputs, but its style lays out 1; give a layout, or None, for each",
            "plan: module \"a.mix\" expects S(2) on axis \"tp\" of number 1 of its inputs, f64[2@tp, 3], which has no dim \
             2; choose one below 2",
            "plan: module \"a.mix\" expects S(2) on axis \"tp\" of number 1 of its outputs, f64[2@tp, 3], which has no \
             dim 2; choose one below 2",
        ]
    );
}

#[test]
fn a_column_cut_layer_gathers_its_input_and_scatters_its_gradient() {
    on_ranks(2, "colwise", |ctx| -> Result<()> {
        let vb = builder(ctx, "up", ColwiseParallel::default())?;
        let up = Linear::new(6, 4, true, &vb.pp("up"))?;
        let leaf = Leaf::new(&values(&[4, 6], 1, DType::F64), vb.mesh(), &[Lay::At(Shard(0))])?;
        let (y, forward) = comm::record(|| up.forward(&leaf.tensor));
        let loss = y?.sqr()?.sum_all()?;
        let (grads, backward) = comm::record(|| loss.backward());
        grads?;
        assert_eq!((forward.get(Op::AllGather).count, forward.total()), (1, 1), "{forward}");
        assert_eq!((backward.get(Op::ReduceScatter).count, backward.total()), (1, 1), "{backward}");
        Ok(())
    });
}
