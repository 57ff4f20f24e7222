//! Convolutions, pools and other sizes of lines and images.
use super::{Call, Dice, Entry, apart, call, float};
use crate::plain;
use candle_nn::ops;
use candle_shard::Conv;
use candle_shard::kernels::Pool;

fn conv(n: &[usize]) -> Conv {
    Conv { padding: n[0], stride: n[1], dilation: n[2], groups: n[3] }
}

/// A kernel and a bias for a convolution.
fn convolved(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let channels = shape[1];
    let groups = if dice.once_in(3) { channels } else { 1 };
    let outs = if groups == 1 { dice.size() } else { channels * (1 + dice.below(2)) };
    let (padding, stride, dilation) = (dice.below(2), 1 + dice.below(2), 1 + dice.below(2));
    let sizes: Vec<usize> = shape[2..].iter().map(|_| 1 + dice.below(3)).collect();
    let fits = shape[2..].iter().zip(&sizes).all(|(&n, &k)| n + 2 * padding > dilation * (k - 1));
    let kernel = [&[outs, channels / groups], &sizes[..]].concat();
    fits.then(|| call(vec![float(&kernel), float(&[outs])], vec![padding, stride, dilation, groups]))
        .flatten()
}

/// A kernel and a bias for a transposed convolution in one group, with its output padding.
fn transposed(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let (outs, stride, dilation) = (dice.size(), 1 + dice.below(2), 1 + dice.below(2));
    let sizes: Vec<usize> = shape[2..].iter().map(|_| 1 + dice.below(3)).collect();
    let least = sizes.iter().map(|k| dilation * (k - 1)).min()?;
    let padding = dice.below(least.min(1) + 1);
    let (kernel, more) = ([&[shape[1], outs], &sizes[..]].concat(), dice.below(stride));
    let fits = shape[2..]
        .iter()
        .zip(&sizes)
        .all(|(&n, &k)| (n - 1) * stride + dilation * (k - 1) + more >= 2 * padding);
    fits.then(|| call(vec![float(&kernel), float(&[outs])], vec![padding, stride, dilation, 1, more]))
        .flatten()
}

fn pooled(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let size = [1 + dice.below(shape[2]), 1 + dice.below(shape[3])];
    call(vec![], vec![size[0], size[1], 1 + dice.below(2), 1 + dice.below(2)])
}

fn pool(n: &[usize]) -> Pool {
    Pool { size: [n[0], n[1]], stride: [n[2], n[3]] }
}

fn sized(dice: &mut Dice, _: &[usize]) -> Option<Call> {
    call(vec![], vec![1 + dice.below(7), 1 + dice.below(7), dice.below(2)])
}

fn of_channels(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let channels = shape[1];
    let divisors: Vec<usize> = (1..=channels).filter(|n| channels.is_multiple_of(*n)).collect();
    call(vec![float(&[channels]); 2], vec![dice.pick(&divisors)])
}

pub(super) const OPS: &[Entry] = apart! {
    conv1d, 3..=3, convolved, |x, n| x[0].conv1d(&x[1], x.get(2), conv(n)), plain::conv(x, conv(n));
    causal_conv1d, 3..=3, |d, s| {
        let mut call = convolved(d, s)?;
        (call.numbers[0], call.numbers[1]) = (0, 1);
        Some(call)
    }, |x, n| x[0].causal_conv1d(&x[1], x.get(2), conv(n)), plain::causal_conv1d(x, conv(n));
    conv2d, 4..=4, convolved, |x, n| x[0].conv2d(&x[1], x.get(2), conv(n)), plain::conv(x, conv(n));
    conv_transpose1d, 3..=3, transposed, |x, n| x[0].conv_transpose1d(&x[1], x.get(2), n[4], conv(n)),
        plain::conv_transpose1d(x, n[4], conv(n));
    conv_transpose2d, 4..=4, transposed, |x, n| x[0].conv_transpose2d(&x[1], None, n[4], conv(n)),
        plain::conv_transpose2d(&x[..2], n[4], conv(n));
    max_pool2d, 4..=4, pooled, |x, n| x[0].max_pool2d(pool(n)), plain::windows(&x[0], pool(n))?.max(4);
    avg_pool2d, 4..=4, pooled, |x, n| x[0].avg_pool2d(pool(n)), plain::windows(&x[0], pool(n))?.mean(4);
    upsample_nearest1d, 3..=3, sized, |x, n| x[0].upsample_nearest1d(n[0]), plain::nearest(&x[0], 2, n[0]);
    upsample_nearest2d, 4..=4, sized, |x, n| x[0].upsample_nearest2d([n[0], n[1]]),
        plain::nearest(&plain::nearest(&x[0], 2, n[0])?, 3, n[1]);
    upsample_bilinear2d, 4..=4, sized, |x, n| x[0].upsample_bilinear2d([n[0], n[1]], n[2] == 1),
        plain::bilinear(&x[0], [n[0], n[1]], n[2] == 1);
    interpolate1d, 3..=3, sized, |x, n| x[0].interpolate1d(n[0]), plain::nearest(&x[0], 2, n[0]);
    interpolate2d, 4..=4, sized, |x, n| x[0].interpolate2d(n[0], n[1]),
        plain::nearest(&plain::nearest(&x[0], 2, n[0])?, 3, n[1]);
    max_pool2d_with_stride, 4..=4, pooled, |x, n| x[0].max_pool2d_with_stride((n[0], n[1]), (n[2], n[3])),
        plain::windows(&x[0], pool(n))?.max(4);
    avg_pool2d_with_stride, 4..=4, pooled, |x, n| x[0].avg_pool2d_with_stride((n[0], n[1]), (n[2], n[3])),
        plain::windows(&x[0], pool(n))?.mean(4);
    upsample_bilinear2d_with_scale, 4..=4, |d, _| call(vec![], vec![1 + d.below(2), 1 + d.below(2), d.below(2)]),
        |x, n| x[0].upsample_bilinear2d_with_scale(n[0] as f64 * 1.5, n[1] as f64 * 1.5, n[2] == 1),
        plain::resized(&x[0], |x| x.upsample_bilinear2d_with_scale(n[0] as f64 * 1.5, n[1] as f64 * 1.5, n[2] == 1));
    pixel_shuffle, 4..=4, |_, s| (s[1] % 4 == 0).then(|| call(vec![], vec![2])).flatten(),
        |x, n| x[0].pixel_shuffle(n[0]), ops::pixel_shuffle(&x[0], n[0]);
    pixel_unshuffle, 4..=4, |_, s| (s[2] % 2 + s[3] % 2 == 0).then(|| call(vec![], vec![2])).flatten(),
        |x, n| x[0].pixel_unshuffle(n[0]), ops::pixel_unshuffle(&x[0], n[0]);
    replication_pad2d, 4..=4, |_, _| call(vec![], vec![1]), |x, n| x[0].replication_pad2d(n[0]), ops::replication_pad2d(&x[0], n[0]);
    group_norm, 2..=4, of_channels, |x, n| x[0].group_norm(n[0], &x[1], &x[2], 1e-1), plain::group_norm(x, n[0], 1e-1);
};
