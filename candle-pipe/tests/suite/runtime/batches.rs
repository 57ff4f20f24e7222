//! What ranks know of each other's batches before a step begins.
use crate::runtime::chain::{self, Tail};
use crate::runtime::model::{Vb, arguments, builder, numbers, pipe, uncut, values};
use crate::runtime::parity::close;
use candle_core::{DType, Tensor};
use candle_dist::{DataParallelOptions, Op, comm};
use candle_pipe::microbatch::{Microbatches, Splitter, split_args_kwargs_into_chunks};
use candle_pipe::schedule::{Schedule, ScheduleKind};
use candle_pipe::{Keep, Kwargs, Pipe, Result, Runtime, StepOptions, Value};
use std::sync::Arc;
use std::time::Duration;
use test_utils::{Ranks, device, on_ranks};

fn plain() -> Tail {
    Arc::new(|_, _, y, _| Ok(y.clone()))
}

#[test]
fn a_batch_that_one_rank_refuses_is_known_to_all_at_once_and_all_go_on() {
    for (ranks, odd) in [(1, 0), (2, 0), (2, 1), (3, 1), (4, 3)] {
        let schedule = ScheduleKind::OneFOneB.schedule(ranks, 4, 1).unwrap();
        let said =
            Ranks::new(ranks, "refused").deadline(Duration::from_secs(5)).run(move |ctx| -> Result<String> {
                let runtime = chain::runtime(&schedule, ctx, &plain())?;
                let step = |microbatches| {
                    let batch = chain::batch(8, microbatches)?;
                    runtime.forward_backward(&batch, &StepOptions::default()).map(drop)
                };
                let said = step(if ctx.rank() == odd { 3 } else { 4 }).unwrap_err().to_string();
                // The same ranks run the next one.
                step(4)?;
                runtime
                    .evaluate(
                        &chain::batch(8, if ctx.rank() == odd { 2 } else { 4 })?,
                        &StepOptions::default(),
                    )
                    .unwrap_err();
                runtime.evaluate(&chain::batch(8, 4)?, &StepOptions::default())?;
                Ok(said)
            });
        for (rank, said) in said.unwrap().iter().enumerate() {
            assert!(said.contains("3 microbatches for a schedule of 4"), "{said}");
            assert_eq!(said.contains(&format!("rank {odd} cannot run the step: ")), rank != odd, "{said}");
        }
    }
}

/// What is left of the schedule is what a schedule of fewer microbatches computes.
#[test]
fn a_batch_of_fewer_rows_than_microbatches_is_that_of_one_device() {
    let values = Arc::new(values(DType::F64).unwrap());
    for (kind, ranks, per_rank) in [
        ("gpipe", 1, 1),
        ("1f1b", 3, 1),
        ("zb-h1", 2, 1),
        ("zbv", 2, 2),
        ("interleaved-1f1b", 2, 2),
        ("looped-bfs", 2, 2),
        ("dualpipev", 2, 2),
    ] {
        let values = values.clone();
        on_ranks(ranks, kind, move |ctx| -> Result<()> {
            let schedule = kind.parse::<ScheduleKind>()?.schedule(ranks, 8, per_rank)?;
            let pipe = pipe(schedule.stages(), true)?;
            let scope = builder(&values, DType::F64)?;
            let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &scope, &device())?;
            for rows in [1, 3, 7, 8, 11] {
                let want = uncut(&values, rows, DType::F64, true)?;
                for (keep, masked) in
                    [(Keep::Activations, false), (Keep::Inputs, false), (Keep::Activations, true)]
                {
                    let (args, kwargs) = arguments(rows, DType::F64)?;
                    let splitter = if masked { Splitter::new(8).masked() } else { Splitter::new(8) };
                    let batch = splitter.split(&args, &kwargs, None, None)?;
                    assert_eq!(batch.len(), rows.min(8));
                    let options = StepOptions::default().step(3).keep(keep);
                    let made = runtime.forward_backward(&batch, &options)?.step;
                    let what = format!("{kind}, {rows} rows, {keep:?}, masked {masked}");
                    if let Ok(loss) = made.loss() {
                        close(&numbers(loss)?, &[want.loss], 1e-12, &what);
                    }
                    for (name, var) in runtime.named_vars()? {
                        close(
                            &numbers(made.grads.get(&var).unwrap())?,
                            &want.grads[&name],
                            1e-12,
                            &format!("{what}: {name}"),
                        );
                    }
                    let (mut given, makes) = (0, made.outputs[0].get("y").is_ok());
                    runtime.evaluate_each(&batch, &StepOptions::default(), |_, outputs| {
                        given += usize::from(outputs.contains_key("y"));
                        Ok(())
                    })?;
                    assert_eq!(given, if makes { rows.min(8) } else { 0 }, "{what}");
                }
            }
            Ok(())
        });
    }
}

