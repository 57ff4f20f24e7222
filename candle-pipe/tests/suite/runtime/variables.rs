//! The variables behind parameters: casts of them, those that nobody declared, and each of them once.
use crate::runtime::model::{Vb, numbers};
use crate::runtime::parity::close;
use candle_core::{DType, Tensor, Var};
use candle_dist::{ClipGradNorm, DataParallelOptions, InitialSync};
use candle_nn::{Optimizer, SGD};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::nn::linear_no_bias;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    In, Keep, Kwargs, LocalPipe, LossReduction, Pipe, PipeBuilder, Result, Runtime, Scope, Share, SplitSpec,
    StepOptions, Value,
};
use std::collections::{BTreeMap, HashMap};
use test_utils::{device, on_ranks};

type Vars = BTreeMap<&'static str, Var>;

fn wave(rows: usize, width: usize, seed: f64) -> Result<Tensor> {
    Ok(Tensor::arange(0f64, (rows * width) as f64, &device())?
        .affine(0.7, seed)?
        .sin()?
        .reshape((rows, width))?)
}

/// Variables of one dtype, plus `shift`.
fn variables(dtype: DType, shift: f64) -> Result<Vars> {
    let names = ["tied", "own.0.weight", "own.1.weight", "both.weight"];
    let var = |(i, name)| {
        Ok((name, Var::from_tensor(&wave(3, 3, i as f64)?.affine(1.0, shift)?.to_dtype(dtype)?)?))
    };
    names.into_iter().enumerate().map(var).collect()
}

/// A builder of casts of the variables, or of the variables where the dtype is theirs.
fn casts(vars: &Vars, dtype: DType) -> Vb {
    let tensors: HashMap<String, Tensor> =
        vars.iter().map(|(name, var)| (name.to_string(), var.as_tensor().clone())).collect();
    Vb::from_tensors(tensors, dtype, &device())
}

/// Two stages with a weight each, a declared weight of both, and one that both ask for undeclared.
fn declare(ends: &'static [usize]) -> Result<Pipe<Vb>> {
    let mut g = PipeBuilder::<Vb>::new();
    let x = g.input("x", In::Arg);
    let tied = g.parameter("tied", Share::Replicate, |vb| Ok(vb.get((3, 3), "tied")?));
    let product =
        |xs: &[Value], _: &candle_pipe::Ctx| Ok(xs[0].tensor()?.matmul(xs[1].tensor()?)?.tanh()?.into());
    let mut h = x;
    for i in 0..2 {
        h = g.func(&format!("tie.{i}"), product, [h, tied]);
        h = g.module(&format!("own.{i}"), |vb| Ok(linear_no_bias(3, 3, vb.clone())?), [h]);
        h = g.module(["both", "two.both"][i], |vb| Ok(linear_no_bias(3, 3, vb.root().pp("both"))?), [h]);
        if ends.contains(&i) {
            g.split();
        }
    }
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
    g.finish(SplitSpec::declared())
}

fn batch(dtype: DType, rows: std::ops::Range<usize>, microbatches: usize) -> Result<Microbatches> {
    let x = wave(8, 3, 0.3)?.narrow(0, rows.start, rows.len())?.to_dtype(dtype)?;
    split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), microbatches, None, None)
}

/// The gradients of one process on the whole batch.
fn alone(of: DType, dtype: DType) -> Result<BTreeMap<&'static str, Vec<f64>>> {
    let vars = variables(of, 0.0)?;
    let local = LocalPipe::new(&declare(&[])?, &casts(&vars, dtype), &device())?;
    let step = local.forward_backward(&batch(dtype, 0..8, 4)?, &StepOptions::default())?;
    assert_eq!(local.named_vars()?.len(), vars.len());
    vars.iter().map(|(name, var)| Ok((*name, numbers(step.grads.get(var).expect("a gradient"))?))).collect()
}

