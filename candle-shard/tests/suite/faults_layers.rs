//! Faults that distributed tensors elsewhere have had in losses, layers and their gradients, by their numbers: not here.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{D, DType, Device, Tensor, Var};
use candle_dist::{Op, comm};
use candle_shard::kernels::Pool;
use candle_shard::nn::{Dropout, Linear, MeshVarBuilder, Mode, recompute};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{
    AttentionMask, Conv, CrossEntropy, DTensor, Placement, Reduction, Replicate, Result, Shard,
};
use itertools::Itertools;
use test_utils::on_ranks;

type Distributed = fn(&[DTensor]) -> Result<DTensor>;
type Plain = fn(&[Tensor]) -> candle_core::Result<Tensor>;
/// A name and both forms of an op.
type Both = (&'static str, Distributed, Plain);

const PARTIALS: [Lay; 2] = [Lay::At(SUM), Lay::VaryingPartial];

fn at(dim: usize) -> Lay {
    Lay::At(Shard(dim))
}

const WHOLE: Lay = Lay::At(Replicate);

/// Value and gradients on `world` ranks against one device, for inputs of these shapes in these layouts.
fn check(world: usize, inputs: &[(&[usize], Lay)], (name, distributed, plain): Both) {
    let inputs = inputs.iter().map(|&(shape, lay)| (shape.to_vec(), lay)).collect_vec();
    let label = format!(
        "{name} of {} on {world}",
        inputs.iter().map(|(s, lay)| format!("{s:?} as {lay}")).join(", ")
    );
    on_ranks(world, &label.clone(), move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[world])?;
        let wholes =
            inputs.iter().zip(1..).map(|((shape, _), seed)| values(shape, seed, DType::F64)).collect_vec();
        let vars: Vec<Var> = wholes.iter().map(Var::from_tensor).try_collect()?;
        let want = plain(&vars.iter().map(|var| var.as_tensor().clone()).collect_vec())?;
        let weights = values(want.dims(), 99, DType::F64);
        let wants = (&want * &weights)?.sum_all()?.backward()?;
        let leaf = |(whole, (_, lay)): (&Tensor, &(Vec<usize>, Lay))| Leaf::new(whole, &mesh, &[*lay]);
        let leaves: Vec<Leaf> = wholes.iter().zip(&inputs).map(leaf).try_collect()?;
        let made = distributed(&leaves.iter().map(|leaf| leaf.tensor.clone()).collect_vec())?;
        let weights = distribute(&weights, &mesh, &[Replicate])?;
        let grads = made.mul(&weights)?.sum_all()?.backward()?;
        let error = value_error(&made, &want)?;
        assert!(error < 1e-11, "{label}: value off by {error:e}");
        for (i, (leaf, var)) in leaves.iter().zip(&vars).enumerate() {
            let want = wants.get(var).map_or_else(|| var.zeros_like(), |grad| Ok(grad.clone()))?;
            let error = leaf.gradient_error(&grads, &want)?;
            assert!(error < 1e-11, "{label}: gradient {i} off by {error:e}");
        }
        Ok(())
    });
}

/// Losses that are means over all elements, some of them composed.
const LOSSES: [Both; 7] = [
    ("mse", |x| x[0].mse_loss(&x[1], Reduction::Mean), |x| (&x[0] - &x[1])?.sqr()?.mean_all()),
    ("l1", |x| x[0].l1_loss(&x[1], Reduction::Mean), |x| (&x[0] - &x[1])?.abs()?.mean_all()),
    ("smooth l1", |x| x[0].huber_loss(&x[1], 1.0, Reduction::Mean), |x| plain_huber(x, 1.0)),
    ("huber", |x| x[0].huber_loss(&x[1], 0.4, Reduction::Mean), |x| plain_huber(x, 0.4)),
    ("bce with logits", |x| x[0].bce_with_logits_loss(&x[1], Reduction::Mean), plain_bce),
    (
        "bce",
        |x| {
            let p = x[0].sigmoid()?;
            let (log_p, log_q) = (p.log()?, p.affine(-1.0, 1.0)?.log()?);
            x[1].mul(&log_p)?.add(&x[1].affine(-1.0, 1.0)?.mul(&log_q)?)?.mean_all()?.neg()
        },
        plain_bce,
    ),
    (
        "soft margin",
        |x| x[0].mul(&x[1])?.neg()?.exp()?.affine(1.0, 1.0)?.log()?.mean_all(),
        |x| ((&x[0] * &x[1])?.neg()?.exp()? + 1.0)?.log()?.mean_all(),
    ),
];

