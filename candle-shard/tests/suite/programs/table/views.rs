//! Parts, views and joins of tensors.
use super::{Call, Dice, Entry, apart, call, dim, float, none, same};
use crate::plain;
use candle_core::Tensor;
use candle_shard::{DTensor, Placement, Replicate, Shard};

fn part(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let at = dice.below(shape.len());
    let start = dice.below(shape[at]);
    call(vec![], vec![at, start, 1 + dice.below(shape[at] - start)])
}

fn place(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let at = dice.below(shape.len());
    call(vec![], vec![at, dice.below(shape[at])])
}

fn padding(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    call(vec![], vec![dice.below(shape.len()), dice.below(3), dice.below(3)])
}

fn two_dims(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let (a, b) = (dice.below(shape.len()), dice.below(shape.len()));
    call(vec![], vec![a.min(b), a.max(b)])
}

fn any_order(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    (1..order.len()).for_each(|i| order.swap(i, dice.below(i + 1)));
    call(vec![], order)
}

/// A shape that this one can be repeated to.
fn wider(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let mut to: Vec<usize> = shape.iter().map(|&n| if n == 1 { dice.size() } else { n }).collect();
    if to.len() < 4 && dice.once_in(2) {
        to.insert(0, dice.size());
    }
    call(vec![], to)
}

/// Another shape of as many elements: dims merged, and one split.
fn reshaped(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let mut to = shape.to_vec();
    if to.len() > 1 && dice.once_in(2) {
        let at = dice.below(to.len() - 1);
        to[at] *= to.remove(at + 1);
    }
    let at = dice.below(to.len());
    let divisors: Vec<usize> = (1..=to[at]).filter(|by| to[at].is_multiple_of(*by)).collect();
    if to.len() < 4 && dice.once_in(2) {
        let by = dice.pick(&divisors);
        to[at] /= by;
        to.insert(at + dice.below(2), by);
    }
    call(vec![], to)
}

pub(super) const OPS: &[Entry] = same! {
    narrow, 1..=4, part, |x, n| x[0].narrow(n[0], n[1], n[2]);
    get, 1..=4, |d, s| call(vec![], vec![d.below(s[0])]), |x, n| x[0].get(n[0]);
    get_on_dim, 1..=4, place, |x, n| x[0].get_on_dim(n[0], n[1]);
    pad_with_zeros, 1..=4, padding, |x, n| x[0].pad_with_zeros(n[0], n[1], n[2]);
    pad_with_same, 1..=4, padding, |x, n| x[0].pad_with_same(n[0], n[1], n[2]);
    transpose, 1..=4, two_dims, |x, n| x[0].transpose(n[0], n[1]);
    t, 2..=4, none, |x, n| x[0].t();
    permute, 1..=4, any_order, |x, n| x[0].permute(n);
    reshape, 1..=4, reshaped, |x, n| x[0].reshape(n);
    flatten, 1..=4, two_dims, |x, n| x[0].flatten(n[0], n[1]);
    flatten_all, 0..=4, none, |x, n| x[0].flatten_all();
    flatten_from, 1..=4, dim, |x, n| x[0].flatten_from(n[0]);
    flatten_to, 1..=4, dim, |x, n| x[0].flatten_to(n[0]);
    squeeze, 1..=4, dim, |x, n| x[0].squeeze(n[0]);
    unsqueeze, 0..=3, |d, s| call(vec![], vec![d.below(s.len() + 1)]), |x, n| x[0].unsqueeze(n[0]);
    broadcast_as, 0..=4, wider, |x, n| x[0].broadcast_as(n);
    expand, 0..=4, wider, |x, n| x[0].expand(n);
    broadcast_left, 0..=3, |d, _| call(vec![], vec![d.size()]), |x, n| x[0].broadcast_left(n[0]);
    repeat, 1..=3, |d, s| call(vec![], s.iter().map(|_| 1 + d.below(2)).collect()), |x, n| x[0].repeat(n);
    roll, 1..=4, |d, s| call(vec![], vec![d.below(7), d.below(s.len())]), |x, n| x[0].roll(n[0] as i32 - 3, n[1]);
    flip, 1..=4, dim, |x, n| x[0].flip(&n[..1]);
};