/// The last batch of an epoch: one replica has rows for all microbatches, the other has a single one.
#[test]
fn replicas_may_have_batches_of_unlike_sizes() {
    let values = Arc::new(values(DType::F64).unwrap());
    on_ranks(4, "unlike replicas", move |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("pp", 2), ("dp", 2)])?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 4, 1)?;
        let scope = builder(&values, DType::F64)?;
        let runtime = Runtime::new(&pipe(2, false)?, &schedule, mesh.axis_group("pp")?, &scope, &device())?
            .with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
        let want = uncut(&values, 6, DType::F64, false)?;
        let rows = [0..5, 5..6][mesh.local_rank("dp")?].clone();
        let (args, kwargs) = arguments(6, DType::F64)?;
        let cut = |value: &Value| match value {
            Value::Tensor(tensor) => Ok(Value::Tensor(tensor.narrow(0, rows.start, rows.len())?)),
            other => Ok(other.clone()),
        };
        let kwargs =
            kwargs.iter().map(|(name, value)| Ok((name.clone(), cut(value)?))).collect::<Result<_>>()?;
        let batch = Splitter::new(4).split(
            &args.iter().map(cut).collect::<Result<Vec<_>>>()?,
            &kwargs,
            None,
            None,
        )?;
        let options = StepOptions::default().first_row(rows.start);
        let made = runtime.forward_backward(&batch, &options)?.step;
        for (name, var) in runtime.named_vars()? {
            close(&numbers(made.grads.get(&var).unwrap())?, &want.grads[&name], 1e-12, &name);
        }
        Ok(())
    });
}

#[test]
fn replicas_set_weights_in_all_or_in_none_and_other_copies_have_equal_numbers_of_microbatches() {
    let values = Arc::new(values(DType::F64).unwrap());
    let said = on_ranks(4, "copies that differ", move |ctx| -> Result<[String; 2]> {
        let mesh = ctx.mesh(&[("pp", 2), ("dp", 2)])?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 4, 1)?;
        let (line, replicas) = (mesh.axis_group("pp")?, mesh.axis_group("dp")?);
        let built =
            || Runtime::new(&pipe(2, false)?, &schedule, line, &builder(&values, DType::F64)?, &device());
        let rows = [4, 2][mesh.local_rank("dp")?];
        let (args, kwargs) = arguments(rows, DType::F64)?;
        let batch = Splitter::new(4).split(&args, &kwargs, None, None)?;
        let weights = (rows == 4).then(|| vec![0.25; 4]);
        let weighted = StepOptions::default().weights(weights);
        let averaged = built()?.with_replicas(replicas, &DataParallelOptions::default())?;
        let unlike = built()?.beside(replicas)?;
        let errors = [
            averaged.forward_backward(&batch, &weighted).unwrap_err(),
            unlike.forward_backward(&batch, &StepOptions::default()).unwrap_err(),
        ];
        Ok(errors.map(|error| error.to_string()))
    });
    for [weights, microbatches] in &said {
        assert!(weights.contains("the use of StepOptions::weights of replica 1"), "{weights}");
        assert!(microbatches.contains("the number of microbatches of replica 1"), "{microbatches}");
    }
}

#[test]
fn a_batch_that_one_replica_refuses_is_known_to_all_replicas() {
    let schedule = ScheduleKind::GPipe.schedule(2, 4, 1).unwrap();
    let said = Ranks::new(4, "replicas").deadline(Duration::from_secs(5)).run(move |ctx| -> Result<String> {
        let mesh = ctx.mesh(&[("pp", 2), ("dp", 2)])?;
        let parameters = builder(&[].into(), DType::F64)?;
        let runtime = Runtime::new(
            &chain::pipe(2, &plain())?,
            &schedule,
            mesh.axis_group("pp")?,
            &parameters,
            &device(),
        )?
        .with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
        let step = |microbatches| {
            let batch = chain::batch(8, microbatches)?;
            runtime.forward_backward(&batch, &StepOptions::default()).map(drop)
        };
        let said = step(if ctx.rank() == 3 { 3 } else { 4 }).unwrap_err().to_string();
        step(4)?;
        Ok(said)
    });
    for said in said.unwrap() {
        assert!(said.contains("3 microbatches for a schedule of 4"), "{said}");
    }
}

#[test]
fn ranks_of_which_one_evaluates_while_others_train_are_told_and_go_on() {
    for odd in 0..2 {
        let schedule = ScheduleKind::OneFOneB.schedule(2, 4, 1).unwrap();
        let said =
            Ranks::new(2, "modes").deadline(Duration::from_secs(5)).run(move |ctx| -> Result<String> {
                let runtime = chain::runtime(&schedule, ctx, &plain())?;
                let batch = chain::batch(8, 4)?;
                let train = || runtime.forward_backward(&batch, &StepOptions::default());
                let made = if ctx.rank() == odd {
                    runtime.evaluate(&batch, &StepOptions::default())
                } else {
                    train()
                };
                let said = made.unwrap_err().to_string();
                train()?;
                runtime.evaluate(&batch, &StepOptions::default())?;
                Ok(said)
            });
        for said in said.unwrap() {
            assert!(said.contains("the mode (train or evaluate) of rank 1 is not that of rank 0"), "{said}");
        }
    }
}

/// The model of all tests, cut for a schedule.
fn of(schedule: &Schedule) -> Result<Pipe<Vb>> {
    pipe(schedule.stages(), false)
}

