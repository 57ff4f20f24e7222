//! Ranks that make different calls: the same error on every rank.
use crate::{Collective, RankContext, ReduceOp, Result};
use candle_core::{DType, Device, Tensor};
use std::time::Duration;

/// A failure of one rank.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Failure {
    /// Its name, for reports.
    pub name: &'static str,
    /// The text of the error.
    pub text: &'static str,
    /// Whether the failing rank panics or ends the process of its rank, and thus returns no error.
    pub silent: bool,
    /// Runs it as one rank. It returns the error that stopped the world.
    pub run: fn(&RankContext) -> Result<()>,
}

/// All ways in which a rank can fail, except a crash of its process.
pub const FAILURES: &[Failure] = &[
    Failure {
        name: "op",
        text: "(op differs)",
        silent: false,
        run: |ctx| differ(ctx, |ctx| ctx.group().all_gather(&x(4)?, 0).map(drop)),
    },
    Failure {
        name: "shape",
        text: "(shape differs)",
        silent: false,
        run: |ctx| differ(ctx, |ctx| ctx.group().all_reduce(&x(5)?, ReduceOp::Sum).map(drop)),
    },
    Failure {
        name: "dtype",
        text: "(dtype differs)",
        silent: false,
        run: |ctx| {
            differ(ctx, |ctx| ctx.group().all_reduce(&x(4)?.to_dtype(DType::F64)?, ReduceOp::Sum).map(drop))
        },
    },
    Failure {
        name: "reduction",
        text: "(reduction differs)",
        silent: false,
        run: |ctx| differ(ctx, |ctx| ctx.group().all_reduce(&x(4)?, ReduceOp::Max).map(drop)),
    },
    Failure {
        name: "form",
        text: "(form (into new memory, in place, started, or monitored) differs)",
        silent: false,
        run: |ctx| {
            differ(ctx, |ctx| {
                ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x(4)?)?.wait().map(drop)
            })
        },
    },
    Failure {
        name: "root_of_broadcast",
        text: "(root differs)",
        silent: false,
        run: |ctx| rooted(ctx, |ctx, root| ctx.group().broadcast(&x(4)?, root).map(drop)),
    },
    Failure {
        name: "root_of_large_broadcast",
        text: "(root differs)",
        silent: false,
        run: |ctx| rooted(ctx, |ctx, root| ctx.group().broadcast(&x(LARGE)?, root).map(drop)),
    },
    Failure {
        name: "root_of_reduce",
        text: "(root differs)",
        silent: false,
        run: |ctx| rooted(ctx, |ctx, root| ctx.group().reduce(&x(4)?, root, ReduceOp::Sum).map(drop)),
    },
    Failure {
        name: "root_of_large_reduce",
        text: "(root differs)",
        silent: false,
        run: |ctx| rooted(ctx, |ctx, root| ctx.group().reduce(&x(LARGE)?, root, ReduceOp::Sum).map(drop)),
    },
    Failure {
        name: "root_of_gather",
        text: "(root differs)",
        silent: false,
        run: |ctx| {
            rooted(ctx, |ctx, root| {
                let sizes = vec![4; ctx.world_size()];
                ctx.group().gather(&x(4)?, 0, &sizes, root).map(drop)
            })
        },
    },
    Failure {
        name: "root_of_scatter",
        text: "(root differs)",
        silent: false,
        run: |ctx| {
            rooted(ctx, |ctx, root| {
                let n = ctx.world_size();
                ctx.group().scatter(Some(&x(n)?), (n, DType::F32), 0, &vec![1; n], root).map(drop)
            })
        },
    },
    Failure {
        name: "own_root_of_reduce",
        text: "(root differs)",
        silent: false,
        run: |ctx| {
            ctx.group().reduce(&x(4)?, ctx.rank(), ReduceOp::Sum)?;
            ctx.group().barrier()
        },
    },
    Failure {
        name: "own_root_of_broadcast",
        text: "(root differs)",
        silent: false,
        run: |ctx| {
            ctx.group().broadcast(&x(4)?, ctx.rank())?;
            ctx.group().barrier()
        },
    },
    Failure {
        name: "broadcast_against_reduce",
        text: "(op differs)",
        silent: false,
        run: |ctx| {
            let last = ctx.world_size() - 1;
            if ctx.rank() == last {
                ctx.group().broadcast(&x(4)?, last)?;
            } else {
                ctx.group().reduce(&x(4)?, last, ReduceOp::Sum)?;
            }
            ctx.group().barrier()
        },
    },
    Failure {
        name: "factor",
        text: "(reduction differs)",
        silent: false,
        run: |ctx| {
            let factor = if ctx.rank() == 0 { 0.5 } else { 0.25 };
            ctx.group().all_reduce(&x(4)?, ReduceOp::pre_mul_sum(factor))?;
            ctx.group().barrier()
        },
    },
    Failure {
        name: "object",
        text: "(description differs)",
        silent: false,
        run: |ctx| match ctx.rank() {
            0 => ctx.group().objects().all_gather(&1u32).map(drop),
            _ => ctx.group().objects().all_gather(&1i64).map(drop),
        },
    },
    Failure {
        name: "late wait",
        text: "waited longer than the timeout of 40ms",
        silent: false,
        run: |ctx| {
            ctx.group().barrier()?;
            if ctx.rank() + 1 == ctx.world_size() {
                std::thread::sleep(Duration::from_millis(500));
                return ctx.group().call(Collective::Barrier).start_all(&[])?.wait().map(drop);
            }
            ctx.group()
                .call(Collective::Barrier)
                .start_all(&[])?
                .wait_timeout(Duration::from_millis(40))
                .map(drop)
        },
    },
    Failure {
        name: "told",
        text: "failed: no such file",
        silent: false,
        run: |ctx| {
            differ(ctx, |ctx| {
                ctx.group().fail("no such file");
                ctx.group().barrier()
            })
        },
    },
    Failure {
        name: "panic",
        text: "panicked: out of cheese",
        silent: true,
        run: |ctx| differ(ctx, |_| panic!("out of cheese")),
    },
];

fn x(len: usize) -> Result<Tensor> {
    Ok(Tensor::ones(len, DType::F32, &Device::Cpu)?)
}

/// The size of a tensor that no backend sends in one piece.
const LARGE: usize = 1 << 20;

/// Runs a correct round, and then one in which the last rank passes another root.
fn rooted(ctx: &RankContext, op: fn(&RankContext, usize) -> Result<()>) -> Result<()> {
    op(ctx, 0)?;
    let last = ctx.world_size() - 1;
    op(ctx, if ctx.rank() == last { last } else { 0 })?;
    // A root that waits for nobody gets the error here at the latest.
    ctx.group().barrier()
}

/// Runs a correct round, and then one in which the last rank makes another call.
fn differ(ctx: &RankContext, wrong: fn(&RankContext) -> Result<()>) -> Result<()> {
    ctx.group().all_reduce(&x(3)?, ReduceOp::Sum)?;
    if ctx.rank() + 1 == ctx.world_size() {
        wrong(ctx)?;
    } else {
        ctx.group().all_reduce(&x(4)?, ReduceOp::Sum)?;
    }
    // If the wrong call waits for nobody, the next one does.
    ctx.group().barrier()
}
