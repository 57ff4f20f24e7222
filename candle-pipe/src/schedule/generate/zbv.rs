//! The zero-bubble schedule with two stages per rank, placed in a V.
use super::{Orders, PassOrder, Size};
use crate::schedule::Action;

/// On rank `r`, stage `a` is on the way down and `z` on the way back.
///
/// The order is generated for at least `2P - 1` microbatches; surplus ones are removed.
pub(crate) fn zbv(size: &Size) -> Orders {
    let microbatches = size.microbatches.max(2 * size.ranks - 1);
    let wanted =
        |action: &Action| action.computes().iter().all(|compute| compute.microbatch < size.microbatches);
    let mut orders = size.each_rank(|rank| whole(size.ranks, rank, microbatches));
    orders.iter_mut().for_each(|order| order.retain(wanted));
    orders
}

fn whole(ranks: usize, rank: usize, microbatches: usize) -> PassOrder {
    let (a, z) = (rank, 2 * ranks - 1 - rank);
    let mut order = PassOrder::default();
    (0..2 * (ranks - rank) - 1).for_each(|_| order.forward(a));
    for _ in 0..rank {
        order.forward(z);
        order.forward(a);
    }
    for _ in rank..ranks {
        order.forward(z);
        order.input(z);
        order.weight_of(z);
    }
    while order.forwards(z) < order.forwards(a) || order.forwards(a) < microbatches {
        if order.forwards(a) < microbatches {
            order.forward(a);
        }
        order.input(a);
        order.weight_of(a);
        order.forward(z);
        order.input(z);
        order.weight_of(z);
    }
    for _ in 0..rank {
        order.input(a);
        order.input(z);
    }
    for _ in rank..ranks {
        order.input(a);
        order.weight_of(a);
    }
    for stage in [z, a] {
        (0..microbatches).for_each(|_| order.weight_of(stage));
    }
    order
}
