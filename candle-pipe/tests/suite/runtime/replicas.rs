//! Evaluation, and replicas of a pipeline that train on rows of their own.
use crate::runtime::model::{Expected, Vb, arguments, batch, builder, numbers, pipe, uncut, values};
use crate::runtime::parity::close;
use candle_core::{DType, Tensor, Var};
use candle_dist::{ClipGradNorm, DataParallelOptions, DeviceMesh, Op, comm};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    In, Kwargs, LocalPipe, LossReduction, PipeBuilder, Result, Runtime, SplitSpec, StepOptions, Value,
    stage_op,
};
use std::sync::Arc;
use test_utils::{device, on_ranks};

/// Small buckets, so that stages have several.
fn options() -> DataParallelOptions {
    DataParallelOptions::default().bucket_bytes(256)
}

/// Rows `start..start + len` of all tensors.
fn rows(args: &[Value], kwargs: &Kwargs, start: usize, len: usize) -> Result<(Vec<Value>, Kwargs)> {
    let cut = |value: &Value| match value {
        Value::Tensor(tensor) => Ok(Value::Tensor(tensor.narrow(0, start, len)?)),
        other => Ok(other.clone()),
    };
    let kwargs = kwargs.iter().map(|(name, value)| Ok((name.clone(), cut(value)?))).collect::<Result<_>>()?;
    Ok((args.iter().map(cut).collect::<Result<_>>()?, kwargs))
}

#[test]
fn replicas_average_their_gradients_to_those_of_the_whole_batch() {
    let (dtype, total) = (DType::F64, 12);
    let values = Arc::new(values(dtype).unwrap());
    let expected = Arc::new(uncut(&values, total, dtype, false).unwrap());
    for (dp, pp, kind) in
        [(2, 1, "gpipe"), (2, 2, "1f1b"), (3, 1, "zbv"), (2, 2, "zb-h1"), (2, 3, "interleaved-zb")]
    {
        let (values, expected) = (values.clone(), expected.clone());
        on_ranks(dp * pp, kind, move |ctx| -> Result<()> {
            let mesh = DeviceMesh::new(ctx.group(), &[("pp", pp), ("dp", dp)])?;
            let kind: ScheduleKind = kind.parse()?;
            let stages = if matches!(kind, ScheduleKind::Zbv | ScheduleKind::InterleavedZb) { 2 } else { 1 };
            let schedule = kind.schedule(pp, 3, stages)?;
            let pipe = pipe(schedule.stages(), false)?;
            let builder = builder(&values, dtype)?;
            let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &builder, &device())?
                .with_replicas(mesh.axis_group("dp")?, &options())?;
            let (args, kwargs) = arguments(total, dtype)?;
            let (replica, each) = (mesh.local_rank("dp")?, total / dp);
            let (args, kwargs) = rows(&args, &kwargs, replica * each, each)?;
            let batch = split_args_kwargs_into_chunks(&args, &kwargs, 3, None, None)?;
            let made = runtime.forward_backward(&batch, &StepOptions::default())?.step;
            for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                let (got, want) = (numbers(made.grads.get(parameter).unwrap())?, &expected.grads[name]);
                let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(off < 1e-12, "{kind} {dp} x {pp}: gradient of {name} is off by {off}");
            }
            Ok(())
        });
    }
}

