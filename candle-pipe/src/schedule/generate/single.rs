//! Schedules with one stage per rank.
use super::{Orders, PassOrder, Size};

/// All forwards, then all backwards.
pub(crate) fn gpipe(size: &Size) -> Orders {
    size.each_rank(|rank| {
        let mut order = PassOrder::default();
        (0..size.microbatches).for_each(|_| order.forward(rank));
        (0..size.microbatches).for_each(|_| order.backward(rank));
        order
    })
}

/// Forwards until the first backward can run, then one of each in turn.
pub(crate) fn one_f_one_b(size: &Size) -> Orders {
    in_turn(size, |rank| size.ranks - 1 - rank)
}

/// The same with twice the forwards before the first backward, so that messages are under way beside computations.
pub(crate) fn eager_1f1b(size: &Size) -> Orders {
    in_turn(size, |rank| 2 * (size.ranks - 1 - rank))
}

/// Forwards, then a forward and a backward in turn, then backwards.
fn in_turn(size: &Size, warm_up: impl Fn(usize) -> usize) -> Orders {
    size.each_rank(|rank| {
        let warm_up = warm_up(rank).min(size.microbatches);
        let mut order = PassOrder::default();
        (0..warm_up).for_each(|_| order.forward(rank));
        for _ in warm_up..size.microbatches {
            order.forward(rank);
            order.backward(rank);
        }
        (0..warm_up).for_each(|_| order.backward(rank));
        order
    })
}

/// 1F1B where rank r defers r weight passes: one per forward that it holds fewer than rank 0.
pub(crate) fn zb_h1(size: &Size) -> Orders {
    zero_bubble(size, |rank| size.ranks - 1 - rank, |rank| rank)
}

/// The same with twice the forwards before the first backward, and twice the deferred weight passes.
pub(crate) fn zb_h2(size: &Size) -> Orders {
    zero_bubble(size, |rank| 2 * (size.ranks - 1 - rank), |rank| 2 * rank)
}

/// 1F1B with `I` instead of `B`. A `W` follows each `I` as soon as more than `put_off` of them are deferred, and in the
/// cool-down phase.
fn zero_bubble(size: &Size, warm_up: impl Fn(usize) -> usize, put_off: impl Fn(usize) -> usize) -> Orders {
    size.each_rank(|rank| {
        let warm_up = warm_up(rank).min(size.microbatches);
        let mut order = PassOrder::default();
        (0..warm_up).for_each(|_| order.forward(rank));
        for i in 0..size.microbatches {
            let steady = i + warm_up < size.microbatches;
            if steady {
                order.forward(rank);
            }
            order.input(rank);
            if i >= put_off(rank) || !steady {
                order.weight();
            }
        }
        order.weights();
        order
    })
}
