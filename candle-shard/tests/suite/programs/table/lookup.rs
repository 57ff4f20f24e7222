//! Ops that take indexes.
use super::Content::Ids;
use super::{Call, Dice, Entry, apart, call, float};
use crate::plain;
use candle_core::Tensor;
use candle_shard::kernels::{self, BagMode, Bags};
use candle_shard::{EmbeddingBagOptions, EmbeddingOptions};

/// Indexes into a dim, in a shape of their own along it.
fn along(dice: &mut Dice, shape: &[usize]) -> (usize, Vec<usize>) {
    let (at, mut part) = (dice.below(shape.len()), shape.to_vec());
    part[at] = dice.size();
    (at, part)
}

fn scattered(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let (at, part) = along(dice, shape);
    call(vec![(part.clone(), Ids(shape[at])), float(&part)], vec![at])
}

/// Indexes of different places, for what keeps one of several that meet.
fn scattered_once(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let (at, mut part) = along(dice, shape);
    part[at] = 1;
    call(vec![(part.clone(), Ids(shape[at])), float(&part)], vec![at])
}

fn rows(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let ids = if dice.once_in(2) { vec![dice.size()] } else { vec![1 + dice.below(2), dice.size()] };
    call(vec![(ids, Ids(shape[0]))], vec![])
}

fn ids_of(ids: &Tensor) -> candle_core::Result<Vec<u32>> {
    ids.flatten_all()?.to_vec1()
}

fn padded() -> EmbeddingOptions {
    EmbeddingOptions::default().padding_idx(-1)
}

pub(super) const OPS: &[Entry] = apart! {
    embedding, 2..=2, rows, |x, n| x[0].embedding(&x[1]), plain::embedding(x);
    embedding_with, 2..=2, rows, |x, n| x[0].embedding_with(&x[1], &padded()), {
        let shape = [x[1].dims(), &x[0].dims()[1..]].concat();
        kernels::embedding(&x[0], ids_of(&x[1])?, Some(x[0].dim(0)? as u32 - 1))?.reshape(shape)
    };
    embedding_bag, 2..=2, |d, s| {
        let ids = vec![d.size(), d.size()];
        call(vec![(ids, Ids(s[0]))], vec![d.below(3)])
    }, |x, n| x[0].embedding_bag(&x[1], None, None, &EmbeddingBagOptions::default().mode(MODES[n[0] % 3])), {
        let (bags, each) = x[1].dims2()?;
        let bags = Bags::new(ids_of(&x[1])?, (0..=bags).map(|bag| bag * each).collect::<Vec<_>>())?;
        kernels::embedding_bag(&x[0], &bags, MODES[n[0] % 3], None)
    };
    index_select, 1..=4, |d, s| {
        let at = d.below(s.len());
        call(vec![(vec![d.size()], Ids(s[at]))], vec![at])
    }, |x, n| x[0].index_select(&x[1], n[0]), x[0].index_select(&x[1], n[0]);
    index_add, 1..=4, |d, s| {
        let (at, part) = along(d, s);
        call(vec![(vec![part[at]], Ids(s[at])), float(&part)], vec![at])
    }, |x, n| x[0].index_add(&x[1], &x[2], n[0]), x[0].index_add(&x[1], &x[2], n[0]);
    gather, 1..=4, |d, s| {
        let (at, part) = along(d, s);
        call(vec![(part, Ids(s[at]))], vec![at])
    }, |x, n| x[0].gather(&x[1], n[0]), x[0].gather(&x[1], n[0]);
    scatter_add, 1..=4, scattered, |x, n| x[0].scatter_add(&x[1], &x[2], n[0]), plain::scatter_add(x, n[0]);
    scatter, 1..=4, scattered_once, |x, n| x[0].scatter(&x[1], &x[2], n[0]), plain::scatter(x, n[0]);
};

const MODES: [BagMode; 3] = [BagMode::Sum, BagMode::Mean, BagMode::Max];
