//! Wrong arguments are refused before anything is sent, and the group stays usable.
use super::Case;
use crate::{Collective, Cut, Error, ProcessGroup, RankContext, ReduceOp, Result};
use candle_core::{DType, Device, Tensor};
use std::time::Duration;

pub(super) const CASES: &[Case] =
    &[Case { name: "wrong arguments are refused by every rank", least: 2, run: refusals }];

type BadArguments = (&'static [&'static str], fn(&ProcessGroup) -> Result<()>);

fn x(dtype: DType) -> Result<Tensor> {
    Ok(Tensor::zeros((7, 11), dtype, &Device::Cpu)?)
}

/// The error texts, and calls with wrong arguments. 7 and 11 are not divisible by any tested number of ranks.
const WRONG: [BadArguments; 18] = [
    (&["broadcast", "is outside"], |g| g.broadcast(&x(DType::F32)?, g.size()).map(drop)),
    (&["all_gather", "dim 2", "[7, 11]"], |g| g.all_gather(&x(DType::F32)?, 2).map(drop)),
    (&["reduce_scatter", "does not divide by"], |g| {
        g.reduce_scatter(&x(DType::F32)?, 0, ReduceOp::Sum).map(drop)
    }),
    (&["dim 0"], |g| {
        g.call(Collective::reduce_scatter(Cut::even(0, 1, g.size()), ReduceOp::Sum))
            .run(&x(DType::F32)?)
            .map(drop)
    }),
    (&["[7]", "ranks"], |g| g.call(Collective::all_gather(Cut::new(0, &[7]))).run(&x(DType::F32)?).map(drop)),
    (&["expected", "counts for each of"], |g| g.all_to_all_single(&x(DType::F32)?, &[[7]]).map(drop)),
    (&["recv", "this rank"], |g| g.recv(1, DType::F32, g.rank()).map(drop)),
    (&["all_to_all", "does not divide"], |g| g.all_to_all(&x(DType::F32)?, 0, 1).map(drop)),
    (&["reduce", "avg of u32", "cast to a float"], |g| g.reduce(&x(DType::U32)?, 0, ReduceOp::Avg).map(drop)),
    (&["reduce", "and of f32", "use whole numbers"], |g| {
        g.reduce(&x(DType::F32)?, 0, ReduceOp::And).map(drop)
    }),
    (&["recv", "f4", "cast to one of"], |g| g.recv(1, DType::F4, (g.rank() + 1) % g.size()).map(drop)),
    (&["subgroup", "twice"], |g| g.subgroup(&[0, 0]).map(drop)),
    (&["all_reduce", "no tensor"], |g| g.call(Collective::AllReduce(ReduceOp::Sum)).run(None).map(drop)),
    (&["reduce", "some ranks get no result"], |g| {
        g.call(Collective::Reduce { op: ReduceOp::Sum, root: 0 }).run(&x(DType::F32)?).map(drop)
    }),
    (&["barrier", "call `run_all`"], |g| {
        g.call(Collective::Barrier).monitored(Duration::from_secs(1)).start_all(&[]).map(drop)
    }),
    (&["recv", "a receive takes no tensor"], |g| {
        let receive = Collective::Recv { from: Some((g.rank() + 1) % g.size()), tag: 0 };
        g.call(receive).of(1, DType::F32).run(&x(DType::F32)?).map(drop)
    }),
    (&["two outputs lie in one memory"], |g| {
        let (x, room) = (x(DType::F32)?, Tensor::zeros((14, 11), DType::F32, &Device::Cpu)?);
        let call = g.call(Collective::AllReduce(ReduceOp::Sum));
        call.into(&room.narrow(0, 0, 7)?).into(&room.narrow(0, 7, 7)?).run_all(&[x.clone(), x]).map(drop)
    }),
    (&["the root must give"], |g| {
        // Only the root can find this error, so every rank calls it as the root.
        let sizes: Vec<usize> = (0..g.size()).map(|rank| if rank == 0 { 7 } else { 0 }).collect();
        g.scatter(None, ((7, 11), DType::F32), 0, &sizes, g.rank()).map(drop)
    }),
];

fn refusals(ctx: &RankContext) -> Result<()> {
    for (parts, call) in WRONG {
        let error = call(ctx.group()).expect_err("the arguments are wrong");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        let text = error.to_string();
        let named = text.contains(&format!("rank {}", ctx.rank()));
        assert!(named && parts.iter().all(|part| text.contains(part)), "{text}");
        ctx.group().barrier()?;
    }
    Ok(())
}
