//! Recomputed segments that capture other values: inputs of their stage, parameters of other stages, variables of the
//! user, results of other layers, and values of a segment around them.
use crate::graph::common::{difference, numbers};
use candle_core::{DType, Device, Tensor, Var};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    EqualCount, In, Keep, Kwargs, LocalPipe, LossReduction, PipeBuilder, Result, Runtime, Share, StepOptions,
    stage_op,
};
use candle_shard::nn::{Init, Linear, MeshVarBuilder, recompute};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate};
use std::collections::BTreeMap;
use test_utils::on_ranks;

type Grads = BTreeMap<String, Tensor>;

/// A block that attends to a memory, so to say: its segment captures a value of each kind.
fn declare(is_recomputed: bool, user: &Var) -> PipeBuilder<MeshVarBuilder> {
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let (x, y) = (g.input("x", In::Arg), g.input("y", In::Arg));
    let scale = g.parameter("scale.weight", Share::Transmit, |vb| {
        Ok(vb.get(4, "weight", Init::Const(0.7), Replicate, false)?.to_local().clone())
    });
    let linear = |vb: &MeshVarBuilder| {
        let (linear, mesh) = (Linear::new(4, 4, true, vb)?, vb.mesh().clone());
        Ok(stage_op(move |xs, _| Ok(vec![linear.forward(&xs[0].on(&mesh)?)?.full_tensor()?.into()])))
    };
    // Each of them before the value that it uses is made, so that stages have inputs in all orders.
    let scaled =
        g.func("scaled", |xs, _| Ok(xs[1].tensor()?.broadcast_mul(xs[0].tensor()?)?.into()), [scale, x]);
    let left = g.module("left", linear, [scaled]);
    let memory = g.module("memory", linear, [y]);
    let user = user.as_tensor().clone();
    let cross = move |vb: &MeshVarBuilder| {
        let (up, down) = (Linear::new(4, 6, true, &vb.pp("up"))?, Linear::new(6, 4, true, &vb.pp("down"))?);
        let (mesh, user) = (vb.mesh().clone(), user.clone());
        Ok(stage_op(move |xs, _| {
            let on = |i: usize| xs[i].on(&mesh);
            let (h, memory, scale, user) = (on(0)?, on(1)?, on(2)?, DTensor::replicated(&user, &mesh)?);
            // The result of an op of the stage, which is not a leaf of its graph.
            let doubled = memory.mul(2.0)?.tanh()?;
            let (up, down) = (up.clone(), down.clone());
            let outer = memory.clone();
            let block = move |h: &DTensor| {
                let (h, down, user, outer) =
                    (up.forward(&h.mul(&doubled)?)?, down.clone(), user.clone(), outer.clone());
                let (around, scale) = (h.clone(), scale.clone());
                let inner = move |h: &DTensor| {
                    let h = h.tanh()?.mul(&around)?;
                    down.forward(&h)?.mul(&user)?.add(&scale)?.mul(&outer)
                };
                if is_recomputed { recompute(&h, inner) } else { inner(&h) }
            };
            let y = if is_recomputed { recompute(&h, block)? } else { block(&h)? };
            Ok(vec![y.full_tensor()?.into()])
        }))
    };
    let h = g.module("cross", cross, [left, memory, scale]);
    // A stage behind it, which has the parameter too.
    let last = g.func("last", |xs, _| Ok(xs[0].tensor()?.broadcast_add(xs[1].tensor()?)?.into()), [h, scale]);
    g.output("y", last);
    g.loss_fn(
        |xs, _| Ok(xs[0].tensor()?.to_dtype(DType::F64)?.sqr()?.mean_all()?),
        [last],
        LossReduction::Mean,
    );
    g
}

fn builder(mesh: &candle_dist::DeviceMesh, dtype: DType) -> Result<MeshVarBuilder> {
    let plan =
        Plan::new("tp").with("*.up", ColwiseParallel::default()).with("*.down", RowwiseParallel::default());
    Ok(MeshVarBuilder::fresh(5, mesh, plan, dtype, &Device::Cpu)?)
}

fn user(dtype: DType) -> Result<Var> {
    Ok(Var::from_tensor(&numbers("user", &[4]).to_dtype(dtype)?)?)
}

