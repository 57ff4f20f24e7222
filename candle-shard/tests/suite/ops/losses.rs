use crate::common::{mesh, values};
use crate::ops::sweep::{Case, Input, Kind, sweep};
use Kind::{Float, Ids, Positive};
use candle_core::{D, DType, Device::Cpu, Tensor};
use candle_dist::{Op, comm};
use candle_shard::{CrossEntropy, DTensor, Reduction, Replicate, Result, Shard};
use test_utils::on_ranks;

/// Logits with shards that are even, uneven and empty, and a class dim with fewer classes than ranks.
const SHAPES: [[&[usize]; 2]; 6] =
    [[&[4, 6], &[4]], [&[5, 3], &[5]], [&[1, 7], &[1]], [&[2, 3, 5], &[2, 3]], [&[3], &[]], [&[3, 2], &[3]]];

/// The definition, composed, for targets below the number of classes.
fn plain(loss: &CrossEntropy, x: &[Tensor], log: bool) -> candle_core::Result<Tensor> {
    let classes = x[0].dim(D::Minus1)?;
    let scores = x[0].reshape(((), classes))?;
    let log_p = if log { scores } else { candle_nn::ops::log_softmax(&scores, 1)? };
    let targets = x[1].flatten_all()?;
    let weights = match x.get(2) {
        Some(weights) => weights.detach(),
        None => Tensor::ones(classes, x[0].dtype(), &Cpu)?,
    };
    let counts = match loss.ignore_index {
        Some(ignored) => targets.ne(ignored as u32)?.to_dtype(x[0].dtype())?,
        None => targets.ones_like()?.to_dtype(x[0].dtype())?,
    };
    let of_target = (weights.index_select(&targets, 0)? * &counts)?;
    let sharp = (log_p.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)? * &of_target)?;
    let smooth = (log_p.broadcast_mul(&weights)?.sum(1)? * &counts)?;
    let (e, sum) = (loss.label_smoothing, -1.0);
    let losses = ((sharp * (sum * (1.0 - e)))? + (smooth * (sum * e / classes as f64))?)?;
    match loss.reduction {
        Reduction::None => losses.reshape(x[1].dims()),
        Reduction::Sum => losses.sum_all(),
        Reduction::Mean => losses.sum_all()? / of_target.sum_all()?,
    }
}

