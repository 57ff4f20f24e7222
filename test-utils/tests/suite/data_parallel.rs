//! The toy Transformer data-parallel beside tensor-parallel against one device on the whole batch.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_dist::{DataParallel, DataParallelOptions, GradAccumulator, RankContext, ReduceOp, comm};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use candle_shard::nn::{MeshVarBuilder, Mode, Parameters};
use candle_shard::{DTensor, Replicate, Result};
use test_utils::model_args::ModelArgs;
use test_utils::toy::Transformer;
use test_utils::{has_ranks, on_ranks, reference};

const STEPS: usize = 3;

fn adam() -> ParamsAdamW {
    ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() }
}

fn assert_close(got: &Tensor, want: &Tensor, within: f64, what: &str) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let difference = (got.to_device(&Device::Cpu).unwrap() - want)
        .unwrap()
        .abs()
        .unwrap()
        .flatten_all()
        .unwrap()
        .max(0)
        .unwrap();
    let difference = difference.to_scalar::<f64>().unwrap();
    assert!(difference < within, "{what} differs by {difference}");
}

/// Which of `total` rows a rank of `n` works on: the first ranks have one more where they do not divide.
fn part(total: usize, rank: usize, n: usize) -> (usize, usize) {
    let (each, more) = (total / n, total % n);
    (rank * each + rank.min(more), each + usize::from(rank < more))
}

/// How a rank makes the gradients of one step.
#[derive(Debug, Clone, Copy)]
enum How {
    /// One backward pass.
    Whole,
    /// One a row, reduced once.
    Accumulated,
}

fn tokens(rows: usize, args: &ModelArgs, step: usize) -> candle_core::Result<Tensor> {
    let len = args.max_seq_len;
    let ids: Vec<u32> =
        (0..rows * len).map(|i| ((i * 7 + i / 3 + step * 5) % args.vocab_size) as u32).collect();
    Tensor::from_vec(ids, (rows, len), &Device::Cpu)
}

/// Losses, the norms before clipping, the clipped gradients of the first step by name, the final parameters by name.
struct Trace {
    losses: Vec<f64>,
    norms: Vec<f64>,
    grads: Vec<(String, Tensor)>,
    params: Vec<(String, Tensor)>,
}

/// Below the norm of every step, so that clipping acts.
const MAX_NORM: f64 = 0.05;

fn transformer_on_one_device(args: &ModelArgs, batch: usize) -> Result<Trace> {
    let model = reference::Transformer::new(args, DType::F64, &Device::Cpu)?;
    let vars = model.vars().to_vec();
    let mut optimizer = AdamW::new(vars.iter().map(|(_, v)| v.clone()).collect(), adam())?;
    let (mut losses, mut norms, mut first) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..STEPS {
        let logits = model.forward(&tokens(batch, args, step)?, Mode::Train { step: step as u64 })?;
        let loss = reference::loss(&logits, &tokens(batch, args, step + 1)?)?;
        let grads = loss.backward()?;
        let mut squares = 0.0;
        for (_, var) in &vars {
            squares += grads.get(var).expect("a gradient").sqr()?.sum_all()?.to_scalar::<f64>()?;
        }
        let norm = squares.sqrt();
        assert!(norm > MAX_NORM, "{norm}");
        let mut clipped = GradStore::default();
        for (_, var) in &vars {
            clipped.insert(var, (grads.get(var).expect("a gradient") * (MAX_NORM / (norm + 1e-6)))?);
        }
        if step == 0 {
            first =
                vars.iter().map(|(n, v)| (n.clone(), clipped.get(v).expect("a gradient").clone())).collect();
        }
        losses.push(loss.to_scalar()?);
        norms.push(norm);
        optimizer.step(&clipped)?;
    }
    let params = vars.iter().map(|(n, v)| Ok((n.clone(), v.as_tensor().copy()?))).collect::<Result<_>>()?;
    Ok(Trace { losses, norms, grads: first, params })
}

#[derive(Debug, Clone, Copy)]
struct Grid {
    dp: usize,
    tp: usize,
    sequence: bool,
    batch: usize,
    how: How,
}

