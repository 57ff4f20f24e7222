//! The toy Transformer with experts on meshes of many axes, whole and in stages, against one device.
use candle_core::{DType, Device, Tensor};
use candle_dist::{ClipGradNorm, DataParallelOptions, RankContext};
use candle_nn::{Optimizer, ParamsAdamW};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{Kwargs, Runtime, StepOptions};
use candle_shard::fsdp::FullyShardOptions;
use candle_shard::nn::{AdamW, MeshVarBuilder, Mode, Parameters};
use candle_shard::{DTensor, Result, TokenOrder, checkpoint, explain};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use test_utils::model_args::ModelArgs;
use test_utils::toy::{Transformer, TransformerPipe, placements};
use test_utils::{Scratch, distance, on_ranks, reference};

const BATCH: usize = 4;
const SEQ: usize = 7;
const STEPS: usize = 2;
const NORM: f64 = 0.2;

fn args() -> ModelArgs {
    ModelArgs {
        vocab_size: 11,
        max_seq_len: SEQ,
        dim: 8,
        n_heads: 4,
        experts: 5,
        top_k: 2,
        dropout_p: 0.0,
        seed: 7,
        ..ModelArgs::default()
    }
}

fn ids(step: usize) -> candle_core::Result<Tensor> {
    let ids: Vec<u32> = (0..BATCH * SEQ).map(|i| ((i * 7 + i / 3 + step * 5) % 11) as u32).collect();
    Tensor::from_vec(ids, (BATCH, SEQ), &Device::Cpu)
}

fn adam() -> ParamsAdamW {
    ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() }
}

/// The losses of some steps, the gradients of the first of them before they are clipped, and the parameters after all.
#[derive(Debug, Clone, Default)]
struct Trace {
    losses: Vec<f64>,
    grads: BTreeMap<String, Tensor>,
    params: BTreeMap<String, Tensor>,
}

/// One device, where the loss is the mean over `parts` of the batch.
fn one_device(args: &ModelArgs, parts: usize) -> candle_core::Result<Trace> {
    let model = reference::Transformer::new(args, DType::F64, &Device::Cpu)?;
    let mut optimizer =
        candle_nn::AdamW::new(model.vars().iter().map(|(_, var)| var.clone()).collect(), adam())?;
    let mut trace = Trace::default();
    for step in 0..STEPS {
        let (x, y, rows) = (ids(step)?, ids(step + 1)?, BATCH / parts);
        let mut loss = Tensor::zeros((), DType::F64, &Device::Cpu)?;
        for part in 0..parts {
            let mode = Mode::TrainRows { step: step as u64, first_row: part * rows };
            let (logits, more) = model.run(&x.narrow(0, part * rows, rows)?, mode)?;
            let mut of_part = model.loss(&logits, &y.narrow(0, part * rows, rows)?)?;
            if let Some(more) = more {
                of_part = (of_part + more)?;
            }
            loss = (loss + (of_part / parts as f64)?)?;
        }
        let mut grads = loss.backward()?;
        trace.losses.push(loss.to_scalar()?);
        if step == 0 {
            let grad = |var| grads.get(var).expect("a gradient").detach();
            trace.grads = model.vars().iter().map(|(name, var)| (name.clone(), grad(var))).collect();
        }
        ClipGradNorm::new(NORM).clip(model.vars(), &mut grads)?;
        optimizer.step(&grads)?;
    }
    for (name, var) in model.vars() {
        trace.params.insert(name.clone(), var.as_tensor().copy()?);
    }
    Ok(trace)
}

/// How the model is distributed.
#[derive(Debug, Clone, Copy)]
struct Mix {
    pp: usize,
    dp: usize,
    /// Of `fsdp`, `cp`, `ep` and `tp`.
    stage: [usize; 4],
    microbatches: usize,
    is_sequence_parallel: bool,
    is_zigzag: bool,
}

impl Mix {
    fn new(pp: usize, dp: usize, stage: [usize; 4]) -> Self {
        Self { pp, dp, stage, microbatches: pp, is_sequence_parallel: false, is_zigzag: false }
    }

    fn world(&self) -> usize {
        self.pp * self.dp * self.stage.iter().product::<usize>()
    }
}

