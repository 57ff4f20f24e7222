//! Calls that are started and waited for later.
use super::Case;
use super::values::{LENGTHS, assert_same, input};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{RankContext, ReduceOp, Result};

pub(crate) const CASES: &[Case] = &[
    Case { name: "started calls may be waited for in any order", least: 1, run: any_order },
    Case { name: "a started call is ready when all have started it", least: 2, run: ready },
    // One rank gets the variable itself.
    Case { name: "a variable may change while a call is pending", least: 2, run: variable },
    Case { name: "a dropped call lets the others go on", least: 2, run: dropped },
    Case { name: "blocking calls pass started ones", least: 1, run: overtaking },
];

fn any_order(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for rows in [1, 9000] {
        let x = input(r, &[n * rows, 2 * n], DType::F32)?;
        for reverse in [false, true] {
            let mut open = vec![
                (g.all_reduce_start(&x, ReduceOp::Sum)?, g.all_reduce(&x, ReduceOp::Sum)?),
                (g.all_gather_start(&x, 1)?, g.all_gather(&x, 1)?),
                (g.reduce_scatter_start(&x, 0, ReduceOp::Avg)?, g.reduce_scatter(&x, 0, ReduceOp::Avg)?),
                (g.all_to_all_start(&x, 0, 1)?, g.all_to_all(&x, 0, 1)?),
                (g.broadcast_start(&x, n - 1)?, g.broadcast(&x, n - 1)?),
            ];
            // Each rank in an order of its own.
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
    if g.rank() == last {
        for other in 0..last {
            g.recv(4, DType::F32, other)?;
        }
        let pending = g.all_reduce_start(&x, ReduceOp::Sum)?;
        assert!(pending.is_ready()?);
        return assert_same(&pending.wait()?, &sum, "the last to start");
    }
    let pending = g.all_reduce_start(&x, ReduceOp::Sum)?;
    assert!(!pending.is_ready()?);
    g.send(&x, last)?; // only when all have sent this does the last rank start
    assert_same(&pending.wait()?, &sum, "one that waits")
}

fn variable(ctx: &RankContext) -> Result<()> {
    for len in LENGTHS {
        let var = Var::ones(len, DType::F32, &Device::Cpu)?;
        let pending = ctx.group().all_reduce_start(&var, ReduceOp::Sum)?;
        var.set(&var.zeros_like()?)?;
        let want = (Tensor::ones(len, DType::F32, &Device::Cpu)? * ctx.world_size() as f64)?;
        assert_same(&pending.wait()?, &want, "the variable as it was")?;
    }
    Ok(())
}

fn dropped(ctx: &RankContext) -> Result<()> {
    let g = ctx.group();
    for len in LENGTHS {
        let x = input(0, &[len], DType::F32)?;
        let pending = g.all_reduce_start(&x, ReduceOp::Sum)?;
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
    let pending: Vec<_> = (0..4).map(|_| g.all_reduce_start(&x, ReduceOp::Max)).collect::<Result<_>>()?;
    let small = g.all_gather(&Tensor::new(&[ctx.rank() as u32], &Device::Cpu)?, 0)?;
    assert_eq!(small.to_vec1::<u32>()?, (0..n as u32).collect::<Vec<_>>());
    let want = g.all_reduce(&x, ReduceOp::Max)?;
    pending.into_iter().rev().try_for_each(|pending| assert_same(&pending.wait()?, &want, "a started call"))
}
