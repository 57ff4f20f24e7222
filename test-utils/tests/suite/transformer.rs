//! The toy Transformer on a mesh against the same model in plain candle on one device.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor};
use candle_dist::{Op, comm};
use candle_nn::{Optimizer, ParamsAdamW};
use candle_shard::nn::{AdamW, MeshVarBuilder, Mode};
use candle_shard::parallel::{ColwiseParallel, Plan};
use candle_shard::{DTensor, Replicate, Result};
use test_utils::model_args::ModelArgs;
use test_utils::reference;
use test_utils::toy::Transformer;
use test_utils::{has_ranks, on_ranks, over_nccl, skip, worlds};

fn tokens(
    rows: usize,
    len: usize,
    vocab: usize,
    step: usize,
    device: &Device,
) -> candle_core::Result<Tensor> {
    let ids: Vec<u32> = (0..rows * len).map(|i| ((i * 7 + i / 3 + step * 5) % vocab) as u32).collect();
    Tensor::from_vec(ids, (rows, len), device)
}

fn largest_difference(a: &Tensor, b: &Tensor) -> candle_core::Result<f64> {
    let on_host = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F64);
    (on_host(a)? - on_host(b)?)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

/// Three AdamW steps: losses, the first gradients by name, and the final parameters by name.
struct Trace {
    losses: Vec<f64>,
    grads: Vec<(String, Tensor)>,
    params: Vec<(String, Tensor)>,
}

const BATCH: usize = 3;
const STEPS: usize = 3;

fn adam() -> ParamsAdamW {
    ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() }
}

fn train_reference(args: &ModelArgs, dtype: DType) -> candle_core::Result<Trace> {
    let model = reference::Transformer::new(args, dtype, &Device::Cpu)?;
    let vars = model.vars().to_vec();
    let mut optimizer = candle_nn::AdamW::new(vars.iter().map(|(_, v)| v.clone()).collect(), adam())?;
    let (mut losses, mut first) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let batch = |step| tokens(BATCH, args.max_seq_len, args.vocab_size, step, &Device::Cpu);
        let x = batch(step)?;
        let logits = model.forward(&x, Mode::Train { step: step as u64 })?;
        let loss = reference::loss(&logits, &batch(step + 1)?)?;
        let grads = loss.backward()?;
        losses.push(loss.to_dtype(DType::F64)?.to_scalar()?);
        if step == 0 {
            first =
                vars.iter().map(|(n, v)| (n.clone(), grads.get(v).expect("a gradient").clone())).collect();
        }
        optimizer.step(&grads)?;
    }
    let params = vars
        .iter()
        .map(|(n, v)| Ok((n.clone(), v.as_tensor().copy()?)))
        .collect::<candle_core::Result<_>>()?;
    Ok(Trace { losses, grads: first, params })
}

fn train_on_mesh(
    ctx: &candle_dist::RankContext,
    args: &ModelArgs,
    plan: Plan,
    dtype: DType,
) -> Result<Trace> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let vb = MeshVarBuilder::fresh(args.seed, &mesh, plan, dtype, ctx.device())?;
    let model = Transformer::new(args, &vb)?;
    let parameters = vb.finish()?;
    let mut optimizer = AdamW::new(&parameters, adam())?;
    let put = |t: Tensor| DTensor::distribute(&t, &mesh, &[Replicate]);
    let (mut losses, mut first) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let batch = |step| put(tokens(BATCH, args.max_seq_len, args.vocab_size, step, ctx.device())?);
        let (x, y) = (batch(step)?, batch(step + 1)?);
        let loss = model.forward(&x, Mode::Train { step: step as u64 })?.cross_entropy(&y)?;
        let grads = parameters.backward(&loss)?;
        losses.push(loss.full_tensor()?.to_dtype(DType::F64)?.to_scalar()?);
        if step == 0 {
            for p in parameters.iter() {
                let grad = p.grad(&grads)?.unwrap_or_else(|| panic!("{} has no gradient", p.name));
                first.push((p.name.clone(), grad.full_tensor()?));
            }
        }
        optimizer.step(&grads)?;
    }
    let whole = |p: &candle_shard::nn::Parameter| Ok((p.name.clone(), p.tensor.full_tensor()?.detach()));
    Ok(Trace { losses, grads: first, params: parameters.iter().map(whole).collect::<Result<_>>()? })
}