fn transformer_on_grid(ctx: &RankContext, args: &ModelArgs, grid: Grid) -> Result<Trace> {
    let mesh = ctx.mesh(&[("dp", grid.dp), ("tp", grid.tp)])?;
    let (tp, dp_group) = (mesh.axis("tp")?, mesh.axis_group("dp")?);
    // Every data-parallel rank draws other numbers; the start takes those of the first.
    let seed = args.seed + dp_group.rank() as u64;
    let plan = Transformer::plan("tp", grid.sequence);
    let vb = MeshVarBuilder::fresh(seed, &tp, plan, DType::F64, ctx.device())?;
    let model = Transformer::new(args, &vb)?;
    let parameters = vb.finish()?;
    let vars = parameters.named_vars();
    let options = DataParallelOptions::default().bucket_bytes(4096);
    let dp = DataParallel::new(dp_group, &vars, &options)?;
    let clip = parameters.clip_grad_norm(MAX_NORM)?;
    let mut optimizer = AdamW::new(parameters.vars(), adam())?;
    let (start, len) = part(grid.batch, dp_group.rank(), grid.dp);
    let (mut losses, mut norms, mut first) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..STEPS {
        let loss_of = |from: usize, count: usize| {
            let put = |t: Tensor| {
                let rows = t.narrow(0, start + from, count)?.to_device(ctx.device())?;
                DTensor::distribute(&rows, &tp, &[Replicate])
            };
            let (x, y) = (put(tokens(grid.batch, args, step)?)?, put(tokens(grid.batch, args, step + 1)?)?);
            model.forward(&x, Mode::Train { step: step as u64 })?.cross_entropy(&y)
        };
        let (mut grads, loss) = gradients(&parameters, grid.how, len, loss_of)?;
        let even = grid.batch.is_multiple_of(grid.dp);
        let (reduced, counts) = comm::record(|| match even {
            true => dp.reduce(&mut grads),
            false => dp.reduce_weighted(&mut grads, len as f64),
        });
        reduced?;
        assert_eq!(counts.total(), if grid.dp == 1 { 0 } else { dp.bucket_count() + usize::from(!even) });
        let (norm, counts) = comm::record(|| clip.clip(&vars, &mut grads));
        norms.push(norm?);
        assert_eq!(counts.total(), usize::from(grid.tp > 1));
        let share = Tensor::new(loss * len as f64 / grid.batch as f64, &Device::Cpu)?;
        losses.push(dp_group.all_reduce(&share, ReduceOp::Sum)?.to_scalar()?);
        if step == 0 {
            for p in parameters.iter() {
                let grad = p.grad(&grads)?.unwrap_or_else(|| panic!("{} has no gradient", p.name));
                assert!(!grad.to_local().track_op(), "{}'s gradient holds a graph", p.name);
                first.push((p.name.clone(), grad.full_tensor()?));
            }
        }
        optimizer.step(&grads)?;
    }
    let whole = |p: &candle_shard::nn::Parameter| Ok((p.name.clone(), p.tensor.full_tensor()?.detach()));
    let params = parameters.iter().map(whole).collect::<Result<_>>()?;
    Ok(Trace { losses, norms, grads: first, params })
}

/// The gradients, complete on the tensor-parallel axis, and the loss of `len` rows.
fn gradients(
    parameters: &Parameters,
    how: How,
    len: usize,
    loss_of: impl Fn(usize, usize) -> Result<DTensor>,
) -> Result<(GradStore, f64)> {
    match how {
        How::Whole => {
            let loss = loss_of(0, len)?;
            Ok((parameters.backward(&loss)?, loss.full_tensor()?.to_scalar()?))
        }
        How::Accumulated => {
            let (mut accumulator, mut sum) = (GradAccumulator::new(&parameters.vars()), 0.0);
            for row in 0..len {
                let loss = loss_of(row, 1)?;
                accumulator.add(&loss.backward()?)?;
                sum += loss.full_tensor()?.to_scalar::<f64>()?;
            }
            // Partial gradients of the tensor-parallel axis are added up once, too.
            let mut grads = accumulator.mean()?;
            parameters.reduce(&mut grads)?;
            Ok((grads, sum / len as f64))
        }
    }
}

fn transformer_equals_one_device(grid: Grid) {
    if !has_ranks(grid.dp * grid.tp) {
        return;
    }
    let args = ModelArgs {
        max_seq_len: 9,
        vocab_size: 11,
        dim: 12,
        n_heads: 6,
        dropout_p: 0.0,
        seed: 7,
        ..ModelArgs::default()
    };
    let want = transformer_on_one_device(&args, grid.batch).unwrap();
    on_ranks(grid.dp * grid.tp, &format!("{grid:?}"), move |ctx| -> Result<()> {
        let got = transformer_on_grid(ctx, &args, grid)?;
        for (what, got, want) in [("loss", &got.losses, &want.losses), ("norm", &got.norms, &want.norms)] {
            for (a, b) in got.iter().zip(want) {
                assert!((a - b).abs() < 1e-9, "{what}: {a} against {b}");
            }
        }
        for (kind, got, want) in
            [("gradient", &got.grads, &want.grads), ("parameter", &got.params, &want.params)]
        {
            assert_eq!(got.len(), want.len());
            for ((name, a), (other, b)) in got.iter().zip(want) {
                assert_eq!(name, other);
                assert_close(a, b, 1e-8, &format!("{kind} {name}"));
            }
        }
        Ok(())
    });
}

#[test]
fn beside_tensor_parallelism_training_equals_one_device() {
    for sequence in [false, true] {
        for (dp, tp) in [(2, 2), (1, 2), (2, 1), (2, 3)] {
            transformer_equals_one_device(Grid { dp, tp, sequence, batch: 4, how: How::Whole });
        }
        transformer_equals_one_device(Grid { dp: 2, tp: 2, sequence, batch: 4, how: How::Accumulated });
    }
}

#[test]
fn beside_tensor_parallelism_uneven_parts_count_by_their_samples() {
    for how in [How::Whole, How::Accumulated] {
        transformer_equals_one_device(Grid { dp: 2, tp: 2, sequence: true, batch: 3, how });
    }
}