/// The rows of a replica in microbatches.
fn batch(step: usize, rows: Range<usize>, microbatches: usize) -> candle_pipe::Result<Microbatches> {
    let part = |x: Tensor| x.narrow(0, rows.start, rows.len());
    let inputs = [part(ids(step)?)?.into(), part(ids(step + 1)?)?.into()];
    split_args_kwargs_into_chunks(&inputs, &Kwargs::new(), microbatches, None, None)
}

/// Where a training comes from, and where it is saved.
#[derive(Debug, Clone, Default)]
struct Paths {
    load: Option<PathBuf>,
    save: Option<PathBuf>,
}

fn state(parameters: &Parameters, optimizer: &AdamW) -> Result<Vec<(String, DTensor)>> {
    Ok([parameters.named_tensors(), optimizer.state()?].concat())
}

/// What one rank sees of some steps.
fn train(
    ctx: &RankContext,
    args: &ModelArgs,
    mix: &Mix,
    steps: Range<usize>,
    paths: &Paths,
) -> candle_pipe::Result<Trace> {
    let &Mix { pp, dp, stage: [fsdp, cp, ep, tp], microbatches, .. } = mix;
    let mesh = ctx.mesh(&[("pp", pp), ("dp", dp), ("fsdp", fsdp), ("cp", cp), ("ep", ep), ("tp", tp)])?;
    let stage = mesh.axes(&["fsdp", "cp", "ep", "tp"])?;
    let plan = Transformer::plan_of(args, "tp", mix.is_sequence_parallel);
    let vb = MeshVarBuilder::fresh(args.seed, &stage, plan, DType::F64, &Device::Cpu)?;
    let vb = vb.fully_shard("fsdp", FullyShardOptions::default())?;
    let pipe = TransformerPipe::new(args, mix.is_sequence_parallel).zigzag(mix.is_zigzag).cut(pp)?;
    let schedule = ScheduleKind::OneFOneB.schedule(pp, microbatches, 1)?;
    let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &Device::Cpu)?
        .with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
    let parameters = vb.built();
    for p in parameters.iter().filter(|p| p.name.contains(".experts.")) {
        let held: usize = p.var.elem_count();
        let most = (p.tensor.elem_count() as f64 / (ep.min(args.experts) * tp.min(2)) as f64 * 1.7) as usize;
        assert!(held <= most, "{} of {} elements of {} on {mix:?}", held, p.tensor.elem_count(), p.name);
    }
    let clip = runtime.clip_grad_norm(parameters.clip_grad_norm(NORM)?);
    let mut optimizer = AdamW::new(&parameters, adam())?;
    if let Some(path) = &paths.load {
        parameters.load(path)?;
        optimizer.load(path)?;
    }
    let (replica, rows) = (mesh.local_rank("dp")?, BATCH / dp);
    let mut trace = Trace::default();
    for step in steps.clone() {
        let batch = batch(step, replica * rows..(replica + 1) * rows, microbatches)?;
        let options = StepOptions::default().step(step as u64).first_row(replica * rows);
        let mut made = runtime.forward_backward(&batch, &options)?.step;
        let loss = made.loss().ok().map(|loss| loss.to_scalar::<f64>()).transpose()?;
        trace.losses.extend(loss);
        parameters.reduce(&mut made.grads)?;
        if step == steps.start {
            for p in parameters.iter() {
                let grad =
                    p.grad(&made.grads)?.unwrap_or_else(|| panic!("no gradient of {} on {mix:?}", p.name));
                trace.grads.insert(p.name.clone(), grad.full_tensor()?.detach());
            }
        }
        clip.clip(&parameters.named_vars(), &mut made.grads)?;
        optimizer.step(&made.grads)?;
    }
    if let Some(path) = &paths.save {
        checkpoint::save(path, &stage, &state(&parameters, &optimizer)?)?;
    }
    for p in parameters.iter() {
        trace.params.insert(p.name.clone(), p.tensor.full_tensor()?.detach());
    }
    Ok(trace)
}

/// Tensors by name of what was seen.
type Part = fn(&Trace) -> &BTreeMap<String, Tensor>;

