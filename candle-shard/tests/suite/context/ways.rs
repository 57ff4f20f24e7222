//! All ways on all numbers of ranks, with even, uneven and empty shards.
use super::harness::{Heads, Pairs, allowed, errors, truth};
use candle_core::DType;
use candle_dist::RankContext;
use candle_shard::{Attention, ContextWay, Result, TokenOrder};
use test_utils::{on_ranks, skip};

pub(super) const WAYS: [Option<ContextWay>; 4] =
    [None, Some(ContextWay::Gather), Some(ContextWay::Ring), Some(ContextWay::Heads)];

/// The ways to test on the device of this rank.
pub(super) fn ways(ctx: &RankContext) -> Vec<Option<ContextWay>> {
    let has_ring = has_ring(ctx);
    WAYS.into_iter().filter(|way| has_ring || *way != Some(ContextWay::Ring)).collect()
}

/// Returns whether this rank's device has the way Ring; if not, rank 0 reports it as skipped.
pub(super) fn has_ring(ctx: &RankContext) -> bool {
    if !ctx.device().is_cpu() && ctx.rank() == 0 {
        skip("the way Ring is for tensors on the host");
    }
    ctx.device().is_cpu()
}

const HEADS: [Heads; 5] =
    [[2, 4, 4, 4, 4], [1, 6, 2, 2, 4], [1, 3, 1, 4, 2], [1, 7, 7, 2, 2], [2, 4, 2, 6, 4]];

#[test]
fn each_way_equals_one_device() {
    for world in 1..=5 {
        on_ranks(world, "ways", move |ctx| -> Result<()> {
            let (mesh, ways) = (ctx.mesh(&[("cp", world)])?, ways(ctx));
            for (nth, len) in [1, 2, 3, 5, 8, 13, 32, 67].into_iter().enumerate() {
                for causal in [false, true] {
                    for dtype in [DType::F64, DType::F32] {
                        let heads = HEADS[(nth + usize::from(causal) + world) % HEADS.len()];
                        let pairs = Pairs { causal, sinks: (nth + world) % 2 == 0, ..Pairs::default() };
                        let truth = truth(heads, (len, len), (&pairs, 0.6), dtype)?;
                        for &way in &ways {
                            for order in [None, Some(TokenOrder::zigzag(len, world))] {
                                let options =
                                    Attention::default().scale(0.6).causal(causal).way(way).order(order);
                                let sizes = options.order.as_ref().map(|order| order.sizes().to_vec());
                                let error = errors(&truth, &options, &mesh, [sizes.as_deref(); 2])?;
                                assert!(
                                    error < allowed(dtype),
                                    "{options:?} {heads:?} of {len} in {dtype:?}: {error:e}"
                                );
                            }
                        }
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn each_length_on_any_ranks_equals_one_device() {
    for world in 1..=5 {
        on_ranks(world, "lengths", move |ctx| -> Result<()> {
            let (mesh, ways) = (ctx.mesh(&[("cp", world)])?, ways(ctx));
            for len in 1..=67 {
                let (heads, causal) = (HEADS[len % HEADS.len()], len % 4 > 0);
                let truth =
                    truth(heads, (len, len), (&Pairs { causal, ..Pairs::default() }, 0.6), DType::F64)?;
                for (nth, &way) in ways.iter().enumerate() {
                    let order = ((len + nth) % 2 > 0).then(|| TokenOrder::zigzag(len, world));
                    let options = Attention::default().scale(0.6).causal(causal).way(way).order(order);
                    let sizes = options.order.as_ref().map(|order| order.sizes().to_vec());
                    let error = errors(&truth, &options, &mesh, [sizes.as_deref(); 2])?;
                    assert!(error < allowed(DType::F64), "{options:?} of {len}: {error:e}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn shards_of_any_sizes_and_other_numbers_of_keys_equal_one_device() {
    on_ranks(3, "sizes", |ctx| -> Result<()> {
        let (mesh, has_ring) = (ctx.mesh(&[("cp", 3)])?, has_ring(ctx));
        for (queries, keys) in
            [([0, 5, 2], [0, 5, 2]), ([3, 0, 1], [0, 9, 0]), ([2, 2, 2], [1, 0, 1]), ([0, 0, 1], [3, 1, 0])]
        {
            let lens = (queries.iter().sum(), keys.iter().sum());
            for (causal, sinks) in [(false, false), (true, false), (false, true), (true, true)] {
                let pairs = Pairs { causal, sinks, ..Pairs::default() };
                let truth = truth(HEADS[4], lens, (&pairs, 0.6), DType::F64)?;
                for way in [None, Some(ContextWay::Gather)]
                    .into_iter()
                    .chain(has_ring.then_some(Some(ContextWay::Ring)))
                {
                    let options = Attention::default().scale(0.6).causal(causal).way(way);
                    let error = errors(&truth, &options, &mesh, [Some(&queries), Some(&keys)])?;
                    assert!(error < allowed(DType::F64), "{options:?} {queries:?} {keys:?}: {error:e}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn scores_of_ten_thousand_keep_their_differences() {
    for world in [1, 3, 5] {
        on_ranks(world, "large scores", move |ctx| -> Result<()> {
            let (mesh, ways) = (ctx.mesh(&[("cp", world)])?, ways(ctx));
            for scale in [1e4, -1e4] {
                let truth = truth(HEADS[0], (13, 13), (&Pairs::default(), scale), DType::F64)?;
                for &way in &ways {
                    let options = Attention::default().scale(scale).way(way);
                    let error = errors(&truth, &options, &mesh, [None; 2])?;
                    // Gradients are multiplied by the scale, and so is the rounding of a score.
                    assert!(error < 1e-7, "{options:?}: {error:e}");
                }
            }
            Ok(())
        });
    }
}