/// Nine rows with dropout; the norm counts parameters of either kind of share once.
#[test]
fn replicas_with_unlike_parts_have_the_gradients_and_norm_of_the_whole_batch() {
    const ROWS: usize = 9;
    const MICROBATCHES: usize = 4;
    let values = Arc::new(values(DType::F64).unwrap());
    let expected = Arc::new(uncut(&values, ROWS, DType::F64, true).unwrap());
    // Pipelines whose copies of the tied weight are on two ranks, and on one.
    for (kind, pp, dp) in
        [(ScheduleKind::OneFOneB, 3, 2), (ScheduleKind::Zbv, 2, 2), (ScheduleKind::ZbH1, 1, 2)]
    {
        let (values, want) = (values.clone(), expected.clone());
        let losses =
            on_ranks(pp * dp, &format!("{dp} replicas of {kind}"), move |ctx| -> Result<Option<f64>> {
                let Expected { grads: want, .. } = &*want;
                let mesh = ctx.mesh(&[("pp", pp), ("dp", dp)])?;
                let schedule = kind.schedule(pp, MICROBATCHES, kind.stages_per_rank())?;
                let pipe = pipe(schedule.stages(), true)?;
                let group = mesh.axis_group("pp")?;
                let runtime =
                    Runtime::new(&pipe, &schedule, group, &builder(&values, DType::F64)?, &device())?;
                let runtime = runtime.with_replicas(mesh.axis_group("dp")?, &options())?;

                let parts = batch(ROWS, dp, DType::F64)?;
                let replica = mesh.local_rank("dp")?;
                let (args, kwargs) = (&parts.args[replica], &parts.kwargs[replica]);
                let mine = split_args_kwargs_into_chunks(args, kwargs, MICROBATCHES, None, None)?;
                let weights: Vec<f64> =
                    mine.rows().iter().map(|&rows| (rows * dp) as f64 / ROWS as f64).collect();
                let first_row = parts.rows()[..replica].iter().sum();
                let options = StepOptions::default().step(3).first_row(first_row).weights(weights);
                let mut made = runtime.forward_backward(&mine, &options)?.step;

                let mut named: Vec<(String, Var)> = Vec::new();
                for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                    let grad = made.grads.get(parameter).unwrap_or_else(|| panic!("no gradient of {name}"));
                    close(&numbers(grad)?, &want[name], 1e-12, &format!("{kind}: gradient of {name}"));
                    named.push((name.clone(), Var::from_tensor(parameter)?));
                }
                let whole = want.values().flatten().map(|grad| grad * grad).sum::<f64>().sqrt();
                let clip = runtime.clip_grad_norm(ClipGradNorm::new(0.5 * whole));
                let norm = clip.clip(&named, &mut made.grads)?;
                assert!((norm - whole).abs() < 1e-12 * whole, "{kind}: norm {norm}, one device {whole}");
                for (name, var) in &named {
                    let half: Vec<f64> =
                        want[name].iter().map(|grad| grad * 0.5 * whole / (whole + 1e-6)).collect();
                    close(
                        &numbers(made.grads.get(var).unwrap())?,
                        &half,
                        1e-12,
                        &format!("{kind}: clipped {name}"),
                    );
                }
                Ok(made.loss().ok().map(|loss| loss.to_scalar::<f64>()).transpose()?)
            });
        let losses: Vec<f64> = losses.into_iter().flatten().collect();
        assert_eq!(losses.len(), dp, "{kind}: each replica has a loss");
        let mean = losses.iter().sum::<f64>() / dp as f64;
        close(&[mean], &[expected.loss], 1e-12, &format!("{kind}: loss"));
    }
}