fn assert_alike(got: &Trace, want: &Trace, what: &str) {
    for (step, (a, b)) in got.losses.iter().zip(&want.losses).enumerate() {
        assert!((a - b).abs() < 1e-9, "{what}: loss of step {step}: {a} against {b}");
    }
    for (kind, got, want) in [("gradient", &got.grads, &want.grads), ("parameter", &got.params, &want.params)]
    {
        assert_eq!(
            got.iter().map(|(n, _)| n).collect::<Vec<_>>(),
            want.iter().map(|(n, _)| n).collect::<Vec<_>>()
        );
        for ((name, a), (_, b)) in got.iter().zip(want) {
            assert_eq!(a.dims(), b.dims(), "{what}: {kind} {name}");
            let difference = largest_difference(a, b).unwrap();
            assert!(difference < 1e-8, "{what}: {kind} {name} differs by {difference}");
        }
    }
}

/// The plan whose logits stay sharded by class, so that the loss is computed on the shards.
fn loss_parallel(plan: Plan) -> Plan {
    plan.with("output", ColwiseParallel::default())
}

fn check(args: ModelArgs, sizes: &[usize]) {
    check_with(args, sizes, |plan| plan);
}

fn check_with(args: ModelArgs, sizes: &[usize], change: fn(Plan) -> Plan) {
    let want = std::sync::Arc::new(train_reference(&args, DType::F64).unwrap());
    for world in worlds(sizes.iter().copied()) {
        for sequence in [false, true] {
            let (args, want) = (args.clone(), want.clone());
            let what = format!("{args:?} on {world}, sequence parallel {sequence}");
            on_ranks(world, &what.clone(), move |ctx| -> Result<()> {
                let got = train_on_mesh(ctx, &args, change(Transformer::plan("tp", sequence)), DType::F64)?;
                assert_alike(&got, &want, &what);
                Ok(())
            });
        }
    }
}

/// Why a case does not run on GPUs.
const EMPTY: &str =
    "some ranks have empty tensors, for which candle launches CUDA kernels without blocks: an error";

fn args() -> ModelArgs {
    if over_nccl() {
        // Uneven on 2, 4 and 8 ranks, and nowhere empty.
        return ModelArgs {
            vocab_size: 15,
            max_seq_len: 15,
            dim: 16,
            n_heads: 8,
            seed: 7,
            ..ModelArgs::default()
        };
    }
    ModelArgs { vocab_size: 11, max_seq_len: 9, dim: 12, n_heads: 6, seed: 7, ..ModelArgs::default() }
}

#[test]
fn training_equals_one_device_on_worlds_1_to_5() {
    check(args(), &[1, 2, 3, 4, 5]);
}

/// The losses of training in a dtype are those of one device in f32, from the same values, up to its precision.
fn check_losses(dtype: DType, tolerance: f64) {
    let want = std::sync::Arc::new(train_reference(&args(), DType::F32).unwrap().losses);
    for world in worlds(1..=5) {
        for sequence in [false, true] {
            let want = want.clone();
            on_ranks(
                world,
                &format!("{dtype:?} on {world}, sequence parallel {sequence}"),
                move |ctx| -> Result<()> {
                    let got = train_on_mesh(ctx, &args(), Transformer::plan("tp", sequence), dtype)?;
                    for (got, want) in got.losses.iter().zip(want.iter()) {
                        assert!((got - want).abs() < tolerance * want.abs(), "{got:?} for {want:?}");
                    }
                    Ok(())
                },
            );
        }
    }
}

#[test]
fn training_in_f32_follows_one_device() {
    check_losses(DType::F32, 1e-4);
}

#[test]
fn training_in_bf16_follows_one_device() {
    check_losses(DType::BF16, 5e-2);
}

