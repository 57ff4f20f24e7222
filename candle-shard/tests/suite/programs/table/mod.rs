//! The ops of programs: what inputs and numbers a call of each takes, and the op in both forms.
mod attention;
mod images;
mod lookup;
mod losses;
mod pointwise;
mod recurrent;
mod reduce;
mod views;

use candle_core::Tensor;
use candle_shard::{DTensor, Result};
use std::ops::RangeInclusive;
use test_utils::Dice;

/// What an input holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Content {
    /// Numbers in ±1.5, with a gradient.
    Float,
    /// u32 below this bound, without gradient.
    Ids(usize),
}

/// The inputs of a call behind its first one, and its numbers.
pub(crate) struct Call {
    pub(crate) others: Vec<(Vec<usize>, Content)>,
    pub(crate) numbers: Vec<usize>,
}

/// An op. `call` draws a call for a first input of some shape, or says that there is none.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    /// How many dims the first input may have.
    pub(crate) dims: RangeInclusive<usize>,
    pub(crate) call: fn(&mut Dice, &[usize]) -> Option<Call>,
    pub(crate) here: fn(&[DTensor], &[usize]) -> Result<DTensor>,
    pub(crate) plain: fn(&[Tensor], &[usize]) -> candle_core::Result<Tensor>,
}

/// Ops that read alike in both forms.
macro_rules! same {
    ($($name:ident, $dims:expr, $call:expr, |$x:ident, $n:ident| $made:expr;)*) => {
        &[$($crate::programs::table::Entry {
            name: stringify!($name),
            dims: $dims,
            call: $call,
            here: |$x, $n| { let _ = $n; Ok($made?) },
            plain: |$x, $n| { let _ = $n; $made },
        }),*]
    };
}

/// Ops with a form for the mesh and one for one device.
macro_rules! apart {
    ($($name:ident, $dims:expr, $call:expr, |$x:ident, $n:ident| $here:expr, $plain:expr;)*) => {
        &[$($crate::programs::table::Entry {
            name: stringify!($name),
            dims: $dims,
            call: $call,
            here: |$x, $n| { let _ = $n; $here },
            plain: |$x, $n| { let _ = $n; $plain },
        }),*]
    };
}
pub(crate) use {apart, same};

const TABLES: [&[Entry]; 13] = [
    attention::OPS,
    images::OPS,
    lookup::OPS,
    losses::OPS,
    pointwise::UNARY,
    pointwise::APART,
    pointwise::BINARY,
    recurrent::OPS,
    reduce::OPS,
    reduce::APART,
    views::OPS,
    views::APART,
    views::JOINS,
];

/// All ops.
pub(crate) fn entries() -> Vec<&'static Entry> {
    TABLES.into_iter().flatten().collect()
}

fn call(others: Vec<(Vec<usize>, Content)>, numbers: Vec<usize>) -> Option<Call> {
    Some(Call { others, numbers })
}

fn float(shape: &[usize]) -> (Vec<usize>, Content) {
    (shape.to_vec(), Content::Float)
}

/// No other inputs and no numbers.
fn none(_: &mut Dice, _: &[usize]) -> Option<Call> {
    call(vec![], vec![])
}

/// A dim of the first input.
fn dim(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    call(vec![], vec![dice.below(shape.len())])
}

/// Another input of the same shape.
fn alike(_: &mut Dice, shape: &[usize]) -> Option<Call> {
    call(vec![float(shape)], vec![])
}

/// A shape that broadcasts with this one.
fn broadcasting(dice: &mut Dice, shape: &[usize]) -> Vec<usize> {
    let from = dice.below(shape.len() + 1) * dice.below(2);
    let one = |&size: &usize| match size {
        1 if dice.once_in(2) => dice.size(),
        _ if dice.once_in(3) => 1,
        size => size,
    };
    shape[from..].iter().map(one).collect()
}

fn broadcast(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let other = broadcasting(dice, shape);
    call(vec![float(&other)], vec![])
}