/// Joins what the ranks saw, and compares it with one device from step `first` on.
fn compare(ranks: &[Trace], want: &Trace, first: usize, what: &str) {
    let with_loss: Vec<&Trace> = ranks.iter().filter(|rank| !rank.losses.is_empty()).collect();
    for (i, want) in want.losses[first..].iter().enumerate() {
        let got = with_loss.iter().map(|rank| rank.losses[i]).sum::<f64>() / with_loss.len() as f64;
        assert!((got - want).abs() < 1e-10, "{what}: loss of step {}: {got} for {want}", first + i);
    }
    let parts: [(Part, f64); 2] = [(|trace| &trace.grads, 1e-12), (|trace| &trace.params, 1e-8)];
    // The gradients of one device are those of its first step.
    for (of, most) in parts.iter().skip(usize::from(first > 0)) {
        for (name, want) in of(want) {
            let mut found = ranks.iter().filter_map(|rank| of(rank).get(name)).peekable();
            assert!(found.peek().is_some(), "{what}: no rank has {name}");
            for got in found {
                let error = distance(got, want);
                assert!(error < *most, "{what}: {name}: {error:e}");
            }
        }
    }
}

fn check(args: &ModelArgs, mix: Mix, want: &Trace) {
    let (args, what) = (args.clone(), format!("{mix:?}"));
    let ranks = on_ranks(mix.world(), &what, move |ctx| train(ctx, &args, &mix, 0..STEPS, &Paths::default()));
    compare(&ranks, want, 0, &what);
}

#[test]
fn experts_on_any_mix_of_axes_train_as_on_one_device() {
    let (args, dense) = (args(), ModelArgs { experts: 0, ..args() });
    let want = one_device(&args, 1).unwrap();
    for mix in [
        Mix::new(1, 1, [1, 2, 2, 1]),
        Mix::new(1, 2, [1, 1, 2, 1]),
        Mix::new(1, 1, [2, 1, 2, 1]),
        Mix::new(1, 1, [1, 1, 2, 2]),
        Mix::new(2, 1, [1, 1, 3, 1]),
        Mix::new(2, 2, [1, 1, 2, 1]),
        Mix::new(2, 1, [1, 2, 2, 1]),
        Mix::new(2, 1, [2, 1, 1, 2]),
        Mix::new(3, 1, [1, 1, 2, 1]),
        Mix::new(1, 1, [2, 2, 2, 1]),
        Mix { is_sequence_parallel: true, ..Mix::new(2, 1, [1, 1, 2, 2]) },
        Mix { is_zigzag: true, ..Mix::new(2, 1, [1, 2, 2, 1]) },
        Mix { microbatches: 4, ..Mix::new(2, 1, [1, 1, 3, 1]) }, // a microbatch of one sequence on three ranks
    ] {
        check(&args, mix, &want);
    }
    let want = one_device(&dense, 1).unwrap();
    for mix in [Mix::new(2, 1, [2, 2, 1, 1]), Mix { is_zigzag: true, ..Mix::new(1, 1, [1, 3, 1, 2]) }] {
        check(&dense, mix, &want);
    }
}

#[test]
fn dropout_and_auxiliary_losses_of_experts_in_stages_are_those_of_one_device() {
    let args = ModelArgs { dropout_p: 0.2, balance_weight: 0.3, z_weight: 0.1, ..args() };
    for (parts, mix) in [
        (1, Mix { microbatches: 1, ..Mix::new(1, 1, [1, 2, 2, 1]) }),
        (1, Mix { microbatches: 1, ..Mix::new(2, 1, [1, 1, 2, 2]) }),
        (2, Mix::new(2, 1, [1, 1, 3, 1])),
        (4, Mix::new(2, 2, [1, 1, 2, 1])),
        (4, Mix { microbatches: 4, ..Mix::new(3, 1, [1, 1, 1, 1]) }),
    ] {
        let want = one_device(&args, parts).unwrap();
        let without = one_device(&ModelArgs { balance_weight: 0.0, ..args.clone() }, parts).unwrap();
        assert!((want.losses[0] - without.losses[0]).abs() > 1e-3, "the balance loss changes nothing");
        check(&args, mix, &want);
    }
}