#[test]
fn parameters_that_are_casts_have_the_whole_gradient_in_their_variables() {
    for (of, dtype, within) in [
        (DType::F64, DType::F64, 1e-12),
        (DType::F32, DType::F64, 1e-6),
        (DType::F64, DType::F32, 1e-5),
        (DType::F32, DType::BF16, 3e-2),
    ] {
        for (pp, dp, kind) in
            [(1, 1, "gpipe"), (2, 1, "1f1b"), (2, 2, "1f1b"), (1, 2, "zbv"), (2, 1, "zb-h1")]
        {
            on_ranks(pp * dp, &format!("{dtype:?} of {of:?}, {pp} x {dp}"), move |ctx| -> Result<()> {
                let want = alone(of, dtype)?;
                let mesh = ctx.mesh(&[("pp", pp), ("dp", dp)])?;
                let per_rank = if kind == "zbv" { 2 } else { 1 };
                let schedule = kind.parse::<ScheduleKind>()?.schedule(pp, 4, per_rank)?;
                let vars = variables(of, 0.0)?;
                let pipe = declare(if schedule.stages() == 2 { &[0] } else { &[] })?;
                let scope = casts(&vars, dtype);
                let mut runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &scope, &device())?;
                if dp > 1 {
                    runtime =
                        runtime.with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
                }
                let (replica, each) = (mesh.local_rank("dp")?, 8 / dp);
                for keep in [Keep::Activations, Keep::Inputs] {
                    let options = StepOptions::default().first_row(replica * each).keep(keep);
                    let cut = batch(dtype, replica * each..(replica + 1) * each, 4)?;
                    let mut made = runtime.forward_backward(&cut, &options)?.step;
                    let named = runtime.named_vars()?;
                    assert!(!named.is_empty() && named.len() == if pp == 1 { 4 } else { 3 }, "{named:?}");
                    for (name, var) in &named {
                        assert_eq!(var.id(), vars[name.as_str()].id(), "{name}");
                        let got =
                            numbers(made.grads.get(var).unwrap_or_else(|| panic!("no gradient of {name}")))?;
                        close(&got, &want[name.as_str()], within, &format!("{kind}: {name}"));
                    }
                    let whole = want.values().flatten().map(|grad| grad * grad).sum::<f64>().sqrt();
                    let norm =
                        runtime.clip_grad_norm(ClipGradNorm::new(0.1)).clip(&named, &mut made.grads)?;
                    assert!((norm - whole).abs() < within * 10.0, "norm {norm}, of one device {whole}");
                }
                Ok(())
            });
        }
    }
}

/// A cast keeps the values of its variable, so making the variables equal would come too late.
#[test]
fn casts_of_unlike_variables_are_refused_by_all() {
    for (pp, dp) in [(2, 1), (1, 2), (2, 2)] {
        let texts = on_ranks(pp * dp, &format!("{pp} x {dp}"), move |ctx| -> Result<Vec<String>> {
            let mesh = ctx.mesh(&[("pp", pp), ("dp", dp)])?;
            let mut texts = Vec::new();
            for (shift, start, is_fine) in [
                (ctx.rank() as f64, DataParallelOptions::default(), false),
                (
                    mesh.local_rank("dp")? as f64,
                    DataParallelOptions::default().start(InitialSync::Trust),
                    true,
                ),
            ] {
                let schedule = ScheduleKind::OneFOneB.schedule(pp, 2, 1)?;
                let scope = casts(&variables(DType::F64, shift)?, DType::F32);
                let pipe = declare(if pp == 2 { &[0] } else { &[] })?;
                let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &scope, &device())
                    .and_then(|runtime| runtime.with_replicas(mesh.axis_group("dp")?, &start));
                match runtime {
                    Ok(_) => assert!(is_fine),
                    Err(error) => texts.push(error.to_string()),
                }
            }
            Ok(texts)
        });
        for texts in texts {
            assert!(
                texts.len() == 1 && texts[0].contains("is made of a variable, such as by a cast"),
                "{texts:?}"
            );
        }
    }
}

