//! Several tensors in one call.
use super::Case;
use super::values::{assert_same, input};
use candle_core::{DType, Tensor};
use candle_dist::{Op, RankContext, ReduceOp, Result, comm};

pub(crate) const CASES: &[Case] =
    &[Case { name: "coalesced calls equal single ones and count as one", least: 1, run: equal }];

type Many<'a> = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a>;
type One<'a> = Box<dyn Fn(&Tensor) -> Result<Tensor> + 'a>;

fn equal(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let list = [
        input(r, &[n, 3], DType::F32)?,
        input(r + 1, &[2, n, 2], DType::BF16)?.transpose(0, 1)?,
        input(r, &[0, 4], DType::F64)?,
        input(r + 2, &[2 * n], DType::U32)?,
        input(r + 3, &[n * 1000, 31], DType::F32)?,
    ];
    let pairs: Vec<(Op, Many<'_>, One<'_>)> = vec![
        (
            Op::AllReduce,
            Box::new(|t| g.all_reduce_coalesced(t, ReduceOp::Max)),
            Box::new(|t| g.all_reduce(t, ReduceOp::Max)),
        ),
        (Op::Broadcast, Box::new(|t| g.broadcast_coalesced(t, n - 1)), Box::new(|t| g.broadcast(t, n - 1))),
        (Op::AllGather, Box::new(|t| g.all_gather_coalesced(t, 0)), Box::new(|t| g.all_gather(t, 0))),
        (
            Op::ReduceScatter,
            Box::new(|t| g.reduce_scatter_coalesced(t, 0, ReduceOp::Sum)),
            Box::new(|t| g.reduce_scatter(t, 0, ReduceOp::Sum)),
        ),
    ];
    for (op, many, one) in pairs {
        let (got, counts) = comm::record(|| many(&list));
        let got = got?;
        assert_eq!(counts.get(op).count, usize::from(n > 1), "{op}");
        assert_eq!(got.len(), list.len());
        for (got, tensor) in got.iter().zip(&list) {
            assert_same(&got.contiguous()?, &one(tensor)?.contiguous()?, op.name())?;
        }
        assert!(many(&[])?.is_empty());
    }
    Ok(())
}