pub(super) const APART: &[Entry] = apart! {
    redistribute, 0..=4, |d, s| call(vec![], vec![d.below(s.len() + 2), d.below(s.len() + 2)]),
        |x, n| x[0].redistribute(&placed(&x[0], n)), Ok(x[0].clone());
    shift, 1..=4, |d, s| call(vec![], vec![d.below(s.len()), d.below(9)]),
        |x, n| x[0].shift(n[0], n[1] as isize - 4), plain::shift(&x[0], n[0], n[1] as isize - 4);
    chunk, 1..=4, |d, s| {
        let (chunks, at) = (1 + d.below(4), d.below(s.len()));
        call(vec![], vec![chunks, at, d.below(chunks)])
    }, |x, n| Ok(x[0].chunk(n[0], n[1])?.into_iter().cycle().nth(n[2]).expect("a chunk")),
        Ok(x[0].chunk(n[0], n[1])?.into_iter().cycle().nth(n[2]).expect("a chunk"));
    i, 2..=4, |d, s| call(vec![], vec![d.below(s[0]), d.below(s[1])]),
        |x, n| x[0].i((n[0], n[1]..)), candle_core::IndexOp::i(&x[0], (n[0], n[1]..));
    unfold, 1..=3, |d, s| {
        let at = d.below(s.len());
        call(vec![], vec![at, 1 + d.below(s[at]), 1 + d.below(3)])
    }, |x, n| x[0].unfold(n[0], n[1], n[2]), plain::unfold(&x[0], n[0], n[1], n[2]);
    slice_assign, 2..=2, |d, s| {
        let at = [d.below(s[0]), d.below(s[1])];
        let to = [at[0] + 1 + d.below(s[0] - at[0]), at[1] + 1 + d.below(s[1] - at[1])];
        call(vec![float(&[to[0] - at[0], to[1] - at[1]])], [at, to].concat())
    }, |x, n| x[0].slice_assign(&[n[0]..n[2], n[1]..n[3]], &x[1]), x[0].slice_assign(&[n[0]..n[2], n[1]..n[3]], &x[1]);
    slice_scatter, 1..=4, |d, s| {
        let part = part(d, s)?.numbers;
        let mut shape = s.to_vec();
        shape[part[0]] = part[2];
        call(vec![float(&shape)], part)
    }, |x, n| x[0].slice_scatter(&x[1], n[0], n[1]), {
        let (size, end) = (x[0].dim(n[0])?, n[1] + n[2]);
        let before = x[0].narrow(n[0], 0, n[1])?;
        let after = x[0].narrow(n[0], if end == size { 0 } else { end }, size - end)?; // candle panics behind the end
        Tensor::cat(&[&before, &x[1], &after], n[0])
    };
};

/// Any placements, of which the numbers below the number of dims are shards.
fn placed(x: &DTensor, numbers: &[usize]) -> Vec<Placement> {
    let rank = x.rank();
    let placement = |&n: &usize| match n {
        n if n < rank => Shard(n),
        n if n == rank => Replicate,
        _ => Placement::PARTIAL_SUM,
    };
    numbers.iter().map(placement).take(x.mesh().ndim()).collect()
}

pub(super) const JOINS: &[Entry] = apart! {
    meshgrid, 1..=1, |d, _| {
        let other = d.size();
        call(vec![float(&[other])], vec![d.below(2), d.below(2)])
    }, |x, n| Ok(DTensor::meshgrid(x, n[0] == 1)?.swap_remove(n[1] % 2)),
        Ok(Tensor::meshgrid(x, n[0] == 1)?.swap_remove(n[1] % 2));
    slice_scatter0, 1..=3, |d, s| {
        let start = d.below(s[0]);
        let len = 1 + d.below(s[0] - start);
        call(vec![float(&[&[len], &s[1..]].concat())], vec![start, len])
    }, |x, n| x[0].slice_scatter0(&x[1], n[0]), {
        let (size, end) = (x[0].dim(0)?, n[0] + n[1]);
        let before = x[0].narrow(0, 0, n[0])?;
        let after = x[0].narrow(0, if end == size { 0 } else { end }, size - end)?;
        Tensor::cat(&[&before, &x[1], &after], 0)
    };
    cat, 1..=4, |d, s| {
        let (mut other, at) = (s.to_vec(), d.below(s.len()));
        other[at] = d.size();
        call(vec![float(&other); 1 + d.below(2)], vec![at])
    }, |x, n| DTensor::cat(x, n[0]), Tensor::cat(x, n[0]);
    stack, 0..=3, |d, s| call(vec![float(s)], vec![d.below(s.len() + 1)]), |x, n| DTensor::stack(x, n[0]), Tensor::stack(x, n[0]);
};
