//! Groups that are dropped while other calls are under way.
use super::{computed, sizes, sum_of};
use candle_core::DType;
use candle_dist::{Collective, ReduceOp, Result};
use std::time::{Duration, Instant};
use test_utils::on_ranks;

/// Freeing a communicator may wait for kernels of others, which wait for the rank that frees.
#[test]
fn a_group_may_be_dropped_while_another_rank_waits_in_a_call() {
    for n in sizes(2) {
        on_ranks(n, "dropped groups", move |ctx| -> Result<()> {
            let all: Vec<usize> = (0..n).collect();
            let x = computed(ctx.rank(), 60, ctx.device())?;
            ctx.group().all_reduce(&x, ReduceOp::Sum)?;
            for round in 0..3 {
                let group = ctx.group().subgroup(&all)?;
                group.all_reduce(&x, ReduceOp::Sum)?;
                group.send(&x, (ctx.rank() + 1) % n)?;
                group.recv(x.shape(), DType::F32, (ctx.rank() + n - 1) % n)?;
                let started = (ctx.rank() == round % n)
                    .then(|| ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x));
                drop(group);
                let started = match started {
                    Some(started) => started?,
                    None => ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?,
                };
                assert_eq!(started.wait()?.to_vec1::<f32>()?, vec![sum_of(n); 60]);
            }
            Ok(())
        });
    }
}

/// More groups than are kept, so some are freed on the way.
#[test]
fn dropped_groups_are_freed_in_quiet_moments_and_their_drop_waits_for_nothing() {
    for n in sizes(2) {
        on_ranks(n, "many groups", move |ctx| -> Result<()> {
            let all: Vec<usize> = (0..n).collect();
            let x = computed(ctx.rank(), 60, ctx.device())?;
            for _ in 0..14 {
                let group = ctx.group().subgroup(&all)?;
                assert_eq!(group.all_reduce(&x, ReduceOp::Sum)?.to_vec1::<f32>()?, vec![sum_of(n); 60]);
                let began = Instant::now();
                drop(group);
                assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
            }
            Ok(())
        });
    }
}
