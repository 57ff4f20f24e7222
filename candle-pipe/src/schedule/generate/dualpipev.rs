//! The schedule with two stages per rank in a V whose forwards and backwards overlap.
use super::{Orders, PassOrder, Size};

/// On rank `r`, stage `a` is on the way down and `z` on the way back; there is at least one microbatch per stage.
pub(crate) fn dualpipev(size: &Size) -> Orders {
    size.each_rank(|rank| {
        let (a, z) = (rank, 2 * size.ranks - 1 - rank);
        // The number of ranks after this one, and of those up to and including it.
        let (behind, upto) = (size.ranks - 1 - rank, rank + 1);
        let mut order = PassOrder::default();
        (0..2 * behind).for_each(|_| order.forward(a));
        for _ in 0..upto {
            order.forward(a);
            order.forward(z);
        }
        for _ in 0..behind {
            order.input(z);
            order.weight();
            order.forward(z);
        }
        for i in 0..size.microbatches + upto - 2 * size.ranks {
            if i == 0 && behind == 0 {
                // The last rank has nothing yet to overlap with.
                order.forward(a);
                order.backward(z);
            } else {
                order.overlap(a, z);
            }
            order.overlap(z, a);
        }
        for _ in 0..behind {
            order.backward(z);
            order.overlap(z, a);
        }
        // From the middle on, the weight gradients are deferred to the gaps at the end.
        for i in 0..2 * upto {
            let stage = if i % 2 == 0 { z } else { a };
            if i < upto { order.backward(stage) } else { order.input(stage) }
        }
        for _ in 0..behind {
            order.weight();
            order.input(a);
        }
        order.weights();
        order
    })
}