/// The inputs of a case: the third, if there is one, becomes the class weights.
fn case(
    name: &str,
    [scores, targets]: [&'static [usize]; 2],
    weighted: bool,
    loss: CrossEntropy,
    log: bool,
) -> Case {
    let classes = scores.last().unwrap();
    let mut inputs: Vec<Input> = vec![(scores, Float), (targets, Ids(*classes as u32))];
    if weighted {
        inputs.push((&scores[scores.len() - 1..], Positive));
    }
    let on_one = loss.clone();
    let distributed = move |x: &[DTensor]| {
        let loss = CrossEntropy { class_weights: x.get(2).cloned(), ..loss.clone() };
        if log { loss.of_log_probabilities(&x[0], &x[1]) } else { loss.of_logits(&x[0], &x[1]) }
    };
    Case::new(name, &inputs, distributed, move |x| plain(&on_one, x, log))
}

#[test]
fn cross_entropy_with_options() {
    let options = |ignore_index, label_smoothing, reduction| CrossEntropy {
        ignore_index,
        label_smoothing,
        reduction,
        class_weights: None,
    };
    let mut cases = Vec::new();
    for shapes in SHAPES {
        cases.push(case("plain", shapes, false, CrossEntropy::default(), false));
        cases.push(case("smooth", shapes, false, options(None, 0.3, Reduction::Mean), false));
        cases.push(case("ignored", shapes, false, options(Some(1), 0.0, Reduction::Sum), false));
        cases.push(case("nll", shapes, false, options(Some(1), 0.0, Reduction::Sum), true));
        cases.push(case("each", shapes, false, options(Some(1), 0.3, Reduction::None), false));
        cases.push(case("nll, each", shapes, false, options(Some(1), 0.0, Reduction::None), true));
    }
    for shapes in [[&[5, 4][..], &[5]], [&[2, 3, 5], &[2, 3]]] {
        cases.push(case("all", shapes, true, options(Some(1), 0.3, Reduction::Mean), false));
        cases.push(case("all, sum", shapes, true, options(Some(1), 1.0, Reduction::Sum), false));
        cases.push(case("nll, weighted", shapes, true, options(Some(2), 0.0, Reduction::Mean), true));
    }
    sweep("cross_entropy with options", cases);
}

#[test]
fn elementwise_losses() {
    let shapes: [&[usize]; 4] = [&[4, 6], &[5, 3], &[1, 7], &[2, 1, 3]];
    let mut cases = Vec::new();
    for shape in shapes {
        for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
            let inputs: [Input; 2] = [(shape, Float), (shape, Positive)];
            let reduce = move |t: Tensor| match reduction {
                Reduction::Mean => t.mean_all(),
                Reduction::Sum => t.sum_all(),
                Reduction::None => Ok(t),
            };
            cases.extend([
                Case::new(
                    "mse",
                    &inputs,
                    move |x| x[0].mse_loss(&x[1], reduction),
                    move |x| reduce((&x[0] - &x[1])?.sqr()?),
                ),
                Case::new(
                    "l1",
                    &inputs,
                    move |x| x[0].l1_loss(&x[1], reduction),
                    move |x| reduce((&x[0] - &x[1])?.abs()?),
                ),
                Case::new(
                    "huber",
                    &inputs,
                    move |x| x[0].huber_loss(&x[1], 0.8, reduction),
                    move |x| {
                        let size = (&x[0] - &x[1])?.abs()?;
                        let near = size.le(0.8)?;
                        reduce(near.where_cond(&(size.sqr()? * 0.5)?, &((&size - 0.4)? * 0.8)?)?)
                    },
                ),
                Case::new(
                    "bce_with_logits",
                    &inputs,
                    move |x| x[0].bce_with_logits_loss(&x[1], reduction),
                    move |x| reduce(((x[0].exp()? + 1.0)?.log()? - (&x[0] * &x[1])?)?),
                ),
            ]);
        }
    }
    sweep("elementwise losses", cases);
}

#[test]
fn losses_of_large_errors_are_finite_and_have_no_slope_at_zero_error() -> candle_core::Result<()> {
    on_ranks(2, "edges", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 2)])?;
        let put = |t: [f64; 4]| DTensor::distribute(&Tensor::new(&t, &Cpu)?, &mesh, &[Shard(0)]);
        let (x, target) = (put([0.0, 1e4, -1e4, 0.5])?, put([0.0, 1.0, 0.0, 0.5])?);
        let (x, var) = x.to_var()?;
        let bce = x.bce_with_logits_loss(&target, Reduction::Sum)?;
        let want = 2f64.ln() + (1.0 + 0.5f64.exp()).ln() - 0.25;
        assert!((bce.full_tensor()?.to_scalar::<f64>()? - want).abs() < 1e-12);
        let slope = bce.backward()?.remove(&var).unwrap().to_vec1::<f64>()?;
        let half = 1.0 / (1.0 + (-0.5f64).exp()) - 0.5;
        let wanted = [[0.5, 0.0], [0.0, half]][ctx.rank()];
        assert!(slope.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-15), "{slope:?}");
        let slope = x.l1_loss(&target, Reduction::Sum)?.backward()?.remove(&var).unwrap().to_vec1::<f64>()?;
        assert_eq!(slope, [[0.0, 1.0], [-1.0, 0.0]][ctx.rank()]);
        Ok(())
    });
    Ok(())
}