fn square(xs: &[Value], _: &candle_pipe::Ctx) -> Result<Tensor> {
    Ok(xs[0].tensor()?.sqr()?.mean_all()?)
}

/// A model with its own variable: captured, brought along by a module, or declared.
fn own(how: &str, own: &Var) -> Result<Pipe<()>> {
    let mut g = PipeBuilder::<()>::new();
    let x = g.input("x", In::Arg);
    let captured = own.as_tensor().clone();
    let h = match how {
        "captured" => g.func("in", move |xs, _| Ok(xs[0].tensor()?.matmul(&captured)?.into()), [x]),
        "module" => g.module("in", move |()| Ok(candle_nn::Linear::new(captured.clone(), None)), [x]),
        _ => {
            let weight = g.parameter("own", Share::Replicate, move |()| Ok(captured.clone()));
            g.func("in", |xs, _| Ok(xs[0].tensor()?.matmul(xs[1].tensor()?)?.into()), [x, weight])
        }
    };
    g.split();
    g.loss_fn(square, [h], LossReduction::Mean);
    g.finish(SplitSpec::declared())
}

#[test]
fn variables_of_no_scope_are_averaged_over_replicas_or_refused_by_all() {
    for how in ["captured", "module", "declared"] {
        let texts = on_ranks(4, how, move |ctx| -> Result<String> {
            let mesh = ctx.mesh(&[("pp", 2), ("dp", 2)])?;
            let var = Var::from_tensor(&wave(3, 3, 0.0)?)?;
            let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
            let pipe = own(how, &var)?;
            let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &(), &device())?
                .with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
            let replica = mesh.local_rank("dp")?;
            let made = runtime
                .forward_backward(&batch(DType::F64, replica * 4..replica * 4 + 4, 2)?, &Default::default());
            let step = match made {
                Ok(made) => made.step,
                Err(error) => return Ok(error.to_string()),
            };
            let local = LocalPipe::new(&own(how, &var)?, &(), &device())?;
            let want = local.forward_backward(&batch(DType::F64, 0..8, 2)?, &StepOptions::default())?;
            if mesh.local_rank("pp")? == 0 {
                close(
                    &numbers(step.grads.get(&var).unwrap())?,
                    &numbers(want.grads.get(&var).unwrap())?,
                    1e-12,
                    how,
                );
            }
            Ok(String::new())
        });
        for text in texts {
            match how {
                "declared" => assert_eq!(text, ""),
                _ => assert!(text.contains("f64[3, 3] and that no scope created"), "{how}: {text}"),
            }
        }
    }
}

/// Gradient descent with a weight that both stages have, on one rank or on two, as on one device.
#[test]
fn named_vars_has_each_variable_once() {
    let run =
        |vars: Vars, named: Vec<(String, Var)>, grads: &candle_core::backprop::GradStore| -> Result<_> {
            SGD::new(named.into_iter().map(|(_, var)| var).collect(), 0.5)?.step(grads)?;
            vars.iter().map(|(name, var)| Ok((*name, numbers(var)?))).collect::<Result<BTreeMap<_, _>>>()
        };
    for (ranks, kind, per_rank) in
        [(1, ScheduleKind::LoopedBfs, 2), (2, ScheduleKind::OneFOneB, 1), (1, ScheduleKind::Zbv, 2)]
    {
        on_ranks(ranks, "once", move |ctx| -> Result<()> {
            let vars = variables(DType::F64, 0.0)?;
            let local = LocalPipe::new(&declare(&[])?, &casts(&vars, DType::F64), &device())?;
            let step = local.forward_backward(&batch(DType::F64, 0..8, 4)?, &StepOptions::default())?;
            let want = run(vars, local.named_vars()?, &step.grads)?;

            let vars = variables(DType::F64, 0.0)?;
            let schedule = kind.schedule(ranks, 4, per_rank)?;
            let runtime =
                Runtime::new(&declare(&[0])?, &schedule, ctx.group(), &casts(&vars, DType::F64), &device())?;
            let step = runtime.forward_backward(&batch(DType::F64, 0..8, 4)?, &StepOptions::default())?.step;
            let named = runtime.named_vars()?;
            let mine: Vec<String> = named.iter().map(|(name, _)| name.clone()).collect();
            let got = run(vars, named, &step.grads)?;
            for name in &mine {
                close(&got[name.as_str()], &want[name.as_str()], 1e-12, name);
            }
            Ok(())
        });
    }
}

