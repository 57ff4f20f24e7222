//! Losses.
use super::Content::Ids;
use super::{Call, Dice, Entry, alike, apart, call};
use crate::plain;
use candle_core::Tensor;
use candle_shard::{CrossEntropy, Reduction};

fn targets(_: &mut Dice, shape: &[usize]) -> Option<Call> {
    let (classes, rows) = shape.split_last()?;
    call(vec![(rows.to_vec(), Ids(*classes))], vec![])
}

fn smooth(reduction: Reduction) -> CrossEntropy {
    CrossEntropy { label_smoothing: 0.3, reduction, ..CrossEntropy::default() }
}

/// The loss of log probabilities that [`smooth`] asks for, summed.
fn smoothed(log_p: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
    let classes = log_p.dim(candle_core::D::Minus1)?;
    let log_p = log_p.reshape(((), classes))?;
    let sharp = log_p.gather(&targets.flatten_all()?.unsqueeze(1)?, 1)?.sum_all()?;
    (sharp * -0.7)? + (log_p.sum_all()? * (-0.3 / classes as f64))?
}

pub(super) const OPS: &[Entry] = apart! {
    cross_entropy, 1..=3, targets, |x, n| x[0].cross_entropy(&x[1]), plain::cross_entropy(x);
    of_logits, 1..=3, targets, |x, n| smooth(Reduction::Mean).of_logits(&x[0], &x[1]), {
        let log_p = candle_nn::ops::log_softmax(&x[0], candle_core::D::Minus1)?;
        smoothed(&log_p, &x[1])? / x[1].elem_count() as f64
    };
    of_log_probabilities, 1..=3, targets, |x, n| {
        CrossEntropy { reduction: Reduction::Sum, ..CrossEntropy::default() }.of_log_probabilities(&x[0], &x[1])
    }, {
        let classes = x[0].dim(candle_core::D::Minus1)?;
        x[0].reshape(((), classes))?.gather(&x[1].flatten_all()?.unsqueeze(1)?, 1)?.sum_all()?.neg()
    };
    of_logits_each, 1..=3, targets, |x, n| smooth(Reduction::None).of_logits(&x[0], &x[1]), {
        let log_p = candle_nn::ops::log_softmax(&x[0], candle_core::D::Minus1)?;
        let sharp = log_p.gather(&x[1].unsqueeze(candle_core::D::Minus1)?, candle_core::D::Minus1)?;
        let spread = log_p.mean(candle_core::D::Minus1)?;
        (sharp.squeeze(candle_core::D::Minus1)? * -0.7)? - (spread * 0.3)?
    };
    mse_loss, 0..=4, alike, |x, n| x[0].mse_loss(&x[1], Reduction::Mean), (&x[0] - &x[1])?.sqr()?.mean_all();
    l1_loss, 0..=4, alike, |x, n| x[0].l1_loss(&x[1], Reduction::Mean), (&x[0] - &x[1])?.abs()?.mean_all();
    huber_loss, 0..=4, alike, |x, n| x[0].huber_loss(&x[1], 0.8, Reduction::Sum), {
        let size = (&x[0] - &x[1])?.abs()?;
        size.le(0.8)?.where_cond(&(size.sqr()? * 0.5)?, &((&size - 0.4)? * 0.8)?)?.sum_all()
    };
    l1_loss_each, 0..=4, alike, |x, n| x[0].l1_loss(&x[1], Reduction::None), (&x[0] - &x[1])?.abs();
    bce_with_logits_loss, 0..=4, alike, |x, n| x[0].bce_with_logits_loss(&x[1], Reduction::Mean),
        ((x[0].exp()? + 1.0)?.log()? - (&x[0] * &x[1])?)?.mean_all();
};
