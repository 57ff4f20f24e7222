//! Schedules that repeat the path of one microbatch through a V at equal intervals.
//!
//! A microbatch goes down the ranks (`F` of the first stage of each), up (`F` of the second), down again (`I` of the
//! second) and up again (`I` of the first). If each of these steps takes one unit of time, the whole path is a building
//! block, and one begins every 6 units; the free units of each rank run the `W`. The sooner a block leaves a rank, the
//! less that rank holds. (Qi et al., <https://arxiv.org/abs/2405.15362>, section 3.)
use super::{Orders, Size};
use crate::schedule::{Action, Compute, Pass, StageOrder};
use std::collections::{BTreeMap, VecDeque};

/// The units between the starts of two blocks: two stages with `F`, `I` and `W` each.
const INTERVAL: usize = 6;

/// A block on `P` ranks.
struct BuildingBlock {
    /// The time of the step down (0), up (1), down (2) or up (3) on a rank.
    start: fn(ranks: usize, leg: usize, rank: usize) -> usize,
    /// The microbatches that a rank may hold.
    peak: fn(ranks: usize) -> usize,
}

/// All legs take one unit per rank: a third of the peak of 1F1B.
const V_MIN: BuildingBlock = BuildingBlock {
    start: |ranks, leg, rank| {
        // Without the pause, legs of the first and the second half would collide on a rank.
        let pause = if ranks.is_multiple_of(3) { 2 } else { 0 };
        [rank, 2 * ranks - 1 - rank, 2 * ranks + pause + rank, 4 * ranks - 1 + pause - rank][leg]
    },
    peak: |ranks| (ranks + 4) / 3,
};

/// Two units per rank down, one up: half of the peak of 1F1B, and room for slower steps.
const V_HALF: BuildingBlock = BuildingBlock {
    start: |ranks, leg, rank| {
        let pause = if ranks.is_multiple_of(2) { 3 } else { 0 };
        [2 * rank, 3 * ranks - 2 - rank, 3 * ranks - 1 + pause + 2 * rank, 6 * ranks - 2 + pause - rank][leg]
    },
    peak: |ranks| (ranks + 2) / 2,
};

/// Has half of the peak of 1F1B.
pub(crate) fn v_half(size: &Size) -> Orders {
    repeat(size, &V_HALF)
}

/// Has a third of the peak of 1F1B.
pub(crate) fn v_min(size: &Size) -> Orders {
    repeat(size, &V_MIN)
}

/// The steps of a rank by their time.
type TimeSlots = BTreeMap<usize, Compute>;

/// Repeats the block, then moves steps before the first and after the last full period into earlier free units.
fn repeat(size: &Size, block: &BuildingBlock) -> Orders {
    let &Size { ranks, microbatches, .. } = size;
    let stage_ranks = StageOrder::V.stage_ranks(ranks, 2);
    let stages = stage_ranks.len();
    // The computation of each step on the path of a microbatch.
    let compute = |step: usize, microbatch| match step < stages {
        true => Compute { stage: step, pass: Pass::Forward, microbatch },
        false => Compute { stage: 2 * stages - 1 - step, pass: Pass::Input, microbatch },
    };
    let begin = |step: usize| (block.start)(ranks, step / ranks, stage_ranks[step % stages]);
    let mut starts: Vec<Vec<usize>> = (0..2 * stages)
        .map(|step| (0..microbatches).map(|microbatch| begin(step) + INTERVAL * microbatch).collect())
        .collect();
    let mut slots = vec![TimeSlots::new(); ranks];
    let mut all = Vec::new();
    for (step, starts) in starts.iter().enumerate() {
        for (microbatch, &start) in starts.iter().enumerate() {
            slots[stage_ranks[step % stages]].insert(start, compute(step, microbatch));
            all.push((start, step, microbatch));
        }
    }
    all.sort_unstable();
    let full = starts[2 * stages - 1][0]..=starts[0][microbatches - 1];
    let peak = 2 * (block.peak)(ranks);
    for (start, step, microbatch) in all.into_iter().filter(|(start, ..)| !full.contains(start)) {
        let before = step.checked_sub(1).map_or(0, |step| starts[step][microbatch] + 1);
        let earlier = microbatch.checked_sub(1).map_or(0, |microbatch| starts[step][microbatch] + 1);
        let slots = &mut slots[stage_ranks[step % stages]];
        for free in before.max(earlier)..start {
            if slots.contains_key(&free) {
                continue;
            }
            let moved = compute(step, microbatch);
            slots.remove(&start);
            slots.insert(free, moved);
            if held(&with_weights(slots)) <= peak {
                starts[step][microbatch] = free;
                break;
            }
            slots.remove(&free);
            slots.insert(start, moved);
        }
    }
    slots.iter().map(|slots| with_weights(slots).into_iter().map(Action::Compute).collect()).collect()
}

/// Returns the computations of a rank in order, with a pending `W` in each free unit.
fn with_weights(slots: &TimeSlots) -> Vec<Compute> {
    let mut order = Vec::with_capacity(slots.len() * 3 / 2);
    let (mut weights, mut now) = (VecDeque::new(), 0);
    for (&start, &compute) in slots {
        order.extend(weights.drain(..weights.len().min(start - now)));
        order.push(compute);
        if compute.pass == Pass::Input {
            weights.push_back(Compute { pass: Pass::Weight, ..compute });
        }
        now = start + 1;
    }
    order.extend(weights);
    order
}

/// Returns the peak of a rank, in microbatches of one stage.
fn held(order: &[Compute]) -> usize {
    let (mut held, mut peak) = (0, 0);
    for compute in order {
        match compute.pass {
            Pass::Forward => held += 1,
            Pass::Weight | Pass::Backward => held -= 1,
            Pass::Input => {}
        }
        peak = peak.max(held);
    }
    peak
}
