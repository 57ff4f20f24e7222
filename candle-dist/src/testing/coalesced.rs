//! Several tensors in one call.
use super::Case;
use super::values::{assert_same, input};
use crate::backend::Cuts;
use crate::{Collective, Cut, Op, RankContext, ReduceOp, Result, comm};
use candle_core::{DType, Tensor};

pub(super) const CASES: &[Case] = &[
    Case { name: "coalesced calls equal single ones and count as one", least: 1, run: equal },
    Case { name: "started coalesced calls cut unevenly, each tensor its own way", least: 1, run: uneven },
];

type CoalescedCall<'a> = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a>;
type SingleCall<'a> = Box<dyn Fn(&Tensor) -> Result<Tensor> + 'a>;

fn equal(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let list = [
        input(r, &[n, 3], DType::F32)?,
        input(r + 1, &[2, n, 2], DType::BF16)?.transpose(0, 1)?,
        input(r, &[0, 4], DType::F64)?,
        input(r + 2, &[2 * n], DType::U32)?,
        input(r + 3, &[n * 1000, 31], DType::F32)?,
    ];
    let even = |t: &[Tensor]| t.iter().map(|t| Cut::even(0, t.dims()[0], n)).collect();
    let parts = |t: &[Tensor]| t.iter().map(|t| Cut::even(0, t.dims()[0] / n, n)).collect();
    let pairs: Vec<(Op, CoalescedCall<'_>, SingleCall<'_>)> = vec![
        (
            Op::AllReduce,
            Box::new(|t| g.call(Collective::AllReduce(ReduceOp::Max)).run_all(t)),
            Box::new(|t| g.all_reduce(t, ReduceOp::Max)),
        ),
        (
            Op::Broadcast,
            Box::new(|t| g.call(Collective::Broadcast { root: n - 1 }).run_all(t)),
            Box::new(|t| g.broadcast(t, n - 1)),
        ),
        (
            Op::AllGather,
            Box::new(|t| g.call(Collective::AllGather(even(t))).run_all(t)),
            Box::new(|t| g.all_gather(t, 0)),
        ),
        (
            Op::ReduceScatter,
            Box::new(|t| g.call(Collective::ReduceScatter(parts(t), ReduceOp::Sum)).run_all(t)),
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

fn uneven(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    let growing: Vec<usize> = (0..n).collect(); // rank 0 has nothing
    let falling: Vec<usize> = (0..n).map(|rank| 1000 * (n - rank)).collect();
    let pieces = [
        (input(r, &[r, 3], DType::F32)?, Cut::new(0, &growing)),
        (input(r + 1, &[5, falling[r]], DType::BF16)?, Cut::new(1, &falling)),
        (input(r, &[2, 0], DType::F64)?, Cut::even(0, 2, n)),
    ];
    let (pieces, cuts): (Vec<Tensor>, Cuts) = pieces.into_iter().unzip();
    let gather = |pieces: &[Tensor]| {
        g.call(Collective::AllGather(cuts.iter().take(pieces.len()).cloned().collect())).start_all(pieces)
    };
    let (pending, counts) = comm::record(|| gather(&pieces));
    let first = pending?;
    assert_eq!(counts.get(Op::AllGather).count, usize::from(n > 1));
    let second = gather(&pieces[..1])?;
    let joined = |(piece, cut): (&Tensor, &Cut)| g.call(Collective::all_gather(cut.clone())).run(piece);
    let whole: Vec<Tensor> = pieces.iter().zip(&cuts).map(joined).collect::<Result<_>>()?;
    assert_same(&second.wait()?[0], &whole[0], "the second of two")?;
    let got = first.wait()?;
    assert_eq!(got.len(), whole.len());
    for (got, want) in got.iter().zip(&whole) {
        assert_same(&got.contiguous()?, &want.contiguous()?, "all_gather")?;
    }

    let got = g.call(Collective::ReduceScatter(cuts.clone(), ReduceOp::Sum)).start_all(&whole)?.wait()?;
    for ((got, whole), cut) in got.iter().zip(&whole).zip(&cuts) {
        let want = g.call(Collective::reduce_scatter(cut.clone(), ReduceOp::Sum)).run(whole)?;
        assert_same(&got.contiguous()?, &want.contiguous()?, "reduce_scatter")?;
    }
    assert!(gather(&[])?.wait()?.is_empty());

    let (wrong, cut) = ([input(r, &[3], DType::F32)?], Cut::even(0, 2, n));
    let error = g.call(Collective::all_gather(cut.clone())).start_all(&wrong).unwrap_err().to_string();
    assert!(error.contains("do not fit"), "{error}");
    assert!(g.call(Collective::reduce_scatter(cut, ReduceOp::Sum)).start_all(&wrong).is_err());
    assert!(g.call(Collective::AllGather(cuts.clone())).run_all(&pieces[..1]).is_err());
    Ok(())
}
