//! Started calls.
use super::Case;
use super::lacks::over_nccl;
use super::values::{LENGTHS, assert_same, input};
use super::written;
use crate::{Collective, Cut, Pending, RankContext, ReduceOp, Result};
use candle_core::{DType, Device, Tensor};
use std::time::{Duration, Instant};

pub(super) const CASES: &[Case] = &[
    Case { name: "started calls may be waited for in any order", least: 1, run: any_order },
    Case { name: "a started call is ready when all have started it", least: 2, run: ready },
    Case { name: "memory may change while a call is pending", least: 1, run: written::started },
    Case { name: "a dropped call lets the others go on", least: 2, run: dropped },
    Case { name: "blocking calls pass started ones", least: 1, run: overtaking },
    Case { name: "every collective may be started", least: 1, run: every },
    Case { name: "a wait may have a timeout, and a list of calls one wait", least: 1, run: waits },
];

fn any_order(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for rows in [1, 9000] {
        let x = input(r, &[n * rows, 2 * n], DType::F32)?;
        for reverse in [false, true] {
            let mut open = vec![
                (g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?, g.all_reduce(&x, ReduceOp::Sum)?),
                (
                    g.call(Collective::all_gather(Cut::even(1, x.dims()[1], g.size()))).start(&x)?,
                    g.all_gather(&x, 1)?,
                ),
                (
                    g.call(Collective::reduce_scatter(
                        Cut::even(0, x.dims()[0] / g.size(), g.size()),
                        ReduceOp::Avg,
                    ))
                    .start(&x)?,
                    g.reduce_scatter(&x, 0, ReduceOp::Avg)?,
                ),
                (
                    g.call(Collective::AllToAll {
                        split: Cut::even(0, x.dims()[0] / g.size(), g.size()),
                        concat: Cut::even(1, x.dims()[1], g.size()),
                    })
                    .start(&x)?,
                    g.all_to_all(&x, 0, 1)?,
                ),
                (g.call(Collective::Broadcast { root: n - 1 }).start(&x)?, g.broadcast(&x, n - 1)?),
            ];
            // Each rank waits in its own order.
            open.rotate_left(r % 4);
            if reverse != (r % 2 == 0) {
                open.reverse();
            }
            for (pending, want) in open {
                assert_same(&pending.wait()?.contiguous()?, &want.contiguous()?, "a started call")?;
            }
        }
    }
    Ok(())
}

fn ready(ctx: &RankContext) -> Result<()> {
    let (g, x, n) = (ctx.group(), input(0, &[4], DType::F32)?, ctx.world_size());
    let sum = (&x * n as f64)?;
    let last = n - 1;
    if over_nccl(g) {
        g.barrier()?; // the first call on a group waits for all members, also if it is started
    }
    if g.rank() == last {
        for other in 0..last {
            g.recv(4, DType::F32, other)?;
        }
        let pending = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
        // A GPU needs a moment, and so do processes that pass on what they have received.
        let until = Instant::now() + Duration::from_secs(60);
        while g.backend().name() != "threads" && !pending.is_ready()? && Instant::now() < until {}
        assert!(pending.is_ready()?);
        return assert_same(&pending.wait()?, &sum, "the last to start");
    }
    let pending = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
    assert!(!pending.is_ready()?);
    g.send(&x, last)?; // only when all have sent this does the last rank start
    assert_same(&pending.wait()?, &sum, "one that waits")
}

fn dropped(ctx: &RankContext) -> Result<()> {
    let g = ctx.group();
    for len in LENGTHS {
        let x = input(0, &[len], DType::F32)?;
        let pending = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
        if ctx.rank() == 1 {
            drop(pending);
        } else {
            assert_same(&pending.wait()?, &(&x * ctx.world_size() as f64)?, "with one that is not there")?;
        }
        g.barrier()?;
    }
    Ok(())
}

fn overtaking(ctx: &RankContext) -> Result<()> {
    let (g, n) = (ctx.group(), ctx.world_size());
    let x = input(ctx.rank(), &[50_001], DType::F32)?;
    let pending: Vec<_> =
        (0..4).map(|_| g.call(Collective::AllReduce(ReduceOp::Max)).start(&x)).collect::<Result<_>>()?;
    let small = g.all_gather(&Tensor::new(&[ctx.rank() as u32], &Device::Cpu)?, 0)?;
    assert_eq!(small.to_vec1::<u32>()?, (0..n as u32).collect::<Vec<_>>());
    let want = g.all_reduce(&x, ReduceOp::Max)?;
    pending.into_iter().rev().try_for_each(|pending| assert_same(&pending.wait()?, &want, "a started call"))
}