fn batch(dtype: DType, chunks: usize) -> Result<candle_pipe::microbatch::Microbatches> {
    let args = ["x", "y"].map(|name| numbers(name, &[5, 4]).to_dtype(dtype)).into_iter();
    let args = args.map(|t| Ok(t?.into())).collect::<Result<Vec<_>>>()?;
    split_args_kwargs_into_chunks(&args, &Kwargs::new(), chunks, None, None)
}

/// All gradients by name, whole; those that this rank has.
fn whole(vb: &MeshVarBuilder, user: &Var, grads: &mut candle_core::backprop::GradStore) -> Result<Grads> {
    let parameters = vb.built();
    parameters.reduce(grads)?;
    let mut all = Grads::new();
    for parameter in parameters.iter() {
        if let Some(grad) = parameter.grad(grads)? {
            all.insert(parameter.name.clone(), grad.full_tensor()?);
        }
    }
    all.extend(grads.get(user).map(|grad| ("user".to_owned(), grad.clone())));
    Ok(all)
}

fn local(dtype: DType, (tp, stages): (usize, usize), is_recomputed: bool, options: StepOptions) -> Grads {
    let label = format!("captured: {dtype:?}, tp {tp}, {stages} stages, {options:?}");
    on_ranks(tp, &label, move |ctx| -> Result<Grads> {
        let (vb, user) = (builder(&ctx.mesh(&[("tp", tp)])?, dtype)?, user(dtype)?);
        let pipe = declare(is_recomputed, &user).finish(EqualCount(stages))?;
        let local = LocalPipe::new(&pipe, &vb, &Device::Cpu)?;
        let mut step = local.forward_backward(&batch(dtype, 2)?, &options)?;
        whole(&vb, &user, &mut step.grads)
    })
    .swap_remove(0)
}

/// The gradients without recomputation; 16-bit parameters are drawn as f32 ones are.
fn expected(dtype: DType) -> Grads {
    let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
    local(wide, (1, 1), false, StepOptions::default())
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 1e-2,
        _ => 6e-2,
    }
}

fn compare(got: &Grads, want: &Grads, dtype: DType, label: &str) {
    for (name, got) in got {
        let (got, want) = (got.to_dtype(DType::F64).unwrap(), want[name].to_dtype(DType::F64).unwrap());
        let off = difference(&got, &want) / (0.1 + difference(&want, &want.zeros_like().unwrap()));
        assert!(off < tolerance(dtype), "{label}: {name} is off by {off:e}: {got}, one graph {want}");
    }
}

#[test]
fn recomputed_segments_pass_gradients_to_all_that_they_capture() {
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let want = expected(dtype);
        assert_eq!(want.len(), 10, "{:?}", want.keys());
        for (tp, stages) in [(1, 1), (1, 2), (1, 3), (2, 4), (3, 5), (1, 6)] {
            for keep in [Keep::Activations, Keep::Inputs] {
                for split in [false, true] {
                    let options = StepOptions::default().keep(keep).split_backward(split);
                    let got = local(dtype, (tp, stages), true, options);
                    assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
                    compare(
                        &got,
                        &want,
                        dtype,
                        &format!("{dtype:?}, tp {tp}, {stages} stages, {keep:?}, {split}"),
                    );
                }
            }
        }
    }
}

#[test]
fn recomputed_segments_of_stages_on_ranks_pass_gradients_to_all_that_they_capture() {
    for (pp, tp, kind, per_rank, dtype) in [
        (2, 1, ScheduleKind::OneFOneB, 1, DType::F64),
        (2, 2, ScheduleKind::GPipe, 1, DType::F64),
        (3, 1, ScheduleKind::ZbH1, 1, DType::F64),
        (2, 1, ScheduleKind::Zbv, 2, DType::F64),
        (2, 2, ScheduleKind::OneFOneB, 1, DType::BF16),
        (3, 1, ScheduleKind::ZbH1, 1, DType::F16),
    ] {
        let want = expected(dtype);
        let count = want.len();
        let label = format!("captured: {kind}, pp {pp}, tp {tp}, {dtype:?}");
        let found = on_ranks(pp * tp, &label.clone(), move |ctx| -> Result<Vec<String>> {
            let mesh = ctx.mesh(&[("pp", pp), ("tp", tp)])?;
            let (vb, user) = (builder(&mesh.axis("tp")?, dtype)?, user(dtype)?);
            let schedule = kind.schedule(pp, 4, per_rank)?;
            let pipe = declare(true, &user).finish(EqualCount(schedule.stages()))?;
            let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &Device::Cpu)?;
            let mut names = Vec::new();
            for keep in [Keep::Activations, Keep::Inputs] {
                let options = StepOptions::default().keep(keep);
                let mut step = runtime.forward_backward(&batch(dtype, 4)?, &options)?.step;
                let got = whole(&vb, &user, &mut step.grads)?;
                compare(&got, &want, dtype, &label);
                names = got.into_keys().collect();
            }
            Ok(names)
        });
        let all: std::collections::BTreeSet<String> = found.into_iter().flatten().collect();
        assert_eq!(all.len(), count, "{kind}: {all:?}");
    }
}