#[test]
fn sharded_classes_are_never_gathered() {
    on_ranks(3, "traffic", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 3)])?;
        let logits = DTensor::distribute(&crate::common::values(&[4, 7], 1, DType::F64), &mesh, &[Shard(1)])?;
        let targets = DTensor::distribute(&Tensor::new(&[0u32, 6, 3, 2], &Cpu)?, &mesh, &[Replicate])?;
        let (logits, _var) = logits.to_var()?;
        let (loss, counts) = comm::record(|| logits.cross_entropy(&targets));
        assert_eq!((counts.get(Op::AllReduce).count, counts.total()), (2, 2), "{counts}");
        let loss = loss?;
        let (grads, counts) = comm::record(|| loss.backward());
        assert_eq!(counts.total(), 0, "{counts}");
        grads.map(drop)
    });
}

#[test]
fn rows_that_do_not_count() {
    on_ranks(2, "ignored", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 2)])?;
        for at in [Shard(0), Shard(1), Replicate] {
            let hidden = f64::NEG_INFINITY;
            let logits = Tensor::new(&[[1.0, 2.0, hidden, hidden], [hidden, 0.0, f64::NAN, 1.0]], &Cpu)?;
            let (logits, var) = DTensor::distribute(&logits, &mesh, &[at])?.to_var()?;
            let targets = |t: [i64; 2]| DTensor::distribute(&Tensor::new(&t, &Cpu)?, &mesh, &[Replicate]);
            let loss = CrossEntropy { ignore_index: Some(-100), ..Default::default() };
            // The second row does not count, whatever its logits are; hidden classes have no probability.
            let mean = loss.of_logits(&logits, &targets([0, -100])?)?;
            let want = (1f64.exp() + 2f64.exp()).ln() - 1.0;
            assert!((mean.full_tensor()?.to_scalar::<f64>()? - want).abs() < 1e-12, "{at}");
            let grad = mean.backward()?.remove(&var).unwrap();
            assert!(grad.flatten_all()?.to_vec1::<f64>()?.iter().all(|g| g.is_finite()), "{at}: {grad}");
            // Without any row the mean is that of nothing, as in PyTorch.
            let none = loss.of_logits(&logits, &targets([-100, -100])?)?;
            assert!(none.full_tensor()?.to_scalar::<f64>()?.is_nan(), "{at}");
        }
        Ok(())
    });
}

#[test]
fn targets_that_were_given_whole_are_refused_alike() {
    // The planner cuts them with the rows of the logits, so that one rank alone would read the bad one.
    for (world, at) in [(2, Shard(0)), (3, Shard(0)), (3, Shard(1)), (3, Replicate)] {
        let texts = on_ranks(world, "bad targets", move |ctx| -> Result<Vec<String>> {
            let mesh = mesh(ctx, &[world])?;
            let logits = DTensor::distribute(&values(&[6, 4], 1, DType::F64), &mesh, &[at])?;
            let targets = Tensor::new(&[0i64, 1, 9, 2, 3, -1], &Cpu)?;
            let targets = DTensor::distribute(&targets, &mesh, &[Replicate])?;
            let (weighed, scores) = (DTensor::ones(4, DType::F64, &Cpu, &mesh, &[Replicate])?, logits.sqr()?);
            let loss = CrossEntropy { class_weights: Some(weighed), ..Default::default() };
            let failed = [
                logits.cross_entropy(&targets),
                loss.of_logits(&logits, &targets),
                loss.of_log_probabilities(&scores, &targets),
            ];
            let texts = failed.map(|failed| failed.unwrap_err().to_string()).to_vec();
            ctx.group().barrier()?; // nothing has stopped the world
            Ok(texts)
        });
        let reason = "target 9 is outside the 4 classes 0..4, and not ignored";
        let want = ["cross_entropy", "cross_entropy", "nll_loss"].map(|op| format!("{op}: {reason}"));
        assert!(texts.iter().all(|texts| *texts == want), "{texts:?}");
    }
}