#[test]
fn a_training_goes_on_from_a_checkpoint_on_another_mesh() {
    let scratch = Scratch::new("mix");
    let want = one_device(&args(), 1).unwrap();
    let saved = scratch.path("saved");
    let run = |stage: [usize; 4], steps: Range<usize>, paths: Paths| {
        let mix = Mix { microbatches: 2, ..Mix::new(1, 1, stage) };
        on_ranks(mix.world(), "checkpoint", move |ctx| train(ctx, &args(), &mix, steps.clone(), &paths))
    };
    run([2, 1, 2, 1], 0..1, Paths { save: Some(saved.clone()), ..Paths::default() });
    for stage in [[1, 1, 1, 1], [1, 2, 3, 1], [1, 1, 2, 2], [2, 1, 3, 1]] {
        let ranks = run(stage, 1..2, Paths { load: Some(saved.clone()), ..Paths::default() });
        compare(&ranks, &want, 1, &format!("from [2, 1, 2, 1] on {stage:?}"));
    }
    assert!(Path::new(&saved).exists());
}

#[test]
fn the_uncut_model_equals_one_device_and_tells_its_ways() {
    let args = ModelArgs { balance_weight: 0.3, z_weight: 0.1, ..args() };
    let model = reference::Transformer::new(&args, DType::F64, &Device::Cpu).unwrap();
    let (logits, losses) = model.run(&ids(0).unwrap(), Mode::Eval).unwrap();
    let losses = losses.unwrap();
    for (shape, is_zigzag) in
        [([1, 2, 2, 1], false), ([2, 1, 2, 1], false), ([1, 2, 1, 2], true), ([1, 1, 2, 2], false)]
    {
        let (args, logits, losses) = (args.clone(), logits.detach(), losses.detach());
        on_ranks(shape.iter().product(), "uncut", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&["dp", "cp", "ep", "tp"].into_iter().zip(shape).collect::<Vec<_>>())?;
            let plan = Transformer::plan_of(&args, "tp", false);
            let vb = MeshVarBuilder::fresh(args.seed, &mesh, plan, DType::F64, &Device::Cpu)?;
            let model = Transformer::new(&args, &vb)?;
            vb.finish()?;
            let order = is_zigzag.then(|| TokenOrder::zigzag(SEQ, shape[1]));
            let tokens = match &order {
                Some(order) => order.distribute(&ids(0)?, 1, &mesh, &placements(&mesh))?,
                None => DTensor::distribute(&ids(0)?, &mesh, &placements(&mesh))?,
            };
            let (made, told) = explain(|| model.run(&tokens, order.as_ref(), Mode::Eval));
            let made = made?;
            let got = made.logits.full_tensor()?;
            let got = order.as_ref().map_or_else(|| Ok(got.clone()), |order| order.undo(&got, 1))?;
            assert!(distance(&got, &logits) < 1e-12, "{shape:?}");
            assert!(distance(&made.loss.unwrap().full_tensor()?, &losses) < 1e-12, "{shape:?}");
            let has = |op: &str| told.ops.iter().any(|told| told.op.starts_with(op));
            assert!(has("moe") && has(if shape[1] > 1 { "flash_attn by " } else { "flash_attn" }), "{told}");
            Ok(())
        });
    }
}

#[test]
fn what_does_not_fit_together_is_one_error_on_all_ranks() {
    let refused = |args: ModelArgs, mix: Mix, text: &str| {
        let errors = on_ranks(mix.world(), "refusals", move |ctx| -> Result<String, String> {
            match train(ctx, &args, &mix, 0..1, &Paths::default()) {
                Ok(_) => Err("no error".into()),
                Err(error) => Ok(error.to_string()),
            }
        });
        assert!(errors.iter().all(|error| error.contains(text)), "{text}: {errors:?}");
    };
    let auxiliary = ModelArgs { balance_weight: 0.1, ..args() };
    refused(auxiliary.clone(), Mix::new(1, 1, [2, 1, 1, 1]), "fully sharded blocks");
    refused(
        ModelArgs { recompute_activations: true, ..auxiliary },
        Mix::new(1, 1, [1, 1, 2, 1]),
        "recomputed blocks",
    );
    let dropped = ModelArgs { dropout_p: 0.1, ..args() };
    refused(dropped, Mix { is_zigzag: true, ..Mix::new(1, 1, [1, 2, 1, 1]) }, "by position");
}
