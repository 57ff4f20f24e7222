//! Schedules with several stages per rank, placed in a loop.
use super::{Orders, PassOrder, Size};
use crate::schedule::{Action, Compute, Pass};

/// Each stage in turn runs all of its forwards; then the stages in reverse run all backwards, the last microbatch
/// first.
pub(crate) fn looped_bfs(size: &Size) -> Orders {
    let compute = |stage, pass, microbatch| Action::Compute(Compute { stage, pass, microbatch });
    let order = |rank| {
        let stages = || (0..size.stages_per_rank).map(move |turn| turn * size.ranks + rank);
        let forwards =
            stages().flat_map(|stage| (0..size.microbatches).map(move |i| compute(stage, Pass::Forward, i)));
        let backwards = stages()
            .rev()
            .flat_map(|stage| (0..size.microbatches).rev().map(move |i| compute(stage, Pass::Backward, i)));
        forwards.chain(backwards).collect()
    };
    (0..size.ranks).map(order).collect()
}

/// 1F1B where each round of microbatches passes all stages of a rank before the next begins.
pub(crate) fn interleaved_1f1b(size: &Size) -> Orders {
    interleaved(size, |rank| 2 * (size.ranks - 1 - rank), PassOrder::backward, |_, _, _| ())
}

/// The same with `I` instead of `B`; rank r defers r weight passes, so that all ranks have the same peak.
pub(crate) fn interleaved_zb(size: &Size) -> Orders {
    let weight = |order: &mut PassOrder, rank, backwards| {
        if backwards >= rank {
            order.weight();
        }
    };
    interleaved(size, |rank| size.ranks - 1 - rank, PassOrder::input, weight)
}

/// `after` gets the rank and the number of backwards before the one that it follows.
fn interleaved(
    size: &Size,
    distance: impl Fn(usize) -> usize,
    backward: impl Fn(&mut PassOrder, usize),
    after: impl Fn(&mut PassOrder, usize, usize),
) -> Orders {
    let (turns, total) = (size.stages_per_rank, size.microbatches * size.stages_per_rank);
    let round = size.microbatches / size.rounds();
    size.each_rank(|rank| {
        let stage = |turn| turn * size.ranks + rank;
        let warm_up = ((turns - 1) * round + distance(rank)).min(total);
        let mut order = PassOrder::default();
        for step in 0..total + warm_up {
            if step < total {
                order.forward(stage(step / round % turns));
            }
            if let Some(backwards) = step.checked_sub(warm_up) {
                backward(&mut order, stage(turns - 1 - backwards / round % turns));
                after(&mut order, rank, backwards);
            }
        }
        order.weights();
        order
    })
}