fn plain_huber(x: &[Tensor], delta: f64) -> candle_core::Result<Tensor> {
    let size = (&x[0] - &x[1])?.abs()?;
    size.le(delta)?.where_cond(&(size.sqr()? * 0.5)?, &((&size - delta / 2.0)? * delta)?)?.mean_all()
}

fn plain_bce(x: &[Tensor]) -> candle_core::Result<Tensor> {
    ((x[0].exp()? + 1.0)?.log()? - (&x[0] * &x[1])?)?.mean_all()
}

/// Fault 3: the gradient of a mean loss was divided by the local number of elements, so scaled by the number of ranks.
#[test]
fn gradients_of_mean_losses_divide_by_the_global_count() {
    for loss in LOSSES {
        for (shape, dim) in [(&[8, 3][..], 0), (&[3, 8], 1), (&[10], 0), (&[5, 2], 0), (&[2, 7], 1)] {
            check(4, &[(shape, at(dim)), (shape, at(dim))], loss);
            check(3, &[(shape, at(dim)), (shape, WHOLE)], loss);
        }
    }
}

/// Fault 4: mean losses over uneven shards were means of local means, and not a number where a shard was empty.
#[test]
fn mean_losses_over_uneven_and_empty_shards_are_global_means() {
    for n in [1usize, 5, 6, 7, 10] {
        for (name, distributed, plain) in LOSSES {
            on_ranks(4, name, move |ctx| -> Result<()> {
                let mesh = mesh(ctx, &[4])?;
                let whole = [values(&[n], 1, DType::F64), values(&[n], 2, DType::F64)];
                let want = plain(&whole)?.to_scalar::<f64>()?;
                let x: Vec<DTensor> =
                    whole.iter().map(|x| distribute(x, &mesh, &[Shard(0)])).try_collect()?;
                let got = distributed(&x)?.to_scalar::<f64>()?;
                assert!((got - want).abs() < 1e-12, "{name} of {n}: {got} for {want}");
                Ok(())
            });
        }
    }
}

const CONV: Both = (
    "conv1d",
    |x| x[0].conv1d(&x[1], Some(&x[2]), Conv { padding: 1, ..Conv::default() }),
    |x| {
        let (padded, out) = (x[0].pad_with_zeros(2, 1, 1)?, x[0].dim(2)? + 3 - x[1].dim(2)?);
        let term = |k: usize| {
            let kernel = x[1].narrow(2, k, 1)?.squeeze(2)?;
            kernel.broadcast_matmul(&padded.narrow(2, k, out)?.contiguous()?)
        };
        let first = term(0)?.broadcast_add(&x[2].unsqueeze(1)?)?;
        (1..x[1].dim(2)?).try_fold(first, |sum, k| sum + term(k)?)
    },
);

/// Fault 9: a convolution of partial sums was taken for whole without adding them up.
#[test]
fn conv1d_of_partial_sums_is_the_conv1d_of_the_sum() {
    for (world, partial) in [2, 3, 4].into_iter().cartesian_product(PARTIALS) {
        check(world, &[(&[2, 4, 6], partial), (&[3, 4, 3], WHOLE), (&[3], WHOLE)], CONV);
        check(world, &[(&[2, 4, 6], WHOLE), (&[3, 4, 2], partial), (&[3], partial)], CONV);
        check(world, &[(&[2, 4, 6], partial), (&[3, 4, 3], partial), (&[3], partial)], CONV);
    }
}