/// Weight decay would move a parameter whose gradient is zeros, and leaves one without gradient.
#[test]
fn a_shared_parameter_that_no_stage_has_a_gradient_of_keeps_none() {
    fn tied<B: Scope>(build: impl Fn(&B) -> Result<Tensor> + Send + Sync + 'static) -> Result<Pipe<B>> {
        let mut g = PipeBuilder::<B>::new();
        let x = g.input("x", In::Arg);
        let unused = g.parameter("unused", Share::Replicate, build);
        let h = g.func(
            "in",
            |xs, _| Ok((xs[0].tensor()? + xs[1].tensor()?.detach().sum_all()?.to_scalar::<f64>()?)?.into()),
            [x, unused],
        );
        g.split();
        let add = |xs: &[Value], _: &candle_pipe::Ctx| {
            Ok(xs[0].tensor()?.broadcast_mul(&xs[1].tensor()?.detach())?.into())
        };
        let y = g.func("out", add, [h, unused]);
        g.loss_fn(square, [y], LossReduction::Mean);
        g.finish(SplitSpec::declared())
    }
    on_ranks(2, "no gradient", |ctx| -> Result<()> {
        let pipe = tied::<Vb>(|vb| Ok(vb.get((1, 3), "unused")?))?;
        let unused = Var::from_tensor(&wave(1, 3, 0.0)?)?;
        let scope = casts(&Vars::from([("unused", unused.clone())]), DType::F64);
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &scope, &device())?;
        let step = runtime.forward_backward(&batch(DType::F64, 0..8, 2)?, &StepOptions::default())?.step;
        assert!(step.grads.get(&unused).is_none());
        Ok(())
    });
}

/// Whoever lists what is trained leaves out what is frozen.
#[test]
fn gradients_are_clipped_with_frozen_parameters() {
    on_ranks(2, "frozen", |ctx| -> Result<()> {
        let vars = variables(DType::F64, 0.0)?;
        // The parameters of the first stage are frozen, except the shared ones.
        let tensors: HashMap<String, Tensor> = vars
            .iter()
            .map(|(name, var)| {
                (
                    name.to_string(),
                    if *name == "own.0.weight" { var.detach() } else { var.as_tensor().clone() },
                )
            })
            .collect();
        let scope = Vb::from_tensors(tensors, DType::F64, &device());
        let local = LocalPipe::new(&declare(&[])?, &scope, &device())?;
        let mut want = local.forward_backward(&batch(DType::F64, 0..8, 2)?, &StepOptions::default())?;
        let want = ClipGradNorm::new(0.1).clip(&local.named_vars()?, &mut want.grads)?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let runtime = Runtime::new(&declare(&[0])?, &schedule, ctx.group(), &scope, &device())?;
        let clip = runtime.clip_grad_norm(ClipGradNorm::new(0.1));
        let named = runtime.named_vars()?;
        let listed: Vec<(String, Var)> = runtime
            .stages()
            .flat_map(|stage| stage.parameters())
            .filter(|(_, parameter)| parameter.is_variable())
            .map(|(name, parameter)| Ok((name.clone(), Var::from_tensor(parameter)?)))
            .collect::<Result<_>>()?;
        for vars in [named, listed] {
            let mut step =
                runtime.forward_backward(&batch(DType::F64, 0..8, 2)?, &StepOptions::default())?.step;
            let norm = clip.clip(&vars, &mut step.grads)?;
            assert!((norm - want).abs() < 1e-12, "{norm} is not {want}");
        }
        Ok(())
    });
}