#[test]
fn without_mask_tying_or_dropout() {
    check(ModelArgs { use_attn_mask: false, weight_tying: false, dropout_p: 0.0, ..args() }, &[2, 3]);
}

#[test]
fn recomputed_activations_change_no_number() {
    check(ModelArgs { recompute_activations: true, ..args() }, &[1, 2, 3]);
}

#[test]
fn more_ranks_than_rows_of_everything() {
    if over_nccl() {
        return skip(EMPTY);
    }
    check(ModelArgs { vocab_size: 3, max_seq_len: 2, dim: 4, n_heads: 2, ..args() }, &[3, 5]);
}

#[test]
fn losses_of_logits_that_stay_sharded_by_class_equal_one_device() {
    check_with(args(), &[1, 2, 3, 4, 5], loss_parallel);
    if over_nccl() {
        return skip(EMPTY);
    }
    // Fewer classes than ranks, and a head of its own.
    check_with(ModelArgs { vocab_size: 3, weight_tying: false, ..args() }, &[4], loss_parallel);
}

/// The all_reduces, all_gathers and reduce_scatters of a forward pass with its loss, of a backward pass, and of a step
/// of the optimizer; there is nothing else.
type Counts = [[usize; 3]; 3];

fn counts_of_a_step(world: usize, plan: Plan) -> Counts {
    counts_of(ModelArgs::default(), world, plan)
}

fn counts_of(args: ModelArgs, world: usize, plan: Plan) -> Counts {
    let of_ranks = on_ranks(world, "counts", move |ctx| -> Result<Counts> {
        let args = ModelArgs { dropout_p: 0.0, ..args.clone() };
        let mesh = ctx.mesh(&[("tp", world)])?;
        let vb = MeshVarBuilder::fresh(0, &mesh, plan.clone(), DType::F32, ctx.device())?;
        let model = Transformer::new(&args, &vb)?;
        let parameters = vb.finish()?;
        let mut optimizer = AdamW::new(&parameters, adam())?;
        let x = DTensor::distribute(&tokens(8, 8, 8, 0, ctx.device())?, &mesh, &[Replicate])?;
        let (loss, forward) = comm::record(|| model.forward(&x, Mode::Eval)?.cross_entropy(&x));
        let loss = loss?;
        let (grads, backward) = comm::record(|| parameters.backward(&loss));
        let grads = grads?;
        let (stepped, step) = comm::record(|| optimizer.step(&grads));
        stepped?;
        let count = |counts: &comm::CommCounts| {
            let kinds = [Op::AllReduce, Op::AllGather, Op::ReduceScatter].map(|op| counts.get(op).count);
            assert_eq!(kinds.iter().sum::<usize>(), counts.total(), "{counts}");
            kinds
        };
        Ok([&forward, &backward, &step].map(count))
    });
    assert!(of_ranks.iter().all(|counts| *counts == of_ranks[0]), "{of_ranks:?}");
    of_ranks[0]
}

#[test]
fn a_step_communicates_the_megatron_minimum() {
    let layers = ModelArgs::default().n_layers;
    // Embedding and output add one each; without sequence parallelism the logits' gather is the only other. The
    // gradients of all norms of a sequence-parallel model are added up in one call.
    let tensor: Counts = [[2 * layers + 1, 1, 0], [2 * layers + 1, 0, 0], [0; 3]];
    let sequence: Counts = [[0, 2 * layers + 2, 2 * layers + 1], [1, 2 * layers + 1, 2 * layers + 1], [0; 3]];
    for world in [2, 4].into_iter().filter(|&world| has_ranks(world)) {
        assert_eq!(counts_of_a_step(world, Transformer::plan("tp", false)), tensor, "{world}");
        assert_eq!(counts_of_a_step(world, Transformer::plan("tp", true)), sequence, "{world}");
    }
}