/// Fault 10: a convolution of an input cut along its width had a wrong global shape, one cut by channels was refused.
#[test]
fn conv1d_of_inputs_cut_by_width_or_channels() {
    for world in [2, 3, 4] {
        for width in [8, 7, 3] {
            let x = [2, 4, width];
            check(world, &[(&x, at(2)), (&[3, 4, 3], WHOLE), (&[3], WHOLE)], CONV);
            check(world, &[(&x, at(1)), (&[3, 4, 3], WHOLE), (&[3], WHOLE)], CONV);
            check(world, &[(&x, at(1)), (&[3, 4, 3], at(1)), (&[3], at(0))], CONV);
            check(world, &[(&x, at(2)), (&[3, 4, 3], at(0)), (&[3], at(0))], CONV);
        }
    }
}

/// Fault 17: a perceptron of 8, 10 and 6 cut by columns, then rows, failed on 4 ranks, with another text on each.
#[test]
fn an_uneven_perceptron_cut_by_columns_then_rows() {
    for (world, at) in [2, 3, 4, 5].into_iter().cartesian_product([Replicate, Shard(0)]) {
        on_ranks(world, "perceptron", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", world)])?;
            let plan = Plan::new("tp")
                .with("up", ColwiseParallel::default())
                .with("down", RowwiseParallel::default().output(at));
            let vb = MeshVarBuilder::fresh(1, &mesh, plan, DType::F64, ctx.device())?;
            let (up, down) =
                (Linear::new(8, 10, true, &vb.pp("up"))?, Linear::new(10, 6, true, &vb.pp("down"))?);
            let parameters = vb.finish()?;
            let whole = values(&[5, 8], 1, DType::F64).to_device(ctx.device())?;
            let y = down.forward(&up.forward(&distribute(&whole, &mesh, &[Replicate])?)?.relu()?)?;
            assert_eq!(y.placements(), [at]);
            let var = |p: &candle_shard::nn::Parameter| {
                Ok::<_, candle_shard::Error>(Var::from_tensor(&p.tensor.full_tensor()?)?)
            };
            let vars: Vec<Var> = parameters.iter().map(var).try_collect()?;
            let hidden = whole.matmul(&vars[0].t()?)?.broadcast_add(&vars[1])?.relu()?;
            let want = hidden.matmul(&vars[2].t()?)?.broadcast_add(&vars[3])?;
            assert!(value_error(&y, &want)? < 1e-12);
            let wants = want.sqr()?.mean_all()?.backward()?;
            let grads = parameters.backward(&y.sqr()?.mean_all()?)?;
            for (p, var) in parameters.iter().zip(&vars) {
                let error = distance(&p.grad(&grads)?.unwrap().full_tensor()?, wants.get(var).unwrap());
                assert!(error < 1e-12, "{}: {error:e}", p.name);
            }
            Ok(())
        });
    }
}