#[test]
fn inputs_that_the_caller_computed_by_recomputation_pass_their_gradients_on() {
    on_ranks(2, "inputs of a recomputed segment", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let [weight, x] = ["w", "x"].map(|name| Var::from_tensor(&numbers(name, &[4])));
        let (weight, x) = (weight?, x?);
        let captured = DTensor::replicated(weight.as_tensor(), &mesh)?;
        let made =
            recompute(&DTensor::replicated(&(x.as_tensor() * 1.0)?, &mesh)?, move |x| x.mul(&captured))?;
        let mut g = PipeBuilder::<()>::new();
        let input = g.input("x", In::Arg);
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.sum_all()?), [input], LossReduction::Sum);
        let local = LocalPipe::new(&g.finish(EqualCount(1))?, &(), &Device::Cpu)?;
        let args = [made.to_local().into()];
        let batch = split_args_kwargs_into_chunks(&args, &Kwargs::new(), 1, None, None)?;
        let step = local.forward_backward(&batch, &StepOptions::default())?;
        // The sum of (x · w)²: 2 x² w, and 2 w² x.
        for (var, other) in [(&weight, &x), (&x, &weight)] {
            let want = ((other.sqr()? * var.as_tensor())? * 2.0)?;
            let got = step.grads.get(var).expect("a gradient");
            assert!(difference(got, &want.detach()) < 1e-12, "{got}, expected {want}");
        }
        Ok(())
    });
}

#[test]
fn a_comparison_sees_variables_of_the_user_that_only_a_recomputed_segment_uses() {
    on_ranks(1, "compared", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 1)])?;
        let (weight, user) = (user(DType::F64)?, user(DType::F64)?);
        let model = |x: &Tensor, factor: f64| -> candle_shard::Result<Tensor> {
            let captured = DTensor::replicated(user.as_tensor(), &mesh)?;
            let x = DTensor::replicated(&x.broadcast_mul(&weight)?, &mesh)?;
            Ok(recompute(&x, move |x| x.mul(&captured.mul(factor)?))?.to_local().sqr()?.sum_all()?)
        };
        let check = |factor: f64| {
            let mut g = PipeBuilder::<()>::new();
            let x = g.input("x", In::Arg);
            let (weight, user, mesh) = (weight.clone(), user.clone(), mesh.clone());
            let loss = move |xs: &[candle_pipe::Value], _: &candle_pipe::Ctx| {
                let captured = DTensor::replicated(user.as_tensor(), &mesh)?;
                let x = DTensor::replicated(&xs[0].tensor()?.broadcast_mul(&weight)?, &mesh)?;
                // The value is that of the plain model, and the gradient of the captured one is not.
                let captured = captured.mul(factor)?.add(captured.mul(1.0 - factor)?.detach())?;
                Ok(recompute(&x, move |x| x.mul(&captured))?.to_local().sqr()?.sum_all()?)
            };
            g.loss_fn(loss, [x], LossReduction::Sum);
            let x = numbers("x", &[3, 4]);
            g.finish(EqualCount(1))?.check_against(
                &(),
                &Device::Cpu,
                &[x.into()],
                &Kwargs::new(),
                1e-9,
                |_, args, _| Ok(Kwargs::from([("loss".into(), model(args[0].tensor()?, 1.0)?.into())])),
            )
        };
        check(1.0)?;
        let said = check(0.5).unwrap_err().to_string();
        assert!(said.contains("the gradient of a variable of shape [4]"), "{said}");
        Ok(())
    });
}