#[test]
fn evaluation_is_that_of_one_process_and_leaves_no_gradients() {
    let dtype = DType::F64;
    let values = Arc::new(values(dtype).unwrap());
    for (ranks, name, stages) in
        [(1, "gpipe", 1), (2, "1f1b", 1), (3, "zbv", 2), (4, "looped-bfs", 2), (2, "dualpipev", 2)]
    {
        let values = values.clone();
        on_ranks(ranks, name, move |ctx| -> Result<()> {
            let schedule = name.parse::<ScheduleKind>()?.schedule(ranks, 4, stages)?;
            let pipe = pipe(schedule.stages(), true)?;
            let (args, kwargs) = arguments(11, dtype)?;
            let batch = split_args_kwargs_into_chunks(&args, &kwargs, 4, None, None)?;
            let local = LocalPipe::new(&pipe, &builder(&values, dtype)?, &device())?
                .evaluate(&batch, &StepOptions::default())?;
            let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &builder(&values, dtype)?, &device())?;
            let made = runtime.evaluate(&batch, &StepOptions::default())?;
            assert_eq!(made.peak_activations, 0);
            assert!(
                runtime.stages().flat_map(|stage| stage.parameters().values()).all(|p| made
                    .step
                    .grads
                    .get(p)
                    .is_none())
            );
            if let Ok(loss) = made.step.loss() {
                assert_eq!(numbers(loss)?, numbers(local.loss()?)?);
            }
            for (got, want) in made.step.outputs.iter().zip(&local.outputs) {
                for (name, got) in got.map()? {
                    assert!(got.same(want.get(name)?)?, "{name}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_stage_is_averaged_in_buckets_each_of_them_once() {
    let values = Arc::new(values(DType::F64).unwrap());
    for (bucket_bytes, per_stage) in [(1 << 20, 1), (0, 0)] {
        let values = values.clone();
        on_ranks(4, "buckets", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("pp", 2), ("dp", 2)])?;
            let schedule = ScheduleKind::OneFOneB.schedule(2, 3, 1)?;
            let pipe = pipe(2, false)?;
            let group = mesh.axis_group("pp")?;
            let runtime = Runtime::new(&pipe, &schedule, group, &builder(&values, DType::F64)?, &device())?;
            let options = DataParallelOptions::default().bucket_bytes(bucket_bytes);
            let runtime = runtime.with_replicas(mesh.axis_group("dp")?, &options)?;
            let batch = batch(12, 3, DType::F64)?;
            let (made, counts) = comm::record(|| runtime.forward_backward(&batch, &StepOptions::default()));
            made?;
            let parameters = runtime.stages().map(|stage| stage.parameters().len()).sum::<usize>();
            let averages = if per_stage == 0 { parameters } else { per_stage };
            // One more for the weight that both stages have.
            assert_eq!(counts.get(Op::AllReduce).count, averages + 1, "{parameters} parameters");
            Ok(())
        });
    }
}

#[test]
fn replicas_that_are_none_are_refused_by_all() {
    let of = |schedules: [ScheduleKind; 2], axes: [&'static str; 2]| {
        let values = Arc::new(values(DType::F64).unwrap());
        on_ranks(4, "no replicas", move |ctx| -> Result<String> {
            let mesh = ctx.mesh(&[("pp", 2), ("dp", 2)])?;
            let schedule = schedules[mesh.local_rank("dp")?].schedule(2, 3, 1)?;
            let group = mesh.axis_group(axes[0])?;
            let builder = builder(&values, DType::F64)?;
            // The failure of a world may find other ranks still at the first of the two.
            let refused = Runtime::new(&pipe(2, false)?, &schedule, group, &builder, &device())
                .and_then(|runtime| runtime.with_replicas(mesh.axis_group(axes[1])?, &options()));
            Ok(refused.err().map_or_else(String::new, |error| error.to_string()))
        })
    };
    for said in of([ScheduleKind::GPipe, ScheduleKind::OneFOneB], ["pp", "dp"]) {
        assert!(said.contains("description differs"), "{said}");
    }
    for said in of([ScheduleKind::GPipe; 2], ["pp", "pp"]) {
        assert!(said.contains("are not replicas of one rank of the pipeline on ranks"), "{said}");
    }
}

/// The first stage has no parameters, the second one that nothing reaches.
#[test]
fn replicas_of_stages_without_gradients() {
    on_ranks(4, "no gradients", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("pp", 2), ("dp", 2)])?;
        let mut g = PipeBuilder::<Vb>::new();
        let x = g.input("x", In::Arg);
        let h = g.func("in", |xs, _| Ok(xs[0].clone()), [x]);
        g.split();
        let apart = |vb: &Vb| {
            let unused = vb.get(2, "unused")?;
            Ok(stage_op(move |xs, _| Ok(vec![xs[0].tensor()?.broadcast_add(&unused.detach())?.into()])))
        };
        let y = g.module("apart", apart, [h]);
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
        let pipe = g.finish(SplitSpec::declared())?;
        let schedule = ScheduleKind::ZbH1.schedule(2, 3, 1)?;
        let ones = Tensor::ones(2, DType::F64, &device())?;
        let builder = builder(&[("apart.unused".to_string(), ones)].into(), DType::F64)?;
        let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &builder, &device())?
            .with_replicas(mesh.axis_group("dp")?, &options())?;
        let x = Tensor::ones((3, 2), DType::F64, &device())?;
        let batch = split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 3, None, None)?;
        let mut made = runtime.forward_backward(&batch, &StepOptions::default())?.step;
        assert_eq!(made.grads.get_ids().count(), 0);
        let named: Vec<(String, Var)> = runtime
            .stages()
            .flat_map(|stage| stage.parameters())
            .map(|(name, parameter)| Ok((name.clone(), Var::from_tensor(parameter)?)))
            .collect::<Result<_>>()?;
        assert_eq!(runtime.clip_grad_norm(ClipGradNorm::new(1.0)).clip(&named, &mut made.grads)?, 0.0);
        if let Ok(loss) = made.loss() {
            assert_eq!(numbers(loss)?, [4.0]);
        }
        Ok(())
    });
}
