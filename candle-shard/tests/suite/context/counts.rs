//! What is sent, against formulas.
use super::ways::has_ring;
use candle_core::DType;
use candle_dist::comm::{self, CommCounts};
use candle_dist::{DeviceMesh, Op};
use candle_shard::{Attention, ContextWay, Replicate, Result, Shard, explain};
use test_utils::{distribute, on_ranks, values};

/// Batch, rows, heads, key heads, dim and width.
const SIZES: [usize; 6] = [2, 24, 4, 2, 4, 6];

/// The counts of the forward and of the backward pass.
fn counted(options: &Attention, mesh: &DeviceMesh) -> Result<[CommCounts; 2]> {
    let [b, n, h, g, d, v] = SIZES;
    let put = |shape: [usize; 4]| distribute(&values(&shape, 1, DType::F64), mesh, &[Shard(1)])?.to_var();
    let [(q, _), (k, _), (v, _)] = [put([b, n, h, d])?, put([b, n, g, d])?, put([b, n, g, v])?];
    let (out, forward) = comm::record(|| options.of(&q, &k, &v));
    let loss = out?.sum_all()?;
    let (grads, backward) = comm::record(|| loss.backward());
    grads?;
    Ok([forward, backward])
}

fn options(way: ContextWay) -> Attention {
    Attention::default().way(way)
}

#[test]
fn each_way_sends_what_its_formula_says() {
    for world in [2, 3, 4] {
        on_ranks(world, "bytes", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("cp", world)])?;
            let [b, n, h, g, d, v] = SIZES;
            let (own, kv) = (n / world, 8 * b * (n / world) * g * (d + v));

            if has_ring(ctx) {
                let [forward, backward] = counted(&options(ContextWay::Ring), &mesh)?;
                let both = (forward.total(), backward.total());
                // Each begins with a barrier, which finds ranks that run another layer.
                assert_eq!(both, (1 + 2 * (world - 1), 1 + 4 * (world - 1)), "{forward} {backward}");
                assert_eq!(forward.get(Op::Send).count, world - 1);
                assert_eq!(
                    (forward.total_bytes(), backward.total_bytes()),
                    ((world - 1) * kv, 2 * (world - 1) * kv)
                );
            }

            let [forward, backward] = counted(&options(ContextWay::Gather), &mesh)?;
            assert_eq!((forward.total(), backward.total()), (1, 1), "{forward} {backward}");
            assert_eq!(
                (forward.get(Op::AllGather).bytes, backward.get(Op::ReduceScatter).bytes),
                (kv, world * kv)
            );

            let [forward, backward] = counted(&options(ContextWay::Heads), &mesh)?;
            assert_eq!((forward.get(Op::AllToAll).count, backward.get(Op::AllToAll).count), (2, 2));
            assert_eq!((forward.total(), backward.total()), (2, 2), "{forward} {backward}");
            // Ranks without a key head of their own use a copy.
            let copies = g.max(world);
            let there = 8 * b * own * (h * d + copies * (d + v));
            let back =
                |rank: usize| 8 * b * n * v * (h / copies.min(h) + usize::from(rank < h % copies.min(h)));
            if world != 3 {
                assert_eq!(forward.total_bytes(), there + back(ctx.rank()), "{forward}");
            }
            Ok(())
        });
    }
}

#[test]
fn keys_travel_only_as_far_as_queries_see_them() {
    on_ranks(4, "hops", |ctx| -> Result<()> {
        if !has_ring(ctx) {
            return Ok(());
        }
        let mesh = ctx.mesh(&[("cp", 4)])?;
        let [b, n, _, g, d, v] = SIZES;
        let kv = 8 * b * (n / 4) * g * (d + v);
        // A window of 7 reaches from the first row of a rank to the first row of the rank before.
        for (window, hops) in [(1, 0), (2, 1), (7, 1), (8, 2)] {
            let near = options(ContextWay::Ring).causal(true).window(window);
            let [forward, backward] = counted(&near, &mesh)?;
            let sent = (0..=ctx.rank()).filter(|&owner| ctx.rank() - owner < hops && ctx.rank() < 3).count();
            assert_eq!(forward.total_bytes(), sent * kv, "window {window}: {forward}");
            let sums = (0..=ctx.rank()).filter(|&owner| (1..=hops).contains(&(ctx.rank() - owner))).count();
            assert_eq!(backward.total_bytes(), (sent + sums) * kv, "window {window}: {backward}");
        }
        // The last rank's keys are seen by no other.
        let [forward, _] = counted(&options(ContextWay::Ring).causal(true), &mesh)?;
        assert_eq!(forward.get(Op::Send).count, if ctx.rank() == 3 { 0 } else { ctx.rank() + 1 });
        Ok(())
    });
}

#[test]
fn the_way_with_the_fewest_bytes_is_chosen_and_explained() {
    for (world, heads, kv_heads, window, [want, on_gpus]) in [
        (2, 4, 1, None, ["flash_attn by gather"; 2]),
        (4, 4, 4, None, ["flash_attn by heads"; 2]),
        (4, 3, 3, None, ["flash_attn by gather"; 2]),
        (4, 4, 1, Some(2), ["flash_attn by ring", "flash_attn by gather"]),
    ] {
        on_ranks(world, "choice", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("cp", world)])?;
            let put = |heads| distribute(&values(&[1, 16, heads, 4], 1, DType::F32), &mesh, &[Shard(1)]);
            let (q, kv) = (put(heads)?, put(kv_heads)?);
            let want = if ctx.device().is_cpu() { want } else { on_gpus };
            let options = Attention::default().window(window).causal(window.is_some());
            let (out, told) = explain(|| options.of(&q, &kv, &kv));
            out?;
            assert!(
                told.ops.iter().any(|entry| entry.op == want && entry.input_calls.is_empty()),
                "want {want}: {told}"
            );
            Ok(())
        });
    }
}

#[test]
fn replicated_queries_join_the_results_over_shards_of_a_cache() {
    on_ranks(3, "decode", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("cp", 3)])?;
        let put = |shape: [usize; 4], at| distribute(&values(&shape, 1, DType::F64), &mesh, &[at]);
        let (q, kv) = (put([2, 1, 4, 4], Replicate)?, put([2, 65, 2, 4], Shard(1))?);
        let (out, counts) = comm::record(|| q.flash_attn(&kv, &kv, 0.5, true));
        let mut out = out?;
        if ctx.device().is_cpu() {
            assert_eq!(
                (counts.get(Op::AllGather).bytes, counts.total()),
                (8 * 2 * 4 * (4 + 2), 1),
                "{counts}"
            );
            assert_eq!(out.placements(), [Replicate]);
        } else {
            // Results are joined on the host only; the placements of others are free.
            out = out.redistribute(&[Replicate])?;
        }
        let whole = put([2, 65, 2, 4], Replicate)?;
        let want = q.flash_attn(&whole, &whole, 0.5, true)?;
        let error = test_utils::distance(out.to_local(), want.to_local());
        assert!(error < 1e-14, "{error:e}");
        Ok(())
    });
}