/// Fault 20: an RMS norm over a sharded dim was refused.
#[test]
fn rms_norm_over_a_sharded_dim() {
    let norm: Both = (
        "rms_norm",
        |x| x[0].rms_norm(&x[1], 1e-6),
        |x| x[0].broadcast_div(&(x[0].sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?)?.broadcast_mul(&x[1]),
    );
    for (world, weight) in [2, 3, 4].into_iter().cartesian_product([at(0), WHOLE, Lay::Varying]) {
        for (shape, dim) in [([4, 2, 6], 2), ([2, 5, 7], 2), ([1, 3, 2], 2), ([2, 3, 5], 1)] {
            check(world, &[(&shape, at(dim)), (&shape[2..], weight)], norm);
        }
    }
}

/// Fault 20: dropout of partial sums was refused; here the mask is that of the sum.
#[test]
fn dropout_of_partial_sums() {
    let dropout: Both = (
        "dropout",
        |x| x[0].dropout(0.4, Stream::new(7, "mask")),
        |x| {
            let keep = Distribution::Bernoulli { p: 0.6 };
            let mask = sample_full(Stream::new(7, "mask"), keep, x[0].dims(), DType::F64, &Device::Cpu)?;
            (&x[0] * mask)? / 0.6
        },
    );
    for (world, partial) in [2, 3, 4].into_iter().cartesian_product(PARTIALS) {
        check(world, &[(&[5, 6], partial)], dropout);
    }
}

/// The cosine of the angle between rows.
fn cosine(a: &DTensor, b: &DTensor) -> Result<DTensor> {
    let length = |x: &DTensor| x.sqr()?.sum(1)?.sqrt();
    a.mul(b)?.sum(1)?.div(&length(a)?.mul(&length(b)?)?)
}

fn plain_cosine(a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
    let length = |x: &Tensor| x.sqr()?.sum(1)?.sqrt();
    (a * b)?.sum(1)? / (length(a)? * length(b)?)?
}

/// Fault 20: the gradients of norms, distances and cosines of partial sums were refused.
#[test]
fn gradients_of_norms_and_cosines_of_partial_sums() {
    let ops: [Both; 4] = [
        ("norm", |x| x[0].add(&x[1])?.norm(), |x| (&x[0] + &x[1])?.sqr()?.sum_all()?.sqrt()),
        ("distance", |x| x[0].sub(&x[1])?.norm(), |x| (&x[0] - &x[1])?.sqr()?.sum_all()?.sqrt()),
        (
            "normalize",
            |x| x[0].div(&x[0].sqr()?.sum_keepdim(1)?.sqrt()?)?.mul(&x[1]),
            |x| x[0].broadcast_div(&x[0].sqr()?.sum_keepdim(1)?.sqrt()?)? * &x[1],
        ),
        ("cosine", |x| cosine(&x[0], &x[1]), |x| plain_cosine(&x[0], &x[1])),
    ];
    for (world, op) in [2, 4].into_iter().cartesian_product(ops) {
        for lays in [[PARTIALS[0]; 2], [PARTIALS[1]; 2], [PARTIALS[0], at(1)], [at(0), PARTIALS[1]]] {
            check(world, &[(&[5, 6], lays[0]), (&[5, 6], lays[1])], op);
        }
    }
}

/// Fault 21: `relu6`, group norm, `avg_pool2d` and `prelu` had no gradient.
#[test]
fn gradients_of_relu6_and_prelu() {
    let relu6: Both = ("relu6", |x| x[0].affine(5.0, 0.0)?.relu6(), |x| (&x[0] * 5.0)?.clamp(0.0, 6.0));
    let prelu: Both = (
        "prelu",
        |x| x[0].gt(0.0)?.where_cond(&x[0], &x[0].mul(&x[1].reshape((3, 1))?)?),
        |x| x[0].gt(0.0)?.where_cond(&x[0], &x[0].broadcast_mul(&x[1].reshape((3, 1))?)?),
    );
    for world in [2, 3, 4] {
        for lay in [at(0), at(1), at(2), WHOLE, PARTIALS[0], PARTIALS[1]] {
            check(world, &[(&[4, 3, 5], lay)], relu6);
            check(world, &[(&[4, 3, 5], lay), (&[3], WHOLE)], prelu);
            check(world, &[(&[4, 3, 5], lay), (&[3], at(0))], prelu);
        }
    }
}

/// Fault 21, in images.
#[test]
fn gradients_of_group_norm_and_avg_pool2d() {
    let group_norm: Both = (
        "group_norm",
        |x| x[0].group_norm(2, &x[1], &x[2], 1e-5),
        |x| {
            let (b, c, h, w) = x[0].dims4()?;
            let rows = x[0].reshape((b, 2, c / 2 * h * w))?;
            let centered = rows.broadcast_sub(&rows.mean_keepdim(2)?)?;
            let normal = centered.broadcast_div(&(centered.sqr()?.mean_keepdim(2)? + 1e-5)?.sqrt()?)?;
            let scaled = normal.reshape((b, c, h, w))?.broadcast_mul(&x[1].reshape((c, 1, 1))?)?;
            scaled.broadcast_add(&x[2].reshape((c, 1, 1))?)
        },
    );
    let avg_pool: Both = (
        "avg_pool2d",
        |x| x[0].avg_pool2d(Pool { size: [2, 2], stride: [2, 2] }),
        |x| {
            let (b, c, h, w) = x[0].dims4()?;
            x[0].reshape((b, c, h / 2, 2, w / 2, 2))?.mean((3, 5))
        },
    );
    for world in [2, 3, 4] {
        for lay in [at(0), at(1), at(2), at(3), WHOLE, PARTIALS[0], PARTIALS[1]] {
            let x: (&[usize], Lay) = (&[3, 6, 4, 6], lay);
            check(world, &[x], avg_pool);
            check(world, &[x, (&[6], WHOLE), (&[6], WHOLE)], group_norm);
        }
    }
}

fn plain_causal(x: &[Tensor]) -> candle_core::Result<Tensor> {
    let (q, k) = (x[0].dim(2)?, x[1].dim(2)?);
    let hidden = (0..q * k).map(|i| if i % k + q > i / k + k { f64::NEG_INFINITY } else { 0.0 });
    let hidden = Tensor::from_iter(hidden, &Device::Cpu)?.reshape((q, k))?;
    let scores =
        (x[0].matmul(&x[1].t()?.contiguous()?)? / (x[0].dim(3)? as f64).sqrt())?.broadcast_add(&hidden)?;
    candle_nn::ops::softmax(&scores, 3)?.matmul(&x[2])
}

/// Fault 21: causal attention had no rule, nor its gradient.
#[test]
fn causal_attention_and_its_gradients() {
    let causal: Both = (
        "causal attention",
        |x| x[0].scaled_dot_product_attention(&x[1], &x[2], AttentionMask::Causal, None),
        plain_causal,
    );
    for world in [2, 3, 4] {
        for lays in [
            [at(0); 3],
            [at(1); 3],
            [at(2); 3],
            [at(3); 3],
            [WHOLE; 3],
            [PARTIALS[0]; 3],
            [at(1), WHOLE, at(2)],
        ] {
            let shape: &[usize] = &[3, 5, 4, 2]; // heads in pieces of unlike sizes
            check(world, &[(shape, lays[0]), (shape, lays[1]), (shape, lays[2])], causal);
        }
    }
}

/// Fault 23: label smoothing was refused where the logits are sharded by class.
#[test]
fn label_smoothing_of_logits_sharded_by_class() {
    const TARGETS: [u32; 5] = [0, 9, 3, 7, 3];
    let smooth: Both = (
        "label smoothing",
        |x| {
            let targets = distribute(&Tensor::new(&TARGETS, &Device::Cpu)?, x[0].mesh(), &[Replicate])?;
            CrossEntropy { label_smoothing: 0.2, ignore_index: Some(3), ..CrossEntropy::default() }
                .of_logits(&x[0], &targets)
        },
        |x| {
            let log_p = candle_nn::ops::log_softmax(&x[0], 1)?.narrow(0, 0, 4)?;
            let rows = Tensor::new(&[0u32, 1, 3], &Device::Cpu)?; // those with another target than 3
            let targets = Tensor::new(&[[0u32], [9], [7]], &Device::Cpu)?;
            let log_p = log_p.index_select(&rows, 0)?;
            let (sharp, even) = (log_p.gather(&targets, 1)?.mean_all()?, log_p.mean_all()?);
            ((sharp * 0.8)? + (even * 0.2)?)?.neg()
        },
    );
    for (world, lay) in [2, 3, 4].into_iter().cartesian_product([at(1), at(0), WHOLE]) {
        check(world, &[(&[5, 10], lay)], smooth);
    }
    on_ranks(4, "no gather", move |ctx| -> Result<()> {
        let logits = distribute(&values(&[5, 10], 1, DType::F64), &mesh(ctx, &[4])?, &[Shard(1)])?;
        let (loss, counts) = comm::record(|| (smooth.1)(&[logits]));
        assert_eq!(loss?.placements(), [Placement::PARTIAL_SUM]);
        assert_eq!(counts.get(Op::AllReduce).count, counts.total(), "{counts}");
        Ok(())
    });
}

/// Fault 23: the cosine embedding loss mixed whole and distributed tensors.
#[test]
fn cosine_embedding_loss_composed() {
    const SIGNS: [f64; 7] = [1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0];
    let loss: Both = (
        "cosine embedding",
        |x| {
            let near = cosine(&x[0], &x[1])?;
            let signs = distribute(&Tensor::new(&SIGNS, &Device::Cpu)?, x[0].mesh(), &[Replicate])?;
            signs.gt(0.0)?.where_cond(&near.affine(-1.0, 1.0)?, &near.affine(1.0, 0.1)?.relu()?)?.mean_all()
        },
        |x| {
            let near = plain_cosine(&x[0], &x[1])?;
            let signs = Tensor::new(&SIGNS, &Device::Cpu)?;
            signs.gt(0.0)?.where_cond(&near.affine(-1.0, 1.0)?, &near.affine(1.0, 0.1)?.relu()?)?.mean_all()
        },
    );
    for world in [2, 3, 4] {
        for lays in [[at(0); 2], [at(1); 2], [at(0), WHOLE], [at(1), at(0)], [PARTIALS[0], at(0)]] {
            check(world, &[(&[7, 5], lays[0]), (&[7, 5], lays[1])], loss);
        }
    }
}

/// A layer that is used twice in a pass dropped the same elements both times; each use has a mask of its own.
#[test]
fn a_dropout_that_is_used_twice_drops_different_elements() {
    type Masks = Vec<Vec<f64>>;
    let masks = |world: usize| {
        let masks = on_ranks(world, "dropout twice", move |ctx| -> Result<Masks> {
            let mesh = mesh(ctx, &[world])?;
            let vb = MeshVarBuilder::fresh(3, &mesh, Plan::new("a"), DType::F64, &device())?;
            let dropout = Dropout::new(0.5, &vb.pp("layer"));
            let x = Leaf::new(&Tensor::ones((6, 16), DType::F64, &Device::Cpu)?, &mesh, &[at(0)])?;
            let mut found = Masks::new();
            let flat =
                |x: &DTensor| -> Result<Vec<f64>> { Ok(x.detach().full_tensor()?.flatten_all()?.to_vec1()?) };
            for step in [0, 1] {
                let mode = Mode::Train { step };
                let again = dropout.clone();
                // Twice, of which the second time is recomputed, and a third time behind that.
                let first = dropout.forward(&x.tensor, mode)?;
                let second = recompute(&x.tensor, move |x| again.forward(x, mode))?;
                let third = dropout.forward(&x.tensor, mode)?;
                let grads = second.sum_all()?.backward()?;
                let grad =
                    DTensor::from_local(grads.get(&x.var).unwrap().clone(), &mesh, &[Shard(0)], (6, 16))?;
                assert_eq!(flat(&grad)?, flat(&second)?, "the mask of the second computation");
                found.extend([flat(&first)?, flat(&second)?, flat(&third)?]);
                // Another pass of the same step draws the same.
                assert_eq!(flat(&dropout.forward(&x.tensor, mode)?)?, flat(&first)?);
                drop(dropout.forward(&x.tensor, mode)?.sum_all()?.backward()?);
            }
            // Rows of a larger batch have the masks that they have there, in each use.
            let whole = [0, 1].map(|_| dropout.forward(&x.tensor, Mode::Train { step: 5 }));
            let part = x.tensor.narrow(0, 2, 3)?;
            let rows = [0, 1].map(|_| dropout.forward(&part, Mode::TrainRows { step: 5, first_row: 2 }));
            for (whole, rows) in whole.into_iter().zip(rows) {
                assert_eq!(flat(&whole?.narrow(0, 2, 3)?)?, flat(&rows?)?);
            }
            Ok(found)
        });
        assert!(masks.iter().all(|of_rank| *of_rank == masks[0]));
        masks.into_iter().next().unwrap()
    };
    let want = masks(1);
    assert!(want.iter().array_combinations().all(|[one, other]| one != other), "a mask was drawn twice");
    for world in 2..=4 {
        assert_eq!(masks(world), want);
    }
}