fn every(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let sizes: Vec<usize> = (0..n).collect();
    let all: usize = sizes.iter().sum();
    for dtype in [DType::F32, if over_nccl(g) { DType::U32 } else { DType::I16 }] {
        let (mine, whole) = (input(r, &[r, 2], dtype)?, input(r, &[all, 2], dtype)?);
        let counts = vec![vec![1; n]; n];
        let rows = input(r, &[n, 3], dtype)?;
        let one = [
            (
                g.call(Collective::all_gather(Cut::new(0, &sizes))).start(&mine)?,
                g.call(Collective::all_gather(Cut::new(0, &sizes))).run(&mine)?,
            ),
            (
                g.call(Collective::reduce_scatter(Cut::new(0, &sizes), ReduceOp::Max)).start(&whole)?,
                g.call(Collective::reduce_scatter(Cut::new(0, &sizes), ReduceOp::Max)).run(&whole)?,
            ),
            (
                g.call(Collective::AllToAll { split: Cut::new(1, &sizes), concat: Cut::new(0, &sizes) })
                    .start(&input(r, &[r, all], dtype)?)?,
                g.call(Collective::AllToAll { split: Cut::new(1, &sizes), concat: Cut::new(0, &sizes) })
                    .run(&input(r, &[r, all], dtype)?)?,
            ),
            (
                g.call(Collective::all_to_all_single(&counts)).start(&rows)?,
                g.all_to_all_single(&rows, &counts)?,
            ),
            (
                g.call(Collective::Scatter { cut: Cut::new(0, &sizes), root: n - 1 })
                    .of((all, 2), dtype)
                    .start((r == n - 1).then_some(&whole))?,
                g.scatter((r == n - 1).then_some(&whole), ((all, 2), dtype), 0, &sizes, n - 1)?,
            ),
        ];
        for (pending, want) in one.into_iter().rev() {
            assert_same(&pending.wait()?.contiguous()?, &want.contiguous()?, "one tensor")?;
        }
        let at_root = [
            (
                g.call(Collective::Reduce { op: ReduceOp::Sum, root: 0 })
                    .start_all(std::slice::from_ref(&rows))?,
                g.reduce(&rows, 0, ReduceOp::Sum)?,
            ),
            (
                g.call(Collective::Gather { cut: Cut::new(0, &sizes), root: n - 1 })
                    .start_all(std::slice::from_ref(&mine))?,
                g.gather(&mine, 0, &sizes, n - 1)?,
            ),
        ];
        for (pending, want) in at_root.into_iter().rev() {
            match (pending.wait()?.pop(), want) {
                (Some(got), Some(want)) => assert_same(&got, &want, "at the root")?,
                (got, want) => assert!(got.is_none() && want.is_none()),
            }
        }
        let sums = [rows.clone(), input(r, &[4], dtype)?];
        let lists = [
            (
                g.call(Collective::Broadcast { root: n - 1 }).start_all(&sums)?,
                g.call(Collective::Broadcast { root: n - 1 }).run_all(&sums)?,
            ),
            (
                g.call(Collective::AllReduce(ReduceOp::Max)).start_all(&sums)?,
                g.call(Collective::AllReduce(ReduceOp::Max)).run_all(&sums)?,
            ),
        ];
        for (pending, want) in lists {
            let mut pairs = pending.wait()?.into_iter().zip(want);
            pairs.try_for_each(|(got, want)| assert_same(&got, &want, "one of two"))?;
        }
        assert!(g.call(Collective::AllReduce(ReduceOp::Sum)).start_all(&[])?.wait()?.is_empty());
    }
    let pending = g.call(Collective::Barrier).start_all(&[])?;
    g.barrier()?;
    pending.wait().map(drop)
}

fn waits(ctx: &RankContext) -> Result<()> {
    let (g, n) = (ctx.group(), ctx.world_size());
    let start = |i: usize| g.call(Collective::AllReduce(ReduceOp::Sum)).start(&input(i, &[30], DType::F32)?);
    let sums = Pending::wait_all((0..5).map(start).collect::<Result<Vec<_>>>()?)?;
    for (i, sum) in sums.iter().enumerate() {
        assert_same(sum, &(input(i, &[30], DType::F32)? * n as f64)?, "in the order of the list")?;
    }
    let pending = start(0)?;
    assert_same(
        &pending.wait_timeout(Duration::from_secs(60))?,
        &(input(0, &[30], DType::F32)? * n as f64)?,
        "in time",
    )?;
    g.call(Collective::Barrier).start_all(&[])?.wait_timeout(Duration::from_secs(60)).map(drop)
}