#[test]
fn ranks_with_unlike_shuffles_are_told() {
    let values = Arc::new(values(DType::F64).unwrap());
    for odd in 0..3 {
        let values = values.clone();
        on_ranks(3, "shuffles", move |ctx| -> Result<()> {
            let schedule = ScheduleKind::OneFOneB.schedule(3, 4, 1)?;
            let builder = builder(&values, DType::F64)?;
            let runtime = Runtime::new(&of(&schedule)?, &schedule, ctx.group(), &builder, &device())?;
            let (mut args, mut kwargs) = arguments(9, DType::F64)?;
            let split =
                |args: &[Value], kwargs: &Kwargs| split_args_kwargs_into_chunks(args, kwargs, 4, None, None);
            let step =
                |batch: &Microbatches| runtime.forward_backward(batch, &StepOptions::default()).map(drop);
            step(&split(&args, &kwargs)?)?;
            let order = Tensor::new(&[3u32, 1, 4, 0, 5, 8, 2, 6, 7], &device())?;
            let shuffled =
                |value: &Value| -> Result<Value> { Ok(value.tensor()?.index_select(&order, 0)?.into()) };
            let original = (args.clone(), kwargs.clone());
            if ctx.rank() == odd {
                args[0] = shuffled(&args[0])?;
                kwargs.insert("target".into(), shuffled(&kwargs["target"])?);
            }
            let said = step(&split(&args, &kwargs)?).unwrap_err().to_string();
            assert!(said.contains("input \"x\" of rank "), "{said}");
            // A plain value that differs.
            let (args, mut kwargs) = original;
            if ctx.rank() == odd {
                kwargs.insert("scale".into(), 0.76.into());
            }
            let said = step(&split(&args, &kwargs)?).unwrap_err().to_string();
            assert!(said.contains("input \"scale\" of rank "), "{said}");
            Ok(())
        });
    }
}

/// The first stage uses `x` and one in the middle `mask`; the last has the target.
#[test]
fn a_rank_gives_what_its_stages_use_and_no_more() {
    let values = Arc::new(values(DType::F64).unwrap());
    let expected = Arc::new(uncut(&values, 9, DType::F64, false).unwrap());
    for (ranks, kind) in [(2, ScheduleKind::GPipe), (3, ScheduleKind::OneFOneB), (4, ScheduleKind::ZbH1)] {
        let (values, expected) = (values.clone(), expected.clone());
        on_ranks(ranks, "their own", move |ctx| -> Result<()> {
            let schedule = kind.schedule(ranks, 4, 1)?;
            let pipe = of(&schedule)?;
            let builder = builder(&values, DType::F64)?;
            let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &builder, &device())?;
            let (args, mut kwargs) = arguments(9, DType::F64)?;
            kwargs.insert("x".into(), args[0].clone());
            let graph = &pipe.info().graph;
            let used = |name: &str| {
                let inputs = runtime.stages().flat_map(|stage| &stage.def().inputs);
                inputs.filter(|input| input.from.is_none()).any(|input| graph.value_name(input.value) == name)
            };
            // The plain value has a default, which is another one.
            let mine = kwargs.iter().filter(|(name, _)| used(name));
            let mine: Kwargs = mine.map(|(name, value)| (name.clone(), value.clone())).collect();
            assert!(mine.len() < kwargs.len());
            let batch = Splitter::new(4).rows(9).split(&[], &mine, None, None)?;
            assert_eq!(batch.rows(), [3, 2, 2, 2]);
            let options = StepOptions::default().step(3);
            let (made, sent) = comm::record(|| runtime.forward_backward(&batch, &options));
            let made = made?.step;
            // One word from everybody to everybody before the step, and nothing else for that.
            assert_eq!(sent.get(Op::AllGather).count, 1);
            for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                let got = numbers(made.grads.get(parameter).unwrap())?;
                close(&got, &expected.grads[name], 1e-12, &format!("{kind}: {name}"));
            }
            // Who lacks what its stages use is named by all.
            let less: Kwargs =
                mine.iter().filter(|(name, _)| *name != "x").map(|(n, v)| (n.clone(), v.clone())).collect();
            let less = Splitter::new(4).rows(9).split(&[], &less, None, None)?;
            let said = runtime.forward_backward(&less, &options).unwrap_err().to_string();
            assert!(said.contains("input \"x\" is missing; give it by place or by name"), "{said}");
            Ok(())
        });
    }
}

#[test]
fn rows_that_are_said_are_those_of_the_tensors() {
    let x: Value = Tensor::zeros((5, 2), DType::F32, &device()).unwrap().into();
    let split =
        |rows| Splitter::new(2).rows(rows).split(std::slice::from_ref(&x), &Kwargs::new(), None, None);
    assert_eq!(split(5).unwrap().rows(), [3, 2]);
    let said = split(6).unwrap_err().to_string();
    assert!(said.contains("args[0] has 5 rows along dim 0 in a batch of 6"), "{said}");
    assert!(Splitter::new(2).rows(0).split(&[], &Kwargs::new(), None, None).is_err());
}