#[test]
fn heads_that_do_not_divide_communicate_no_more() {
    if over_nccl() {
        return skip(EMPTY);
    }
    for sequence in [false, true] {
        let [even, uneven] = [4, 6].map(|n_heads| {
            counts_of(
                ModelArgs { dim: 12, n_heads, ..ModelArgs::default() },
                4,
                Transformer::plan("tp", sequence),
            )
        });
        assert_eq!(even, uneven);
    }
}

/// What PyTorch's model of the same name communicates on 4 ranks with 2 layers (its own test of this counts so).
#[test]
fn no_pass_communicates_more_than_the_model_elsewhere() {
    if !has_ranks(4) {
        return;
    }
    let elsewhere: [(bool, Counts); 2] =
        [(false, [[6, 1, 0], [9, 0, 0], [0; 3]]), (true, [[0, 6, 6], [0, 6, 5], [30, 0, 0]])];
    for (sequence, most) in elsewhere {
        let counts = counts_of_a_step(4, Transformer::plan("tp", sequence));
        for (pass, (counts, most)) in counts.iter().zip(&most).enumerate() {
            // The one all_reduce of norm gradients replaces those of the optimizer.
            let norms = usize::from(sequence && pass == 1);
            assert!(
                counts[0] <= most[0] + norms && counts[1] <= most[1] && counts[2] <= most[2],
                "{counts:?} {most:?}"
            );
        }
        let all = |counts: &Counts| counts.iter().flatten().sum::<usize>();
        assert!(all(&counts) < all(&most), "{counts:?} {most:?}");
    }
}

#[test]
fn a_loss_on_shards_gathers_no_logits() {
    if !has_ranks(4) {
        return;
    }
    for sequence in [false, true] {
        let whole = counts_of_a_step(4, Transformer::plan("tp", sequence));
        let sharded = counts_of_a_step(4, loss_parallel(Transformer::plan("tp", sequence)));
        // Instead of the gather the largest logit of each row and the sum of the exponentials; backward nothing.
        let mut want = whole;
        want[0][1] -= 1;
        want[0][0] += 2;
        // The loss that is composed of candle's ops sums one gradient more.
        want[1][0] += usize::from(over_nccl());
        assert_eq!(sharded, want);
    }
}

#[test]
fn heads_that_do_not_divide_the_model_are_refused() {
    if !has_ranks(2) {
        return;
    }
    on_ranks(2, "heads", |ctx| -> Result<()> {
        let (mesh, plan) = (ctx.mesh(&[("tp", 2)])?, Transformer::plan("tp", false));
        let vb = MeshVarBuilder::fresh(0, &mesh, plan, DType::F32, ctx.device())?;
        let text =
            Transformer::new(&ModelArgs { dim: 12, n_heads: 5, ..args() }, &vb).unwrap_err().to_string();
        assert_eq!(text, "plan: 5 heads do not divide a model of dim 12; choose a number that does");
        Ok(())
    });
}

#[test]
fn a_recomputed_step_communicates_its_forward_twice_and_its_backward_once() {
    if !has_ranks(2) {
        return;
    }
    on_ranks(2, "checkpoint counts", |ctx| -> Result<()> {
        let args = ModelArgs { dropout_p: 0.0, recompute_activations: true, ..ModelArgs::default() };
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let vb = MeshVarBuilder::fresh(0, &mesh, Transformer::plan("tp", false), DType::F32, ctx.device())?;
        let model = Transformer::new(&args, &vb)?;
        let parameters = vb.finish()?;
        let x = DTensor::distribute(&tokens(2, 16, 8, 0, ctx.device())?, &mesh, &[Replicate])?;
        let (loss, forward) = comm::record(|| model.forward(&x, Mode::Eval)?.cross_entropy(&x));
        let loss = loss?;
        let (grads, backward) = comm::record(|| parameters.backward(&loss));
        grads?;
        assert_eq!(forward.get(Op::AllReduce).count, 2 * args.n_layers + 1);
        // 2 a layer recomputed, 2 a layer and 1 for the output layer in the backward pass proper.
        assert_eq!(backward.get(Op::AllReduce).count, 4 * args.n_layers + 1);
        Ok(())
    });
}
