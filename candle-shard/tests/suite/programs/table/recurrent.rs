//! Layers that keep a state of a sequence, and dims in units.
use super::{Call, Dice, Entry, apart, call, float};
use crate::plain;

/// Taps of each channel of `[batch, inputs, channels]`.
fn taps(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let taps = 1 + dice.below(shape[1].min(4));
    call(vec![float(&[shape[2], taps])], vec![])
}

/// A key, a value, and the gates of queries `[batch, tokens, heads, key]`.
fn delta(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let &[batch, tokens, heads, _] = shape else { return None };
    let (values, width) = (1 + dice.below(2), dice.size());
    let gates = float(&[batch, tokens, heads, values]);
    call(vec![float(shape), float(&[batch, tokens, heads, values * width]), gates.clone(), gates], vec![])
}

/// `b`, an input, and logarithms of decays for `c` `[batch, tokens, groups, state]`.
fn state_space(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let &[batch, tokens, groups, _] = shape else { return None };
    let (heads, width) = (1 + dice.below(3), dice.size());
    let x = float(&[batch, tokens, groups, heads, width]);
    call(vec![float(shape), x, float(&[batch, tokens, groups, heads])], vec![])
}

fn unit(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let at = dice.below(shape.len());
    let divisors: Vec<usize> = (1..=shape[at]).filter(|unit| shape[at].is_multiple_of(*unit)).collect();
    call(vec![], vec![at, dice.pick(&divisors)])
}

pub(super) const OPS: &[Entry] = apart! {
    short_conv, 3..=3, taps, |x, n| x[0].short_conv(&x[1], None), plain::short_conv(&x[0], &x[1]);
    gated_delta_rule, 4..=4, delta, |x, n| {
        let [made, _] = x[0].gated_delta_rule([&x[1], &x[2]], [&x[3], &x[4]], None, None)?;
        Ok(made)
    }, plain::gated_delta_rule(x, None).map(|[made, _]| made);
    state_space_scan, 4..=4, state_space, |x, n| {
        let [made, _] = x[0].state_space_scan([&x[1], &x[2]], &x[3], None, None)?;
        made.flatten_from(3)
    }, plain::state_space_scan(x, None).and_then(|[made, _]| made.flatten_from(3));
    split_units, 1..=3, unit, |x, n| x[0].split_units(n[0], n[1]), {
        let mut shape = x[0].dims().to_vec();
        shape[n[0]] /= n[1];
        shape.insert(n[0] + 1, n[1]);
        x[0].reshape(shape)
    };
};
