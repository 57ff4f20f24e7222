//! Evaluation, and replicas of a pipeline that train on rows of their own.
use crate::model::{arguments, builder, numbers, pipe, uncut, values};
use candle_core::{DType, Device};
use candle_dist::DeviceMesh;
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{Kwargs, LocalPipe, Result, Runtime, StepOptions, Value};
use std::sync::Arc;
use test_utils::on_ranks;

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
    for (dp, pp, kind) in [(2, 1, "gpipe"), (2, 2, "1f1b"), (3, 1, "zbv"), (2, 2, "zb-h1"), (2, 3, "interleaved-zb")] {
        let (values, expected) = (values.clone(), expected.clone());
        on_ranks(dp * pp, kind, move |ctx| -> Result<()> {
            let mesh = DeviceMesh::new(ctx.group(), &[("pp", pp), ("dp", dp)])?;
            let kind: ScheduleKind = kind.parse()?;
            let stages = if matches!(kind, ScheduleKind::Zbv | ScheduleKind::InterleavedZb) { 2 } else { 1 };
            let schedule = kind.schedule(pp, 3, stages)?;
            let pipe = pipe(schedule.stages(), false)?;
            let builder = builder(&values, dtype)?;
            let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &builder, &Device::Cpu)?
                .with_replicas(mesh.axis_group("dp")?);
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
            let local = LocalPipe::new(&pipe, &builder(&values, dtype)?, &Device::Cpu)?.evaluate(&batch)?;
            let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &builder(&values, dtype)?, &Device::Cpu)?;
            let made = runtime.evaluate(&batch)?;
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
